"""What the sparse methods share: their configuration, what a call is, the density they report.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch

from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.engine import selected_kernel
from multimodal_gen.runtime.layers.attention.config import SparseConfig
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import ring_layout
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    layout_of,
)
from multimodal_gen.runtime.layers.attention.warn_once import warn_if_dense_run
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = ["SparseImpl"]

_ConfigT = TypeVar("_ConfigT", bound=SparseConfig)


class SparseImpl(AttentionImpl, Generic[_ConfigT]):
    """A sparse method on one self-attention layer; see `AttentionImpl` for the arguments.

    Attributes:
        declaration: the backend that it implements.
        config: the parameters; the defaults where a method was chosen without any.
        label: the backend's name, for messages.
        kernel: what computes every call: a kernel of the engine, or the authors' package.
    """

    declaration: ClassVar[type[AttentionBackend]]
    per_head: ClassVar[bool] = True
    config: _ConfigT

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cls: Any = self.declaration.config_cls
        self.config = self.config if isinstance(self.config, cls) else cls()
        self.label = str(self.declaration.backend)
        self.kernel = selected_kernel(self.variant, self.config)
        # By step and first head: heads may come in groups.
        self._densities: dict[tuple[int, int], float | torch.Tensor] = {}
        self.prepare()

    def prepare(self) -> None:
        """Make what the layer keeps between calls; the end of construction."""

    def check_run(self, context: ForwardContext) -> None:
        """Warn if no step is sparse; see `AttentionImpl.check_run`."""
        backend = self.declaration.backend
        warn_if_dense_run(self.config, backend, context.num_steps, self.warnings)

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
    ) -> torch.Tensor:
        """See `AttentionImpl.forward` and `per_head`; the mask is [B, 1, 1, Sk], and bool.

        Raises:
            UsageError: the latent grid is unknown or does not fit the sequence.
        """
        if not query.shape[0]:
            return query.new_empty((*query.shape[:3], value.shape[3]))
        keep = None
        if attn_mask is not None:
            keep = attn_mask[:, 0, 0, :].expand(key.shape[0], -1)
        if not continued:
            self.kernel.begin_call()
        call = self.call(query, key, value, context, keep=keep, first_head=first_head)
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
            UsageError: the latent grid is unknown or does not fit the sequence.
        """
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
        )

    def ring_layout(self, inputs: RingInputs, context: ForwardContext | None) -> SequenceLayout:
        """Return where the video lies in the sequence of a ring; the beginning of a call in one.

        Raises:
            UsageError: see `ring_tiles.ring_layout`.
        """
        self.kernel.begin_call()
        return ring_layout(inputs, context, self.label)

    @abstractmethod
    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return the method's attention, [B, Sq, H, D].

        Args:
            call: the call.
            context: the running denoiser call.
        """

    def record(
        self, context: ForwardContext, density: float | torch.Tensor, first_head: int = 0
    ) -> None:
        """Note the share of query-key pairs that the step attends to, in [0, 1], for the report.

        Args:
            context: the running denoiser call.
            density: the share, or where the data decide, a tensor [] of it, which is not waited
                for before the report is made.
            first_head: see `SparseCall`.
        """
        self._densities[context.current_timestep, first_head] = density

    def kernel_detours(self) -> Mapping[tuple[str, str], int]:
        """See `AttentionImpl.kernel_detours`."""
        return self.kernel.detours()

    def densities(self) -> Mapping[int, float]:
        """Return the density of every step so far; waits for the device where data decided it."""
        found: dict[int, list[float]] = {}
        for (step, _), density in self._densities.items():
            found.setdefault(step, []).append(float(density))
        return {step: sum(shares) / len(shares) for step, shares in found.items()}
