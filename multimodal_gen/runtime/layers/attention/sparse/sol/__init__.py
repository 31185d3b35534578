"""Sol-Attn."""
