"""Sparse methods on small videos, each with what it keeps by its definition, block by block.

`Defined.check` compares a layer with that, `Defined.check_gradients` its gradients: with text,
masks and tails, whatever the method. Rules are written with loops, in float64.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from multimodal_gen.kernels.select.row_reference import Rule
from multimodal_gen.runtime.managers.forward_context import TextSpan
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import QKV
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    SparseMethod,
    assert_same_gradients,
    best_blocks,
    block_inputs,
    joint_mask,
    kept_map,
    pair_mask,
    run_sparse,
    text_places,
    tokens_of_tiles,
    video_tokens,
)
from tests.helpers.tail import pooled_attention
from tests.helpers.tolerance import assert_within_error_budget
from tests.kernels.select.naive_chunks import naive_choice, naive_means

Grid = tuple[int, int, int]
Blocks = Sequence[Sequence[int]]
Cut = Callable[[Grid, TextSpan | None], tuple[Blocks, Blocks]]
Choose = Callable[..., torch.Tensor]


def tiles(*tile: int) -> Cut:
    """Cut the video into tiles."""

    def cut(grid: Grid, text: TextSpan | None) -> tuple[Blocks, Blocks]:
        found = tokens_of_tiles(grid, tile, text)
        return found, found

    return cut


def pieces(queries: int, keys: int | None = None) -> Cut:
    """Cut the video as it comes into pieces of so many tokens."""

    def cut(grid: Grid, text: TextSpan | None) -> tuple[Blocks, Blocks]:
        video = video_tokens(grid, text)
        first, second = (
            [video[i : i + size] for i in range(0, len(video), size)]
            for size in (queries, keys or queries)
        )
        return first, second

    return cut


def frames(grid: Grid, text: TextSpan | None) -> tuple[Blocks, Blocks]:
    """Cut the video into its frames."""
    return tiles(1, *grid[1:])(grid, text)


def rows_and_chunks(chunk: Callable[[Grid], Sequence[int]]) -> Cut:
    """Cut the video into chunks of keys, whose queries choose one by one."""

    def cut(grid: Grid, text: TextSpan | None) -> tuple[Blocks, Blocks]:
        return [[t] for t in video_tokens(grid, text)], tokens_of_tiles(grid, chunk(grid), text)

    return cut


class Checked(NamedTuple):
    """A layer that was called, what it returned, and bool [B, H, S, S], what it had to keep."""

    layer: Any
    out: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Defined:
    """A sparse method, and its definition.

    Attributes:
        method: it, with parameters that leave much out.
        cut: makes the blocks of queries and of keys.
        choose: from q, k and v, both kinds of blocks and `token_mask`, and parameters of its own,
            tells which block attends to which, bool [B, H, Nq, Nk].
        grid: of the videos that it is tried on.
        varied: cuts them into parts that have means of their own, so that scores differ by much.
        stands_in: from queries, their blocks and `token_mask`, tells which query each one takes the
            output of, int64 [B, S, H]; None where each has its own.
    """

    method: SparseMethod
    cut: Cut
    choose: Choose
    grid: Grid = (5, 6, 9)
    varied: Cut = field(default=pieces(16))
    stands_in: Callable[..., torch.Tensor] | None = None

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.method.scale

    def inputs(
        self,
        text: TextSpan | None = None,
        *,
        batch: int = 1,
        kv_heads: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> QKV:
        """Return q, k and v whose scores differ by much."""
        qkv = self.method.inputs(self.grid, text=text, batch=batch, kv_heads=kv_heads)
        varied = block_inputs(qkv, self.varied(self.grid, text)[0], values=True)
        return QKV(*(x.to(dtype) for x in varied))

    def mask(
        self,
        qkv: QKV,
        text: TextSpan | None = None,
        token_mask: torch.Tensor | None = None,
        **rule: Any,
    ) -> torch.Tensor:
        """Return which token attends to which, bool [B, H, S, S]."""
        cuts, sizes = self.cut(self.grid, text), (qkv.query.shape[1], qkv.key.shape[1])
        chosen = self.choose(qkv, *cuts, token_mask=token_mask, **rule)
        batch, _, heads, _ = qkv.query.shape
        mask = pair_mask(chosen, *cuts, *sizes).expand(batch, heads, -1, -1)
        mask = joint_mask(mask, video_tokens(self.grid, text), token_mask)
        if self.stands_in is not None:
            source = self.stands_in(qkv.query, cuts[0], token_mask).transpose(1, 2)
            mask = mask & (source == torch.arange(sizes[0])).unsqueeze(3)
        return mask

    def spread(
        self,
        query: torch.Tensor,
        mask: torch.Tensor,
        text: TextSpan | None,
        token_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries, and what they keep, with those in place that stand for others."""
        if self.stands_in is None:
            return query, mask
        source = self.stands_in(query.detach(), self.cut(self.grid, text)[0], token_mask)
        rows = source.transpose(1, 2).unsqueeze(3).expand(mask.shape)
        return query.gather(1, source.unsqueeze(3).expand(query.shape)), mask.gather(2, rows)

    def defined(
        self,
        mask: torch.Tensor,
        text: TextSpan | None,
        token_mask: torch.Tensor | None,
        *qkv: torch.Tensor,
        **parameters: object,
    ) -> torch.Tensor:
        """Return attention under a mask in float64, with the tail that the parameters ask for."""
        config = self.method.config(**parameters)
        query, mask = self.spread(qkv[0], mask, text, token_mask)
        qkv = (query, *qkv[1:])
        if config.tail == "none":
            return reference_attention(*qkv, scale=self.scale, mask=mask)[0]
        return pooled_attention(
            *qkv,
            mask,
            self.cut(self.grid, text)[1],
            scale=self.scale,
            rows=video_tokens(self.grid, text),
            token_mask=token_mask,
            first_order=getattr(config, "first_order", False),
        )

    def check(
        self,
        text: TextSpan | None = None,
        *,
        qkv: QKV | None = None,
        token_mask: torch.Tensor | None = None,
        rule: Mapping[str, Any] = MappingProxyType({}),
        known: Mapping[str, Any] | None = None,
        step: int = 0,
        layer: Any = None,
        **parameters: object,
    ) -> Checked:
        """Raise AssertionError unless a layer computes what is defined.

        Args:
            text: where text lies.
            qkv: its inputs; `inputs` when None.
            token_mask: bool [B, S], tokens that count; the others hold NaN.
            rule: parameters of `choose`.
            known: further fields of the context.
            step: denoising step.
            layer: it; one with the parameters when None.
            **parameters: of the method, beside those that it has here.
        """
        if qkv is None:
            qkv = self.inputs(text, batch=1 if token_mask is None else len(token_mask))
        if layer is None:
            of_layer = {"kv_heads": qkv.key.shape[2], "dtype": qkv.query.dtype}
            layer = self.method.layer(**of_layer, **parameters)
        given, real = qkv, slice(None)
        if token_mask is not None:
            given = QKV(*(x.masked_fill(~token_mask[..., None, None], torch.nan) for x in qkv))
            real = token_mask
        context = {"text": text, "step": step, "known": known}
        out = run_sparse(layer, given, self.grid, attn_mask=token_mask, **context)
        mask = self.mask(qkv, text, token_mask, **rule)
        if self.method.config(**parameters).tail == "none":
            query, rows = self.spread(qkv.query, mask, text, token_mask)
            rows = rows if token_mask is None else rows & token_mask[:, None, :, None]
            assert_within_error_budget(out, query, *qkv[1:], scale=self.scale, mask=rows)
        else:
            want = self.defined(mask, text, token_mask, *qkv, **parameters)
            torch.testing.assert_close(out.double()[real], want[real], rtol=1e-4, atol=1e-5)
        return Checked(layer, out, mask)

    def check_gradients(self, text: TextSpan | None = None, **parameters: object) -> None:
        """Raise AssertionError unless a layer has the gradients of what is defined."""
        qkv = self.inputs(text)
        mask, layer = self.mask(qkv, text), self.method.layer(kv_heads=1, **parameters)
        assert_same_gradients(
            lambda *x: run_sparse(layer, QKV(*x), self.grid, text=text),
            lambda *x: self.defined(mask, text, None, *x, **parameters),
            *qkv,
        )


