"""SageAttention 1 and 2: attention with 8-bit queries and keys."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from multimodal_gen.runtime.layers.attention.backends._common import (
    AlignedImpl,
    refuse_grad,
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
from multimodal_gen.runtime.layers.attention.config import BackendConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

_BASIC = frozenset({Feature.GQA, Feature.CAUSAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class SageAttnConfig(BackendConfig):
    """Parameters of `sage_attn`.

    Attributes:
        kernel: which implementation runs; "auto" takes the best one present.
    """

    kernel: Literal["auto", "sageattention"] = option(
        "auto", "implementation: the sageattention package, or auto for the best one present"
    )


class SageAttentionImpl(AlignedImpl):
    """Attention through `sageattention.sageattn`."""

    label = "sage_attn"
    only_square = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import sageattention

        self._sageattn = sageattention.sageattn
        # Version 1 smooths the keys in place, in the caller's memory: they are smoothed here.
        self._smooth_here = self.variant == "sage1"

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_grad(self.label, query, key, value)
        options = {"return_lse": True} if lse else {}
        if self._smooth_here:
            key = key - key.mean(dim=1, keepdim=True)
            options["smooth_k"] = False
        query, key, value = unit_stride(query, key, value)
        result: Any = self._sageattn(
            query,
            key,
            value,
            tensor_layout="NHD",
            is_causal=self.causal,
            sm_scale=self.softmax_scale,
            **options,
        )
        return (result[0], result[1]) if lse else (result, None)


class SageAttentionBackend(AttentionBackend):
    """SageAttention 1 and 2."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SAGE_ATTN
    summary: ClassVar[str] = "SageAttention 1 or 2: 8-bit queries and keys"
    config_cls: ClassVar[type[BackendConfig]] = SageAttnConfig
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="sage2",
            platforms=frozenset({PlatformEnum.CUDA}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(minimum=8, maximum=128, multiple_of=8),
            features=_BASIC | {Feature.LSE, Feature.RING},
            packages=(
                PackageProbe(
                    module="sageattention",
                    distribution="sageattention",
                    install="build github.com/thu-ml/SageAttention",
                    minimum="2",
                ),
            ),
            capability=Capability(exact=((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))),
        ),
        Variant(
            name="sage1",
            platforms=frozenset({PlatformEnum.CUDA}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(listed=(64, 96, 128)),
            features=_BASIC,
            packages=(
                PackageProbe(
                    module="sageattention",
                    distribution="sageattention",
                    install="pip install sageattention",
                    minimum="1.0.6",
                    below="2",
                ),
            ),
            capability=Capability(minimum=(8, 0)),
        ),
        Variant(
            name="musa",
            platforms=frozenset({PlatformEnum.MUSA}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(minimum=8, maximum=128, multiple_of=8),
            features=_BASIC | {Feature.LSE, Feature.RING},
            packages=(
                PackageProbe(
                    module="sageattention",
                    distribution="sageattention",
                    install="install github.com/MooreThreads/mate",
                ),
            ),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `SageAttentionImpl`."""
        return SageAttentionImpl
