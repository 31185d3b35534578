"""What the sparse backends share: the layout of a call, key masks, and the density they report."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.backends.engine import selected_kernel
from multimodal_gen.runtime.layers.attention.config import SparseConfig
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    sequence_layout,
)
from multimodal_gen.runtime.layers.attention.warn_once import warn_if_dense_run
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

__all__ = ["SparseImpl"]


class SparseImpl(AttentionImpl):
    """A sparse method on one self-attention layer; see `AttentionImpl` for the arguments.

    Attributes:
        backend: the method, for messages.
        config_cls: its parameters.
        kernel: what runs its plans, or the authors' package.
    """

    backend: AttentionBackendEnum
    config_cls: ClassVar[type[SparseConfig]]
    per_head: ClassVar[bool] = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.kernel = selected_kernel(self.variant, self.config)
        self._first_head = 0  # of the call that runs
        # By step and first head: heads may come in groups.
        self._densities: dict[tuple[int, int], float | torch.Tensor] = {}

    def check_run(self, context: ForwardContext) -> None:
        """Warn if no step is sparse; see `AttentionImpl.check_run`."""
        config = self.config if isinstance(self.config, self.config_cls) else self.config_cls()
        warn_if_dense_run(config, self.backend, context.num_steps, self.warnings)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext | None = None,
        *,
        attn_mask: torch.Tensor | None = None,
        first_head: int = 0,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward`; the mask is [B, 1, 1, Sk], and bool.

        Raises:
            UsageError: the latent grid is unknown or does not fit the sequence.
        """
        self._first_head = first_head
        self.kernel.begin_call()
        layout = sequence_layout(query, key, context, str(self.backend))
        assert context is not None, "a layout needs a context"
        keep = None
        if attn_mask is not None:
            keep = attn_mask[:, 0, 0, :].expand(key.shape[0], -1)
        return self.attend(query, key, value, layout, context, keep)

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        context: ForwardContext,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the method's attention.

        Args:
            query: [B, Sq, H, D] in the order of the sequence.
            key: [B, Sk, Hkv, D].
            value: [B, Sk, Hkv, D].
            layout: where the video lies.
            context: the running denoiser call.
            keep: bool [B, Sk], keys that may be attended to; None for all.

        Returns:
            [B, Sq, H, D].
        """

    def record(self, context: ForwardContext, density: float | torch.Tensor) -> None:
        """Note the share of query-key pairs that the step attends to, in [0, 1], for the report.

        Args:
            context: the running denoiser call.
            density: the share, or where the data decide, a tensor [] of it, which is not waited
                for before the report is made.
        """
        self._densities[context.current_timestep, self._first_head] = density

    def kernel_detours(self) -> Mapping[tuple[str, str], int]:
        """See `AttentionImpl.kernel_detours`."""
        return self.kernel.detours()

    def densities(self) -> Mapping[int, float]:
        """Return the density of every step so far; waits for the device where data decided it."""
        found: dict[int, list[float]] = {}
        for (step, _), density in self._densities.items():
            found.setdefault(step, []).append(float(density))
        return {step: sum(shares) / len(shares) for step, shares in found.items()}
