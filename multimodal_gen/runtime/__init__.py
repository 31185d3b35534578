"""Layers, platforms and the generator."""
