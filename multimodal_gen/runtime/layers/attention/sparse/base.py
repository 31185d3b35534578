"""What is left of the sparse methods of 0.1, and the parameter `tail`, which most methods have."""

import warnings
from abc import abstractmethod
from typing import Any, Generic, TypeVar

import torch
from typing_extensions import override

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.tile_order.api import TileOrder
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import Limits
from multimodal_gen.runtime.layers.attention.config import (
    SparseConfig,
    Tail,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.density import density_of_map, density_of_plan
from multimodal_gen.runtime.layers.attention.sparse.method import SparseMethodImpl
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import ring_layout
from multimodal_gen.runtime.layers.attention.sparse.router import Budget, Cut, Router
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    layout_of,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = ["SparseImpl", "Tail", "refuse_foreign_tail", "tail_option"]

_NO_RING = "what it attends to depends on all tokens of a head, which a ring never joins"

_ConfigT = TypeVar("_ConfigT", bound=SparseConfig)


class _NoRouter(Router[Any]):
    """Stands where methods have a router: nothing is known of what this one attends to."""

    @override
    def cut(self, settings: Any, grid: tuple[int, int, int]) -> Cut:
        return Cut((1, 1, 1))

    @override
    def varies(self, settings: Any) -> bool:
        return True


class SparseImpl(SparseMethodImpl, Generic[_ConfigT]):
    """A sparse method that attends itself, as methods of 0.1 did; deprecated for routers.

    See `AttentionImpl` for the arguments. `forward_ring` and other methods of `SparseMethodImpl`
    are the method's own where it defines them.

    Attributes:
        declaration: the backend that it implements.
        config: the parameters; the defaults where a method was chosen without any. Those of one
            step, where some change from step to step, are `settings`.
        label: the backend's name, for messages.
        kernel: what computes every call.
    """

    router_cls = _NoRouter
    takes_projection = False
    trains_in_ring = False
    cache_reason = "it chooses among the keys of one call"
    config: _ConfigT

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        warnings.warn(
            f"{cls.__name__} derives from SparseImpl, which the next release will not have; write "
            f'a router, see "Migrating a `SparseImpl` to a router" in '
            f"docs/pages/guides/migrating.md",
            DeprecationWarning,
            stacklevel=3,  # the class statement, behind that of ABCMeta
        )
        for old, name in (("add_coarse", "add_branch"), ("add_coarse_ring", "add_branch_in_ring")):
            if old in vars(cls):
                setattr(cls, name, vars(cls)[old])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.takes = ("first_head", "continued")
        self.takes += ("projection",) if self.takes_projection else ()
        self.takes += ("gate",) if self._has("forward_gated") or self._has("add_coarse") else ()
        self.observes = self._has("observe")
        self.keeps_state = self.observes or self._has("end_request")
        ring = None if self._has("forward_ring") else _NO_RING
        if self.config.skip_below is not None:
            raise ConfigError(
                f"`skip_below` of {self.label} must be left out, got {self.config.skip_below:g}: "
                f"it attends itself; remove it"
            )
        self.prepare()
        self.limits = Limits(
            ulysses=self.ulysses_reason(),
            ring=self.ring_reason() or ring,
            ring_gradients=None if self.trains_in_ring else "it records no gradients there",
            cache=self.cache_reason,
        )

    def _has(self, method: str) -> bool:
        """Whether a method has an optional part of its own."""
        return getattr(type(self), method, None) is not getattr(SparseImpl, method, None)

    @override
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext | None = None,
        *,
        gate: torch.Tensor | None = None,
        **of_call: Any,
    ) -> torch.Tensor:
        if gate is None:
            return super().forward(query, key, value, context, **of_call)
        first = of_call.get("first_head", 0)
        return self.forward_gated(query, key, value, gate, context, first_head=first)

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
        """Return what `forward` does plus `gate`, [B, S, H, D], times a coarse branch."""
        return super().forward(query, key, value, context, gate=gate, first_head=first_head)

    @override
    def add_branch(self, out: torch.Tensor, *call: Any) -> torch.Tensor:
        own: Any = self
        added: torch.Tensor = own.add_coarse(out, *call)
        return added

    @override
    def add_branch_in_ring(self, out: torch.Tensor, *call: Any) -> torch.Tensor:
        own: Any = self
        added: torch.Tensor = own.add_coarse_ring(out, *call)
        return added

    call = SparseMethodImpl._call

    def ring_reason(self) -> str | None:
        """Return why this configuration cannot be part of a ring, or None."""
        return None

    def ulysses_reason(self) -> str | None:
        """Return why this configuration needs all heads in one process, or None."""
        return None

    def prepare(self) -> None:
        """Make what the layer keeps between calls; the end of construction."""

    @abstractmethod
    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return the method's attention, [B, Sq, H, D].

        Args:
            call: the call.
            context: the running denoiser call.
        """

    def known_density(
        self, layout: SequenceLayout, context: ForwardContext, heads: slice
    ) -> tuple[float, int] | None:
        """Return the share of pairs that a call will attend to, and the tokens of its blocks.

        None where the data decide, or where dense attention is something else than the method with
        every pair.

        Args:
            layout: where the video lies.
            context: the running denoiser call.
            heads: which of the layer's heads the call has.
        """
        return None

    @override
    def _known_density(
        self, sizes: tuple[int, int], heads: slice, context: ForwardContext
    ) -> tuple[float, int] | None:
        return self.known_density(layout_of(*sizes, context, self.label), context, heads)

    def learn_share(
        self, share: torch.Tensor, block: int, context: ForwardContext, first_head: int
    ) -> None:
        """Note the share of pairs, [], that a call keeps in blocks of so many keys, if data decide.

        Args:
            share: the share.
            block: tokens of a block of keys.
            context: the running denoiser call.
            first_head: see `SparseCall`; the first heads of a call stand for all of it.
        """
        if first_head == 0:
            self.layer.dense_above.learn(share, block, context)

    def record(
        self, context: ForwardContext, density: float | torch.Tensor, num_heads: int
    ) -> None:
        """Note the share of pairs, a number or a tensor [], that so many heads of a call keep."""
        self.layer.note(context, density, num_heads)

    def record_pairs(
        self, context: ForwardContext, plan: BlockPlan, layout: SequenceLayout, num_heads: int
    ) -> None:
        """Note what a plan of lists of equal length keeps."""
        self.record(context, density_of_plan(plan, layout), num_heads)

    def record_map(
        self,
        context: ForwardContext,
        layout: SequenceLayout,
        chosen: torch.Tensor,
        num_heads: int,
        order: TileOrder | None = None,
    ) -> None:
        """Note what a map of blocks, bool [B|1, H|1, Nq, Nk], keeps; see `density_of_map`."""
        self.record(context, density_of_map(chosen, layout, order), num_heads)

    def warn_of_density(
        self, layout: SequenceLayout, asked: float, kept: int, num_blocks: int
    ) -> None:
        """Warn, once, where a sequence is too short for the density that was asked for."""
        self.layer.warn_of(layout, Budget(kept, num_blocks, asked))

    @property
    def pools_tail(self) -> bool:
        """Whether blocks that are not kept count by their means."""
        return self.layer.pools_tail

    def ring_layout(self, inputs: RingInputs, context: ForwardContext | None) -> SequenceLayout:
        """Return where the video lies in the sequence of a ring; the beginning of a call in one.

        Raises:
            UsageError: see `ring_tiles.ring_layout`.
        """
        self.kernel.begin_call()
        return ring_layout(inputs, context, self.label)
