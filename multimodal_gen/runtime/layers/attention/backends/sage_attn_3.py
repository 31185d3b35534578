"""SageAttention 3: attention with FP4 operands on SM12x GPUs.

Tested by simulation only: the call is checked against a package with the same signature.
"""

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from multimodal_gen.runtime.layers.attention.backends._common import (
    align_rows,
    expand_kv,
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


class SageAttention3Impl(AttentionImpl):
    """Attention through `sageattn3.sageattn3_blackwell`.

    The package always scales by D ** -0.5, wants as many key heads as query heads, smooths the
    keys in the caller's memory and knows no bottom-right causality; all of that is met here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import sageattn3

        self._sageattn = sageattn3.sageattn3_blackwell
        self._query_factor = self.softmax_scale * math.sqrt(self.head_size)

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
        refuse_mask(attn_mask, "sage_attn_3")
        refuse_grad("sage_attn_3", query, key, value)
        num_queries, num_heads = query.shape[1:3]
        if self.causal:
            query = align_rows(query, key.shape[1])
        if not math.isclose(self._query_factor, 1.0, rel_tol=1e-6):
            query = query * self._query_factor
        own_key = key.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        out = self._sageattn(
            query.transpose(1, 2).contiguous(),
            expand_kv(own_key, num_heads, dim=1).contiguous(),
            expand_kv(value.transpose(1, 2), num_heads, dim=1).contiguous(),
            is_causal=self.causal,
        ).transpose(1, 2)
        return align_rows(out, num_queries) if self.causal else out


class SageAttention3Backend(AttentionBackend):
    """SageAttention 3."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SAGE_ATTN_3
    summary: ClassVar[str] = "SageAttention 3: FP4 operands, for SM12x GPUs"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="sage3",
            platforms=frozenset({PlatformEnum.CUDA}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(listed=(64, 128)),
            features=frozenset({Feature.GQA, Feature.CAUSAL}),
            packages=(
                PackageProbe(
                    module="sageattn3",
                    distribution="sageattn3",
                    install="build sageattention3_blackwell/ of github.com/thu-ml/SageAttention",
                ),
            ),
            capability=Capability(exact=((12, 0), (12, 1))),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `SageAttention3Impl`."""
        return SageAttention3Impl
