"""SageAttention 3: attention with FP4 operands on SM12x GPUs.

Tested by simulation only: the call is checked against a package with the same signature.
"""

import math
from typing import Any, ClassVar

import torch

from multimodal_gen.runtime.layers.attention.backends._common import (
    AlignedImpl,
    expand_kv,
    refuse_grad,
)
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    Capability,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum


class SageAttention3Impl(AlignedImpl):
    """Attention through `sageattn3.sageattn3_blackwell`.

    The package always scales by D ** -0.5, wants as many key heads as query heads and smooths the
    keys in the caller's memory; all of that is met here.
    """

    label = "sage_attn_3"
    only_square = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import sageattn3

        self._sageattn = sageattn3.sageattn3_blackwell
        self._query_factor = self.softmax_scale * math.sqrt(self.head_size)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_grad(self.label, query, key, value)
        num_heads = query.shape[2]
        if not math.isclose(self._query_factor, 1.0, rel_tol=1e-6):
            query = query * self._query_factor
        own_key = key.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        out: torch.Tensor = self._sageattn(
            query.transpose(1, 2).contiguous(),
            expand_kv(own_key, num_heads, dim=1).contiguous(),
            expand_kv(value.transpose(1, 2), num_heads, dim=1).contiguous(),
            is_causal=self.causal,
        )
        return out.transpose(1, 2), None


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
