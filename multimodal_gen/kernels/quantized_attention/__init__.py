"""Attention on 8-bit scores and values, dense and over block lists.

`api` validates and runs the kernel that `kernels/engine.py` chooses, `reference` is the definition,
`quantise_kernel` makes the 8-bit tensors that `triton_kernel` and `gluon_kernel` (SM90) read.
"""
