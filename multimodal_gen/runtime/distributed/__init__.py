"""Meshes, process groups, exchanges and rings for tokens that are split over ranks."""
