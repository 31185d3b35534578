"""k-means in plain PyTorch: the definition, for any device.

Shapes: N problems, S tokens, C clusters, D channels.
"""

import torch


def assign_reference(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return the nearest centroid of every token; of equally near ones the first.

    Centroids are rounded to the dtype of the tokens before they are compared.

    Args:
        x: [N, S, D].
        centroids: fp32 [N, C, D].

    Returns:
        int32 [N, S].
    """
    rounded = centroids.to(x.dtype).float()
    half = rounded.square().sum(-1) / 2
    labels = [
        (tokens.float() @ points.T - norms).argmax(1)
        for tokens, points, norms in zip(x, rounded, half, strict=True)
    ]
    return torch.stack(labels).int()


def sort_reference(labels: torch.Tensor, num: int) -> tuple[torch.Tensor, ...]:
    """Sort tokens by label, stably.

    Args:
        labels: int32 [N, S], in [0, num]; `num` stands for none.
        num: C, the number of clusters.

    Returns:
        order, int32 [N, S], tokens of no cluster last; starts and counts, int32 [N, C].
    """
    order = torch.argsort(labels, dim=1, stable=True)
    counts = labels.new_zeros((labels.shape[0], num + 1))
    counts.scatter_add_(1, labels.long(), torch.ones_like(labels))
    counts = counts[:, :num]
    starts = counts.cumsum(1) - counts
    return order.int(), starts.int(), counts


def kmeans_reference(
    x: torch.Tensor,
    centroids: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    iterations: int,
    tolerance: float,
) -> tuple[torch.Tensor, ...]:
    """Run Lloyd's iterations; each problem stops where no centroid moved by `tolerance`.

    Args:
        x: [N, S, D].
        centroids: fp32 [N, C, D] to begin with.
        mask: bool [N, S], tokens that count; None for all.
        iterations: at most so many updates; 0 only assigns.
        tolerance: least distance that counts as a move.

    Returns:
        centroids after the last update, and order, starts and counts of the labels before it.
    """
    num = centroids.shape[1]
    labels = torch.empty(0)
    active = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    for i in range(max(iterations, 1)):
        found = assign_reference(x, centroids)
        if mask is not None:
            found = torch.where(mask, found, num)
        labels = found if i == 0 else torch.where(active[:, None], found, labels)
        if iterations == 0:
            break
        updated = torch.where(active[:, None, None], _means(x, labels, centroids), centroids)
        shift = (updated - centroids).square().sum(-1).amax(1)
        centroids = updated
        active = active & (shift >= tolerance**2)
    return centroids, *sort_reference(labels, num)


def _means(x: torch.Tensor, labels: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return the mean of every cluster's tokens; an empty cluster keeps its centroid."""
    num = centroids.shape[1]
    means = []
    for tokens, clusters, before in zip(x, labels.long(), centroids, strict=True):
        sums = before.new_zeros((num + 1, x.shape[2])).index_add_(0, clusters, tokens.float())
        counts = before.new_zeros(num + 1).index_add_(
            0, clusters, torch.ones_like(clusters).float()
        )
        mean = sums / counts.clamp_min(1.0)[:, None]
        means.append(torch.where(counts[:num, None] > 0, mean[:num], before))
    return torch.stack(means)
