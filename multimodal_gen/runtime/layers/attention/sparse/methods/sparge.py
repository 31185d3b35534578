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
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.engine import BLOCK_SPARSE, place_of
from multimodal_gen.kernels.tile_pool.api import select_tiles
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import engine_variants
from multimodal_gen.runtime.layers.attention.backends.sage_attn import (
    SPAS_SAGE,
    SPAS_SAGE_VARIANT,
    SpasCall,
    attend_spas_sage,
    mask_blocks,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, SparseConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selectors import Ratio, first_of, ratio_now
from multimodal_gen.runtime.layers.attention.sparse.base import (
    Cut,
    MapImpl,
    Means,
    Tail,
    means_of,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    in_one_row,
    in_tiles,
    pool_video,
)
from multimodal_gen.runtime.layers.attention.sparse.upstream import lists_as_map
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_UNIT = 64  # tokens that are pooled; blocks are one or two of them
_BLOCKS = (128, 64)
_AT_ONCE = 2**25  # numbers that are held at a time, in fp32


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
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference", "spas_sage_attn"] = option(
        "auto", "kernel that runs"
    )

    def check(self) -> None:
        """The budget is given once, and the authors' kernel drops what is not kept."""
        refuse_foreign_tail("sparge_attn", self.tail, self.kernel, SPAS_SAGE)
        if self.cdfthreshd is not None and self.topk != 0.5:
            raise ConfigError(
                f"`topk` of sparge_attn must not be given with `cdfthreshd`, got {self.topk} and "
                f"{self.cdfthreshd}; remove one"
            )


class SpargeBackend(AttentionBackend):
    """SpargeAttn."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SPARGE_ATTN
    summary: ClassVar[str] = "SpargeAttn: the best blocks among those that are alike inside"
    config_cls: ClassVar[type[SpargeConfig]] = SpargeConfig
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants(BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK, Feature.RING)),
        SPAS_SAGE_VARIANT,
    )

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return the tokens of a block in plans; see `AttentionBackend.block_sizes`."""
        return _UNIT, _UNIT

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return SpargeImpl