def near(q_blocks: Blocks, k_blocks: Blocks, reach: int) -> torch.Tensor:
    """Return whether blocks lie at most `reach` apart, bool [Nq, Nk]; queries are the last keys."""
    own = torch.arange(len(q_blocks)) + len(k_blocks) - len(q_blocks)
    return (own[:, None] - torch.arange(len(k_blocks))).abs() <= reach


def best(
    qkv: QKV,
    q_blocks: Blocks,
    k_blocks: Blocks,
    *,
    kept: int,
    centred: bool = False,
    own: bool = False,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keep the blocks whose means match best, and, if `own`, a block's own."""
    options: dict[str, Any] = {"token_mask": token_mask, "centred": centred}
    chosen = best_blocks(qkv.query, qkv.key, q_blocks, k_blocks, kept, **options)
    return chosen | near(q_blocks, k_blocks, 0) if own else chosen


def _means(x: torch.Tensor, blocks: Blocks, kept: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of every block's kept tokens, and zero where there are none."""
    found = []
    for tokens in blocks:
        real = [t for t in tokens if kept is None or kept[t]]
        found.append(x[real].double().mean(0) if real else torch.zeros(x.shape[1]).double())
    return torch.stack(found).to(x.dtype).double()


def above(
    qkv: QKV,
    q_blocks: Blocks,
    k_blocks: Blocks,
    *,
    tau: float = 1.0,
    thresh_type: str = "diag",
    topk: float | None = None,
    neighbours: int = 1,
    inside: Sequence[int] = (),
    rows: bool = False,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keep what scores above a threshold of its row, neighbours, and the blocks `inside` a sink.

    Args:
        qkv: the inputs.
        q_blocks: positions of the tokens of each block of queries.
        k_blocks: the same for keys.
        tau: how many deviations the threshold is above the mean of the scores.
        thresh_type: whether their variance is that of the keys alone, or exact.
        topk: share of the blocks that is kept instead.
        neighbours: how far away blocks are kept in any case.
        inside: blocks of the sink.
        rows: whether the sink attends to everything.
        token_mask: bool [B, S], tokens that count; None for all.
    """
    batch, _, heads, size = qkv.query.shape
    num, scale = len(k_blocks), size**-0.5
    chosen = near(q_blocks, k_blocks, neighbours).repeat(batch, heads, 1, 1)
    for b, h in product(range(batch), range(heads)):
        kept = None if token_mask is None else token_mask[b]
        query = _means(qkv.query[b, :, h], q_blocks, kept)
        key = _means(qkv.key[b, :, h * qkv.key.shape[2] // heads], k_blocks, kept)
        real = [n for n in range(num) if kept is None or kept[list(k_blocks[n])].any()]
        for i in range(len(q_blocks)):
            scores = {j: float(query[i] @ key[j]) * scale for j in real}
            if topk is not None:
                count = min(max(round(topk * num), 1), num - 1)
                bound = sorted(scores.values(), reverse=True)[count]
            else:
                mean = sum(scores.values()) / len(real)
                variance = sum((s - mean) ** 2 for s in scores.values()) / len(real)
                if thresh_type == "diag":
                    spread = key[real].var(0, unbiased=False)
                    variance = float((query[i] ** 2) @ spread) * scale**2
                bound = mean + tau * math.sqrt(variance + 1e-6)
            chosen[b, h, i, [j for j in real if scores[j] > bound]] = True
    chosen[..., list(inside)] = True
    if rows:
        chosen[:, :, list(inside)] = True
    return chosen


def holding(
    qkv: QKV,
    q_blocks: Blocks,
    k_blocks: Blocks,
    *,
    mass: float,
    widths: Grid | None,
    counts: tuple[int, int],
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keep the best tiles, one at least, that hold `mass` together, and those nearby.

    Args:
        qkv: the inputs.
        q_blocks: positions of the tokens of each tile of queries, which are the last ones.
        k_blocks: the same for keys.
        mass: share of a row's softmax over means; what is dropped holds less than the rest.
        widths: tiles nearby along time, height and width; None for none.
        counts: tiles along height and width.
        token_mask: bool [B, S], tokens that count; None for all.
    """
    batch, _, heads, size = qkv.query.shape
    chosen = torch.zeros(batch, heads, len(q_blocks), len(k_blocks), dtype=torch.bool)
    places = list(product(range(len(k_blocks)), *map(range, counts)))[: len(k_blocks)]
    for b, h in product(range(batch), range(heads)):
        kept = None if token_mask is None else token_mask[b]
        query = _means(qkv.query[b, :, h], q_blocks, kept)
        key = _means(qkv.key[b, :, h * qkv.key.shape[2] // heads], k_blocks, kept)
        real = [n for n in range(len(key)) if kept is None or kept[list(k_blocks[n])].any()]
        for i, row in enumerate(query):
            shares = (key[real] @ row * size**-0.5).softmax(0).tolist()
            below, order, keeps = 0.0, sorted(zip(shares, real, strict=True)), []
            for share, j in order:
                below += share
                keeps += [j] * (below >= 1 - mass or j == order[-1][1])
            own = places[len(k_blocks) - len(q_blocks) + i]
            for j, place in enumerate(places if widths is not None else ()):
                far = [abs(a - c) for a, c in zip(own, place, strict=True)]
                keeps += [j] * all(d <= w // 2 for d, w in zip(far, widths or (), strict=True))
            chosen[b, h, i, keeps] = True
    return chosen


def stand_ins(
    query: torch.Tensor, blocks: Blocks, token_mask: torch.Tensor | None = None, *, ratio: float
) -> torch.Tensor:
    """Return which query each one takes the output of, int64 [B, S, H].

    Of a block, a share of the queries that count are computed, those least like the middle one; the
    others take the nearest one's output. Those that do not count, and text, have their own.
    """
    batch, tokens, heads, _ = query.shape
    source = torch.arange(tokens)[None, :, None].repeat(batch, 1, heads)
    for b, h, block in product(range(batch), range(heads), map(list, blocks)):
        real = [t for t in block if token_mask is None or token_mask[b, t]]
        if not real:
            continue
        rows = query[b, real, h].double()
        rows = rows / rows.norm(dim=-1, keepdim=True)
        alike = (rows @ rows[len(real) // 2]).tolist()
        of = {t: place for place, t in enumerate(block)}
        count = max(1, math.floor(Fraction(str(ratio)) * len(real)))
        order = sorted(range(len(real)), key=alike.__getitem__)
        places = sorted(of[real[i]] for i in order[:count])
        nearest = [min(places, key=lambda x, p=of[t]: (abs(x - p), x)) for t in real]
        source[b, real, h] = torch.tensor([block[place] for place in nearest])
    return source


def holding_of_computed(
    qkv: QKV,
    q_blocks: Blocks,
    k_blocks: Blocks,
    *,
    ratio: float,
    mass: float,
    least: int,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keep the best tiles until they hold `mass`, by the means of the computed queries."""
    batch, _, heads, size = qkv.query.shape
    source = stand_ins(qkv.query, q_blocks, token_mask, ratio=ratio)
    chosen = torch.zeros(batch, heads, len(q_blocks), len(k_blocks), dtype=torch.bool)
    for b, h in product(range(batch), range(heads)):
        kept = None if token_mask is None else token_mask[b]
        own = source[b, :, h].tolist()
        computed = [[t for t in x if own[t] == t] for x in q_blocks]
        query = _means(qkv.query[b, :, h], computed, kept)
        key = _means(qkv.key[b, :, h * qkv.key.shape[2] // heads], k_blocks, kept)
        real = [n for n in range(len(key)) if kept is None or kept[list(k_blocks[n])].any()]
        for i, row in enumerate(query):
            shares = (key[real] @ row * size**-0.5).softmax(0).tolist()
            before, keeps = 0.0, []
            for rank, place in enumerate(sorted(range(len(real)), key=lambda j, s=shares: -s[j])):
                keeps += [real[place]] * (before < mass or rank < least)
                before += shares[place]
            chosen[b, h, i, keeps] = True
    return chosen


def largest(
    qkv: QKV,
    q_blocks: Blocks,
    k_blocks: Blocks,
    *,
    sparsity: float,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keep the largest entries of a head's softmax over means, and the best one of every row."""
    batch, _, heads, size = qkv.query.shape
    chosen = torch.zeros(batch, heads, len(q_blocks), len(k_blocks), dtype=torch.bool)
    for b, h in product(range(batch), range(heads)):
        kept = None if token_mask is None else token_mask[b]
        query = _means(qkv.query[b, :, h], q_blocks, kept)
        key = _means(qkv.key[b, :, h * qkv.key.shape[2] // heads], k_blocks, kept)
        rows, real = (
            [n for n, x in enumerate(blocks) if kept is None or kept[list(x)].any()]
            for blocks in (q_blocks, k_blocks)
        )
        entries = {}
        for i in rows:
            draft = (key[real] @ query[i] * size**-0.5).log_softmax(0).tolist()
            entries |= {(i, j): entry for j, entry in zip(real, draft, strict=True)}
            chosen[b, h, i, real[draft.index(max(draft))]] = True
        number = math.floor(Fraction(str(sparsity)) * len(entries))
        bound = sorted(entries.values())[number - 1] if number else -math.inf
        large = [place for place, entry in entries.items() if entry >= bound and sparsity < 1]
        if large:
            chosen[b, h][tuple(torch.tensor(large).T)] = True
    return chosen


def _cell_means(
    x: torch.Tensor, blocks: Blocks, size: int, kept: torch.Tensor | None
) -> list[list[torch.Tensor]]:
    """Return the means of each block's cells of `size` that hold tokens."""
    found = []
    for tokens in blocks:
        parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        parts = [[t for t in part if kept is None or kept[t]] for part in parts]
        found.append([x[part].double().mean(0).to(x.dtype).double() for part in parts if part])
    return found


def by_cells(
    qkv: QKV,
    q_blocks: Blocks,
    k_blocks: Blocks,
    *,
    n_q: int = 4,
    n_k: int = 4,
    block: int = 64,
    kept: int = 8,
    own: bool = False,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keep the blocks whose cells match best together; cells are shares of the longest block."""
    longest = min(block, max(map(len, q_blocks)))  # of a short chunk, less than of its keys
    batch, _, heads, size = qkv.query.shape
    chosen = torch.zeros(batch, heads, len(q_blocks), len(k_blocks), dtype=torch.bool)
    for b, h in product(range(batch), range(heads)):
        of_sample = None if token_mask is None else token_mask[b]
        of_group = qkv.key[b, :, h * qkv.key.shape[2] // heads]
        query = _cell_means(qkv.query[b, :, h], q_blocks, longest // n_q, of_sample)
        key = _cell_means(of_group, k_blocks, block // n_k, of_sample)
        for i, rows in enumerate(query):
            scores = [
                torch.logsumexp(
                    torch.stack([size**-0.5 * (q @ k) for q in rows for k in columns]), 0
                )
                if rows and columns
                else -torch.inf
                for columns in key
            ]
            order = sorted(range(len(scores)), key=lambda j, s=scores: -float(s[j]))
            chosen[b, h, i, order[:kept]] = True
    return chosen | near(q_blocks, k_blocks, 0) if own else chosen


def lvsa_frames(frames: int, window: int, first: int, interval: int, offset: int) -> torch.Tensor:
    """Return which frames each frame sees, by widening its window frame by frame."""
    shared = set(range(first)) | {
        (offset + i * interval) % frames for i in range(-(-frames // interval))
    }
    rows = []
    for f in range(frames):
        low, high = f - window, f + window
        if low < 0:
            low, high = 0, 2 * window
        if high >= frames:
            low, high = frames - 1 - 2 * window, frames - 1
        seen = set(range(max(low, 0), min(high, frames - 1) + 1))
        turn = -1
        while len(seen - shared) < min(2 * window + 1, frames - len(shared)):
            beyond = min(seen) - 1 if turn < 0 else max(seen) + 1
            seen |= {beyond} & set(range(frames))
            turn = -turn
        rows.append([g in seen | shared for g in range(frames)])
    return torch.tensor(rows)


def lvsa(
    qkv: QKV, blocks: Blocks, _: Blocks, *, token_mask: object = None, interval: int, offset: int
) -> torch.Tensor:
    """Keep a window of frames, the first one, and one in each interval."""
    return lvsa_frames(len(blocks), 1, 1, interval, offset)[None, None]


def chunks(
    qkv: QKV,
    blocks: Blocks,
    _: Blocks,
    *,
    token_mask: object = None,
    chunk: int,
    radius: int,
    anchors: str,
) -> torch.Tensor:
    """Keep chunks of frames nearby, frame by frame, and the first and the last one."""
    last = len(blocks) - 1
    kept = torch.zeros(len(blocks), len(blocks), dtype=torch.bool)
    for f, g in product(range(last + 1), repeat=2):
        low, high = f - radius, f + radius
        if chunk:
            low, high = (f // chunk - radius) * chunk, (f // chunk + radius + 1) * chunk - 1
        kept[f, g] = low <= g <= high
        kept[f, g] |= anchors in ("rows", "both") and f in (0, last)
        kept[f, g] |= anchors in ("columns", "both") and g in (0, last)
    return kept[None, None]


def rows_choose(
    qkv: QKV,
    rows: Blocks,
    chunks: Blocks,
    *,
    rule: Rule,
    before: int = 0,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keep, for each row, its own chunk and those whose means match it best.

    Keys begin with so many tokens `before` the queries' own.
    """
    own = [next(n for n, chunk in enumerate(chunks) if t + before in chunk) for (t,) in rows]
    means = []
    for b, key in enumerate(qkv.key.split(1)):
        kept = [[t for t in c if token_mask is None or token_mask[b, t]] for c in chunks]
        means.append(naive_means(key, kept))
    query = qkv.query[:, [t for (t,) in rows]]
    return naive_choice(query, torch.cat(means), own, rule)


def windows(
    qkv: QKV, blocks: Blocks, _: Blocks, *, window: Grid, counts: Grid, token_mask: object = None
) -> torch.Tensor:
    """Keep windows of tiles."""
    return kept_map(window, counts)[None, None]


def method(backend: str, heads: int = 2, **given: object) -> SparseMethod:
    """Return a method that is never exchanged for dense attention, with these parameters."""
    return SparseMethod(
        backend=AttentionBackendEnum(backend), given={"dense_above": 1.0, **given}, heads=heads
    )


LONG = (5, 9, 13)  # 585 tokens: nine blocks of 64, and one of 9
TILE = (4, 4, 4)
CUBE_TILE = (2, 4, 4)
ALWAYS = {"dense_steps": None, "dense_layers": None}
CHUNKS: Mapping[str, Callable[[Grid], Sequence[int]]] = {
    "temporal": lambda grid: (2, *grid[1:]),
    "spatial": lambda grid: (grid[0], 3, 4),
    "st": lambda grid: (2, 3, 4),
}


def _vmoba(kind: str, topk: int) -> Defined:
    sizes = {"temporal_chunk_size": 2, "spatial_chunk_size": [3, 4], "st_chunk_size": [2, 3, 4]}
    turns = {f"{other}_layer": int(other == kind) for other in CHUNKS}
    given = {**sizes, **turns, f"{kind}_topk": topk, "moba_select_mode": "topk"}
    return Defined(
        method=method("vmoba_attn", **given, first_full_step=0),
        cut=rows_and_chunks(CHUNKS[kind]),
        choose=partial(rows_choose, rule=Rule(topk=topk)),
        varied=rows_and_chunks(CHUNKS[kind]),
    )


DEFINED: Mapping[str, Defined] = {
    "sta": Defined(
        method=method("sliding_tile_attn", window=(1, 1, 1), tile_size=TILE, skip_time_steps=0),
        cut=tiles(*TILE),
        choose=partial(windows, window=(1, 1, 1), counts=(2, 2, 3)),
    ),
    "vsa": Defined(
        method=method("video_sparse_attn", topk=3),
        cut=tiles(*TILE),
        choose=partial(best, kept=3),
        varied=tiles(*TILE),
    ),
    "vsa h3": Defined(
        method=method("video_sparse_attn_h3", sparsity=0.75),
        cut=tiles(*TILE),
        choose=partial(best, kept=3),
        varied=tiles(*TILE),
    ),
    "vsa by cells": Defined(
        method=method("video_sparse_attn", topk=8, router="subblock"),
        cut=tiles(*TILE),
        choose=by_cells,
        grid=LONG,
    ),
    "sla": Defined(
        method=method("sla_attn", topk_ratio=0.3, BLKQ=128, BLKK=64),
        cut=pieces(128, 64),
        choose=partial(best, kept=3, centred=True),
        grid=LONG,
    ),
    "sol": Defined(
        method=method("sol_attn", **ALWAYS, tail="none"),
        cut=pieces(64),
        choose=above,
        grid=LONG,
        varied=pieces(64),
    ),
    "sol, exact": Defined(
        method=method("sol_attn", **ALWAYS, tail="none", tau=0.5, thresh_type="exact"),
        cut=pieces(64),
        choose=partial(above, tau=0.5, thresh_type="exact"),
        grid=LONG,
        varied=pieces(64),
    ),
    "sol by cells": Defined(
        method=method(
            "sol_attn", **ALWAYS, tail="none", topk_ratio=0.4, neighbours=0, router="subblock"
        ),
        cut=pieces(64),
        choose=partial(by_cells, kept=4, own=True),
        grid=LONG,
    ),
    "cube": Defined(
        method=method("cube_sparse_attn", local_cube_size=list(CUBE_TILE), topk_ratio=0.25),
        cut=tiles(*CUBE_TILE),
        choose=partial(best, kept=4, own=True),  # floor(0.25 * 18)
        varied=tiles(*CUBE_TILE),
    ),
    "nabla": Defined(
        method=method("nabla_attn", P=0.6, wT=3, wH=1, wW=3, tile_size=list(CUBE_TILE)),
        cut=tiles(*CUBE_TILE),
        choose=partial(holding, mass=0.6, widths=(3, 1, 3), counts=(2, 3)),
        varied=tiles(*CUBE_TILE),
    ),
    "draft": Defined(
        method=method("draft_attn", sparsity_ratio=0.7, pool_h=4, pool_w=4),
        cut=tiles(1, 4, 4),
        choose=partial(largest, sparsity=0.7),
        varied=tiles(1, 4, 4),
    ),
    "bsa": Defined(
        method=method(
            "bsa_attn",
            query_keep_ratio=0.5,
            kv_cumulative_threshold=0.8,
            min_kv_blocks=2,
            tile_size=list(CUBE_TILE),
        ),
        cut=tiles(*CUBE_TILE),
        choose=partial(holding_of_computed, ratio=0.5, mass=0.8, least=2),
        varied=tiles(*CUBE_TILE),
        stands_in=partial(stand_ins, ratio=0.5),
    ),
    "pisa": Defined(
        method=method("pisa_attn", density=0.35, tail="none"),
        cut=pieces(64),
        choose=partial(best, kept=3),
        grid=LONG,
        varied=pieces(64),
    ),
    "sparge": Defined(
        method=method("sparge_attn", topk=0.35),
        cut=pieces(128, 64),
        choose=partial(best, kept=3, centred=True),
        grid=LONG,
        varied=pieces(64),
    ),
    "subblock": Defined(
        method=method("subblock_sparse_attn", sparsity=0.5, skip_first_steps=0, min_seq_len=0),
        cut=pieces(64),
        choose=by_cells,
        grid=LONG,
    ),
    "static, lvsa": Defined(
        method=method(
            "static_sparse_attn",
            pattern="lvsa",
            window_size=1,
            key_frame_interval=4,
        ),
        cut=frames,
        choose=partial(lvsa, interval=4, offset=0),
        grid=(9, 3, 5),
    ),
    "static, chunks": Defined(
        method=method("static_sparse_attn", pattern="chunks", chunk=2, radius=0),
        cut=frames,
        choose=partial(chunks, chunk=2, radius=0, anchors="both"),
        grid=(9, 3, 5),
    ),
    "vmoba, temporal": _vmoba("temporal", 2),
    "vmoba, spatial": _vmoba("spatial", 2),
    "vmoba, st": _vmoba("st", 3),
}
"""By its name, every method that keeps blocks of a fixed cut."""


SMALL: Mapping[str, dict[str, Any]] = {
    "sliding_tile_attn": {"window": [1, 1, 1], "tile_size": [1, 2, 3], "skip_time_steps": 0},
    "video_sparse_attn": {"topk": 1},
    "video_sparse_attn_h3": {"sparsity": 1.0},
    "sla_attn": {"topk_ratio": 0.0, "BLKQ": 64},
    "vmoba_attn": {
        "temporal_layer": 0,
        "spatial_chunk_size": [2, 3],
        "st_chunk_size": [1, 2, 3],
        "moba_select_mode": "topk",
        "first_full_step": 0,
        "spatial_topk": 2,
        "st_topk": 2,
    },
    "sol_attn": {"dense_steps": None, "dense_layers": None, "tile_size": [1, 2, 2], "tau": 0.0},
    "pisa_attn": {"density": 0.5, "dense_steps": None},
    "cube_sparse_attn": {"topk_ratio": 0.3, "local_cube_size": [1, 2, 2]},
    "nabla_attn": {"P": 0.5, "wT": 1, "wH": 1, "wW": 1, "tile_size": [1, 2, 2]},
    "draft_attn": {"sparsity_ratio": 0.5, "pool_h": 2, "pool_w": 2},
    "bsa_attn": {"kv_cumulative_threshold": 0.5, "min_kv_blocks": 1, "tile_size": [1, 2, 2]},
    "sparge_attn": {"topk": 0.5},
    "static_sparse_attn": {"pattern": "lvsa", "window_size": 1, "key_frame_interval": 2},
    "subblock_sparse_attn": {"sparsity": 0.5, "skip_first_steps": 0, "min_seq_len": 0},
    "sparse_video_gen_2_attn": {
        "svg2_num_q_centroids": 3,
        "svg2_num_k_centroids": 6,
        "svg2_top_p_kmeans": 0.2,
        "svg2_kmeans_iter_init": 2,
        "svg2_first_layers_fp": 0,
        "svg2_first_times_fp": 0,
    },
}
"""By its name, parameters with which a method leaves much out of tiny models, from step 0 on."""


Pick = Callable[[int, int], int]


def picks(seed: int) -> Pick:
    """Return what draws whole numbers, both ends included."""
    generator = torch.Generator().manual_seed(seed)
    return lambda first, last: int(torch.randint(first, last + 1, (), generator=generator))


def drawn_call(case: Defined, pick: Pick, *, without: slice) -> dict[str, Any]:
    """Return text, samples, key heads and a mask for a case, drawn, as `Defined.check` takes them.

    Args:
        case: the method.
        pick: draws them.
        without: the samples of which a stretch of tokens is masked, where some are.
    """
    place = ("no text", "text first", "text last")
    text = text_places(case.grid, pick(1, 9))[place[pick(0, 2)]]
    batch, token_mask = pick(1, 2), None
    qkv = case.inputs(text, batch=batch, kv_heads=pick(1, 2))
    if pick(0, 2) == 0:
        tokens, lost = qkv.key.shape[1], pick(2, 6)
        token_mask = torch.arange(batch * tokens).view(batch, -1) % lost != 1
        token_mask[without, tokens // 3 : tokens // 2] = False
    return {"text": text, "qkv": qkv, "token_mask": token_mask}
