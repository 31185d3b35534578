"""Vmoba."""
