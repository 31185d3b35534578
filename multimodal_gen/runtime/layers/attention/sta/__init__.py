"""Sliding Tile Attention without its kernel: windows, strategy files, and the search for both."""
