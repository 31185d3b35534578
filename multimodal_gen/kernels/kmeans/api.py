"""Batched Euclidean k-means: every head of every batch entry is a problem of its own.

Shapes: B batch, S tokens, H heads, D head size, C clusters.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import AUTO, KMEANS, Request, choose
from multimodal_gen.kernels.kmeans.reference import kmeans_reference
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tensors import check_mask, place_of

_FLOATING = (torch.float16, torch.bfloat16, torch.float32)
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clusters:
    """The tokens of every head, cluster by cluster.

    Attributes:
        centroids: fp32 [B, H, C, D], after the last update.
        order: int32 [B, H, S], the tokens by cluster, within one in their own order; tokens of no
            cluster come last.
        starts: int32 [B, H, C], where in `order` each cluster begins.
        counts: int32 [B, H, C], the tokens of each cluster, by the centroids before the last
            update.
    """

    centroids: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor


def initial_centroids(
    x: torch.Tensor, num: int, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `num` random tokens of every head, the same ones every time.

    Args:
        x: [B, S, H, D].
        num: C, or more than S for all of them.
        mask: bool [B, S], tokens to choose from first; None for all.

    Returns:
        fp32 [B, H, min(C, S), D].
    """
    tokens = _shuffled(x.shape[1], x.device)
    num = min(num, x.shape[1])
    if mask is None:
        return x.index_select(1, tokens[:num]).transpose(1, 2).float()
    first = torch.argsort(~mask[:, tokens], dim=1, stable=True)[:, :num]
    chosen = tokens[first][:, :, None, None].expand(-1, -1, *x.shape[2:])
    return x.gather(1, chosen).transpose(1, 2).float()


@static_cache(maxsize=32)
def _shuffled(total: int, device: torch.device) -> torch.Tensor:
    # Cached, because the copy waits for the device.
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randperm(total, generator=generator).to(device)


def kmeans(
    x: torch.Tensor,
    centroids: torch.Tensor,
    *,
    iterations: int,
    mask: torch.Tensor | None = None,
    tolerance: float = 1e-4,
    kernel: str = AUTO,
) -> Clusters:
    """Cluster the tokens of every head by Lloyd's algorithm; does not wait for the device.

    Two runs agree bit by bit. A token as near to several centroids goes to the first of them; an
    empty cluster keeps its centroid. A head whose centroids all moved by less than `tolerance`
    stops.

    Args:
        x: [B, S, H, D], any strides.
        centroids: floating [B, H, C, D] to begin with.
        iterations: at most so many updates; 0 only assigns tokens to `centroids`.
        mask: bool [B, S], tokens to cluster; None for all.
        tolerance: least distance that counts as a move.
        kernel: "triton", "reference", "flash_kmeans" where the package of that name is installed,
            or "auto" for the fastest.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other, or a number is out of range.
        UnsupportedBackendError: the kernel asked for cannot serve this call.
    """
    _validate(x, centroids, mask, iterations, tolerance)
    request = Request(*place_of(x.device), x.dtype, x.shape[3], masked=mask is not None)
    kernel = choose(KMEANS, kernel, request)
    batch, tokens, heads, size = x.shape
    if kernel == "triton":
        from multimodal_gen.kernels.kmeans.kmeans_kernel import kmeans_triton

        found = kmeans_triton(x, centroids, mask, iterations=iterations, tolerance=tolerance)
    else:
        flat = x.transpose(1, 2).reshape(batch * heads, tokens, size)
        begin = centroids.float().flatten(0, 1)
        if kernel == "flash_kmeans":
            found = _run_flash_kmeans(flat, begin, iterations, tolerance)
        else:
            kept = None if mask is None else mask.repeat_interleave(heads, dim=0)
            found = kmeans_reference(flat, begin, kept, iterations=iterations, tolerance=tolerance)
    shaped = (part.view(batch, heads, *part.shape[1:]) for part in found)
    centroids, order, starts, counts = shaped
    return Clusters(centroids=centroids, order=order, starts=starts, counts=counts)


def _validate(
    x: torch.Tensor,
    centroids: torch.Tensor,
    mask: torch.Tensor | None,
    iterations: int,
    tolerance: float,
) -> None:
    if x.ndim != 4 or x.dtype not in _FLOATING:
        raise UsageError(
            f"`x` must be float16, bfloat16 or float32 [B, S, H, D], got {x.dtype} {list(x.shape)}"
        )
    batch, _, heads, size = x.shape
    shape = (batch, heads, size)
    if centroids.ndim != 4 or (*centroids.shape[:2], centroids.shape[3]) != shape:
        raise UsageError(
            f"`centroids` must be [{batch}, {heads}, C, {size}], got {list(centroids.shape)}"
        )
    if centroids.device != x.device:
        raise UsageError(
            f"`centroids` must be on the device of x ({x.device}), got {centroids.device}"
        )
    if centroids.shape[2] < 1:
        raise UsageError("`centroids` must hold at least 1 cluster, got 0")
    check_mask(mask, x)
    if iterations < 0:
        raise UsageError(f"`iterations` must be at least 0, got {iterations}")
    if not tolerance >= 0:
        raise UsageError(f"`tolerance` must be at least 0, got {tolerance}")


def _run_flash_kmeans(
    x: torch.Tensor, centroids: torch.Tensor, iterations: int, tolerance: float
) -> tuple[torch.Tensor, ...]:
    from flash_kmeans import batch_kmeans_Euclid  # type: ignore[import-not-found]

    from multimodal_gen.kernels.kmeans.kmeans_kernel import sort_labels

    num = centroids.shape[1]
    labels, updated, *_ = batch_kmeans_Euclid(
        x,
        num,
        max_iters=max(iterations, 1),
        tol=tolerance,
        init_centroids=centroids.to(x.dtype),
    )
    return (updated.float() if iterations else centroids), *sort_labels(labels.int(), num)


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
    """Return about the principal direction of [N, M, D], by power iteration: [N, D, 1].

    Its length is any. Of x^T x with a trace of 1 the greatest eigenvalue lies in [1 / D, 1], so
    that a few rounds neither overflow nor vanish, and need no scaling between them.
    """
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    direction = x.square().sum(1, keepdim=True).transpose(1, 2)
    for _ in range(_ROUNDS):
        direction = x.transpose(1, 2) @ (x @ direction)
    return direction


def by_similarity(centroids: torch.Tensor) -> torch.Tensor:
    """Return the centroids [..., C, D] in such an order."""
    order = similarity_order(centroids).unsqueeze(-1)
    return centroids.gather(-2, order.expand_as(centroids))
