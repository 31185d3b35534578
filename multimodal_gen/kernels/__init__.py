"""Attention kernels; they know tensors only."""
