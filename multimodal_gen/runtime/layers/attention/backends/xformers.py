"""xFormers' memory-efficient attention."""

from typing import Any, ClassVar

import torch

from multimodal_gen.kernels.requirements import Capability, HeadSizes, PackageProbe
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import (
    AlignedImpl,
    expand_kv,
    refuse_grad,
    unit_stride,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    Variant,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum


class XFormersImpl(AlignedImpl):
    """Attention through `xformers.ops`.

    Key heads are expanded: its own grouped form has no backward.
    """

    label = "xformers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import xformers.ops as xops

        self._attention = xops.memory_efficient_attention
        self._attention_lse = xops.memory_efficient_attention_forward_requires_grad
        self._bias = (
            xops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if self.causal else None
        )

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attend = self._attention
        if lse:
            refuse_grad("xformers with its log-sum-exp", query, key, value)
            attend = self._attention_lse
        result: Any = attend(
            *self._inputs(query, key, value), attn_bias=self._bias, scale=self.softmax_scale
        )
        # Rows of the log-sum-exp may be padded to a multiple of 32.
        return (result[0], result[1][:, :, : query.shape[1]]) if lse else (result, None)

    def _inputs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        num_heads = query.shape[2]
        return unit_stride(query, expand_kv(key, num_heads), expand_kv(value, num_heads))


class XFormersBackend(AttentionBackend):
    """xFormers."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.XFORMERS
    summary: ClassVar[str] = "xFormers memory-efficient attention"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="xformers",
            platforms=frozenset({PlatformEnum.CUDA}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(minimum=8, maximum=256, multiple_of=8),
            features=frozenset(
                {Feature.GQA, Feature.CAUSAL, Feature.LSE, Feature.RING, Feature.BACKWARD}
            ),
            packages=(
                PackageProbe(
                    module="xformers.ops",
                    distribution="xformers",
                    install="pip install xformers",
                    minimum="0.0.28",
                ),
            ),
            capability=Capability(minimum=(8, 0)),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `XFormersImpl`."""
        return XFormersImpl
