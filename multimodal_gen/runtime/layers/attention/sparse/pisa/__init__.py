"""PISA."""
