"""The package's own engines, block-sparse and 8-bit, as attention backends declare and call them.

Their kernels need nothing beyond torch and the Triton that comes with it; a method's upstream
package is one more variant where it is installed.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import (
    AUTO,
    QUANTIZED,
    KernelDeclaration,
    Operation,
    Request,
    SelectedKernel,
    e4m3_reason,
)
from multimodal_gen.kernels.requirements import Capability, HeadSizes, PackageProbe
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import (
    attend_to_nothing,
    refuse_mask,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    Variant,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, option
from multimodal_gen.runtime.layers.attention.masks import zero_masked_rows
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
)
from multimodal_gen.runtime.platforms import PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.kernels.quantized_attention.api import Values
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = [
    "BF16_ONLY",
    "CUDA_ONLY",
    "FASTVIDEO_KERNEL",
    "SELF_ONLY",
    "SPAS_SAGE_ATTN",
    "DensePlanImpl",
    "QuantizedBackend",
    "dense_plan",
    "drop_masked",
    "engine_variants",
    "refuse_foreign_values",
    "selected_kernel",
    "upstream_variant",
    "values_of",
    "values_option",
]

SELF_ONLY = frozenset({AttentionRole.SELF})
CUDA_ONLY = frozenset({PlatformEnum.CUDA})
BF16_ONLY = frozenset({torch.bfloat16})

FASTVIDEO_KERNEL = PackageProbe(
    module="fastvideo_kernel",
    distribution="fastvideo-kernel",
    install="pip install fastvideo-kernel einops",
)
SPAS_SAGE_ATTN = PackageProbe(
    module="spas_sage_attn",
    distribution="spas_sage_attn",
    install="pip install git+https://github.com/thu-ml/SpargeAttn.git --no-build-isolation",
)

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
        trains: whether gradients flow through what the method does beside the engine.
    """
    names = operation.names if kernels is None else kernels
    return tuple(
        _variant(kernel, frozenset(features), roles, trains=trains)
        for kernel in operation.kernels
        if kernel.name in names and kernel.serves >= set(plans)
    )


def _variant(
    kernel: KernelDeclaration,
    features: frozenset[Feature],
    roles: frozenset[AttentionRole],
    *,
    trains: bool,
) -> Variant:
    refused = set() if "causal" in kernel.serves else {Feature.CAUSAL}
    backward = {Feature.BACKWARD} if trains and "backward" in kernel.serves else set()
    names = map(str, PlatformEnum) if kernel.platforms is None else kernel.platforms
    return Variant(
        name=kernel.name,
        platforms=frozenset(map(PlatformEnum, names)),
        # What methods compute beside an engine takes 32 bits at most.
        dtypes=kernel.dtypes - {torch.float64},
        head_sizes=kernel.head_sizes,
        features=(features - refused) | backward,
        packages=kernel.packages,
        capability=kernel.capability,
        roles=roles,
        kernel=kernel,
    )


def selected_kernel(variant: str, config: BackendConfig | None) -> SelectedKernel:
    """Return what an implementation passes to an engine as `kernel`.

    Args:
        variant: name of the variant that selection chose; "" for a layer built without selection.
        config: the backend's configuration; a kernel that it names refuses calls it cannot serve.
    """
    asked = getattr(config, "kernel", AUTO)
    return SelectedKernel(variant or asked, named=asked != AUTO)


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
        platforms=CUDA_ONLY,
        dtypes=BF16_ONLY,
        head_sizes=HeadSizes(listed=head_sizes),
        features=frozenset(),
        packages=packages,
        capability=capability,
        roles=SELF_ONLY,
    )


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

    A new plan is waited for, so that any stream may read what is cached.

    Args:
        num_queries: Sq.
        num_keys: Sk.
        q_size: queries per block.
        kv_size: keys per block.
        causal: whether keys after the query are dropped.
        device: where the tensors lie.
    """
    with torch.inference_mode(False):
        plan = BlockPlan.dense(
            Blocks.regular(num_queries, q_size),
            Blocks.regular(num_keys, kv_size),
            device,
            causal=causal,
        )
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return plan


def drop_masked(
    key: torch.Tensor, value: torch.Tensor, plan: BlockPlan, attn_mask: torch.Tensor, label: str
) -> tuple[torch.Tensor, torch.Tensor, BlockPlan]:
    """Move the kept keys of every sample to its front; does not wait for the device.

    Args:
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, D].
        plan: a plan of `dense_plan`.
        attn_mask: bool [B|1, 1, 1, Sk], True where a key is kept.
        label: who asks, for messages.

    Returns:
        Keys and values in the new order, and the plan whose blocks end with each sample's kept
        keys.

    Raises:
        UsageError: the plan is causal.
    """
    if plan.causal:
        refuse_mask(attn_mask, f"causal {label}")
    keep = attn_mask[:, 0, 0, :].expand(key.shape[0], -1)
    index = torch.argsort(~keep, dim=1, stable=True).int()
    key, value = gather_tokens((key, value), index)
    kv = plan.kv
    starts = torch.arange(kv.num, dtype=torch.int32, device=keep.device) * kv.size
    lengths = (keep.sum(1, dtype=torch.int32).view(-1, 1, 1) - starts).clamp(0, kv.size)
    ragged = Blocks.ragged(starts.view(1, 1, -1), lengths, total=kv.total, size=kv.size)
    return key, value, replace(plan, kv=ragged)


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

    never_unasked: ClassVar[str] = "rounds to 8 bits"

    @classmethod
    def variants_for(cls, config: BackendConfig | None) -> tuple[Variant, ...]:
        """Return the variants that the parameters leave: e4m3 values leave the engine's."""
        left = super().variants_for(config)
        return tuple(v for v in left if v.name in QUANTIZED.names or values_of(config) == "16-bit")

    @classmethod
    def config_reasons(
        cls, request: AttentionRequest, config: BackendConfig | None
    ) -> tuple[str, ...]:
        """Return what the GPU lacks for the values asked for."""
        if values_of(config) != "e4m3" or getattr(config, "kernel", AUTO) == "reference":
            return ()
        asked = Request(
            platform=str(request.environment.platform),
            capability=request.environment.capability,
            dtype=request.dtype,
            head_size=request.head_size,
            e4m3=True,
        )
        reason = e4m3_reason(asked)
        return () if reason is None else (reason,)


class DensePlanImpl(AttentionImpl):
    """Dense attention on an engine, over a plan of every block; for the arguments `AttentionImpl`.

    Attributes:
        label: the backend's name in errors.
    """

    label: str
    kernel: SelectedKernel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kernel = SelectedKernel(self.variant or AUTO, named=bool(self.variant))

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
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)[0]
        plan = self.plan(query, key, causal=self.causal)
        if attn_mask is not None:
            key, value, plan = drop_masked(key, value, plan, attn_mask, self.label)
        return self.attend(query, key, value, plan)[0]

    def forward_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keep: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)
        plan = self.plan(query, key, causal=self.causal and keep is None)
        if keep is not None:
            # Kernels read masked rows beside others, and a weight of zero times NaN is NaN.
            key, value = (zero_masked_rows(x, keep) for x in (key, value))
            key, value, plan = drop_masked(key, value, plan, keep[:, None, None, :], self.label)
        out, lse = self.attend(query, key, value, plan, return_lse=True)
        assert lse is not None, "it was asked for"
        return out, lse

    @abstractmethod
    def plan(self, query: torch.Tensor, key: torch.Tensor, *, causal: bool) -> BlockPlan:
        """Return the plan of every block, in blocks that suit the engine."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: BlockPlan,
        *,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the engine computes, and lse where asked for."""
