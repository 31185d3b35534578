"""Attention over a part of the keys: by its formula, its gradients, and how parts are merged.

A part is an output [B, Sq, H, Dv] and the natural log-sum-exp of its scores, fp32 [B, H, Sq]. A
query that sees none of the keys has output 0 and log-sum-exp -inf.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from multimodal_gen.kernels.part_merge.api import merge_two
from multimodal_gen.kernels.part_merge.reference import merge_weights

__all__ = ["KeyPart", "Merger", "part_gradients", "plain_part"]

# Scores that a formula holds at a time: 64 Mi, a quarter of a GiB in fp32.
_MAX_SCORES = 1 << 26

_Part = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyPart:
    """A part of the keys as some queries see it.

    Attributes:
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, Dv].
        causal: query i sees key j <= i + Sk - Sq.
        keep: bool [B, Sk], False for padding; None where there is none.
        owner: whose tokens they are in a ring; None for those that all ranks hold.
    """

    key: torch.Tensor
    value: torch.Tensor
    causal: bool = False
    keep: torch.Tensor | None = None
    owner: int | None = None


class Merger:
    """Merges parts over different keys, in fp32 or better.

    Parts of all queries are merged in one pass each. The last of them waits until the result is
    asked for, so that it is written in its dtype at once.

    Args:
        query: [B, Sq, H, D].
        value_size: Dv.
    """

    def __init__(self, query: torch.Tensor, value_size: int) -> None:
        batch, rows, heads = query.shape[:3]
        self._like = query
        self._shape = (batch, rows, heads, value_size)
        self._precise = torch.promote_types(query.dtype, torch.float32)
        self._merged: _Part | None = None
        self._last: _Part | None = None

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a part of the queries in `rows`; nobody may write to its tensors any more."""
        lse = lse.to(self._precise)
        if out.shape[1] == self._shape[1]:
            self._merged = self._all(self._precise)
            self._last = (out, lse)
            return
        merged, seen = self._writable()
        old, new, total = merge_weights(seen[:, :, rows], lse)
        merged[:, rows].mul_(old)
        # A row without keys holds zeros in every part; its weight is 0, too.
        merged[:, rows].addcmul_(out, new)
        seen[:, :, rows] = total

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output in the dtype of the query, and the log-sum-exp."""
        out, lse = self._all(self._like.dtype) or self._nothing()
        return out.to(self._like.dtype), lse

    def _all(self, dtype: torch.dtype) -> _Part | None:
        """Return what there is so far; in `dtype` where two parts have to be merged for it."""
        if self._merged is None or self._last is None:
            return self._last or self._merged
        return merge_two(*self._merged, *self._last, dtype=dtype)

    def _writable(self) -> _Part:
        """Make what there is so far one precise part that may be written to, and return it."""
        part = self._all(self._precise)
        if part is None:
            part = self._nothing()
        elif self._merged is None:
            part = part[0].to(self._precise, copy=True), part[1].clone()
        self._merged, self._last = part, None
        return part

    def _nothing(self) -> _Part:
        """Return what is merged when there are no keys."""
        batch, rows, heads, _ = self._shape
        out = self._like.new_zeros(self._shape, dtype=self._precise)
        return out, out.new_full((batch, heads, rows), -math.inf)


def plain_part(
    query: torch.Tensor, part: KeyPart, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a part by the formula, for what kernels do not give the log-sum-exp of.

    Args:
        query: [B, Sq, H, D].
        part: the keys.
        scale: factor on q k^T.
    """
    outs, stats = [], []
    value = _masked(part.value, part.keep)
    for _, scores in _scores(query, part, scale):
        lse = scores.logsumexp(-1)
        weights = _weight(scores, lse[..., None])
        outs.append(torch.einsum("bngts,bsnd->btngd", weights, value.to(weights.dtype)))
        stats.append(lse.flatten(1, 2))
    return torch.cat(outs, dim=1).flatten(2, 3).to(query.dtype), torch.cat(stats, dim=-1)


def part_gradients(
    query: torch.Tensor,
    part: KeyPart,
    scale: float,
    grad: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v that go through one part, in fp32 or better.

    Args:
        query: [B, Sq, H, D].
        part: the keys.
        scale: factor on q k^T.
        grad: gradient of the merged output, [B, Sq, H, Dv].
        delta: its product with the merged output, summed over channels, [B, H, Sq].
        lse: of the merged parts, [B, H, Sq].
    """
    dtype = lse.dtype
    key, value = (_masked(x, part.keep).to(dtype) for x in (part.key, part.value))
    groups = (key.shape[2], query.shape[2] // key.shape[2])
    grad_query = torch.empty_like(query, dtype=dtype)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    delta, lse = (torch.unflatten(x, 1, groups) for x in (delta.to(dtype), lse))
    for rows, scores in _scores(query, part, scale):
        weights = _weight(scores, lse[..., rows, None])
        upstream = torch.unflatten(grad[:, rows].to(dtype), 2, groups)
        grad_value += torch.einsum("bngts,btngd->bsnd", weights, upstream)
        grad_weights = torch.einsum("btngd,bsnd->bngts", upstream, value)
        grad_scores = weights * (grad_weights - delta[..., rows, None]) * scale
        own = torch.einsum("bngts,bsnd->btngd", grad_scores, key)
        grad_query[:, rows] = own.flatten(2, 3)
        tile = torch.unflatten(query[:, rows].to(dtype), 2, groups)
        grad_key += torch.einsum("bngts,btngd->bsnd", grad_scores, tile)
    return grad_query, grad_key, grad_value


def _scores(
    query: torch.Tensor, part: KeyPart, scale: float
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield rows of queries with their scores [B, Hkv, H / Hkv, rows, Sk], masked ones -inf."""
    batch, num_queries, heads = query.shape[:3]
    num_keys, kv_heads = part.key.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = (kv_heads, heads // kv_heads)
    key = _masked(part.key, part.keep).to(dtype)
    tile = max(1, _MAX_SCORES // max(1, batch * heads * num_keys))
    columns = torch.arange(num_keys, device=query.device)
    for start in range(0, num_queries, tile):
        rows = slice(start, min(start + tile, num_queries))
        own = torch.unflatten(query[:, rows].to(dtype), 2, groups)
        scores = torch.einsum("btngd,bsnd->bngts", own, key) * scale
        if part.causal:
            last = torch.arange(rows.start, rows.stop, device=query.device)
            seen = columns <= (last + num_keys - num_queries)[:, None]
            scores = scores.masked_fill(~seen, -math.inf)
        if part.keep is not None:
            scores = scores.masked_fill(~part.keep[:, None, None, None], -math.inf)
        yield rows, scores


def _weight(exponent: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return exp(exponent - total), 0 where nothing is seen."""
    return (exponent - total.masked_fill(total == -math.inf, 0.0)).exp()


def _masked(x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """Return [B, S, H, D] with zeros where it is padding: a weight of 0 times NaN is NaN."""
    return x if keep is None else torch.where(keep[:, :, None, None], x, 0.0)