class SpargeImpl(MapImpl[SpargeConfig]):
    """SpargeAttn of one layer."""

    declaration = SpargeBackend
    cache_reason: ClassVar[str] = "it compares the tokens of blocks of one call"

    def cut(self, config: SpargeConfig, layout: SequenceLayout) -> Cut:
        """Return blocks in the order of the sequence; see `MapImpl.cut`."""
        return in_one_row(layout), (1, 1, _UNIT)

    def choose(self, config: SpargeConfig, means: Means, context: ForwardContext) -> torch.Tensor:
        """Return the chosen blocks; see `MapImpl.choose`."""
        chosen = self._chosen(config, means, _BLOCKS)
        num = means.query.shape[2]
        for axis, size in zip((2, 3), _BLOCKS, strict=True):
            chosen = chosen.repeat_interleave(size // _UNIT, dim=axis)
        return chosen[:, :, :num, :num]

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return attention over the chosen blocks, by the authors' kernel where it was chosen."""
        if call.kernel.name != SPAS_SAGE:
            return super().attend(call, context)
        layout, tile = self.cut(self.config, call.layout)
        queries, _ = in_tiles(layout, tile, call.query.device)
        means = means_of(replace(call, layout=layout), queries)
        _, capability = place_of(call.query.device)
        keep = self._chosen(self.settings(context), means, mask_blocks(capability))
        self.record_map(context, layout, keep, call.query.shape[2])
        asked = SpasCall(
            label=self.label,
            queries=call.query.shape[1],
            keys=call.key.shape[1],
            heads=call.query.shape[2],
            kv_heads=call.key.shape[2],
            masked=call.keep is not None or bool(layout.text),
        )
        return attend_spas_sage(
            call.query, call.key, call.value, keep, scale=call.scale, call=asked
        )

    def known_density(
        self, layout: SequenceLayout, context: ForwardContext, heads: slice
    ) -> tuple[float, int] | None:
        """See `SparseImpl.known_density`; where a share of the blocks is kept, and no others."""
        if self.config.cdfthreshd is not None or self.config.simthreshd1 >= 0:
            return None
        num = -(-layout.num_video // _BLOCKS[1])
        kept = max(1, first_of(ratio_now(self.settings(context).topk), num))
        return layout.density(kept / num), _UNIT

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        if self.config.simthreshd1 >= 0:
            return "simthreshd1 from 0 on compares tokens of a block, which ranks do not exchange"
        return super().ring_reason()

    def _chosen(self, config: SpargeConfig, means: Means, sizes: tuple[int, int]) -> torch.Tensor:
        """Return the chosen blocks of these sizes, bool [B, H, Nq, Nk]; some heads at a time."""
        query, _ = _merged(means.query, means.counts, sizes[0] // _UNIT)
        key, held = _merged(means.key, means.counts, sizes[1] // _UNIT)
        alike = self._alike(config, means, sizes)
        if alike is None and config.cdfthreshd is None:
            ratio = ratio_now(config.topk)
            kept = max(1, first_of(ratio, key.shape[2]))
            self.warn_of_density(means.layout, ratio, kept, key.shape[2])
            real = held[:, 0, :, 0] > 0 if means.masked else None
            return lists_as_map(select_tiles(query, key, kept, real=real), key.shape[2])
        heads, group = query.shape[1], query.shape[1] // key.shape[1]
        at_once = max(1, _AT_ONCE // max(1, query.shape[0] * query.shape[2] * key.shape[2]))
        parts = []
        for first in range(0, heads, at_once):
            some = torch.arange(first, min(first + at_once, heads), device=key.device)
            scores = query[:, some].float() @ key[:, some // group].float().mT
            sides = None if alike is None else (alike[0][:, some], alike[1][:, some // group])
            scores = (scores * self.softmax_scale).masked_fill(held.mT == 0, -torch.inf)
            parts.append(self._best(config, scores, sides))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _best(
        self,
        config: SpargeConfig,
        scores: torch.Tensor,
        alike: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Return what scores, [B, h, Nq, Nk], keep, where blocks of both sides may be alike."""
        if alike is not None:
            scores = scores.masked_fill(~alike[1][:, :, None], -torch.inf)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        if config.cdfthreshd is None:
            kept = max(1, first_of(ratio_now(config.topk), scores.shape[3]))
            chosen = torch.zeros_like(scores, dtype=torch.bool)
            chosen.scatter_(-1, order[..., :kept], True)
        else:
            mass = scores.softmax(-1).nan_to_num(0.0).gather(-1, order).cumsum(-1)
            held = mass <= config.cdfthreshd
            held[..., 0] = True
            chosen = torch.zeros_like(held).scatter_(-1, order, held)
        if alike is None:
            return chosen
        return chosen | ~alike[0].unsqueeze(3) | ~alike[1].unsqueeze(2)

    def _alike(
        self, config: SpargeConfig, means: Means, sizes: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the blocks that their means describe, bool [B, H, Nq] and [B, Hkv, Nk].

        The mean cosine of the pairs of a block is the square of the mean of its tokens, each of
        length 1; those of keys are taken from their mean over the video.
        """
        call = means.call
        if config.simthreshd1 < 0 or call is None:
            return None
        weight = means.counts[:, None, :, None]
        middle = (means.key.float() * weight).sum(2) / weight.sum(2).clamp_min(1)
        found = []
        for x, size, centred in zip((call.query, call.key), sizes, (False, True), strict=True):
            at_once = max(1, _AT_ONCE // max(1, x.shape[0] * x.shape[1] * x.shape[3]))
            parts = []
            for first in range(0, x.shape[2], at_once):
                heads = slice(first, first + at_once)
                part = x[:, : call.key.shape[1], heads].float()
                if centred:
                    part = part - middle[:, None, heads]
                (unit,) = pool_video((F.normalize(part, dim=-1),), means.blocks, keep=call.keep)
                whole, _ = _merged(unit, means.counts, size // _UNIT)
                parts.append(whole.square().sum(-1) > config.simthreshd1)
            found.append(torch.cat(parts, dim=1))
        return found[0], found[1]


def _merged(
    means: torch.Tensor, counts: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return means of so many blocks together, and their counts: [B, H, N', D], [B|1, 1, N', 1]."""
    weight = counts[:, None, :, None]
    missing = -means.shape[2] % number
    total, held = (
        torch.unflatten(F.pad(x, (0, 0, 0, missing)), 2, (-1, number)).sum(3)
        for x in (means.float() * weight, weight)
    )
    return (total / held.clamp_min(1)).to(means.dtype), held
