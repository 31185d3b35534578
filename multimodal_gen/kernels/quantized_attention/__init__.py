"""Attention on 8-bit scores and values, dense and over block lists.

`api` validates and chooses a provider, `reference` is the definition, `quantise` makes the 8-bit
tensors that both kernels, `portable` (Triton) and `hopper` (Gluon, SM90), read.
"""
