"""What implementations can do in a ring beyond giving the log-sum-exp.

Some compute the ring themselves, because what they attend to depends on where tokens lie.

Shapes: B batch, S tokens of this rank's chunk, H heads of the rank, D head size.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch

from multimodal_gen.runtime.distributed.ring import RingCall
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = ["GatedRingMethod", "KeptKeysImpl", "RingInputs", "RingMethod"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingInputs:
    """What a rank holds of a sequence whose keys and values travel round a ring.

    Attributes:
        call: how the tokens are split, and the masks of all of them.
        query: [B, prefix + S + suffix, H, D].
        key: [B, S, Hkv, D].
        value: [B, S, Hkv, D].
        shared_key: keys that all ranks hold, [B, P, Hkv, D], or None.
        shared_value: their values.
        gate: weight of a coarse branch, [B, S, H, D], or None.
    """

    call: RingCall
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    shared_key: torch.Tensor | None
    shared_value: torch.Tensor | None
    gate: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> "RingInputs":
        """Return the same inputs in another dtype."""

        def cast(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(dtype)

        return replace(
            self,
            query=self.query.to(dtype),
            key=self.key.to(dtype),
            value=self.value.to(dtype),
            shared_key=cast(self.shared_key),
            shared_value=cast(self.shared_value),
            gate=cast(self.gate),
        )


class KeptKeysImpl(AttentionImpl):
    """An implementation that leaves padding out of a part without waiting for the device."""

    @abstractmethod
    def forward_lse_kept(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keep: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as `forward_lse`, for the keys that `keep`, bool [B, Sk], leaves; not causal.

        What the others hold, even NaN, has no influence.
        """


class RingMethod(AttentionImpl):
    """An implementation whose variants may declare `ring` without `lse`."""

    def against_ring(self) -> str | None:
        """Return why this configuration cannot be part of a ring, or None."""
        return None

    @abstractmethod
    def forward_in_ring(
        self, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """Return attention of this rank's queries over the keys of all ranks.

        Every rank of the ring calls it, without gradients.

        Args:
            inputs: what this rank holds.
            context: the running denoiser call.

        Returns:
            [B, prefix + S + suffix, H, D], the gate's branch included. Rows of queries that see no
            key are zero.
        """


class GatedRingMethod(RingMethod):
    """A method with a coarse branch, which dense steps of its schedule keep."""

    @abstractmethod
    def add_coarse_in_ring(
        self, out: torch.Tensor, inputs: RingInputs, context: ForwardContext | None = None
    ) -> torch.Tensor:
        """Return `out`, [B, S, H, D], plus the gate times the coarse branch; may change `out`."""
