"""FlashAttention on Ascend NPUs, through torch_npu's fused inference operator.

Its masks are inverted (True hides) and causality is a mode that needs a fixed 2048 x 2048 triangle.
Tested by simulation only: the call is checked against a package with the same signature.
"""

from functools import cache
from typing import Any, ClassVar

import torch

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
