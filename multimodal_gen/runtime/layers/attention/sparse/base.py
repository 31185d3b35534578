"""What the sparse methods share: their configuration, what a call is, the density they report.

Shapes: B batch, S tokens, H heads, D head size, N blocks of the video; q/k suffix = query/key side.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.skip import Skip
from multimodal_gen.kernels.block_sparse.slots import (
    CacheCut,
    SeenMeans,
    SeenTiles,
    means_of_seen,
    pooled_seen,
)
from multimodal_gen.kernels.block_sparse.tail import PooledBlocks, PooledTail, plan_of_map
from multimodal_gen.kernels.engine import SelectedKernel, records_gradient
from multimodal_gen.kernels.tile_order.api import TileOrder
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    Facts,
)
from multimodal_gen.runtime.layers.attention.backends.engine import selected_kernel
from multimodal_gen.runtime.layers.attention.config import (
    SparseConfig,
    config_at,
    option,
    varying,
)
from multimodal_gen.runtime.layers.attention.sparse.dense_above import KeptTooMuch
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import pairs_of_map
from multimodal_gen.runtime.layers.attention.sparse.ring_tail import attend_ring_map
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    own_queries,
    pool_over_ring,
    ring_layout,
    shards_of,
    whole_tiles_only,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    TiledSequence,
    attend_tiled,
    in_tiles,
    layout_of,
    pool_video,
    tile_means,
)
from multimodal_gen.runtime.layers.attention.warn_once import warn_if_dense_run
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = [
    "Cut",
    "MapImpl",
    "Means",
    "SparseImpl",
    "Tail",
    "means_of",
    "refuse_foreign_tail",
    "tail_option",
]

Tail = Literal["none", "pooled"]
"""What becomes of keys that a query does not keep: they are dropped, or count by their means."""

_ConfigT = TypeVar("_ConfigT", bound=SparseConfig)

_FAR = 0.1  # from what was asked for

# Runs of a layer that are remembered; a run has one grid and one length of text.
_MOST_RUNS = 256


def tail_option(default: Tail = "none") -> Any:
    """Declare the parameter `tail` of a method."""
    return option(default, "what is not kept: dropped (none), or counted by its means (pooled)")


def refuse_foreign_tail(backend: str, tail: Tail, kernel: str, *foreign: str) -> None:
    """Raise `ConfigError` where a tail was asked of a kernel of somebody else.

    Args:
        backend: the backend's name, for the message.
        tail: the parameter `tail`.
        kernel: the parameter `kernel`.
        *foreign: kernels of other packages.
    """
    if tail != "none" and kernel in foreign:
        raise ConfigError(
            f"`tail` of {backend} must be none with `kernel` {kernel}, which drops what is not "
            f"kept, got {tail}; leave `kernel` out"
        )


class SparseImpl(AttentionImpl, Generic[_ConfigT]):
    """A sparse method on one self-attention layer; see `AttentionImpl` for the arguments.

    Attributes:
        declaration: the backend that it implements.
        config: the parameters; the defaults where a method was chosen without any. Those of one
            step, where some change from step to step, are `settings`.
        label: the backend's name, for messages.
        kernel: what computes every call: a kernel of the engine, or the authors' package.
        varies_by_step: whether what is known of a call's density depends on the step.
    """

    declaration: ClassVar[type[AttentionBackend]]
    per_head: ClassVar[bool] = True
    varies_by_step: bool = False
    config: _ConfigT
    kernel: SelectedKernel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cls: Any = self.declaration.config_cls
        self.config = self.config if isinstance(self.config, cls) else cls()
        self._skip: Skip | None = None
        self._has_schedules = bool(varying(self.config))
        self.varies_by_step = self.varies_by_step or self._has_schedules
        self.label = str(self.declaration.backend)
        self.kernel = selected_kernel(self.variant, self.config)
        # By step: the mean of what was noted, and of how many heads it is.
        self._densities: dict[int, tuple[float | torch.Tensor, int]] = {}
        measured = self.declaration.dense_above.get(self.kernel.name, ())
        self._limits = () if self.kernel.named else measured
        self._stays_sparse = self.dense_limit(0) is None
        self._dense_reasons: dict[tuple[object, ...], str | None] = {}
        self._kept_too_much = KeptTooMuch()
        self.prepare()

    def prepare(self) -> None:
        """Make what the layer keeps between calls; the end of construction."""

    def check_run(self, context: ForwardContext) -> None:
        """Warn if no step is sparse; see `AttentionImpl.check_run`."""
        backend = self.declaration.backend
        steps, sigmas = context.num_steps, context.sigmas
        warn_if_dense_run(self.config, backend, steps, self.warnings, sigmas)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext | None = None,
        *,
        attn_mask: torch.Tensor | None = None,
        first_head: int = 0,
        continued: bool = False,
        projection: nn.Linear | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward` and `per_head`; the mask is [B, 1, 1, Sk], and bool.

        Raises:
            UsageError: the latent grid is unknown or does not fit the sequence.
        """
        if not query.shape[0] or query.is_meta:  # which has a shape and no data to choose by
            return query.new_empty((*query.shape[:3], value.shape[3]))
        keep = None
        if attn_mask is not None:
            keep = attn_mask[:, 0, 0, :].expand(key.shape[0], -1)
        if not continued:
            self.kernel.begin_call()
        call = self.call(query, key, value, context, keep=keep, first_head=first_head)
        call = call if projection is None else replace(call, projection=projection)
        assert context is not None, "a layout needs a context"
        return self.attend(call, context)

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext | None,
        *,
        keep: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        first_head: int = 0,
    ) -> SparseCall:
        """Return a call of this layer; see `SparseCall`.

        Raises:
            UsageError: the latent grid is unknown or does not fit the sequence, values have another
                shape than keys, or a gradient is asked for of a layer that skips.
        """
        if value.shape != key.shape:
            raise UsageError(
                f"`v` of {self.label} must have the shape of k {list(key.shape)}, got "
                f"{list(value.shape)}; run such layers on a dense backend"
            )
        return SparseCall(
            query=query,
            key=key,
            value=value,
            layout=layout_of(query.shape[1], key.shape[1], context, self.label),
            scale=self.softmax_scale,
            kernel=self.kernel,
            keep=keep,
            gate=gate,
            first_head=first_head,
            tail=self.pools_tail,
            skip=self._skip_for(query, key, value),
        )

    def _skip_for(self, *qkv: torch.Tensor) -> Skip | None:
        """Return what `skip_below` asks for, counted on their device; None where it is not given.

        Raises:
            UsageError: a gradient is asked for.
        """
        below = getattr(self.config, "skip_below", None)
        if below is None:
            return None
        if records_gradient(*qkv):
            raise UsageError(
                f"`skip_below` of {self.label} must be left out where a gradient is asked for, got "
                f"{below:g}: a backward pass does not know what a kernel left out; remove it, or "
                f"call the layer under torch.no_grad()"
            )
        device = qkv[0].device
        if self._skip is None or self._skip.counts is None or self._skip.counts.device != device:
            with torch.inference_mode(False):
                counts = torch.zeros(2, dtype=torch.int64, device=device)
            self._skip = Skip(below=below, counts=counts)
        return self._skip

    def facts(self) -> Facts:
        """See `AttentionImpl.facts`."""
        return Facts(self.densities(), self._share_skipped())

    def _share_skipped(self) -> float | None:
        if self._skip is None or self._skip.counts is None:
            return None
        skipped, steps = self._skip.counts.tolist()
        return float(skipped) / steps if steps else None

    @property
    def pools_tail(self) -> bool:
        """Whether blocks that are not kept count by their means."""
        return getattr(self.config, "tail", "none") == "pooled"

    def cut_with(self, cut: CacheCut | str, upstream: Collection[str] = ()) -> CacheCut | str:
        """Return blocks of a cache, or why there are none: `upstream` kernels take no lists."""
        if isinstance(cut, CacheCut) and self.kernel.name in upstream:
            return f"kernel {self.kernel.name} takes no lists of a cache"
        if isinstance(cut, CacheCut) and getattr(self.config, "skip_below", None) is not None:
            return "`skip_below` is for keys of one call"
        return cut

    def attend_plan(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: BlockPlan,
        context: ForwardContext | None,
        density: float | torch.Tensor,
        tail: PooledTail | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and lse over a plan of tiles of a cache; see `forward_tiles`."""
        self.kernel.begin_call()
        if context is not None:
            self.record(context, density, query.shape[2])
        given, scale = (query, key, value, plan), self.softmax_scale
        found = block_sparse_attention(
            *given, scale=scale, kernel=self.kernel, return_lse=True, tail=tail
        )
        assert isinstance(found, tuple), "the lse was asked for"
        return found

    def attend_lists(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: SeenTiles,
        lists: torch.Tensor | None,
        context: ForwardContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and lse over lists, int32 [B, H, Nq, K], of blocks; see `forward_tiles`.

        Without lists, over all that is seen.
        """
        if lists is None:
            return self.attend_plan(query, key, value, tiles.plan, context, 1.0)
        plan, density = tiles.plan_of(lists)
        tail = self.tail_of_seen(key, value, tiles)
        return self.attend_plan(query, key, value, plan, context, density, tail)

    def tail_of_seen(
        self, key: torch.Tensor, value: torch.Tensor, tiles: SeenTiles
    ) -> PooledTail | None:
        """Return by what blocks of a cache count that are not kept; None where they do not."""
        return PooledTail(pooled=pooled_seen(key, value, tiles)) if self.pools_tail else None

    def ring_layout(self, inputs: RingInputs, context: ForwardContext | None) -> SequenceLayout:
        """Return where the video lies in the sequence of a ring; the beginning of a call in one.

        Raises:
            UsageError: see `ring_tiles.ring_layout`.
        """
        self.kernel.begin_call()
        return ring_layout(inputs, context, self.label)

    def settings(self, context: ForwardContext | None) -> _ConfigT:
        """Return the parameters of the running step: ratios that change over the steps are numbers.

        Args:
            context: the running denoiser call.

        Raises:
            UsageError: a ratio changes, and the step or their number is unknown.
        """
        if not self._has_schedules:
            return self.config
        step, total = (
            (0, None) if context is None else (context.current_timestep, context.num_steps)
        )
        return config_at(self.config, step, total)

    @abstractmethod
    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return the method's attention, [B, Sq, H, D].

        Args:
            call: the call.
            context: the running denoiser call.
        """

    def record(
        self, context: ForwardContext, density: float | torch.Tensor, num_heads: int
    ) -> None:
        """Note the share of query-key pairs that a call attends to, in [0, 1], for the report.

        The report has the mean over the calls of a step and their heads.

        Args:
            context: the running denoiser call.
            density: the share, or where the data decide, a tensor [] of it, which is not waited
                for before the report is made.
            num_heads: of how many heads it is, once per call or group of heads.
        """
        step = context.current_timestep
        if step not in self._densities:
            self._densities[step] = density, num_heads
            return
        mean, heads = self._densities[step]
        heads += num_heads
        if isinstance(mean, torch.Tensor) and isinstance(density, torch.Tensor):
            mean = mean.to(density.device)  # the layer may have moved
        # In this form the mean of equal numbers is that number.
        self._densities[step] = (mean + (density - mean) * (num_heads / heads), heads)

    def record_pairs(
        self, context: ForwardContext, plan: BlockPlan, layout: SequenceLayout, num_heads: int
    ) -> None:
        """Note what a plan of the first heads keeps, which stand for all of the call.

        For lists of equal length, whose blocks are of several sizes: which are, is up to the data.
        """
        of_video = plan.pairs(full=True).double().mean() / layout.num_video**2
        of_tiles = of_video - (layout.num_keys - layout.num_video) / layout.num_video
        self.record(context, layout.density(of_tiles), num_heads)

    def record_map(
        self,
        context: ForwardContext,
        layout: SequenceLayout,
        chosen: torch.Tensor,
        num_heads: int,
        order: TileOrder | None = None,
        kept: torch.Tensor | None = None,
    ) -> None:
        """Note the share of the pairs that are attended to exactly.

        Args:
            context: the running denoiser call.
            layout: where the video lies.
            chosen: bool [B|1, H|1, Nq, Nk], the exact blocks.
            num_heads: H.
            order: the blocks, where they are those of both sides; None for blocks of one size.
            kept: the exact blocks of every row, [B|1, H|1, Nq], where they are counted already.
        """
        if order is None or order.uniform:
            total = (chosen if kept is None else kept).sum(dtype=torch.int64)
            share: Any = total.double() / chosen.numel()
            self.record(context, layout.density(share), num_heads)
            return
        pairs = pairs_of_map(chosen, order, kept)
        self.record(context, layout.density(pairs / layout.num_video**2), num_heads)

    def warn_of_density(
        self, layout: SequenceLayout, asked: float, kept: int, num_blocks: int
    ) -> None:
        """Warn, once, where a sequence is too short for the density that was asked for.

        Args:
            layout: where the video lies.
            asked: the share of blocks to keep.
            kept: blocks that are kept.
            num_blocks: blocks of the video.
        """
        density = layout.density(kept / num_blocks)
        if density - asked < _FAR:
            return
        reasons = []
        if kept / num_blocks - asked >= _FAR / 2:
            blocks = (
                "1 block, which" if num_blocks == 1 else f"{num_blocks} blocks, of which {kept}"
            )
            verb = "is" if kept == 1 else "are"
            reasons.append(f"the latent grid {layout.grid} has {blocks} {verb} kept")
        text = layout.num_keys - layout.num_video
        if text:
            reasons.append(f"{text} of {layout.num_keys} tokens are text, which is never left out")
        component = None if self.site is None else self.site.component
        self.warnings.warn(
            f"{self.label} of {component or 'a layer'} attends to {density:.0%} of the pairs, not "
            f"to the {asked:.0%} that were asked for: {'; '.join(reasons)}"
        )

    def dense_limit(self, block: int) -> float | None:
        """Return the share of pairs above which a call is to be dense; None for never.

        Args:
            block: tokens of a block of keys.
        """
        given = self.config.dense_above
        if given is None:
            given = next((limit for least, limit in reversed(self._limits) if block >= least), None)
        return None if given is None or given >= 1 else given

    def known_density(
        self, layout: SequenceLayout, context: ForwardContext, heads: slice
    ) -> tuple[float, int] | None:
        """Return the share of pairs that a call will attend to, and the tokens of its blocks.

        None where the data decide, or where dense attention is something else than the method with
        every pair. A method whose share changes from step to step says so by `varies_by_step`.

        Args:
            layout: where the video lies.
            context: the running denoiser call.
            heads: which of the layer's heads the call has.
        """
        del layout, context, heads
        return None

    def dense_reason(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        context: ForwardContext | None,
        first_head: int = 0,
    ) -> str | None:
        """See `AttentionImpl.dense_reason`; by `known_density`, or what steps before have kept.

        Raises:
            UsageError: the latent grid does not fit the sequence.
        """
        if self._stays_sparse or context is None or context.latent_grid is None:
            return None  # without a grid, the call itself is refused
        if torch.are_deterministic_algorithms_enabled():
            return None
        if records_gradient(query, key):
            return None
        heads = slice(first_head, first_head + query.shape[2])
        step = (context.current_timestep, context.num_steps) if self.varies_by_step else None
        sequences = (query.shape[1], key.shape[1], context.latent_grid, context.text_span)
        run = (*sequences, step, heads.start, heads.stop)
        if run not in self._dense_reasons:
            if len(self._dense_reasons) >= _MOST_RUNS:
                self._dense_reasons.clear()
            layout = layout_of(query.shape[1], key.shape[1], context, self.label)
            known = self.known_density(layout, context, heads)
            limit = None if known is None else self.dense_limit(known[1])
            above = known is not None and limit is not None and known[0] > limit
            self._dense_reasons[run] = (
                f"{self.label} would keep more than {limit:g} of the pairs (`dense_above`)"
                if above
                else None
            )
        found = self._dense_reasons[run]
        if found is not None:
            return found
        limit = self._kept_too_much.limit_passed(context)
        if limit is None:
            return None
        return f"{self.label} kept more than {limit:g} of the pairs when last tried (`dense_above`)"

    def learn_share(
        self, share: torch.Tensor, block: int, context: ForwardContext, first_head: int
    ) -> None:
        """Note what a call keeps whose share the data decide; see `KeptTooMuch`.

        Args:
            share: the share of pairs, [].
            block: tokens of a block of keys.
            context: the running denoiser call.
            first_head: see `SparseCall`; the first heads of a call stand for all of it.
        """
        limit = self.dense_limit(block)
        if limit is not None and first_head == 0:
            self._kept_too_much.learn(share > limit, limit, context)

    def densities(self) -> Mapping[int, float]:
        """Return the density of every step so far; waits for the device where data decided it."""
        return {step: float(mean) for step, (mean, _) in self._densities.items()}


Cut = tuple[SequenceLayout, tuple[int, ...]]
"""A layout whose tiles are the blocks of a method, and the tokens of a tile along its axes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Means:
    """What blocks are chosen by.

    Attributes:
        query: means of the blocks' queries, [B, H, N, D].
        key: means of their keys, [B, Hkv, N, D].
        counts: how many tokens of each block count, [B|1, N]; floating.
        masked: whether any are masked.
        blocks: the blocks.
        layout: where the video lies, as it was cut.
        call: the call; None in a ring, whose ranks hold a part of it.
    """

    query: torch.Tensor
    key: torch.Tensor
    counts: torch.Tensor
    masked: bool
    blocks: TiledSequence
    layout: SequenceLayout
    call: SparseCall | None

    @property
    def real(self) -> torch.Tensor | None:
        """Blocks of which not everything is masked, bool [B, N]; None for all."""
        return self.counts > 0 if self.masked else None


def means_of(call: SparseCall, queries: TiledSequence) -> Means:
    """Return the means of a call's blocks.

    Args:
        call: the call, with the layout that its blocks are tiles of.
        queries: its queries in tiles.
    """
    query, key, _ = tile_means(call, queries)
    counts = queries.order.lengths.float().unsqueeze(0)
    if call.keep is not None:
        (share,) = pool_video((call.keep[..., None, None].float(),), queries)
        counts = (share[:, 0, :, 0] * counts).round()
    return Means(
        query=query,
        key=key,
        counts=counts,
        masked=call.keep is not None,
        blocks=queries,
        layout=call.layout,
        call=call,
    )


class MapImpl(SparseImpl[_ConfigT]):
    """A method that decides for every block of queries which blocks of keys it attends to."""

    @abstractmethod
    def cut(self, config: _ConfigT, layout: SequenceLayout) -> Cut:
        """Return how the video is cut into blocks.

        Args:
            config: the parameters of the running step.
            layout: where the video lies.
        """

    @abstractmethod
    def choose(self, config: _ConfigT, means: Means, context: ForwardContext) -> torch.Tensor:
        """Return which blocks each block attends to exactly: bool [B|1, H|1, N, N].

        Does not wait for the device.

        Args:
            config: the parameters of the running step.
            means: what to choose by.
            context: the running denoiser call.
        """

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return attention over the chosen blocks; see `SparseImpl.attend`."""
        config = self.settings(context)
        layout, tile = self.cut(config, call.layout)
        call = replace(call, layout=layout)
        queries, keys = in_tiles(layout, tile, call.query.device)
        with torch.no_grad():
            means = means_of(call, queries)
            chosen = self.choose(config, means, context)
        reused = call.tail and not call.first_order and call.keep is None
        if reused and not records_gradient(call.query, call.key, call.value):
            (values,) = pool_video((call.value,), queries)
            counts = queries.order.lengths.view(1, 1, -1)
            call = replace(call, pooled=PooledBlocks(keys=means.key, values=values, counts=counts))
        # Text is behind the blocks of the video.
        listed = chosen
        if keys.num_text_blocks:
            listed = F.pad(chosen, (0, keys.num_text_blocks), value=True)

        def plan_of(heads: slice) -> BlockPlan:
            return plan_of_map(listed[:, heads], queries.blocks, keys.blocks, keys.num_tiles)

        heads, kept = call.query.shape[2], None
        get_plan: Callable[[slice], BlockPlan] = plan_of
        if queries.in_order and keys.in_order and call.keep is None:
            plan = plan_of(slice(0, heads))  # the only one, which has counted the blocks
            get_plan, kept = lambda _: plan, plan.counts - keys.num_text_blocks
        self.record_map(context, layout, chosen, heads, queries.order, kept)
        return attend_tiled(call, queries, keys, get_plan)

    def choose_seen(
        self,
        config: _ConfigT,
        means: SeenMeans,
        tiles: SeenTiles,
        context: ForwardContext | None,
    ) -> torch.Tensor:
        """Return which blocks of a cache each block attends to exactly: bool [B, H, Nq, Nk].

        Blocks that are not seen are left out afterwards.

        Args:
            config: the parameters of the running step.
            means: what to choose by.
            tiles: see `forward_tiles`.
            context: see `forward_tiles`.
        """
        raise NotImplementedError(f"{type(self).__name__} sees no tiles of a cache")

    def forward_tiles(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: SeenTiles,
        context: ForwardContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention over the chosen blocks; see `AttentionImpl.forward_tiles`."""
        config, means = self.settings(context), means_of_seen(query, key, tiles)
        chosen = self.choose_seen(config, means, tiles, context) & means.real[:, None, None]
        plan = plan_of_map(chosen, tiles.plan.q, tiles.plan.kv, tiles.plan.kv.num)
        tail = self.tail_of_seen(key, value, tiles)
        return self.attend_plan(query, key, value, plan, context, tiles.density(plan), tail)

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        return whole_tiles_only(self.kernel)

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`; every rank chooses for all blocks."""
        layout, call = self.ring_layout(inputs, context), inputs.call
        assert context is not None, "a layout needs a context"
        config = self.settings(context)
        layout, tile = self.cut(config, layout)
        queries, _ = in_tiles(layout, tile, inputs.query.device)
        shards = shards_of(layout, call, queries.order.tile, inputs.query.device)
        tensors = (own_queries(inputs), inputs.key, inputs.value)
        pooled, counts = pool_over_ring(tensors[: 2 + self.pools_tail], shards, call)
        query, key, *values = (mean.to(inputs.query.dtype) for mean in pooled)
        means = Means(
            query=query,
            key=key,
            counts=counts,
            masked=call.keep is not None,
            blocks=queries,
            layout=layout,
            call=None,
        )
        chosen = self.choose(config, means, context)
        self.record_map(context, layout, chosen, inputs.query.shape[2], queries.order)
        tail = None
        if self.pools_tail:
            tail = PooledBlocks(keys=key, values=values[0], counts=counts.int().unsqueeze(1))
        return attend_ring_map(
            inputs, shards, chosen, scale=self.softmax_scale, kernel=self.kernel, tail=tail
        )
