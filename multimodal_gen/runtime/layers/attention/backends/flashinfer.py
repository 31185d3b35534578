"""FlashInfer's prefill attention, one call per sample."""

import math
from typing import Any, ClassVar

import torch

from multimodal_gen.kernels.requirements import Capability, HeadSizes, PackageProbe
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
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum


class FlashInferImpl(AlignedImpl):
    """Attention through `flashinfer.single_prefill_with_kv_cache`.

    The entry point for batches plans on the host, which would wait for the device; DiT batches are
    one or two samples of many tokens, so a call per sample costs nothing.
    """

    label = "flashinfer"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import flashinfer

        self._prefill = flashinfer.single_prefill_with_kv_cache

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_grad(self.label, query, key, value)
        results: list[Any] = [
            self._prefill(
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                causal=self.causal,
                kv_layout="NHD",
                sm_scale=self.softmax_scale,
                return_lse=lse,
            )
            for q, k, v in zip(query, key, value, strict=True)
        ]
        if not lse:
            return torch.stack(results), None
        # The package gives [S, H] in base 2.
        stats = torch.stack([stats for _, stats in results]).transpose(1, 2) * math.log(2)
        return torch.stack([out for out, _ in results]), stats


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
