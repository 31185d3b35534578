"""Sparse attention by patterns that are known in advance."""
