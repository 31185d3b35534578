"""Tokens of a latent grid in tile order, and back.

`api` computes the order and moves tokens, `reference` is the definition and `tile_order_kernel`
moves several tensors in one launch on a GPU.
"""
