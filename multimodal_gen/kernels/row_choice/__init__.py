"""Block-sparse attention where every query row chooses its own key blocks, at about its true cost.

Rows that lie together rarely choose alike, so the blocks that any row of a tile chose are several
times what each of them chose. Here the key blocks are cut in groups of a few. For each group, the
rows that chose any of its blocks are sorted by what they chose, so that nearly every tile of rows
agrees; attention runs per group, and the parts of a row are merged by their log-sum-exp.

`api` validates and chooses, `reference` is the definition, `row_choice_kernel` does the same in
Triton.
"""
