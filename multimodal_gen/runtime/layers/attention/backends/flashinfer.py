"""FlashInfer's prefill attention, one call per sample."""

import math

import torch
from typing_extensions import override

from multimodal_gen.kernels.requirements import Capability, HeadSizes
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    DenseBackend,
    DenseImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import refuse_grad
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    BASIC,
    MERGEABLE,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.packages import FLASHINFER
from multimodal_gen.runtime.platforms import AttentionBackendEnum


class FlashInferImpl(DenseImpl):
    """Attention through `flashinfer.single_prefill_with_kv_cache`.

    The entry point for batches plans on the host, which would wait for the device; DiT batches are
    one or two samples of many tokens, so a call per sample costs nothing.
    """

    label = "flashinfer"
    function = "flashinfer:single_prefill_with_kv_cache"

    @override
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_grad(self.label, query, key, value)
        results = [
            self.run(
                *(x.contiguous() for x in sample),
                causal=self.causal,
                kv_layout="NHD",
                sm_scale=self.softmax_scale,
                return_lse=lse,
            )
            for sample in zip(query, key, value, strict=True)
        ]
        if not lse:
            return torch.stack(results), None
        outs, stats = (torch.stack(parts) for parts in zip(*results, strict=True))
        return outs, stats.transpose(1, 2) * math.log(2)  # the package gives [S, H] in base 2


class FlashInferBackend(DenseBackend):
    """FlashInfer."""

    backend = AttentionBackendEnum.FLASHINFER
    summary = "FlashInfer prefill kernels"
    impl = FlashInferImpl
    variants = (
        Variant(
            name="flashinfer",
            head_sizes=HeadSizes(listed=(64, 128, 256)),
            features=BASIC | MERGEABLE,
            packages=(FLASHINFER,),
            capability=Capability(minimum=(8, 0)),
        ),
    )
