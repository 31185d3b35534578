"""How far attention backends take a pipeline's output from the reference, and what they save."""
