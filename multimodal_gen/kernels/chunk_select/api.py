"""Which chunks of keys each query selects: validates, then runs Triton or the reference.

Shapes: B batch, S tokens, H heads, D head size, N chunks. Chunk i holds the keys at positions
[starts[i], starts[i] + lengths[i]), or, with an `index`, the keys it names at these positions.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.chunk_select.reference import (
    Rule,
    chunk_means_reference,
    pack_bits,
    select_chunks_reference,
)
from multimodal_gen.kernels.engine import CHUNK_CHOICE, CHUNK_MEANS, choose_for

__all__ = ["ChunkMeans", "Rule", "chunk_means", "pack_bits", "select_chunks"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkMeans:
    """Means of the keys of every chunk.

    Attributes:
        means: [B, Hkv, N, D] in fp32 (fp64 for fp64); zero where a chunk has no key.
        counts: keys of every chunk, int32 [B, N], or [1, N] where no key is masked.
        masked: whether keys were masked, so that chunks may be empty.
    """

    means: torch.Tensor
    counts: torch.Tensor
    masked: bool


def chunk_means(
    key: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    size: int,
    index: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
) -> ChunkMeans:
    """Return the mean of every chunk's keys, summed in fp32; does not wait for the GPU.

    Args:
        key: [B, S, Hkv, D], any strides.
        starts: int32 [N].
        lengths: int32 [N], at least 1.
        size: upper bound of `lengths`.
        index: int32 [S'], the key at every position; None where keys lie chunk by chunk.
        keep: bool [B, S], keys that count, in the order of `key`; None for all.

    Returns:
        The means, and how many keys each chunk has.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other.
    """
    _check_chunks(key, starts, lengths, index)
    if size < 1:
        raise UsageError(f"`size` must be at least 1, got {size}")
    _check_keep(keep, key)
    counts = lengths.unsqueeze(0)
    if keep is not None:
        kept = keep if index is None else keep[:, index.long()]
        before = torch.nn.functional.pad(kept.cumsum(1), (1, 0))
        counts = (before[:, (starts + lengths).long()] - before[:, starts.long()]).int()
    if choose_for(CHUNK_MEANS, key) == "triton":
        from multimodal_gen.kernels.chunk_select import chunk_select_kernel

        means = chunk_select_kernel.chunk_means(
            key.detach(), starts, lengths, size, index, keep, counts
        )
    else:
        means = chunk_means_reference(key.detach(), starts, lengths, index, keep, counts)
    return ChunkMeans(means=means, counts=counts, masked=keep is not None)


def select_chunks(
    query: torch.Tensor,
    chunks: ChunkMeans,
    own: torch.Tensor,
    rule: Rule,
    *,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunks that every query selects; does not wait for the GPU.

    Equal scores go to the lowest chunk in the scope `query_head` and stay together in the others.
    Chunks without keys are not selected, except as a query's own.

    Args:
        query: [B, S, H, D], any strides; query head h uses key head h // (H / Hkv).
        chunks: what they are scored against.
        own: int32 [S], the chunk that each query lies in.
        rule: how to choose.
        keep: bool [B, S], queries that count; None for all. The others choose their own chunk,
            compete with none, and may hold anything, NaN too.

    Returns:
        The choice, int32 [B, H, S, ceil(N / 32)], with chunk n at bit n % 32 of word n // 32; and
        how many pairs of a query and a key that makes in all, int64 [].

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other.
    """
    means = chunks.means
    _check_query(query, means, own)
    _check_keep(keep, query)
    query = query.detach()  # a choice has no gradient
    together = rule.scope != "query_head"
    if choose_for(CHUNK_CHOICE, query, num_kv=means.shape[2], together=together) == "triton":
        from multimodal_gen.kernels.chunk_select import chunk_select_kernel

        return chunk_select_kernel.select_chunks(
            query, means, chunks.counts, own, rule, masked=chunks.masked, keep=keep
        )
    real = chunks.counts > 0 if chunks.masked else None
    chosen = select_chunks_reference(query, means, own, rule, real, keep)
    return pack_bits(chosen), (chosen.sum((1, 2)) * chunks.counts).sum()


def _check_chunks(
    key: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, index: torch.Tensor | None
) -> None:
    if key.ndim != 4:
        raise UsageError(f"`key` must be [B, S, H, D], got {list(key.shape)}")
    for name, x in (("starts", starts), ("lengths", lengths), ("index", index)):
        if x is not None and (x.dtype != torch.int32 or x.ndim != 1 or x.device != key.device):
            raise UsageError(
                f"`{name}` must be int32, 1-D and on {key.device}, got {x.dtype} "
                f"{list(x.shape)} on {x.device}"
            )
    if len(starts) != len(lengths) or not len(starts):
        raise UsageError(
            f"`lengths` must hold one value per start, got {len(lengths)} for {len(starts)}"
        )


def _check_keep(keep: torch.Tensor | None, tokens: torch.Tensor) -> None:
    if keep is not None and (keep.dtype != torch.bool or keep.shape != tokens.shape[:2]):
        raise UsageError(
            f"`keep` must be bool {list(tokens.shape[:2])}, got {keep.dtype} {list(keep.shape)}"
        )


def _check_query(query: torch.Tensor, means: torch.Tensor, own: torch.Tensor) -> None:
    if query.ndim != 4:
        raise UsageError(f"`query` must be [B, S, H, D], got {list(query.shape)}")
    batch, tokens, heads, head_size = query.shape
    fits = (means.shape[0], means.shape[3]) == (batch, head_size) and heads % means.shape[1] == 0
    if not fits or means.device != query.device:
        raise UsageError(
            f"`chunks` must hold means [{batch}, a divisor of {heads}, N, {head_size}] on "
            f"{query.device}, got {list(means.shape)} on {means.device}"
        )
    if own.dtype != torch.int32 or tuple(own.shape) != (tokens,) or own.device != query.device:
        raise UsageError(
            f"`own` must be int32 [{tokens}] on {query.device}, got {own.dtype} "
            f"{list(own.shape)} on {own.device}"
        )
