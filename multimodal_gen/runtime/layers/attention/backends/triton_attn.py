"""Dense attention on this package's own block-sparse engine, with every block kept."""

from dataclasses import replace
from typing import ClassVar

from multimodal_gen.errors import NotInThisBuildError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    ALL_ROLES,
    AttentionBackend,
    AttentionImpl,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine_variants import engine_variants
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_FEATURES = (Feature.GQA, Feature.CAUSAL, Feature.KEY_MASK, Feature.LSE)


class TritonAttentionBackend(AttentionBackend):
    """Dense attention that needs nothing but torch and its Triton."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.TRITON_ATTN
    summary: ClassVar[str] = "dense attention on the package's own kernels"
    not_in_this_build: ClassVar[str | None] = "The dense Triton kernel is not in this build yet"
    variants: ClassVar[tuple[Variant, ...]] = tuple(
        replace(variant, roles=ALL_ROLES)
        for variant in engine_variants(_FEATURES)
        if variant.name in ("gluon", "triton")
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Raise `NotInThisBuildError`."""
        raise NotInThisBuildError(cls.not_in_this_build)
