"""FlashAttention on Intel GPUs, through `sgl_kernel`'s packed entry point.

Tested by simulation only: the call is checked against a package with the same signature.
"""

import importlib
from typing import Any, ClassVar

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention.backends._common import (
    AlignedImpl,
    refuse_grad,
)
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum


class XpuFlashAttentionImpl(AlignedImpl):
    """Attention through `sgl_kernel.flash_attn`; a batch is packed segments of equal length."""

    label = "fa (xpu)"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A declaration cannot say this; on other GPUs the package raises at each call.
        if not torch.xpu.get_device_properties().has_fp64:
            raise UnsupportedBackendError(
                "backend fa (xpu) needs a GPU with fp64 support, this GPU has none; "
                "use torch_sdpa, or a data-center GPU"
            )
        module = importlib.import_module("sgl_kernel.flash_attn")
        self._varlen = module.flash_attn_varlen_func

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, num_queries = query.shape[:2]
        num_keys = key.shape[1]
        out = self.forward_varlen(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            cu_seqlens_q=_starts(batch, num_queries, query.device),
            cu_seqlens_k=_starts(batch, num_keys, query.device),
            max_seqlen_q=num_queries,
            max_seqlen_k=num_keys,
        )
        return out.view(batch, num_queries, *out.shape[1:]), None

    def forward_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_varlen`."""
        refuse_grad(self.label, query, key, value)
        out: torch.Tensor = self._varlen(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
        )
        return out


class XpuFlashAttentionBackend(AttentionBackend):
    """FlashAttention on XPU."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.FA
    summary: ClassVar[str] = "FlashAttention for Intel GPUs"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="xpu",
            platforms=frozenset({PlatformEnum.XPU}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(listed=(64, 96, 128, 192, 256)),
            features=frozenset({Feature.GQA, Feature.CAUSAL, Feature.VARLEN}),
            packages=(
                PackageProbe(
                    module="sgl_kernel.flash_attn",
                    distribution="sglang-kernel-xpu",
                    install="install github.com/sgl-project/sgl-kernel-xpu",
                ),
            ),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `XpuFlashAttentionImpl`."""
        return XpuFlashAttentionImpl


def _starts(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length
