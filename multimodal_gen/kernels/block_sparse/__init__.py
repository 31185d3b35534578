"""One block-sparse attention for every sparse method.

`plan` says which pairs count, `api` validates and runs the kernel that `kernels/engine.py` chooses,
`reference` is the definition. `triton_kernel`, `gluon_kernel` (SM90) and `fa4` (FlashAttention 4)
know nothing of each other.
"""
