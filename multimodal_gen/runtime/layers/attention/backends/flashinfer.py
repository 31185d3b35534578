"""FlashInfer's prefill attention, one call per sample."""

import math
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
    Capability,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext


class FlashInferImpl(AttentionImpl):
    """Attention through `flashinfer.single_prefill_with_kv_cache`.

    The entry point for batches plans on the host, which would wait for the device; DiT batches are
    one or two samples of many tokens, so a call per sample costs nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import flashinfer

        self._prefill = flashinfer.single_prefill_with_kv_cache

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
        refuse_mask(attn_mask, "flashinfer")
        num_queries, num_keys = query.shape[1], key.shape[1]
        if self.causal and num_queries > num_keys:
            return align_rows(self.forward(align_rows(query, num_keys), key, value), num_queries)
        return torch.stack(self._per_sample(query, key, value, return_lse=False))

    def forward_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        num_queries, num_keys = query.shape[1], key.shape[1]
        if self.causal and num_queries > num_keys:
            out, lse = self.forward_lse(align_rows(query, num_keys), key, value)
            return align_rows(out, num_queries), align_lse(lse, num_queries)
        pairs = self._per_sample(query, key, value, return_lse=True)
        out = torch.stack([pair[0] for pair in pairs])
        # The package gives [S, H] in base 2.
        lse = torch.stack([pair[1] for pair in pairs]).transpose(1, 2) * math.log(2)
        return out, lse

    def _per_sample(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, return_lse: bool
    ) -> list[Any]:
        refuse_grad("flashinfer", query, key, value)
        return [
            self._prefill(
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                causal=self.causal,
                kv_layout="NHD",
                sm_scale=self.softmax_scale,
                return_lse=return_lse,
            )
            for q, k, v in zip(query, key, value, strict=True)
        ]


class FlashInferBackend(AttentionBackend):
    """FlashInfer."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.FLASHINFER
    summary: ClassVar[str] = "FlashInfer prefill kernels"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="flashinfer",
            platforms=frozenset({PlatformEnum.CUDA}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(listed=(64, 128, 256)),
            features=frozenset({Feature.GQA, Feature.CAUSAL, Feature.LSE, Feature.RING}),
            packages=(
                PackageProbe(
                    module="flashinfer",
                    distribution="flashinfer-python",
                    install="pip install flashinfer-python",
                    minimum="0.2",
                ),
            ),
            capability=Capability(minimum=(8, 0)),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `FlashInferImpl`."""
        return FlashInferImpl
