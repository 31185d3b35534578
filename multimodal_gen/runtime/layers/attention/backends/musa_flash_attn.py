"""FlashAttention on Moore Threads GPUs, through the wrapper of their `mate` package.

Tested by simulation only: the call is checked against a package with the same signature.
"""

from types import MappingProxyType
from typing import ClassVar

from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashLibrary,
)
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum


class MusaFlashAttentionImpl(FlashAttentionImpl):
    """Attention through mate's wrapper, which has FlashAttention 3's interface."""

    libraries: ClassVar[MappingProxyType[str, FlashLibrary]] = MappingProxyType(
        {"musa": FlashLibrary(module="flash_attn_interface", backward=False)}
    )


class MusaFlashAttentionBackend(AttentionBackend):
    """FlashAttention on MUSA."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.FA
    summary: ClassVar[str] = "FlashAttention for Moore Threads GPUs"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="musa",
            platforms=frozenset({PlatformEnum.MUSA}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(minimum=8, maximum=512, multiple_of=8),
            features=frozenset(
                {Feature.GQA, Feature.CAUSAL, Feature.VARLEN, Feature.LSE, Feature.RING}
            ),
            packages=(
                PackageProbe(
                    module="flash_attn_interface",
                    distribution="mate-flash-attention",
                    install="install github.com/MooreThreads/mate",
                ),
            ),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `MusaFlashAttentionImpl`."""
        return MusaFlashAttentionImpl
