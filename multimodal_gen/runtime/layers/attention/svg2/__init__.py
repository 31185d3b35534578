"""Parts of Sparse VideoGen 2."""
