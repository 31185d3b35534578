"""Sequence parallel."""
