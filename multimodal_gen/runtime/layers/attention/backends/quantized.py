"""Dense attention on the package's own 8-bit engine, and what its backends declare in common.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.quantized_attention.api import Values, quantized_attention
from multimodal_gen.kernels.quantized_attention.providers import has_e4m3
from multimodal_gen.runtime.layers.attention.backends._common import (
    attend_to_nothing,
    refuse_grad,
)
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    ALL_ROLES,
    HALF_DTYPES,
    Capability,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.dense_plan import dense_plan, drop_masked
from multimodal_gen.runtime.layers.attention.backends.engine_variants import (
    CUDA_ONLY,
    TRITON,
    TRITON_WITH_GLUON,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, option
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
)
from multimodal_gen.runtime.platforms import PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = [
    "ENGINE_KERNELS",
    "QuantizedAttentionImpl",
    "QuantizedBackend",
    "quantized_variants",
    "refuse_foreign_values",
    "values_of",
    "values_option",
]

ENGINE_KERNELS = ("gluon", "triton", "reference")
"""Kernels of the 8-bit engine, fastest first."""

_HEAD_SIZES = HeadSizes(minimum=16, maximum=128, multiple_of=8)
_BLOCK = 128


def quantized_variants(
    features: Iterable[Feature], roles: frozenset[AttentionRole] = ALL_ROLES
) -> tuple[Variant, ...]:
    """Return the engine's GPU kernels, fastest first, each with `features`.

    Args:
        features: what the method can honour on every kernel.
        roles: layer roles it serves.
    """
    portable = Variant(
        name="triton",
        platforms=CUDA_ONLY,
        dtypes=HALF_DTYPES,
        head_sizes=_HEAD_SIZES,
        features=frozenset(features),
        packages=(TRITON,),
        capability=Capability(minimum=(8, 0)),
        roles=roles,
    )
    hopper = replace(
        portable,
        name="gluon",
        packages=(TRITON_WITH_GLUON,),
        capability=Capability(exact=((9, 0),)),
    )
    return hopper, portable


def values_option() -> Any:
    """Declare the parameter `values` of a backend on the engine."""
    return option("16-bit", "what built-in kernels round weights and values to; e4m3 is less exact")


def values_of(config: BackendConfig | None) -> Values:
    """Return the parameter `values` of a configuration."""
    values: Values = getattr(config, "values", "16-bit")
    return values


def refuse_foreign_values(kernel: str, values: Values, backend: str, *own: str) -> None:
    """Raise `ConfigError` where `values` was given for a kernel of somebody else.

    Args:
        kernel: the parameter `kernel`.
        values: the parameter `values`.
        backend: the backend's name, for the message.
        *own: what `kernel` is called where it is one of this package.
    """
    if values != "16-bit" and kernel not in ("auto", *own):
        raise ConfigError(
            f"`values` of {backend} must be 16-bit with `kernel` {kernel}, whose values are its "
            f"package's own, got {values}; leave `kernel` out, or give {' or '.join(own)}"
        )


class QuantizedBackend(AttentionBackend):
    """A backend on the engine, whose own kernels take the parameter `values`."""

    @classmethod
    def variants_for(cls, config: BackendConfig | None) -> tuple[Variant, ...]:
        """Return the variants that the parameters leave: e4m3 values leave the engine's."""
        left = super().variants_for(config)
        return tuple(v for v in left if v.name in ENGINE_KERNELS or values_of(config) == "16-bit")

    @classmethod
    def choose_variant(
        cls,
        request: AttentionRequest,
        config: BackendConfig | None = None,
        *,
        only: Callable[[Variant], bool] | None = None,
    ) -> Variant | None:
        """Return the variant that serves `request`, if the GPU has the values asked for."""
        if _values_reasons(request, config):
            return None
        return super().choose_variant(request, config, only=only)

    @classmethod
    def unsupported_reasons(
        cls, request: AttentionRequest, config: BackendConfig | None = None
    ) -> tuple[str, ...]:
        """Return what is missing; that the GPU lacks the values asked for is reason enough."""
        return _values_reasons(request, config) or super().unsupported_reasons(request, config)


def _values_reasons(request: AttentionRequest, config: BackendConfig | None) -> tuple[str, ...]:
    environment = request.environment
    capability = environment.capability
    asked = values_of(config) == "e4m3" and getattr(config, "kernel", "auto") != "reference"
    if not asked or environment.platform is not PlatformEnum.CUDA or capability is None:
        return ()
    if has_e4m3("cuda", capability):
        return ()
    return (
        f"needs compute capability >= 8.9 for `values` e4m3, this GPU has "
        f"{capability.as_version_str()}; use values=16-bit",
    )


class QuantizedAttentionImpl(AttentionImpl):
    """Attention over a plan of every block; see `AttentionImpl` for the arguments.

    Attributes:
        label: the backend's name in errors.
    """

    label = "sage_attn"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: "ForwardContext | None" = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward`; the mask is bool [B, 1, 1, Sk]."""
        del context
        refuse_grad(self.label, query, key, value)
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)[0]
        plan = _plan(query, key, self.causal)
        if attn_mask is not None:
            key, value, plan = drop_masked(key, value, plan, attn_mask, self.label)
        out = quantized_attention(
            query,
            key,
            value,
            plan,
            scale=self.softmax_scale,
            kernel=self.variant or "auto",
            values=values_of(self.config),
        )
        assert isinstance(out, torch.Tensor)
        return out

    def forward_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        refuse_grad(self.label, query, key, value)
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)
        plan = _plan(query, key, self.causal)
        out, lse = quantized_attention(
            query,
            key,
            value,
            plan,
            scale=self.softmax_scale,
            kernel=self.variant or "auto",
            values=values_of(self.config),
            return_lse=True,
        )
        return out, lse


def _plan(query: torch.Tensor, key: torch.Tensor, causal: bool) -> BlockPlan:
    q_size = 64 if query.shape[1] <= 64 else _BLOCK
    return dense_plan(query.shape[1], key.shape[1], q_size, _BLOCK, causal, query.device)
