"""An order of centroids in which neighbours are alike.

Clusters that are alike are kept together, so that in this order what is kept lies in fewer runs.
"""

import torch
import torch.nn.functional as F

__all__ = ["by_similarity", "similarity_order"]

_ROUNDS = 8


def similarity_order(centroids: torch.Tensor) -> torch.Tensor:
    """Return an order by halving along the principal direction, again and again.

    Does not wait for the device.

    Args:
        centroids: floating [..., C, D].

    Returns:
        int64 [..., C].
    """
    *leading, num, size = centroids.shape
    levels = (num - 1).bit_length()
    x = F.pad(centroids.float().reshape(-1, num, size), (0, 0, 0, (1 << levels) - num))
    order = torch.arange(1 << levels, device=x.device).expand(x.shape[0], -1)
    for level in range(levels):
        parts = x.view(x.shape[0] << level, -1, size)
        real = (order < num).view(parts.shape[0], -1, 1)
        mean = (parts * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp_min(1)
        along = (parts - mean) @ _principal_direction((parts - mean) * real)
        along = torch.where(real, along, torch.inf).squeeze(2)
        index = along.argsort(dim=1, stable=True)
        order = order.reshape(parts.shape[:2]).gather(1, index).view(x.shape[0], -1)
        x = parts.gather(1, index.unsqueeze(2).expand_as(parts)).view_as(x)
    # What fills up comes last in every half, and so here.
    real = (order < num).int()
    first = real.argsort(dim=1, descending=True, stable=True)[:, :num]
    return order.gather(1, first).view(*leading, num)


def _principal_direction(x: torch.Tensor) -> torch.Tensor:
    """Return about the principal direction of [N, M, D], by power iteration: [N, D, 1]."""
    direction = x.square().sum(1, keepdim=True).transpose(1, 2)
    for _ in range(_ROUNDS):
        direction = F.normalize(x.transpose(1, 2) @ (x @ direction), dim=1)
    return direction


def by_similarity(centroids: torch.Tensor) -> torch.Tensor:
    """Return the centroids [..., C, D] in such an order."""
    order = similarity_order(centroids).unsqueeze(-1)
    return centroids.gather(-2, order.expand_as(centroids))
