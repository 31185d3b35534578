"""FlashAttention on GPUs and NPUs of other makers, through the packages that they publish.

Tested by simulation only: the calls are checked against packages with the same signatures.
"""

import importlib
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.requirements import HeadSizes, PackageProbe
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import (
    AlignedImpl,
    refuse_grad,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashLibrary,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum


class MusaFlashAttentionImpl(FlashAttentionImpl):
    """Attention through mate's wrapper, which has FlashAttention 3's interface."""

    libraries: ClassVar[MappingProxyType[str, FlashLibrary]] = MappingProxyType(
        {"musa": FlashLibrary(module="flash_attn_interface", backward=False)}
    )


class MusaFlashAttentionBackend(AttentionBackend):
    """FlashAttention on MUSA."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.FA
    summary: ClassVar[str] = "FlashAttention for Moore Threads GPUs"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="musa",
            platforms=frozenset({PlatformEnum.MUSA}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(minimum=8, maximum=512, multiple_of=8),
            features=frozenset(
                {Feature.GQA, Feature.CAUSAL, Feature.VARLEN, Feature.LSE, Feature.RING}
            ),
            packages=(
                PackageProbe(
                    module="flash_attn_interface",
                    distribution="mate-flash-attention",
                    install="install github.com/MooreThreads/mate",
                ),
            ),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `MusaFlashAttentionImpl`."""
        return MusaFlashAttentionImpl


_BOTTOM_RIGHT_CAUSAL = 3  # sparse_mode


class NpuFlashAttentionImpl(AlignedImpl):
    """Attention through `torch_npu.npu_fused_infer_attention_score`."""

    label = "fa (npu)"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import torch_npu

        self._fused = torch_npu.npu_fused_infer_attention_score

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_grad(self.label, query, key, value)
        causal = {
            "sparse_mode": _BOTTOM_RIGHT_CAUSAL,
            "atten_mask": _hidden_triangle(query.device),
        }
        out, stats = self._fused(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            num_heads=query.shape[2],
            num_key_value_heads=key.shape[2],
            input_layout="BSND",
            scale=self.softmax_scale,
            softmax_lse_flag=lse,
            **(causal if self.causal else {}),
        )
        return out, stats.squeeze(-1) if lse else None


class NpuFlashAttentionBackend(AttentionBackend):
    """FlashAttention on NPU."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.FA
    summary: ClassVar[str] = "FlashAttention for Ascend NPUs"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="npu",
            platforms=frozenset({PlatformEnum.NPU}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(minimum=8, maximum=512, multiple_of=8),
            features=frozenset({Feature.GQA, Feature.CAUSAL, Feature.LSE, Feature.RING}),
            packages=(
                PackageProbe(
                    module="torch_npu",
                    distribution="torch-npu",
                    install="pip install torch-npu",
                ),
            ),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `NpuFlashAttentionImpl`."""
        return NpuFlashAttentionImpl


@cache
def _hidden_triangle(device: torch.device) -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


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
