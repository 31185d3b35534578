"""What Video Sparse Attention needs besides its backend: the authors' own kernels."""
