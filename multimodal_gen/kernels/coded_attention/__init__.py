"""Attention to keys and values that are kept in codes of 4 or 2 bits.

`codes` says what a code stands for, `reference` is the definition of attention to them, and
`coded_attention_kernel` does the same in Triton, which makes keys and values of the codes in
registers. `api` checks and chooses.
"""
