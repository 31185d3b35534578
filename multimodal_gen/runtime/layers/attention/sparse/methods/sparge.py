"""SpargeAttn: blocks that are alike inside are chosen by their means, all others are kept.

The rule is that of the authors' package, spas_sage_attn (arXiv:2502.18137): queries in blocks of
128, keys in blocks of 64, in the order of the sequence. A block whose tokens differ, by the mean
cosine of their pairs, is not described by its mean: such queries attend to everything, and such
keys are attended to by everything. Among the others a block of queries keeps the blocks of keys
with the largest softmax of the products of means: a share of them, or as many as hold a mass.
Attention is of 16 bits with this package's kernels, and of 8 bits with the authors'. Text is
attended to by everything, and attends to everything.

Shapes: B batch, S tokens, H heads, D head size, N blocks of 64 tokens.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from typing_extensions import override

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.tensors import place_of
from multimodal_gen.runtime.layers.attention.backends.sage_attn import (
    SPAS_SAGE,
    SPAS_SAGE_VARIANT,
    attend_spas_sage,
    mask_blocks,
)
from multimodal_gen.runtime.layers.attention.config import (
    EngineKernel,
    Ratio,
    SparseConfig,
    Tail,
    option,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.router import (
    BlockStats,
    Budget,
    Cut,
    Limits,
    Router,
    TokenMap,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall, by_heads
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_UNIT = 64  # tokens that are pooled; blocks are one or two of them
_BLOCKS = (128, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpargeConfig(SparseConfig):
    """Parameters of `sparge_attn`.

    Attributes:
        topk: share of the blocks of keys that a block of queries keeps, rounded down to at least
            one block. It may change over the steps: {0: 0.8, 0.4: 0.5}.
        cdfthreshd: mass in [0, 1] that the kept blocks may hold together, instead of `topk`.
        simthreshd1: mean cosine of its tokens above which a block is described by its mean; below
            zero every block is.
        tail: what becomes of blocks that are not kept: `none` drops them; `pooled` counts each by
            the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    topk: Ratio = option(0.5, "share of key blocks to keep", ge=0, le=1)
    cdfthreshd: float | None = option(
        None, "mass that kept blocks may hold, instead of topk", ge=0, le=1
    )
    simthreshd1: float = option(
        -0.1, "mean cosine above which a mean describes its block", ge=-1, le=1
    )
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal[EngineKernel, "spas_sage_attn"] = option("auto", "kernel that runs")

    def check(self) -> None:
        """The budget is given once, and the authors' kernel drops what is not kept."""
        refuse_foreign_tail("sparge_attn", self.tail, self.kernel, SPAS_SAGE)
        if self.cdfthreshd is not None and self.topk != 0.5:
            raise ConfigError(
                f"`topk` of sparge_attn must not be given with `cdfthreshd`, got {self.topk} and "
                f"{self.cdfthreshd}; remove one"
            )


