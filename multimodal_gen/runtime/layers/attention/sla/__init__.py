"""Sparse-Linear Attention without its sparse branch: block map, linear branch, projection."""
