"""xFormers' memory-efficient attention."""

from typing import Any

import torch
from typing_extensions import override

from multimodal_gen.kernels.requirements import Capability, HeadSizes
from multimodal_gen.kernels.tensors import unit_stride
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    DenseBackend,
    DenseImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import (
    expand_kv,
    refuse_grad,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    BASIC,
    MERGEABLE,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.packages import XFORMERS
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum


class XFormersImpl(DenseImpl):
    """Attention through `xformers.ops`.

    Key heads are expanded: its own grouped form has no backward.
    """

    label = "xformers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import xformers.ops as xops

        self.run = xops.memory_efficient_attention
        self._run_lse = xops.memory_efficient_attention_forward_requires_grad
        self._bias = (
            xops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if self.causal else None
        )

    @override
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        heads = query.shape[2]
        parts = [*map(unit_stride, (query, expand_kv(key, heads), expand_kv(value, heads)))]
        if not lse:
            return self.run(*parts, attn_bias=self._bias, scale=self.softmax_scale), None
        refuse_grad("xformers with its log-sum-exp", *parts)
        out, stats = self._run_lse(*parts, attn_bias=self._bias, scale=self.softmax_scale)
        return out, stats[:, :, : query.shape[1]]  # rows may be padded to a multiple of 32


class XFormersBackend(DenseBackend):
    """xFormers."""

    backend = AttentionBackendEnum.XFORMERS
    summary = "xFormers memory-efficient attention"
    impl = XFormersImpl
    variants = (
        Variant(
            name="xformers",
            head_sizes=HeadSizes(minimum=8, maximum=256, multiple_of=8),
            features=BASIC | MERGEABLE | {Feature.BACKWARD},
            packages=(XFORMERS,),
            capability=Capability(minimum=(8, 0)),
        ),
    )
