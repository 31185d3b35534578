"""The linear branch of Sparse-Linear Attention: phi(q) (phi(k)^T v) / (eps + phi(q) . sum phi(k)).

`api` validates and chooses, `reference` is the definition,
`linear_attention_kernel` does the same in Triton.
"""
