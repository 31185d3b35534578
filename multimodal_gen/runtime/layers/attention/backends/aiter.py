"""AMD's AITER kernels: `aiter`, and `aiter_sage` with quantised operands.

Tested by simulation only: the calls are checked against a package with the same signatures.
"""

import torch
from typing_extensions import override

from multimodal_gen.kernels.requirements import HeadSizes
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    DenseBackend,
    DenseImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import refuse_grad
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    BASIC,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.flash_attn import FORWARD, FlashAttentionImpl
from multimodal_gen.runtime.layers.attention.backends.packages import AITER, AITER_SAGE
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

_ROCM = frozenset({PlatformEnum.ROCM})


class AiterImpl(FlashAttentionImpl):
    """Attention through `aiter`, which has FlashAttention's interface."""

    label = "aiter"


class AiterBackend(DenseBackend):
    """AITER's FlashAttention."""

    backend = AttentionBackendEnum.AITER
    summary = "AITER FlashAttention for AMD GPUs"
    impl = AiterImpl
    variants = (
        Variant(
            name="aiter",
            platforms=_ROCM,
            head_sizes=HeadSizes(minimum=8, maximum=256, multiple_of=8),
            features=FORWARD | {Feature.BACKWARD},
            packages=(AITER,),
        ),
    )


class AiterSageImpl(DenseImpl):
    """Attention through AITER's SageAttention kernel, which computes in bf16 outside."""

    label = "aiter_sage"
    function = "aiter.ops.triton.attention.fav3_sage:fav3_sage_wrapper_func"

    @override
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_grad(self.label, query, key, value)
        scale, causal = self.softmax_scale, self.causal
        out = self.run(query, key, value, softmax_scale=scale, causal=causal, layout="bshd")
        return out.to(query.dtype), None


class AiterSageBackend(DenseBackend):
    """AITER's SageAttention."""

    backend = AttentionBackendEnum.AITER_SAGE
    summary = "AITER SageAttention for AMD GPUs: quantised operands"
    never_unasked = "rounds to 8 bits"
    operand_bits = 8
    impl = AiterSageImpl
    variants = (
        Variant(
            name="aiter_sage",
            platforms=_ROCM,
            head_sizes=HeadSizes(listed=(64, 128)),
            features=BASIC,
            packages=(AITER_SAGE,),
        ),
    )
