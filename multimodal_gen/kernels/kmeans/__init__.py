"""Batched Euclidean k-means over the tokens of every head.

`api` validates and dispatches, `reference` is the definition and `kernel` runs it on a GPU.
"""
