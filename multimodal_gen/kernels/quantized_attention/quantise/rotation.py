"""The rotation of queries and keys over their channels; see `reference` for what it is for."""

from functools import cache

import torch

__all__ = ["rotation"]


@cache
def rotation(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return sqrt(n) times the rotation of n channels: a Hadamard matrix, of 1 and -1.

    Kept for the process: 64 KiB at most for every width, dtype and device. It is copied from the
    CPU, which waits, so that it is there on every stream.

    Args:
        width: n, the channels of a head with those that pad it; a power of two.
        dtype: any that has these numbers; all do.
        device: where the result lives.

    Returns:
        The symmetric matrix [width, width].
    """
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, device="cpu")
        while len(matrix) < width:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix.to(device, dtype)
