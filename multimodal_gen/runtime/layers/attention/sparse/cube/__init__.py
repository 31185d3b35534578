"""Cube sparse attention."""
