"""The package's own engines, block-sparse and 8-bit, as attention backends declare and call them.

Their kernels need nothing beyond torch and the Triton that comes with it; a method's upstream
package is one more variant where it is installed.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from multimodal_gen.errors import ConfigError, UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import (
    AUTO,
    QUANTIZED,
    Operation,
    e4m3_reason,
)
from multimodal_gen.kernels.requirements import Capability, HeadSizes, PackageProbe
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    SAGE,
    Variant,
    kernel_request,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, option
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
)
from multimodal_gen.runtime.platforms import PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.kernels.quantized_attention.api import Values

SELF_ONLY = frozenset({AttentionRole.SELF})


_HOPPER = Capability(exact=((9, 0),))


def engine_variants(
    operation: Operation,
    features: Iterable[Feature],
    *,
    roles: frozenset[AttentionRole] = SELF_ONLY,
    plans: Iterable[str] = (),
    kernels: Iterable[str] | None = None,
    trains: bool = True,
) -> tuple[Variant, ...]:
    """Return what an engine's kernels declare, fastest first.

    Args:
        operation: the engine, `BLOCK_SPARSE` or `QUANTIZED`.
        features: what the method can honour on kernels that can.
        roles: layer roles that it serves.
        plans: what all plans of the method are, as fields of a kernel's request: other kernels
            are left out.
        kernels: the kernels to take; all when None.
        trains: whether gradients flow through what the method does around the engine.
    """
    names = operation.names if kernels is None else kernels
    found = []
    for kernel in operation.kernels:
        if kernel.name not in names or not kernel.serves >= set(plans):
            continue
        refused = set() if "causal" in kernel.serves else {Feature.CAUSAL}
        backward = {Feature.BACKWARD} if trains and "backward" in kernel.serves else set()
        platforms = map(str, PlatformEnum) if kernel.platforms is None else kernel.platforms
        variant = Variant(
            name=kernel.name,
            platforms=frozenset(map(PlatformEnum, platforms)),
            # What methods compute around an engine takes 32 bits at most.
            dtypes=kernel.dtypes - {torch.float64},
            head_sizes=kernel.head_sizes,
            features=(frozenset(features) - refused) | backward,
            packages=kernel.packages,
            capability=kernel.capability,
            roles=roles,
            kernel=kernel,
        )
        found.append(variant)
    return tuple(found)


def variants_in_8_bits(features: Iterable[Feature]) -> tuple[Variant, ...]:
    """Return what 8-bit kernels declare for a method that has them beside those of 16 bits."""
    found = engine_variants(QUANTIZED, features)
    return tuple(replace(v, name=f"{v.name}{SAGE}", operand_bits=8) for v in found)


def upstream_variant(
    name: str,
    *packages: PackageProbe,
    head_sizes: tuple[int, ...] = (64, 128),
    capability: Capability = _HOPPER,
) -> Variant:
    """Return the declaration of a method's own package: bfloat16 self attention on CUDA.

    Args:
        name: short name for reports and for the `kernel` parameter.
        *packages: packages that must all be installed.
        head_sizes: head sizes its kernel takes.
        capability: compute capabilities its kernel runs on.
    """
    return Variant(
        name=name,
        dtypes=frozenset({torch.bfloat16}),
        head_sizes=HeadSizes(listed=head_sizes),
        features=frozenset(),
        packages=packages,
        capability=capability,
        roles=SELF_ONLY,
    )


def refuse_upstream(
    reasons: Sequence[str], *, kernel: str, backend: str, what: str = "call"
) -> None:
    """Raise where there are reasons against a package.

    Args:
        reasons: requirement and actual of each.
        kernel: the package.
        backend: the method.
        what: what they are about: "call", "run" or "layer".

    Raises:
        UnsupportedBackendError: there are reasons; lists them.
    """
    if reasons:
        raise UnsupportedBackendError(
            f"kernel {kernel} of {backend} cannot serve this {what}: {'; '.join(reasons)}; use "
            f"kernel=auto"
        )


DENSE_BLOCK = 384
"""Rows and keys of a block where everything is attended to: the fastest of 16 bits."""


@static_cache(maxsize=128)
def dense_plan(
    num_queries: int,
    num_keys: int,
    q_size: int,
    kv_size: int,
    causal: bool,
    device: torch.device,
) -> BlockPlan:
    """Return the plan of dense attention on regular blocks; the last 128 are cached.

    Args:
        num_queries: Sq.
        num_keys: Sk.
        q_size: queries per block.
        kv_size: keys per block.
        causal: whether keys after the query are dropped.
        device: where the tensors lie.
    """
    q, kv = Blocks.regular(num_queries, q_size), Blocks.regular(num_keys, kv_size)
    return replace(BlockPlan.dense(q, kv, device, causal=causal), shared=True)


def drop_masked(
    key: torch.Tensor, value: torch.Tensor, plan: BlockPlan, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, BlockPlan]:
    """Move the kept keys of every sample to its front; does not wait for the device.

    Args:
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        plan: a plan of `dense_plan`, not causal.
        mask: bool [B|1, Sk], True where a key is kept.

    Returns:
        Keys and values in the new order, and the plan whose blocks end with each sample's kept
        keys.
    """
    mask = mask.expand(key.shape[0], -1)
    index = torch.argsort(~mask, dim=1, stable=True).int()
    key, value = gather_tokens((key, value), index)
    kv = plan.kv
    starts = torch.arange(kv.num, dtype=torch.int32, device=mask.device) * kv.size
    lengths = (mask.sum(1, dtype=torch.int32).view(-1, 1, 1) - starts).clamp(0, kv.size)
    ragged = Blocks.ragged(starts.view(1, 1, -1), lengths, total=kv.total, size=kv.size)
    return key, value, replace(plan, kv=ragged, shared=False)


def values_option() -> Any:
    """Declare the parameter `values` of a backend on the engine."""
    return option("16-bit", "what built-in kernels round weights and values to; e4m3 is less exact")


def values_of(config: BackendConfig | None) -> "Values":
    """Return the parameter `values` of a configuration."""
    values: Values = getattr(config, "values", "16-bit")
    return values


def refuse_foreign_values(kernel: str, values: "Values", backend: str, *own: str) -> None:
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

    never_unasked = "rounds to 8 bits"
    operand_bits = 8

    @override
    @classmethod
    def variants_for(cls, config: BackendConfig | None) -> tuple[Variant, ...]:
        # E4m3 values leave those of the engine.
        left = super().variants_for(config)
        return tuple(v for v in left if v.name in QUANTIZED.names or values_of(config) == "16-bit")

    @override
    @classmethod
    def config_reasons(
        cls, request: AttentionRequest, config: BackendConfig | None
    ) -> tuple[str, ...]:
        if values_of(config) != "e4m3" or getattr(config, "kernel", AUTO) == "reference":
            return ()
        reason = e4m3_reason(kernel_request(request)._replace(e4m3=True))
        return () if reason is None else (reason,)
