"""The rotation of queries and keys over their channels; see `reference` for what it is for."""

from functools import cache

import torch

__all__ = ["rotation", "rotation_size"]


def rotation_size(head_size: int) -> int:
    """Return the channels that are mixed: the largest power of two that divides the head size."""
    return head_size & -head_size


@cache
def rotation(head_size: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return sqrt(n) times the rotation: 1, -1 and, between groups of n channels, 0.

    Kept for the process: 64 KiB at most for every head size, dtype and device. It is copied from
    the CPU, which waits, so that it is there on every stream.

    Args:
        head_size: D; n is the largest power of two that divides it.
        width: channels with those that pad a head, a multiple of n.
        dtype: any that has these numbers; all do.
        device: where the result lives.

    Returns:
        The symmetric matrix [width, width].
    """
    size = rotation_size(head_size)
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, device="cpu")
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        groups = torch.eye(width // size, device="cpu")
        return torch.kron(groups, matrix).to(device, dtype)