class SpargeRouter(Router[SpargeConfig]):
    """The best blocks among those that their means describe, and all others."""

    chooses = "map"

    @override
    def cut(self, settings: SpargeConfig, grid: Window) -> Cut:
        return Cut.rows(_UNIT)

    @override
    def budget(self, settings: SpargeConfig, blocks: int, tokens: int) -> Budget | None:
        if settings.cdfthreshd is not None:
            return None
        budget = Budget.of_share(settings.topk, blocks)
        return budget if settings.simthreshd1 < 0 else budget._replace(asked=None)

    @override
    def density(self, settings: SpargeConfig, blocks: int, tokens: int) -> float | None:
        if settings.simthreshd1 >= 0:  # whole rows and columns are kept besides
            return None
        return super().density(settings, blocks, tokens)

    @override
    def limits(self, settings: SpargeConfig) -> Limits:
        if settings.simthreshd1 < 0:
            return Limits()
        return Limits(
            ring="simthreshd1 from 0 on compares tokens of a block, which ranks do not exchange",
            cache="simthreshd1 from 0 on compares the tokens of blocks of one call",
        )

    @override
    def more(self, settings: SpargeConfig, stats: BlockStats) -> tuple[TokenMap, TokenMap] | None:
        """Return tokens of length 1; those of keys are taken from their mean over the video."""
        if settings.simthreshd1 < 0:
            return None
        assert stats.counts is not None, "blocks are whole"
        weight = stats.counts[:, None, :, None]
        middle = (stats.key.float() * weight).sum(2) / weight.sum(2).clamp_min(1)
        return (
            lambda query, _: F.normalize(query, dim=-1),
            lambda key, heads: F.normalize(key - middle[:, None, heads], dim=-1),
        )

    @override
    def choose(
        self, settings: SpargeConfig, stats: BlockStats, budget: Budget | None
    ) -> torch.Tensor:
        rows, columns = (size // _UNIT for size in _BLOCKS)
        if self.layer.kernel.name == SPAS_SAGE:  # whose kernel has blocks of its own
            _, capability = place_of(stats.key.device)
            rows, columns = (size // _UNIT for size in mask_blocks(capability))
            budget = self.budget(settings, -(-stats.num // columns), 0)
            assert stats.layout is not None, "a cache is refused"
            self.layer.warn_of(stats.layout, budget)
            return _chosen(settings, stats, budget, (rows, columns))
        chosen = _chosen(settings, stats, budget, (rows, columns))
        return chosen.repeat_interleave(rows, dim=2)[:, :, : stats.query.shape[2]]

    @override
    def attend_upstream(
        self, settings: SpargeConfig, call: SparseCall, keys: Any, select: Any
    ) -> torch.Tensor | None:
        masked, label = call.mask is not None or bool(call.layout.text), self.layer.label
        parts = (call.query, call.key, call.value)
        return attend_spas_sage(*parts, select(), scale=call.scale, label=label, masked=masked)


def _chosen(
    config: SpargeConfig, stats: BlockStats, budget: Budget | None, sizes: tuple[int, int]
) -> torch.Tensor:
    """Return the chosen blocks of so many units each, bool [B, H, R', N']; some heads at a time.

    A block is alike where the mean cosine of the pairs of its tokens, which is the square of the
    mean of its tokens, each of length 1, is above the threshold.
    """
    sides = (stats.row_counts, sizes[0]), (stats.counts, sizes[1])
    query, _ = _merged(stats.query, *sides[0])
    key, counts = _merged(stats.key, *sides[1])
    if stats.more is None and budget is not None:
        real = stats.real[1]
        if real is not None and sizes[1] > 1:
            real = counts > 0
        return replace(stats, query=query, key=key, real=(None, real)).mark_best(budget.kept)
    alike = None
    if stats.more is not None:
        q_mean, k_mean = (_merged(x, *side)[0] for x, side in zip(stats.more, sides, strict=True))
        alike = tuple(x.square().sum(-1) > config.simthreshd1 for x in (q_mean, k_mean))
    heads, group = query.shape[1], query.shape[1] // key.shape[1]

    def best(some: slice) -> torch.Tensor:
        used = torch.arange(some.start, some.stop, device=key.device) // group
        scores = query[:, some].float() @ key[:, used].float().mT
        scores = (scores * stats.scale).masked_fill(counts[:, None, None] == 0, -torch.inf)
        if alike is not None:
            scores = scores.masked_fill(~alike[1][:, used, None], -torch.inf)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        if budget is not None:
            chosen.scatter_(-1, order[..., : budget.kept], True)
        else:
            assert config.cdfthreshd is not None, "then there is a budget"
            mass = scores.softmax(-1).nan_to_num(0.0).gather(-1, order).cumsum(-1)
            held = mass <= config.cdfthreshd
            held[..., 0] = True
            chosen.scatter_(-1, order, held)
        if alike is None:
            return chosen
        return chosen | ~alike[0][:, some].unsqueeze(3) | ~alike[1][:, used].unsqueeze(2)

    return by_heads(heads, query[:, 0, :, 0].numel() * key.shape[2], best)


def _merged(
    means: torch.Tensor, counts: torch.Tensor | None, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return means of so many blocks together, and their counts: [B, H, N', D] and [B|1, N']."""
    assert counts is not None, "blocks are whole"
    if number == 1:
        return means, counts
    weight = counts[:, None, :, None]
    missing = -means.shape[2] % number
    total, held = (
        torch.unflatten(F.pad(x, (0, 0, 0, missing)), 2, (-1, number)).sum(3)
        for x in (means.float() * weight, weight)
    )
    return (total / held.clamp_min(1)).to(means.dtype), held[:, 0, :, 0]


class SpargeBackend(SparseBackend):
    """SpargeAttn."""

    backend = AttentionBackendEnum.SPARGE_ATTN
    summary = "SpargeAttn: the best blocks among those that are alike inside"
    config_cls = SpargeConfig
    router = SpargeRouter
    variants = (
        *SparseBackend.variants,
        SPAS_SAGE_VARIANT,
    )
