"""SageAttention: 8-bit queries and keys, by this package's own kernels or others'; and version 3.

Shapes: B batch, L tokens, H heads, D head size, Nq and Nk blocks.
"""

import importlib
import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.engine import AUTO, QUANTIZED
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
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
    ALL_ROLES,
    HALF_DTYPES,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine import (
    SPAS_SAGE_ATTN,
    DensePlanImpl,
    QuantizedBackend,
    dense_plan,
    engine_variants,
    refuse_foreign_values,
    upstream_variant,
    values_of,
    values_option,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = [
    "SPAS_SAGE",
    "SPAS_SAGE_VARIANT",
    "PackageImpl",
    "QuantizedAttentionImpl",
    "SageAttention3Backend",
    "SageAttention3Impl",
    "SageAttentionBackend",
    "SageAttentionImpl",
    "SageAttnConfig",
    "SpasCall",
    "SpasImpl",
    "attend_spas_sage",
    "mask_blocks",
]

SPAS_SAGE = "spas_sage_attn"
SPAS_SAGE_VARIANT = replace(
    upstream_variant(
        SPAS_SAGE,
        SPAS_SAGE_ATTN,
        capability=Capability(exact=((8, 0), (8, 6), (8, 7), (8, 9), (9, 0))),
    ),
    dtypes=HALF_DTYPES,
)
"""The declaration of SpargeAttn, for every method that it can compute."""

# Above every score, so that no product of weights and values is skipped.
_SKIP_NOTHING = 1e6


def mask_blocks(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return queries and keys of the blocks that the kernel's mask is made of on a GPU."""
    return (64, 128) if capability == (9, 0) else (128, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpasCall:
    """What decides whether the kernel can serve a call.

    Attributes:
        label: the backend's name in errors.
        queries: query tokens.
        keys: key tokens.
        heads: query heads.
        kv_heads: key and value heads.
        masked: whether keys are masked out or there is text, which the mask's blocks cannot tell.
        causal: whether keys after the query are masked out.
    """

    label: str
    queries: int
    keys: int
    heads: int
    kv_heads: int
    masked: bool = False
    causal: bool = False

    def reasons(self) -> tuple[str, ...]:
        """Return every reason the kernel cannot serve the call, requirement then actual."""
        found = []
        if self.masked:
            found.append("needs sequences of video alone without masked keys, got others")
        if self.causal:
            found.append("has no causal variant of a mask")
        if self.kv_heads != self.heads:
            found.append(f"needs as many key heads as the {self.heads}, got {self.kv_heads}")
        if min(self.queries, self.keys) < 128:
            found.append(f"needs at least 128 tokens, got {min(self.queries, self.keys)}")
        return tuple(found)


def attend_spas_sage(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keep: torch.Tensor,
    *,
    scale: float,
    call: SpasCall,
) -> torch.Tensor:
    """Return attention over the blocks of a mask, [B, L, H, D].

    Args:
        query: [B, L, H, D].
        key: as `query`.
        value: as `query`.
        keep: bool [B, H, Nq, Nk] in blocks as `mask_blocks` tells, at least one in every row.
        scale: factor of the scores.
        call: what the call is.

    Raises:
        UnsupportedBackendError: the kernel cannot serve the call; lists the reasons.
    """
    reasons = call.reasons()
    if reasons:
        raise UnsupportedBackendError(
            f"kernel {SPAS_SAGE} of {call.label} cannot serve this call: {'; '.join(reasons)}; "
            f"use kernel=auto"
        )
    heads_first = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    out: torch.Tensor = importlib.import_module(SPAS_SAGE).block_sparse_sage2_attn_cuda(
        *heads_first,
        mask_id=keep.to(torch.int8).contiguous(),
        scale=scale,
        pvthreshd=_SKIP_NOTHING,
        tensor_layout="HND",
    )
    return out.transpose(1, 2).to(query.dtype)


_BASIC = frozenset({Feature.GQA, Feature.CAUSAL})
_ENGINE = frozenset({Feature.GQA, Feature.CAUSAL, Feature.KEY_MASK, Feature.LSE, Feature.RING})
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
        if self.variant in QUANTIZED.names:
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
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keep: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        return self._impl.forward_lse(query, key, value, keep)


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


_GLUON, _TRITON = engine_variants(QUANTIZED, _ENGINE, roles=ALL_ROLES, kernels=("gluon", "triton"))


_BLOCK = 128  # queries, and keys


class QuantizedAttentionImpl(DensePlanImpl):
    """Dense attention on 8 bits."""

    label = "sage_attn"

    def plan(self, query: torch.Tensor, key: torch.Tensor, *, causal: bool) -> BlockPlan:
        """See `DensePlanImpl.plan`."""
        q_size = 64 if query.shape[1] <= 64 else _BLOCK
        return dense_plan(query.shape[1], key.shape[1], q_size, _BLOCK, causal, query.device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: BlockPlan,
        *,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `DensePlanImpl.attend`."""
        refuse_grad(self.label, query, key, value)
        found = quantized_attention(
            query,
            key,
            value,
            plan,
            scale=self.softmax_scale,
            kernel=self.variant or AUTO,
            values=values_of(self.config),
            return_lse=return_lse,
        )
        return (found, None) if isinstance(found, torch.Tensor) else found


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
        _GLUON,
        _TRITON,
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
        SPAS_SAGE_VARIANT,
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
    never_unasked: ClassVar[str] = "rounds to 4 bits"
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
