"""Merging two attention outputs over different keys by their log-sum-exp.

`api` chooses, `reference` is the definition, `part_merge_kernel` does the same in Triton in
one pass.
"""
