"""A sparse method on one layer: its router and parameters, and what all methods do alike.

Shapes: B batch, S tokens, H heads, D head size.
"""

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.kernels.block_sparse.skip import Skip
from multimodal_gen.kernels.engine import AUTO, BLOCK_SPARSE, SelectedKernel, records_gradient
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    Facts,
    Limits,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import SAGE, Variant
from multimodal_gen.runtime.layers.attention.backends.engine import (
    engine_variants,
    variants_in_8_bits,
)
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    SparseConfig,
    config_at,
    settings_text,
    varying,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.sparse.dense_above import DenseAbove
from multimodal_gen.runtime.layers.attention.sparse.executors.kept import (
    CACHE,
    RING,
    KeptChoices,
    reason_against,
)
from multimodal_gen.runtime.layers.attention.sparse.executors.local import (
    add_branch,
    attend_locally,
)
from multimodal_gen.runtime.layers.attention.sparse.executors.ring import (
    add_branch_in_ring,
    attend_ring,
)
from multimodal_gen.runtime.layers.attention.sparse.router import (
    ANY_GRID,
    KnownCall,
    Router,
    SparseLayer,
    require,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    ENGINE,
    SparseCall,
    layout_of,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext

SPARSE_FEATURES = frozenset({Feature.GQA, Feature.KEY_MASK, Feature.RING})
"""What a method can honour that leaves the rest to executors."""


VARIANTS_OF_BOTH = (
    *engine_variants(BLOCK_SPARSE, SPARSE_FEATURES),
    *variants_in_8_bits(SPARSE_FEATURES),
)
"""All kernels of the block-sparse engine, and those in 8 bits that `compute_mode` asks for."""


class SparseBackend(AttentionBackend):
    """A sparse method: a declaration, a configuration and a router.

    Attributes:
        router: the class of its router, of which every layer has one object.
        variants: all kernels of the block-sparse engine by default.
    """

    config_cls: ClassVar[type[SparseConfig]]
    router: ClassVar[type[Router[Any]]]
    variants: ClassVar[tuple[Variant, ...]] = engine_variants(BLOCK_SPARSE, SPARSE_FEATURES)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "backend" not in cls.__dict__:
            return
        own = getattr(cls, "router", None), getattr(cls, "config_cls", None)
        require(all(map(isinstance, own, (type, type))), cls, "router, config_cls", "given", own)
        require(cls.backend.is_sparse, cls, "backend", "registered with sparse=True", cls.backend)
        cls.router.check()

    @override
    @classmethod
    def variants_for(cls, config: BackendConfig | None) -> tuple[Variant, ...]:
        """Return those of 8 bits where `compute_mode` asks for them, else the others."""
        kernel = getattr(config, "kernel", AUTO)
        in_8_bits = isinstance(config, SparseConfig) and config.in_8_bits
        left = (v for v in cls.variants if v.name.endswith(SAGE) == in_8_bits)
        return tuple(v for v in left if kernel in (AUTO, v.name.removesuffix(SAGE)))

    @classmethod
    def block_sizes(cls, config: BackendConfig | None) -> tuple[int, int]:
        """Return the tokens of a block of queries and of keys."""
        cut = cls.router().blocks(cls._given(config), ANY_GRID)
        return math.prod(cut.tile), math.prod(cut.of_keys)

    @classmethod
    def limits(cls, config: BackendConfig | None = None) -> Limits:
        """Return what the method cannot do, so configured, on the engine's kernels, and why."""
        given = cls._given(config)
        layer = SparseLayer(pools_tail=_pools_tail(given))
        return _limits(cls.router(layer), given, layer.kernel)

    @classmethod
    def _given(cls, config: BackendConfig | None) -> SparseConfig:
        """Return the parameters, the defaults where a method was chosen without any."""
        return config if isinstance(config, cls.config_cls) else cls.config_cls()

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return what layers call."""
        router = cls.router
        takes = ["first_head", "continued"]
        takes += ["projection"] if router.takes_projection else []
        takes += ["gate"] if router.branch is not None else []
        attributes = {"declaration": cls, "router_cls": router, "takes": tuple(takes)}
        return type("SparseMethodImpl", (SparseMethodImpl,), attributes)


def _pools_tail(config: SparseConfig) -> bool:
    return getattr(config, "tail", "none") == "pooled"


def _limits(router: Router[Any], config: SparseConfig, kernel: SelectedKernel) -> Limits:
    """Return what a method cannot do on a kernel, and why."""
    own = router.limits(config)
    require(isinstance(own, Limits), type(router), "limits()", "a Limits", own)
    ring, cache = own.ring, own.cache
    if router.chooses == "pattern" and not router.defines("density_of_cache"):
        cache = cache or "its patterns are places in one latent grid"
    if router.defines("group"):
        ring = ring or "its groups are of all tokens of a head"
        cache = cache or "its groups are of the keys of one call"
    if kernel.name not in ENGINE:
        cache = cache or f"kernel {kernel.name} takes no lists of a cache"
    elif kernel.named and "ragged" not in BLOCK_SPARSE.kernel(kernel.name).serves:
        ring = ring or f"kernel {kernel.name} takes whole tiles only, and shards cut them"
    gradients, skips = own.ring_gradients, config.skips()
    if config.in_8_bits:
        gradients = gradients or "8-bit attention has no gradients"
        cache = cache or "8 bits are made of the keys of one call"
    if skips is not None:
        ring = f"{skips[0]} compares the scores of a row over all keys in one pass"
        cache = f"`{skips[0]}` is for keys of one call"
    if config.refresh_every > 1:
        ring, cache = ring or RING, cache or CACHE
    return own._replace(ring=ring, cache=cache, ring_gradients=gradients)


class SparseMethodImpl(AttentionImpl):
    """A router on one self-attention layer; see `AttentionImpl` for the arguments.

    Attributes:
        declaration: the backend that it implements.
        router_cls: the class of what chooses.
        config: the parameters; the defaults where a method was chosen without any.
        router: what chooses.
        layer: what routers and executors know of it.
        observes: whether it looks at the calls of dense steps.
        keeps_state: whether it keeps something from call to call, for a request.
    """

    declaration: ClassVar[type[AttentionBackend]]
    router_cls: ClassVar[type[Router[Any]]]
    is_sparse = True
    config: SparseConfig
    kernel: SelectedKernel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cls: Any = self.declaration.config_cls
        self.config = self.config if isinstance(self.config, cls) else cls()
        asked = getattr(self.config, "kernel", AUTO)
        name = (self.variant or asked).removesuffix(SAGE)
        kernel = self.kernel = SelectedKernel(name, named=asked != AUTO)
        self.label = str(self.declaration.backend)
        named = kernel.named or self.config.in_8_bits
        measured = () if named else self.declaration.dense_above.get(kernel.name, ())
        dense_above = DenseAbove(self.label, self.config.dense_above, measured)
        self._skip: Skip | None = None
        self.layer = SparseLayer(
            label=self.label,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.softmax_scale,
            kernel=kernel,
            pools_tail=_pools_tail(self.config),
            site=self.site,
            warnings=self.warnings,
            dense_above=dense_above,
        )
        self.router: Router[Any] = self.router_cls(self.layer)
        self._refuse_skips()
        self._varies = bool(varying(self.config)) or self.router.varies(self.config)
        self.router.prepare(self.config)
        self._engine = self.router.engine(self.config)
        self.limits = _limits(self.router, self.config, kernel)
        self.observes = self.router.observes(self.config)
        self._kept = self._keeps_choices()
        self.keeps_state = self.observes or self.router.keeps_state or self._kept is not None

    def _keeps_choices(self) -> KeptChoices | None:
        """Return what choices are kept in, where they are."""
        every = self.config.refresh_every
        if every == 1:
            return None
        reason = reason_against(self.router, self.config)
        if reason is not None:
            raise ConfigError(
                f"`refresh_every` of {self.label} must be 1, got {every}: {reason}; remove it"
            )
        return KeptChoices(every, self.layer)

    def uncapturable(self) -> str | None:
        """Return why a CUDA graph of a call would not do for another step, or None."""
        if self.keeps_state:
            return f"{self.label} goes on from the step before"
        if self.router.varies(self.config) or self.router.search is not None:
            return f"what {self.label} keeps changes from step to step, by its parameters"
        if self.layer.dense_above.learns:
            return f"{self.label} learns from its calls which are dense (`dense_above=1`: none)"
        return None

    def step_kind(self, context: ForwardContext) -> Hashable:
        """Return what tells the steps apart that a CUDA graph of one does not serve."""
        return self.settings(context) if self._varies else None

    def _refuse_skips(self) -> None:
        """Refuse what leaves products out where no kernel of the engine is all there is."""
        skips, reason = self.config.skips(), None
        if self.router.engine(self.config) is not None or self.router.defines("group"):
            reason = "its kernels are its own"
        elif self.router.chooses == "rows":
            reason = "its rows attend in parts that are put together"
        if skips is not None and reason is not None:
            raise ConfigError(
                f"`{skips[0]}` of {self.label} must be left out, got {skips[1]:g}: {reason}; "
                f"remove it"
            )

    def settings(self, context: ForwardContext | None) -> Any:
        """Return the parameters of the running step: those that change over the steps are numbers.

        Raises:
            UsageError: a parameter changes, and the step or their number is unknown.
        """
        if not self._varies:
            return self.config
        at = (0, None) if context is None else (context.current_timestep, context.num_steps)
        return self.router.at(config_at(self.config, *at), *at)

    def check_run(self, context: ForwardContext) -> None:
        """Refuse a run that the parameters do not fit; warn if no step is sparse."""
        self.router.check_run(self.config, context)
        steps, sigmas = context.num_steps, context.sigmas
        reason = self.config.never_sparse("steps", steps, sigmas) or self._keeps_all(context)
        if reason is not None:
            self.warnings.warn(f"{self.declaration.backend} {reason}")

    def _keeps_all(self, context: ForwardContext) -> str | None:
        """Return what is said of parameters that leave nothing out in any step, else None."""
        grid, total = context.latent_grid, context.num_steps
        if self.config.skips() is not None or self.router.keeps_all(self.config):
            return None
        if grid is None or (self._varies and total is None):
            return None
        # The last step first: it is the least likely to keep all.
        steps = reversed(range(total or 0)) if self._varies else (context.current_timestep,)
        num, every = math.prod(grid), slice(0, self.num_heads)
        for step in steps:
            known = self._known((num, num), every, replace(context, current_timestep=step))
            asked = known.budget and known.budget.asked
            if known.share != 1 or (asked is not None and asked < 1):
                return None  # a grid that is too small for what was asked is told of elsewhere
        given, example = settings_text(self.config), self.config.example
        such = f" such as {example}" if example and given == "defaults" else ""
        return (
            f"leaves nothing out in any step, with {given} on the latent grid {grid}, as dense "
            f"attention does; give parameters{such} that leave some out, or take a dense backend"
        )

    @override
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
        projection: nn.Linear | None = None,
    ) -> torch.Tensor:
        """Return the method's attention, [B, S, H, D]; the mask is [B, 1, 1, Sk], and bool.

        Raises:
            UsageError: the latent grid is unknown or does not fit the sequence.
        """
        if not query.shape[0] or query.is_meta:  # which has a shape and no data to choose by
            return query.new_empty((*query.shape[:3], value.shape[3]))
        mask = None
        if attn_mask is not None:
            mask = attn_mask[:, 0, 0, :].expand(key.shape[0], -1)
        if not continued:
            self.kernel.begin_call()
        own = {"mask": mask, "gate": gate, "first_head": first_head, "projection": projection}
        call = self._call(query, key, value, context, **own)
        assert context is not None, "a layout needs a context"
        return self.attend(call, context)

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return the method's attention, [B, Sq, H, D]."""
        settings = self.settings(context)
        found = None if self._kept is None else self._kept.of_call(settings, call, context)
        return attend_locally(self.router, settings, call, context, found)

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext | None,
        **own: Any,
    ) -> SparseCall:
        """Return a call with what is its own, as `SparseCall` names it."""
        if value.shape != key.shape:
            raise UsageError(
                f"`v` of {self.label} must have the shape of k {list(key.shape)}, got "
                f"{list(value.shape)}; run such layers on a dense backend"
            )
        if records_gradient(query, key, value):
            self.require_backward()
        return SparseCall(
            query=query,
            key=key,
            value=value,
            layout=layout_of(query.shape[1], key.shape[1], context, self.label),
            scale=self.softmax_scale,
            kernel=self.kernel,
            tail=self.layer.pools_tail,
            skip=self._skip_for(query, key, value),
            engine=self._engine,
            **own,
        )

    def require_backward(self) -> None:
        """Raise a `UsageError` for a parameter that calls with gradients cannot have."""
        skips, every = self.config.skips(), self.config.refresh_every
        if skips is not None:
            rule, got = f"`{skips[0]}` of {self.label} must be left out", skips[1]
            reason = "a backward pass does not know what a kernel left out"
        elif every > 1:
            rule, got = f"`refresh_every` of {self.label} must be 1", every
            reason = "weights move between steps"
        else:
            return
        raise UsageError(
            f"{rule} where a gradient is asked for, got {got:g}: {reason}; remove it, or call the "
            f"layer under torch.no_grad()"
        )

    def _skip_for(self, *qkv: torch.Tensor) -> Skip | None:
        """Return what leaves products out, counted on their device; None for nothing."""
        skips, below = self.config.skips(), self.config.decibels(qkv[1].shape[1])
        if skips is None or below is None:
            return None
        device, last = qkv[0].device, self._skip
        counts = None if last is None else last.counts
        if counts is None or counts.device != device:
            with torch.inference_mode(False):
                counts = torch.zeros(2, dtype=torch.int64, device=device)
        if last is None or last.below != below or last.counts is not counts:
            self._skip = last = Skip(below=below, counts=counts)
        return last

    def dense_reason(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext | None,
        first_head: int = 0,
    ) -> str | None:
        """Return why a call is to be dense, or None; asked before every call.

        Because its parameters say so, or because that is faster, which is no reason where gradients
        are recorded. Does not wait for the device.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: [B, Sk, Hkv, D].
            context: the running denoiser call.
            first_head: index of the first of `query`'s heads among those of the layer.
        """
        own = self.ruled_dense(query.shape[1], context)
        if own is not None:
            return own
        grid = None if context is None else context.latent_grid
        if self.layer.dense_above.never or context is None or grid is None:
            return None  # without a grid, the call itself is refused
        if torch.are_deterministic_algorithms_enabled() or records_gradient(query, key, value):
            return None
        heads = slice(first_head, first_head + query.shape[2])
        step = (context.current_timestep, context.num_steps) if self._varies else None
        run = (query.shape[1], key.shape[1], grid, context.text_span, step, heads.start, heads.stop)
        sizes = query.shape[1], key.shape[1]
        density = partial(self._known_density, sizes, heads, context)
        return self.layer.dense_above.reason(run, density, context)

    def ruled_dense(self, tokens: int, context: ForwardContext | None) -> str | None:
        """Return why so many tokens are dense by the method's own rule, or None."""
        grid = None if context is None else context.latent_grid
        return self.router.dense_reason(self.config, tokens, None if grid is None else grid[0])

    def _known_density(
        self, sizes: tuple[int, int], heads: slice, context: ForwardContext
    ) -> tuple[float, int] | None:
        """Return the share of pairs that a call will keep, and the tokens of a block, if known."""
        known = self._known(sizes, heads, context)
        return None if known.share is None else (known.share, math.prod(known.tile))

    def _known(self, sizes: tuple[int, int], heads: slice, context: ForwardContext) -> KnownCall:
        """Return what is known before a call of so many queries and keys."""
        whole = layout_of(*sizes, context, self.label)
        return self.router.known(self.settings(context), whole, heads, context)

    @override
    def facts(self) -> Facts:
        counts = None if self._skip is None else self._skip.counts
        skipped, steps = (0, 0) if counts is None else counts.tolist()
        return Facts(self.layer.densities.by_step(), float(skipped) / steps if steps else None)

    def observe(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        context: ForwardContext | None,
        attn_mask: torch.Tensor | None,
    ) -> None:
        """Look at a call of an earlier, dense step, with the mask as the layer was given it."""
        # What is kept for a request is for its later steps alone.
        if context is not None and (context.request_id is None or context.is_last_step):
            return
        video = layout_of(query.shape[1], key.shape[1], context, self.label).video
        assert context is not None, "a layout needs a context"
        mask = None
        if attn_mask is not None and tuple(attn_mask.shape) == (key.shape[0], key.shape[1]):
            # As in `normalise_mask`, the other kinds of mask promise finite tokens.
            floating = attn_mask.dtype.is_floating_point
            mask = (attn_mask >= 0 if floating else attn_mask != 0)[:, video]
        with torch.no_grad():
            self.router.group(self.config, query[:, video], key[:, video], mask, context)

    def end_request(self, request_id: str) -> None:
        """Drop what is kept for a request that is over; others may still run.

        What keeps tensors for a request drops them by itself in the last step of one whose number
        of steps is known, if the request gets there on this layer.
        """
        self.router.end_request(request_id)
        if self._kept is not None:
            self._kept.end(request_id)

    def add_branch(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        context: ForwardContext | None,
    ) -> torch.Tensor:
        """Return `out`, [B, S, H, D], plus `gate` times the coarse branch; may change `out`.

        Dense steps of the method's schedule are its sparse ones at sparsity 0: they keep it.
        """
        call = self._call(query, key, value, context, gate=gate)
        return add_branch(self.router, self.settings(context), out, call)

    def forward_ring(self, inputs: RingInputs, context: ForwardContext | None) -> torch.Tensor:
        """Return attention of this rank's queries over the keys of all ranks, who all call it.

        Returns:
            [B, prefix + S + suffix, H, D], the gate's branch included.
        """
        self.kernel.begin_call()
        trained = inputs.projection if self.router.takes_projection else None
        return attend_ring(self.router, self.settings(context), inputs, context, trained)

    def add_branch_in_ring(
        self, out: torch.Tensor, inputs: RingInputs, context: ForwardContext | None
    ) -> torch.Tensor:
        """Do as `add_branch` in a ring."""
        self.kernel.begin_call()
        return add_branch_in_ring(self.router, self.settings(context), out, inputs, context)
