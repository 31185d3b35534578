"""Batched Euclidean k-means over the tokens of every head.

`api` validates and dispatches, `reference` is the definition and `kmeans_kernel` runs it on a GPU.
"""
