"""A sparse method on one layer: its router and parameters, and what all methods do alike.

Shapes: B batch, S tokens, H heads, D head size.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.skip import Skip
from multimodal_gen.kernels.block_sparse.slots import CacheCut, KeptChunks, SeenTiles
from multimodal_gen.kernels.engine import SelectedKernel, records_gradient
from multimodal_gen.kernels.tile_order.api import tile_order
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.engine import selected_kernel
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    SparseConfig,
    config_at,
    varying,
)
from multimodal_gen.runtime.layers.attention.sparse.dense_above import (
    MEASURED_LIMITS,
    DenseAbove,
)
from multimodal_gen.runtime.layers.attention.sparse.density import Densities
from multimodal_gen.runtime.layers.attention.sparse.executors.cache import attend_cache
from multimodal_gen.runtime.layers.attention.sparse.executors.local import (
    add_branch,
    attend_locally,
)
from multimodal_gen.runtime.layers.attention.sparse.executors.ring import (
    add_branch_in_ring,
    attend_ring,
)
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import whole_tiles_only
from multimodal_gen.runtime.layers.attention.sparse.router import Router, SparseLayer, share_of
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SparseCall,
    fit_tile,
    layout_of,
)
from multimodal_gen.runtime.layers.attention.warn_once import warn_if_dense_run
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = ["SparseBackend", "SparseMethodImpl"]

_ANY_GRID = (1 << 20, 1 << 20, 1 << 20)


class SparseBackend(AttentionBackend):
    """A sparse method: a declaration, a configuration and a router.

    Attributes:
        router: the class of its router, of which every layer has one object.
    """

    config_cls: ClassVar[type[SparseConfig]]
    router: ClassVar[type[Router[Any]]]

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return the tokens of a block of queries and of keys."""
        given = config if isinstance(config, cls.config_cls) else cls.config_cls()
        size = math.prod(cls.router().cut(given, _ANY_GRID).tile)
        return size, size

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return what layers call."""
        return type("SparseMethodImpl", (SparseMethodImpl,), {"declaration": cls})


class SparseMethodImpl(AttentionImpl):
    """A router on one self-attention layer; see `AttentionImpl` for the arguments.

    Attributes:
        declaration: the backend that it implements.
        config: the parameters; the defaults where a method was chosen without any.
        router: what chooses.
        layer: what routers and executors know of it.
    """

    declaration: ClassVar[type[SparseBackend]]
    per_head: ClassVar[bool] = True
    config: SparseConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        backend = self.declaration.backend
        cls = self.declaration.config_cls
        self.config = self.config if isinstance(self.config, cls) else cls()
        kernel = selected_kernel(self.variant, self.config)
        self.label = str(backend)
        measured = () if kernel.named else MEASURED_LIMITS.get((backend, kernel.name), ())
        self._dense_above = DenseAbove(self.label, self.config.dense_above, measured)
        self._changes = bool(varying(self.config))
        self._skip: Skip | None = None
        self.layer = SparseLayer(
            label=self.label,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.softmax_scale,
            kernel=kernel,
            pools_tail=getattr(self.config, "tail", "none") == "pooled",
            site=self.site,
            warnings=self.warnings,
            densities=Densities(),
            dense_above=self._dense_above,
        )
        self.router: Router[Any] = self.declaration.router(self.layer)
        self.router.prepare(self.config)
        limits = self.router.limits(self.config)
        self.trains_in_ring = limits.ring_gradients is None  # type: ignore[misc]
        self.gated = self.router.branch is not None
        self.lacks = frozenset(
            name
            for name, has in (
                ("add_coarse", self.gated),
                ("observe", self.router.observes),
                ("end_request", self.router.keeps_state),
            )
            if not has
        )

    @property
    def kernel(self) -> SelectedKernel:
        """What computes: a kernel of the engine, or the authors' package."""
        return self.layer.kernel

    def settings(self, context: ForwardContext | None) -> Any:
        """Return the parameters of the running step: those that change over the steps are numbers.

        Raises:
            UsageError: a parameter changes, and the step or their number is unknown.
        """
        step, total = 0, None
        if context is not None:
            step, total = context.current_timestep, context.num_steps
        found = config_at(self.config, step, total) if self._changes else self.config
        return self.router.at(found, step, total)

    def check_run(self, context: ForwardContext) -> None:
        """Refuse a run that the parameters do not fit; warn if no step is sparse."""
        steps, sigmas = context.num_steps, context.sigmas
        warn_if_dense_run(self.config, self.declaration.backend, steps, self.warnings, sigmas)
        self.router.check_run(self.config, context)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext | None = None,
        *,
        attn_mask: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        first_head: int = 0,
        continued: bool = False,
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
        call = self._call(query, key, value, context, keep=keep, gate=gate, first_head=first_head)
        assert context is not None, "a layout needs a context"
        return attend_locally(self.router, self.settings(context), call, context)

    def _call(
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
            tail=self.layer.pools_tail,
            skip=self._skip_for(query, key, value),
        )

    def _skip_for(self, *qkv: torch.Tensor) -> Skip | None:
        """Return what `skip_below` asks for, counted on their device; None for nothing."""
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

    def share_skipped(self) -> float | None:
        """See `AttentionImpl.share_skipped`; waits for the device."""
        if self._skip is None or self._skip.counts is None:
            return None
        skipped, steps = self._skip.counts.tolist()
        return float(skipped) / steps if steps else None

    def dense_reason(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        context: ForwardContext | None,
        first_head: int = 0,
    ) -> str | None:
        """See `AttentionImpl.dense_reason`; the method's own rule goes first."""
        grid = None if context is None else context.latent_grid
        frames = None if grid is None else grid[0]
        own = self.router.dense_reason(self.config, query.shape[1], frames)
        if own is not None:
            return own
        if self._dense_above.never or context is None or grid is None:
            return None  # without a grid, the call itself is refused
        if torch.are_deterministic_algorithms_enabled() or records_gradient(query, key):
            return None
        heads = slice(first_head, first_head + query.shape[2])
        step = None
        if self._changes or self.router.varies(self.config):
            step = context.current_timestep, context.num_steps
        run = (query.shape[1], key.shape[1], grid, context.text_span, step, heads.start, heads.stop)
        sizes = query.shape[1], key.shape[1]
        return self._dense_above.reason(
            run, lambda: self._known_density(sizes, heads, context), context
        )

    def _known_density(
        self, sizes: tuple[int, int], heads: slice, context: ForwardContext
    ) -> tuple[float, int] | None:
        """Return the share of pairs that a call will keep, and the tokens of a block, if known."""
        layout, router = layout_of(*sizes, context, self.label), self.router
        settings = self.settings(context)
        cut = router.cut(settings, layout.grid)
        grid = cut.layout(layout).grid
        tile = fit_tile(cut.tile, grid)
        if router.chooses == "pattern":
            pattern = router.pattern(settings, layout.grid, context.current_timestep)
            share: float | None = share_of(pattern, tile_order(grid, tile))
        else:
            num = math.prod(-(-n // edge) for n, edge in zip(grid, tile, strict=True))
            share = router.density(settings, num, layout.num_video)
        return None if share is None else (layout.density(share), math.prod(tile))

    def densities(self) -> Mapping[int, float]:
        """See `AttentionImpl.densities`."""
        return self.layer.densities.by_step()

    def kernel_detours(self) -> Mapping[tuple[str, str], int]:
        """See `AttentionImpl.kernel_detours`."""
        return self.kernel.detours()

    def observe(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        context: ForwardContext | None,
        attn_mask: torch.Tensor | None,
    ) -> None:
        """See `AttentionImpl.observe`."""
        self.router.observe(self.config, query, key, context, attn_mask)

    def end_request(self, request_id: str) -> None:
        """See `AttentionImpl.end_request`."""
        self.router.end_request(request_id)

    def forward_gated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        context: ForwardContext | None = None,
        *,
        first_head: int = 0,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_gated`."""
        return self.forward(query, key, value, context, gate=gate, first_head=first_head)

    def add_coarse(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        context: ForwardContext | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.add_coarse`."""
        call = self._call(query, key, value, context, gate=gate)
        return add_branch(self.router, self.config, out, call)

    def ring_reason(self) -> str | None:
        """See `AttentionImpl.ring_reason`."""
        if getattr(self.config, "skip_below", None) is not None:
            return "skip_below compares the scores of a row over all keys in one pass"
        return self.router.limits(self.config).ring or whole_tiles_only(self.kernel)

    def ulysses_reason(self) -> str | None:
        """See `AttentionImpl.ulysses_reason`."""
        return self.router.limits(self.config).ulysses

    def forward_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_ring`."""
        self.kernel.begin_call()
        return attend_ring(self.router, self.settings(context), inputs, context)

    def add_coarse_ring(
        self, out: torch.Tensor, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """See `AttentionImpl.add_coarse_ring`."""
        self.kernel.begin_call()
        return add_branch_in_ring(self.router, self.config, out, inputs, context)

    def cut_of_cache(self, kept: KeptChunks, context: ForwardContext | None) -> CacheCut | str:
        """See `AttentionImpl.cut_of_cache`."""
        cut = self.router.limits(self.config).cache or self.router.cut_of_cache(
            self.config, kept, None if context is None else context.latent_grid
        )
        if isinstance(cut, CacheCut) and self.kernel.name in self.router.upstream:
            return f"kernel {self.kernel.name} takes no lists of a cache"
        if isinstance(cut, CacheCut) and getattr(self.config, "skip_below", None) is not None:
            return "`skip_below` is for keys of one call"
        return cut

    def forward_tiles(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: SeenTiles,
        context: ForwardContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_tiles`."""
        self.kernel.begin_call()
        return attend_cache(self.router, self.settings(context), query, key, value, tiles, context)
