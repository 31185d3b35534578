"""FlashAttention on GPUs and NPUs of other makers, through the packages that they publish.

Tested by simulation only: the calls are checked against packages with the same signatures.
"""

from functools import cache
from typing import Any

import torch
from typing_extensions import Unpack, override

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.requirements import HeadSizes
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    DenseBackend,
    DenseImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import Segments, refuse_grad
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    MERGEABLE,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.flash_attn import FORWARD, FlashAttentionImpl
from multimodal_gen.runtime.layers.attention.backends.packages import (
    FLASH_ATTN_MUSA,
    FLASH_ATTN_XPU,
    TORCH_NPU,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

_UP_TO_512 = HeadSizes(minimum=8, maximum=512, multiple_of=8)
_BOTTOM_RIGHT_CAUSAL = 3  # sparse_mode


class MusaFlashAttentionBackend(DenseBackend):
    """FlashAttention on MUSA: mate's wrapper, which has FlashAttention 3's interface."""

    backend = AttentionBackendEnum.FA
    summary = "FlashAttention for Moore Threads GPUs"
    impl = FlashAttentionImpl
    variants = (
        Variant(
            name="musa",
            platforms=frozenset({PlatformEnum.MUSA}),
            head_sizes=_UP_TO_512,
            features=FORWARD,
            packages=(FLASH_ATTN_MUSA,),
        ),
    )


class NpuFlashAttentionImpl(DenseImpl):
    """Attention through `torch_npu.npu_fused_infer_attention_score`."""

    label = "fa (npu)"
    function = "torch_npu:npu_fused_infer_attention_score"

    @override
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_grad(self.label, query, key, value)
        causal = {
            "sparse_mode": _BOTTOM_RIGHT_CAUSAL,
            "atten_mask": _hidden_triangle(query.device),
        }
        out, stats = self.run(
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


class NpuFlashAttentionBackend(DenseBackend):
    """FlashAttention on NPU."""

    backend = AttentionBackendEnum.FA
    summary = "FlashAttention for Ascend NPUs"
    impl = NpuFlashAttentionImpl
    variants = (
        Variant(
            name="npu",
            platforms=frozenset({PlatformEnum.NPU}),
            head_sizes=_UP_TO_512,
            features=FORWARD - {Feature.VARLEN},
            packages=(TORCH_NPU,),
        ),
    )


@cache
def _hidden_triangle(device: torch.device) -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


class XpuFlashAttentionImpl(DenseImpl):
    """Attention through `sgl_kernel.flash_attn`; a batch is packed segments of equal length."""

    label = "fa (xpu)"
    function = "sgl_kernel.flash_attn:flash_attn_varlen_func"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A declaration cannot say this; on other GPUs the package raises at each call.
        if not torch.xpu.get_device_properties().has_fp64:
            raise UnsupportedBackendError(
                "backend fa (xpu) needs a GPU with fp64 support, this GPU has none; "
                "use torch_sdpa, or a data-center GPU"
            )
        super().__init__(*args, **kwargs)

    @override
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, num_queries = query.shape[:2]
        num_keys = key.shape[1]
        out = self.forward_varlen(
            *(x.flatten(0, 1) for x in (query, key, value)),
            cu_seqlens_q=_starts(batch, num_queries, query.device),
            cu_seqlens_k=_starts(batch, num_keys, query.device),
            max_seqlen_q=num_queries,
            max_seqlen_k=num_keys,
        )
        return out.view(batch, num_queries, *out.shape[1:]), None

    @override
    def forward_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **segments: Unpack[Segments],
    ) -> torch.Tensor:
        refuse_grad(self.label, query, key, value)
        parts = (x.contiguous() for x in (query, key, value))
        out: torch.Tensor = self.run(
            *parts, softmax_scale=self.softmax_scale, causal=self.causal, **segments
        )
        return out


class XpuFlashAttentionBackend(DenseBackend):
    """FlashAttention on XPU."""

    backend = AttentionBackendEnum.FA
    summary = "FlashAttention for Intel GPUs"
    impl = XpuFlashAttentionImpl
    variants = (
        Variant(
            name="xpu",
            platforms=frozenset({PlatformEnum.XPU}),
            head_sizes=HeadSizes(listed=(64, 96, 128, 192, 256)),
            features=FORWARD - MERGEABLE,
            packages=(FLASH_ATTN_XPU,),
        ),
    )


def _starts(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length
