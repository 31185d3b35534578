"""One block-sparse attention for every sparse method.

`plan` says which pairs count, `api` validates and runs the kernel that `kernels/engine.py` chooses,
`reference` is the definition. `triton_kernel`, `gluon_kernel` (SM90), `fa4` (FlashAttention 4) and
`cudnn` (cuDNN, SM100) know nothing of each other.
"""
