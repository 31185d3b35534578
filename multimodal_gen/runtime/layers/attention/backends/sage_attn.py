"""SageAttention: 8-bit queries and keys, by this package's own kernels or by others'."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from multimodal_gen.runtime.layers.attention.backends._common import (
    AlignedImpl,
    refuse_grad,
    unit_stride,
)
from multimodal_gen.runtime.layers.attention.backends._spas_sage import (
    SPAS_SAGE,
    SpasCall,
    attend_spas_sage,
    mask_blocks,
)
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    Capability,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine_variants import (
    SPAS_SAGE_ATTN,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.backends.quantized import (
    ENGINE_KERNELS,
    QuantizedAttentionImpl,
    QuantizedBackend,
    quantized_variants,
    refuse_foreign_values,
    values_of,
    values_option,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

_BASIC = frozenset({Feature.GQA, Feature.CAUSAL})
_ENGINE = frozenset({Feature.GQA, Feature.KEY_MASK, Feature.LSE, Feature.RING})
# Value of `kernel` -> variants that it leaves.
_VARIANTS = MappingProxyType(
    {
        "sageattention": ("sage2", "sage1", "musa"),
        "spas_sage_attn": ("spas_sage_attn",),
        "triton": ("gluon", "triton"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SageAttnConfig(BackendConfig):
    """Parameters of `sage_attn`.

    Attributes:
        kernel: which implementation runs: the package sageattention or spas_sage_attn, or "triton",
            this package's own kernels; "auto" takes the fastest one present.
        values: what this package's own kernels round weights and values to: "16-bit", or "e4m3",
            which is a third to half as exact, needs compute capability 8.9, and is the slower one
            on 9.0. Packages have values of their own: e4m3 leaves the built-in kernels alone.

    Raises:
        ConfigError: `values` is e4m3 and `kernel` a package.
    """

    kernel: Literal["auto", "sageattention", "spas_sage_attn", "triton"] = option(
        "auto", "implementation: a package, triton for the built-in kernels, auto for the fastest"
    )
    values: Literal["16-bit", "e4m3"] = values_option()

    def check(self) -> None:
        """Packages take no `values`."""
        refuse_foreign_values(self.kernel, self.values, "sage_attn", "triton")


class SageAttentionImpl(AttentionImpl):
    """Attention by whatever the variant stands for; see `AttentionImpl` for the arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kind: type[AttentionImpl] = PackageImpl
        if self.variant in ENGINE_KERNELS:
            kind = QuantizedAttentionImpl
        elif self.variant == SPAS_SAGE:
            kind = SpasImpl
        self._impl = kind(*args, **kwargs)

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
        return self._impl.forward(query, key, value, context, attn_mask=attn_mask)

    def forward_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        return self._impl.forward_lse(query, key, value)


class SpasImpl(AlignedImpl):
    """Attention through SpargeAttn's kernel, with every block kept."""

    label = "sage_attn"

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        del lse
        refuse_grad(self.label, query, key, value)
        on_cuda = query.device.type == "cuda"
        capability = torch.cuda.get_device_capability(query.device) if on_cuda else None
        rows, keys = mask_blocks(capability)
        batch, num_queries, heads, _ = query.shape
        blocks = -(-num_queries // rows), -(-key.shape[1] // keys)
        call = SpasCall(
            label=self.label,
            queries=num_queries,
            keys=key.shape[1],
            heads=heads,
            kv_heads=key.shape[2],
            causal=self.causal,
        )
        keep = torch.ones((batch, heads, *blocks), dtype=torch.bool, device=query.device)
        return attend_spas_sage(query, key, value, keep, scale=self.softmax_scale, call=call), None


class PackageImpl(AlignedImpl):
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


_HOPPER, _PORTABLE = (
    replace(variant, features=variant.features | {Feature.CAUSAL})
    if variant.name == "triton"
    else variant
    for variant in quantized_variants(_ENGINE)
)


class SageAttentionBackend(QuantizedBackend):
    """SageAttention, by the fastest implementation present."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SAGE_ATTN
    summary: ClassVar[str] = "SageAttention: 8-bit queries and keys"
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
        # Version 1 is behind both: 427 to 448 TFLOP/s on an H200, where they reach 844 and 479.
        _HOPPER,
        _PORTABLE,
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
        replace(
            upstream_variant(
                SPAS_SAGE,
                SPAS_SAGE_ATTN,
                capability=Capability(exact=((8, 0), (8, 6), (8, 7), (8, 9), (9, 0))),
            ),
            dtypes=HALF_DTYPES,
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

    @classmethod
    def variants_for(cls, config: BackendConfig | None) -> tuple[Variant, ...]:
        """Return the variants that the parameters leave; e4m3 values leave the built-in ones."""
        kernel = getattr(config, "kernel", "auto")
        if values_of(config) == "e4m3":
            kernel = "triton"
        return tuple(v for v in cls.variants if v.name in _VARIANTS.get(kernel, (v.name,)))
