"""Tokens of a latent grid in tile order, and back.

`api` computes the order and moves tokens, `reference` is the definition and `kernel` moves several
tensors in one launch on a GPU.
"""
