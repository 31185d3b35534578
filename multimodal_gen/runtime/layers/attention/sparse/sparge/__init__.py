"""SpargeAttn's rule."""
