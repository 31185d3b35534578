"""What the coarse stage of tile-based sparse attention needs: means, best tiles, and their use.

`api` validates and chooses, `reference` is the definition, `kernel` does the same in Triton.
"""
