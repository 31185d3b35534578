"""FlashAttention on Ascend NPUs, through torch_npu's fused inference operator.

Its masks are inverted (True hides) and causality is a mode that needs a fixed 2048 x 2048 triangle.
Tested by simulation only: the call is checked against a package with the same signature.
"""

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from multimodal_gen.runtime.layers.attention.backends._common import (
    align_lse,
    align_rows,
    refuse_grad,
    refuse_mask,
)
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    HALF_DTYPES,
    AttentionBackend,
    AttentionImpl,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

_BOTTOM_RIGHT_CAUSAL = 3  # sparse_mode


class NpuFlashAttentionImpl(AttentionImpl):
    """Attention through `torch_npu.npu_fused_infer_attention_score`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import torch_npu

        self._fused = torch_npu.npu_fused_infer_attention_score

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: "ForwardContext | None" = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward`."""
        refuse_mask(attn_mask, "fa (npu)")
        return self._attend(query, key, value, lse=False)[0]

    def forward_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        out, lse = self._attend(query, key, value, lse=True)
        return out, lse

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_queries, num_keys = query.shape[1], key.shape[1]
        if self.causal and num_queries > num_keys:
            out, stats = self._attend(align_rows(query, num_keys), key, value, lse=lse)
            stats = align_lse(stats, num_queries) if lse else stats
            return align_rows(out, num_queries), stats
        refuse_grad("fa (npu)", query, key, value)
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
        return out, stats.squeeze(-1) if lse else stats


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
