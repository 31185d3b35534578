"""The pass that makes 8-bit queries, keys and values."""
