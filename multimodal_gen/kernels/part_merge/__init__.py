"""Merging two attention outputs over different keys by their log-sum-exp.

`api` chooses, `reference` is the definition, `kernel` does the same in Triton in one pass.
"""
