"""Input factories, tolerances and tiny models, shared by tests and benchmarks."""
