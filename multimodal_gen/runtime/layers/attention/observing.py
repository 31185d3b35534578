"""Implementations that learn from the calls another backend serves on their layer."""

from abc import ABC, abstractmethod

import torch

from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = ["ObservingImpl"]


class ObservingImpl(ABC):
    """What an implementation has that looks at the dense steps before its own."""

    @abstractmethod
    def observe(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        context: ForwardContext | None,
        attn_mask: torch.Tensor | None,
    ) -> None:
        """Look at a call before a dense backend serves it.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            context: the running denoiser call.
            attn_mask: the mask as the layer was given it.
        """
