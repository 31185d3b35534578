"""Block-sparse attention over lists of key blocks.

`plan` says which pairs count, `api` validates and chooses a provider, `reference` is the
definition and `portable` the Triton provider. No attention backend calls the engine yet.
"""
