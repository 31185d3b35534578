"""xFormers' memory-efficient attention."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from multimodal_gen.runtime.layers.attention.backends._common import (
    align_lse,
    align_rows,
    expand_kv,
    refuse_grad,
    refuse_mask,
    unit_stride,
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


class XFormersImpl(AttentionImpl):
    """Attention through `xformers.ops`.

    Key heads are expanded: its own grouped form has no backward.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import xformers.ops as xops

        self._attention = xops.memory_efficient_attention
        self._attention_lse = xops.memory_efficient_attention_forward_requires_grad
        self._bias = (
            xops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if self.causal else None
        )

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
        refuse_mask(attn_mask, "xformers")
        num_queries, num_keys = query.shape[1], key.shape[1]
        if self.causal and num_queries > num_keys:
            return align_rows(self.forward(align_rows(query, num_keys), key, value), num_queries)
        out: torch.Tensor = self._attention(
            *self._inputs(query, key, value), attn_bias=self._bias, scale=self.softmax_scale
        )
        return out

    def forward_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        refuse_grad("xformers with its log-sum-exp", query, key, value)
        num_queries, num_keys = query.shape[1], key.shape[1]
        if self.causal and num_queries > num_keys:
            out, lse = self.forward_lse(align_rows(query, num_keys), key, value)
            return align_rows(out, num_queries), align_lse(lse, num_queries)
        out, lse = self._attention_lse(
            *self._inputs(query, key, value), attn_bias=self._bias, scale=self.softmax_scale
        )
        return out, lse[:, :, :num_queries]  # rows may be padded to a multiple of 32

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
