"""Plans of causal video models, made from the lengths of their chunks and never from a mask.

A token sees whole chunks or nothing of them, so queries and keys are cut where chunks end, and a
small table says which chunks see which. It costs one entry per pair of chunks and one list per
query block, where a mask costs one per pair of tokens.
"""

from collections.abc import Sequence

import torch

from multimodal_gen.errors import UsageError, short
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.tensors import usable_device

QUERY_ROWS = 384
"""Rows of a query block: whole tiles of 192 rows on compute capability 9.0, of 128 elsewhere."""


def segment_plan(
    queries: Sequence[int],
    keys: Sequence[int],
    mask: torch.Tensor,
    *,
    device: torch.device | str = "cpu",
    query_rows: int = QUERY_ROWS,
) -> BlockPlan:
    """Return the plan of segments that see each other as wholes.

    Args:
        queries: tokens of each segment of the queries, in order.
        keys: tokens of each segment of the keys, in order.
        mask: bool [segments of the queries, segments of the keys], True where one sees the other;
            with [B|1, H|1] in front where samples or heads differ.
        device: where the plan is used.
        query_rows: rows of a query block at most.

    Returns:
        A plan whose key blocks are the segments, and whose query blocks never cross one.

    Raises:
        UsageError: a segment is empty, `query_rows` below 1, or `mask` is not a bool table of the
            segments.
    """
    _check_lengths("queries", queries)
    _check_lengths("keys", keys)
    _check_number("query_rows", query_rows, 1)
    wanted = (len(queries), len(keys))
    if not isinstance(mask, torch.Tensor):
        raise UsageError(f"`mask` must be a bool tensor {list(wanted)}, got {short(mask)}")
    if mask.dtype != torch.bool or mask.dim() not in (2, 4) or tuple(mask.shape[-2:]) != wanted:
        raise UsageError(
            f"`mask` must be bool {list(wanted)}, or have two sizes more in front, got "
            f"{mask.dtype} {list(mask.shape)}"
        )
    owner, lengths = [], []
    for segment, length in enumerate(queries):
        for begin in range(0, length, query_rows):
            owner.append(segment)
            lengths.append(min(query_rows, length - begin))
    q = _adjoining(lengths, query_rows)
    kv = _adjoining(keys, max(keys))
    rows = mask.cpu()[..., torch.tensor(owner), :]
    rows = rows[None, None] if rows.dim() == 2 else rows
    return BlockPlan.from_map(rows, q, kv).longest_first().to(usable_device(device))


def _adjoining(lengths: Sequence[int], size: int) -> Blocks:
    """Return blocks of such lengths, one after another, each of at most `size` rows."""
    of = torch.tensor(lengths, dtype=torch.int32)
    starts = of.cumsum(0, dtype=torch.int32) - of
    return Blocks.ragged(starts, of, total=sum(lengths), size=size)


def chunk_causal_plan(
    chunks: Sequence[int],
    *,
    window: int | None = None,
    sink: int = 0,
    device: torch.device | str = "cpu",
    query_rows: int = QUERY_ROWS,
) -> BlockPlan:
    """Return the plan in which chunk k sees the chunks j <= k, and all of its own.

    Args:
        chunks: tokens of each chunk, in order.
        window: how many chunks one sees, itself included: those with j > k - window; None for all.
        sink: how many first chunks every later one sees besides its window.
        device: where the plan is used.
        query_rows: rows of a query block at most.

    Raises:
        UsageError: a chunk is empty, `window` or `query_rows` is below 1, or `sink` below 0.
    """
    _check_lengths("chunks", chunks)
    mask = _seen(len(chunks), window, sink)
    return segment_plan(chunks, chunks, mask, device=device, query_rows=query_rows)


def frame_causal_plan(
    num_frames: int,
    tokens_per_frame: int,
    *,
    window: int | None = None,
    sink: int = 0,
    device: torch.device | str = "cpu",
    query_rows: int = QUERY_ROWS,
) -> BlockPlan:
    """Return `chunk_causal_plan` of frames: a token sees its frame and those before it.

    Args:
        num_frames: latent frames.
        tokens_per_frame: tokens of each.
        window: how many frames one sees, itself included; None for all.
        sink: how many first frames every later one sees besides its window.
        device: where the plan is used.
        query_rows: rows of a query block at most.

    Raises:
        UsageError: a size is below 1, or `sink` below 0.
    """
    _check_number("num_frames", num_frames, 1)
    _check_number("tokens_per_frame", tokens_per_frame, 1)
    frames = [tokens_per_frame] * num_frames
    return chunk_causal_plan(frames, window=window, sink=sink, device=device, query_rows=query_rows)


def teacher_forcing_plan(
    chunks: Sequence[int],
    *,
    window: int | None = None,
    sink: int = 0,
    device: torch.device | str = "cpu",
    query_rows: int = QUERY_ROWS,
) -> BlockPlan:
    """Return the plan of a sequence of clean chunks followed by the noisy ones of the same video.

    Clean chunk k sees the clean chunks of `chunk_causal_plan`. Noisy chunk k sees itself, and of
    the clean chunks those that clean chunk k sees without its own. Nothing else sees noise.

    Args:
        chunks: tokens of each chunk, in order; the sequence is twice as long.
        window: as in `chunk_causal_plan`.
        sink: as in `chunk_causal_plan`.
        device: where the plan is used.
        query_rows: rows of a query block at most.

    Raises:
        UsageError: a chunk is empty, `window` or `query_rows` is below 1, or `sink` below 0.
    """
    _check_lengths("chunks", chunks)
    clean = _seen(len(chunks), window, sink)
    own = torch.eye(len(chunks), dtype=torch.bool)
    mask = torch.cat(
        (torch.cat((clean, own.new_zeros(own.shape)), 1), torch.cat((clean & ~own, own), 1))
    )
    both = [*chunks, *chunks]
    return segment_plan(both, both, mask, device=device, query_rows=query_rows)


def _check_lengths(name: str, lengths: Sequence[int]) -> None:
    if not isinstance(lengths, Sequence) or hasattr(lengths, "hex") or not lengths:
        raise UsageError(f"`{name}` must be a list of lengths in tokens, got {short(lengths)}")
    for i, length in enumerate(lengths):
        _check_number(f"{name}[{i}]", length, 1)


def _check_number(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise UsageError(f"`{name}` must be a whole number >= {least}, got {short(value)}")


def _seen(num: int, window: int | None, sink: int) -> torch.Tensor:
    """Return bool [num, num]: True where chunk k (rows) sees chunk j."""
    if window is not None:
        _check_number("window", window, 1)
    _check_number("sink", sink, 0)
    k, j = torch.arange(num)[:, None], torch.arange(num)[None, :]
    recent = j > k - (num if window is None else window)
    return (j <= k) & (recent | (j < sink))
