"""One block-sparse attention for every sparse method.

`plan` says which pairs count, `api` validates and chooses a provider, `reference` is the
definition. The providers `portable` (Triton), `hopper` (Gluon, SM90) and `cute` (FlashAttention-4)
know nothing of each other.
"""
