"""Which chunks of keys each query selects: means of chunks, scores against them, and the choice.

`api` validates and chooses, `reference` is the definition and says how to choose,
`chunk_select_kernel` does the same in Triton where the scores of a query compete with one another
only.
"""
