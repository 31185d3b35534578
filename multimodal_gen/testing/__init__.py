"""Tiny models, for tests and first tries."""
