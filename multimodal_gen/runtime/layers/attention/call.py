"""One attention call, what its layer is, and who looks at calls.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from multimodal_gen.runtime.layers.attention.backends.block_masks import AnyBlockMask
from multimodal_gen.runtime.layers.attention.masks import VarlenMaskMeta
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.layers.attention.warn_once import PROCESS, WarnOnce
from multimodal_gen.runtime.managers.forward_context import set_for_block

if TYPE_CHECKING:
    from multimodal_gen.runtime.distributed.ring import AttendPart, RingInputs
    from multimodal_gen.runtime.layers.attention.causal_cache import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """What an implementation is constructed with.

    Attributes:
        num_heads: query heads.
        head_size: channels per head.
        num_kv_heads: key and value heads.
        softmax_scale: factor on q k^T.
        causal: bottom-right aligned causality.
        site: where the layer sits.
        warnings: what its user was warned of.
    """

    num_heads: int
    head_size: int
    num_kv_heads: int
    softmax_scale: float
    causal: bool
    site: LayerSite
    warnings: WarnOnce = field(default=PROCESS, compare=False)


class AttentionCall(NamedTuple):
    """One call of a layer, from its `forward` to an implementation.

    What a caller gives are the first five, `mask_meta`, `replicated`, `seq_lens`, `exchange`,
    `some_heads`, `cache`, `block_mask` and `sink_logits`; the others are set on the way. While
    `torch.compile` traces, a packing is not carried along: it is made again.

    Attributes:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, Dv].
        mask: as `LocalAttention.forward` takes it; where tokens are split over ranks, the part of
            this rank.
        gate: [B, Sq, H, D] weight of a coarse branch, or None.
        mask_meta: packing of a 2-D `mask`, where the caller has it already.
        whole_mask: the mask of the tokens of all ranks, where the caller has it already.
        replicated: tokens that all ranks hold: in front, at the end, and keys in front.
        seq_lens: tokens of each rank; None to let ranks tell each other.
        exchange: whether the layer may exchange tokens with other ranks.
        some_heads: whether the tensors may hold a share of the layer's heads.
        no_grid: why the tokens are not those of a latent grid, so that a sparse method cannot serve
            the call, which runs dense then; "" where that is not known.
        first_head: index of the first head of `query` among the layer's heads.
        continued: whether earlier heads of the same call came before.
        projection: the layer's trained projection, for methods that have one; None for zero.
        zero_rows: rows of zeros that the output has behind those of `query`.
        spare_gate: computes the gate, as `gate`, of a layer that has no coarse branch, for those
            who look at its calls; None where there is none.
        cache: the layer's part of a cache of chunks, of which `key` and `value` are the running
            one; None without.
        block_mask: which blocks are attended to, in place of `mask`; of the whole sequence also
            where tokens are split over ranks.
        exact: why neither a sparse method nor rounded operands may serve the call; "" where they
            may.
        check: looks at what a call gives whose tokens are split over ranks; None for nothing.
        sink_logits: [H] logit of a key without a value that every query of a head sees, of all
            heads of the layer; or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    mask_meta: VarlenMaskMeta | None = None
    whole_mask: torch.Tensor | None = None
    replicated: tuple[int, int, int] = (0, 0, 0)
    seq_lens: Sequence[int] | None = None
    exchange: bool = True
    some_heads: bool = False
    no_grid: str = ""
    first_head: int = 0
    continued: bool = False
    projection: nn.Linear | None = None
    zero_rows: int = 0
    spare_gate: Callable[[], torch.Tensor] | None = None
    cache: "LayerCache | None" = None
    block_mask: "AnyBlockMask | None" = None
    sink_logits: torch.Tensor | None = None
    exact: str = ""
    check: "SplitCheck | None" = None

    def is_extended(self) -> bool:
        """Whether it has a cache, a mask of blocks or sink logits."""
        return self.cache is not None or self.block_mask is not None or self.sink_logits is not None

    def autocast(self) -> "AttentionCall":
        """Cast as autocast, where it is on, does: selection then sees what kernels get."""
        if not autocasts(self.query.device):
            return self
        dtype = torch.get_autocast_dtype(self.query.device.type)
        # Autocast leaves doubles alone.
        query, key, value = (
            x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x
            for x in self[:3]
        )
        return self._replace(query=query, key=key, value=value)

    def wants_gradient(self) -> bool:
        """Whether autograd records what is computed from the tensors."""
        # Spelled out: a generator would cost more than the rest of the call.
        return torch.is_grad_enabled() and (
            self.query.requires_grad
            or self.key.requires_grad
            or self.value.requires_grad
            or (self.mask is not None and self.mask.requires_grad)
            or (self.gate is not None and self.gate.requires_grad)
        )


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device."""
    # Asking about "meta" is an error, and torch cannot trace what tells such devices apart.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


@lru_cache(maxsize=64)
def device_type(device: torch.device) -> str:
    """Return `device.type`, kept because torch builds the text anew whenever it is asked."""
    return device.type


class SplitCheck(Protocol):
    """Looks at what one call gives on a rank, where that has its heads of the tokens.

    Attributes:
        reason: why what it computes again is exact, as `AttentionCall.exact`.
    """

    reason: str

    def heads(
        self, serve: Callable[[AttentionCall], torch.Tensor], call: AttentionCall
    ) -> torch.Tensor:
        """Return what `serve` gives for this rank's heads of all tokens, once it is checked."""
        ...

    def part(self, attend: "AttendPart", exact: "AttendPart") -> "AttendPart":
        """Return what computes a part in a ring as `attend` does, or `exact` if it has to."""
        ...

    def ring(self, inputs: "RingInputs", lengths: Sequence[int], out: torch.Tensor) -> None:
        """Check what a ring gave for this rank's tokens.

        Args:
            inputs: what this rank brought to it.
            lengths: queries of each rank in the ring that are not on all ranks.
            out: what it gave, [B, prefix + S + suffix, H, Dv].
        """
        ...


Watch: TypeAlias = Callable[
    [Any, AttentionCall, Callable[[AttentionCall], torch.Tensor]], torch.Tensor
]
"""Looks at the calls of all layers: gets the layer, the call as it is to be served, and what serves
it, and returns the output."""

Guard: TypeAlias = Callable[
    [Any, Callable[[AttentionCall], torch.Tensor], AttentionCall], torch.Tensor
]
"""Serves the calls of a layer, maybe otherwise than was asked for: gets the layer, what serves a
call, and the call as it is to be served, and returns the output."""

_WATCH: ContextVar[Watch | None] = ContextVar("multimodal_gen_attention_watch", default=None)

current_watch: Final = _WATCH.get
"""Returns what looks at calls now, or None."""


def watching(watch: Watch | None) -> AbstractContextManager[None]:
    """Let `watch` serve the calls of layers inside the block; None for no watch."""
    return set_for_block(_WATCH, watch)
