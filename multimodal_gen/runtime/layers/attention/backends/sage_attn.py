"""SageAttention: 8-bit queries and keys, by this package's own kernels or others'; and version 3.

Shapes: B batch, L tokens, H heads, D head size, Nq and Nk blocks.
"""

import importlib
import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from typing_extensions import override

from multimodal_gen.kernels.engine import QUANTIZED
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.kernels.requirements import Capability, HeadSizes
from multimodal_gen.kernels.tensors import place_of, unit_stride
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    DenseBackend,
    DenseImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import (
    attend_to_nothing,
    expand_kv,
    refuse_grad,
    refuse_mask,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    ALL_ROLES,
    BASIC,
    HALF_DTYPES,
    MERGEABLE,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine import (
    QuantizedBackend,
    dense_plan,
    drop_masked,
    engine_variants,
    refuse_foreign_values,
    refuse_upstream,
    upstream_variant,
    values_of,
    values_option,
)
from multimodal_gen.runtime.layers.attention.backends.packages import (
    SAGEATTENTION_1,
    SAGEATTENTION_2,
    SAGEATTENTION_MUSA,
    SAGEATTN_3,
    SPAS_SAGE_ATTN,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

SPAS_SAGE = "spas_sage_attn"
SPAS_SAGE_VARIANT = replace(
    upstream_variant(
        SPAS_SAGE,
        SPAS_SAGE_ATTN,
        capability=Capability(exact=((8, 0), (8, 6), (8, 7), (8, 9), (9, 0))),
    ),
    dtypes=HALF_DTYPES,
    operand_bits=8,
)
"""The declaration of SpargeAttn, for every method that it can compute."""

# Above every score, so that no product of weights and values is skipped.
_SKIP_NOTHING = 1e6
_BLOCK = 128  # queries, and keys, of the engine's plans


def mask_blocks(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return queries and keys of the blocks that the kernel's mask is made of on a GPU."""
    return (64, 128) if capability == (9, 0) else (128, 64)


def attend_spas_sage(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
    label: str,
    masked: bool = False,
    causal: bool = False,
) -> torch.Tensor:
    """Return attention over the blocks of a mask, [B, L, H, D].

    Args:
        query: [B, L, H, D].
        key: as `query`.
        value: as `query`.
        mask: bool [B, H, Nq, Nk] in blocks as `mask_blocks` tells, at least one in every row.
        scale: factor of the scores.
        label: the backend's name in errors.
        masked: whether keys are masked out or there is text, which the mask's blocks cannot tell.
        causal: whether keys after the query are masked out.

    Raises:
        UnsupportedBackendError: the kernel cannot serve the call; lists the reasons.
    """
    reasons = []
    if masked:
        reasons.append("needs sequences of video alone without masked keys, got others")
    if causal:
        reasons.append("has no causal variant of a mask")
    if key.shape[2] != query.shape[2]:
        reasons.append(f"needs as many key heads as the {query.shape[2]}, got {key.shape[2]}")
    if min(query.shape[1], key.shape[1]) < 128:
        reasons.append(f"needs at least 128 tokens, got {min(query.shape[1], key.shape[1])}")
    refuse_upstream(reasons, kernel=SPAS_SAGE, backend=label)
    heads_first = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    out: torch.Tensor = importlib.import_module(SPAS_SAGE).block_sparse_sage2_attn_cuda(
        *heads_first,
        mask_id=mask.to(torch.int8).contiguous(),
        scale=scale,
        pvthreshd=_SKIP_NOTHING,
        tensor_layout="HND",
    )
    return out.transpose(1, 2).to(query.dtype)


_UP_TO_128 = HeadSizes(minimum=8, maximum=128, multiple_of=8)
_ENGINE = BASIC | MERGEABLE | {Feature.KEY_MASK}
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


class SageAttentionImpl(DenseImpl):
    """Attention by the kernel that the variant stands for: a package's, or one of the engine."""

    label = "sage_attn"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_engine = self.variant in QUANTIZED.names
        self.only_square = not self._on_engine and self.variant != SPAS_SAGE
        if self.only_square:
            self.run = importlib.import_module("sageattention").sageattn

    @override
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_grad(self.label, query, key, value)
        if self.only_square:
            return self._by_package(query, key, value, lse=lse)
        if self._on_engine:
            return self._by_engine(query, key, value, lse=lse)
        return self._by_spas_sage(query, key, value), None

    @override
    def _attend_masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        if self.causal or not self._on_engine:
            refuse_mask(mask, f"causal {self.label}" if self._on_engine else self.label)
        refuse_grad(self.label, query, key, value)
        return self._by_engine(query, key, value, mask[:, 0, 0, :])[0]

    def _by_package(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options = {"return_lse": True} if lse else {}
        if self.variant == "sage1":
            # It smooths the keys in place, in the caller's memory: they are smoothed here.
            key = key - key.mean(dim=1, keepdim=True)
            options["smooth_k"] = False
        found: Any = self.run(
            *map(unit_stride, (query, key, value)),
            tensor_layout="NHD",
            is_causal=self.causal,
            sm_scale=self.softmax_scale,
            **options,
        )
        return found if lse else (found, None)

    def _by_engine(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)
        sizes = 64 if query.shape[1] <= 64 else _BLOCK, _BLOCK
        plan = dense_plan(query.shape[1], key.shape[1], *sizes, self.causal, query.device)
        if mask is not None:
            key, value, plan = drop_masked(key, value, plan, mask)
        found = quantized_attention(
            query,
            key,
            value,
            plan,
            scale=self.softmax_scale,
            kernel=self.variant,
            values=values_of(self.config),
            return_lse=lse,
        )
        return (found, None) if isinstance(found, torch.Tensor) else found

    def _by_spas_sage(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return attention by SpargeAttn's kernel, with every block kept."""
        rows, keys = mask_blocks(place_of(query.device)[1])
        batch, length, heads, _ = query.shape
        shape = batch, heads, -(-length // rows), -(-key.shape[1] // keys)
        mask = torch.ones(shape, dtype=torch.bool, device=query.device)
        scale, causal = self.softmax_scale, self.causal
        return attend_spas_sage(
            query, key, value, mask, scale=scale, label=self.label, causal=causal
        )


_GLUON, _TRITON = engine_variants(QUANTIZED, _ENGINE, roles=ALL_ROLES, kernels=("gluon", "triton"))


class SageAttentionBackend(QuantizedBackend, DenseBackend):
    """SageAttention, by the fastest implementation present."""

    backend = AttentionBackendEnum.SAGE_ATTN
    summary = "SageAttention: 8-bit queries and keys"
    config_cls = SageAttnConfig
    impl = SageAttentionImpl
    variants = (
        Variant(
            name="sage2",
            head_sizes=_UP_TO_128,
            features=BASIC | MERGEABLE,
            packages=(SAGEATTENTION_2,),
            capability=Capability(exact=((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))),
        ),
        # Version 1 is behind both: 427 to 448 TFLOP/s on an H200, where they reach 844 and 479.
        _GLUON,
        _TRITON,
        Variant(
            name="sage1",
            head_sizes=HeadSizes(listed=(64, 96, 128)),
            features=BASIC,
            packages=(SAGEATTENTION_1,),
            capability=Capability(minimum=(8, 0)),
        ),
        SPAS_SAGE_VARIANT,
        Variant(
            name="musa",
            platforms=frozenset({PlatformEnum.MUSA}),
            head_sizes=_UP_TO_128,
            features=BASIC | MERGEABLE,
            packages=(SAGEATTENTION_MUSA,),
        ),
    )

    @override
    @classmethod
    def variants_for(cls, config: BackendConfig | None) -> tuple[Variant, ...]:
        kernel = getattr(config, "kernel", "auto")
        if values_of(config) == "e4m3":
            kernel = "triton"
        return tuple(v for v in cls.variants if v.name in _VARIANTS.get(kernel, (v.name,)))


class SageAttention3Impl(DenseImpl):
    """Attention through `sageattn3.sageattn3_blackwell`.

    The package always scales by D ** -0.5, wants as many key heads as query heads and smooths the
    keys in the caller's memory; all of that is met here.
    """

    label = "sage_attn_3"
    function = "sageattn3:sageattn3_blackwell"
    only_square = True

    @override
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_grad(self.label, query, key, value)
        num_heads = query.shape[2]
        factor = self.softmax_scale * math.sqrt(self.head_size)
        if not math.isclose(factor, 1.0, rel_tol=1e-6):
            query = query * factor
        own_key = key.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        out: torch.Tensor = self.run(
            query.transpose(1, 2).contiguous(),
            expand_kv(own_key, num_heads, dim=1).contiguous(),
            expand_kv(value.transpose(1, 2), num_heads, dim=1).contiguous(),
            is_causal=self.causal,
        )
        return out.transpose(1, 2), None


class SageAttention3Backend(DenseBackend):
    """SageAttention 3."""

    backend = AttentionBackendEnum.SAGE_ATTN_3
    summary = "SageAttention 3: FP4 operands, for SM12x GPUs"
    never_unasked = "rounds to 4 bits"
    operand_bits = 4
    impl = SageAttention3Impl
    variants = (
        Variant(
            name="sage3",
            head_sizes=HeadSizes(listed=(64, 128)),
            features=BASIC,
            packages=(SAGEATTN_3,),
            capability=Capability(exact=((12, 0), (12, 1))),
        ),
    )
