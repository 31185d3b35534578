"""What sparse methods choose by and how: means of tiles and chunks, the best of them, row bits.

`api` has the means of tiles, of their cells, the best tiles and the gated sum; `rows` the choice of
rows among chunks and their order. Both validate and choose; `reference` and `row_reference` are the
definitions. In Triton, `pool_kernel` sums tokens, `tile_kernel` scores and selects tiles,
`chunk_kernel` lets rows choose, and `row_kernel` sorts rows and merges their parts.
"""
