"""What the coarse stage of tile-based sparse attention needs: means, best tiles, and their use.

`api` validates and chooses, `reference` is the definition, `tile_pool_kernel` does the same in
Triton.
"""
