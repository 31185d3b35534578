"""The implementations of 8-bit attention, what each can serve, and the choice among them."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from multimodal_gen.errors import UnsupportedBackendError, nearest
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.providers import GLUON_TRITON, loadable
from multimodal_gen.kernels.quantized_attention.packed import slots_of
from multimodal_gen.kernels.quantized_attention.reference import (
    key_mean_reference,
    quantise_reference,
    quantized_reference,
)
from multimodal_gen.kernels.quantized_attention.tuning import gluon_tile, triton_tile

__all__ = [
    "AUTO",
    "MAX_HEAD_SIZE",
    "PROVIDERS",
    "Call",
    "Provider",
    "QuantisedRequest",
    "Result",
    "choose",
    "has_e4m3",
]

AUTO = "auto"
MAX_HEAD_SIZE = 128
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_E4M3 = (8, 9)
# What the reference takes for a tile of keys.
_REFERENCE_TILE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedRequest:
    """Everything the choice of a provider depends on.

    Attributes:
        device_type: "cuda", "cpu", ...
        capability: compute capability of a CUDA device, else None.
        rocm: whether the device is an AMD GPU.
        dtype: dtype of q, k and v.
        head_size: D.
        values: "16-bit" or "e4m3".
        causal: whether the plan is causal.
        aligned_causal: whether the blocks of a causal plan are multiples of 64.
    """

    device_type: str
    capability: tuple[int, int] | None = None
    rocm: bool = False
    dtype: torch.dtype
    head_size: int
    values: str = "16-bit"
    causal: bool = False
    aligned_causal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call's tensors and options; see `api.quantized_attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    plan: BlockPlan
    scale: float
    return_lse: bool
    e4m3: bool
    mean: torch.Tensor | None


Result = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One implementation.

    Attributes:
        name: what the `kernel` argument takes.
        unsupported_reasons: every reason why a request cannot be served; none if it can.
        run: computes a call.
    """

    name: str
    unsupported_reasons: Callable[[QuantisedRequest], tuple[str, ...]]
    run: Callable[[Call], Result]


@cache
def _triton_version() -> str:
    if importlib.util.find_spec("triton") is None:
        return ""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@cache
def _interpreted() -> bool:
    from multimodal_gen.kernels.quantized_attention import quantise_kernel as kernel

    return kernel.interpreted()


def has_e4m3(device_type: str, capability: tuple[int, int] | None) -> bool:
    """Whether a device multiplies e4m3 numbers; the CPU does, in the reference."""
    return device_type == "cpu" or (capability is not None and capability >= _E4M3)


def _common_reasons(request: QuantisedRequest) -> list[str]:
    reasons = []
    if request.dtype not in _SIXTEEN_BIT:
        reasons.append(f"needs float16 or bfloat16, got {request.dtype}")
    if request.head_size > MAX_HEAD_SIZE or request.head_size % 8:
        reasons.append(
            f"needs a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}, "
            f"got {request.head_size}"
        )
    if request.values == "e4m3" and not has_e4m3(request.device_type, request.capability):
        reasons.append(
            f"needs compute capability >= 8.9 for e4m3 values, this GPU has "
            f"{_dotted(request.capability)}; use values='16-bit'"
        )
    if request.causal and not request.aligned_causal:
        reasons.append("needs blocks of a multiple of 64 queries and keys to be causal")
    return reasons


def _dotted(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else ".".join(map(str, capability))


def _triton_reasons(request: QuantisedRequest) -> tuple[str, ...]:
    if not _triton_version():
        return ("needs the package triton, which is not installed",)
    reasons = _common_reasons(request)
    on_cpu = request.device_type == "cpu" and _interpreted()
    if not on_cpu and (request.device_type != "cuda" or request.rocm):
        reasons.append(
            f"needs an NVIDIA GPU (or Triton's interpreter), the tensors are on "
            f"{'an AMD GPU' if request.rocm else request.device_type}"
        )
    elif not on_cpu and (request.capability or (0, 0)) < (8, 0):
        reasons.append(
            f"needs compute capability >= 8.0, this GPU has {_dotted(request.capability)}"
        )
    return tuple(reasons)


def _gluon_reasons(request: QuantisedRequest) -> tuple[str, ...]:
    version = _triton_version()
    if not version.startswith(GLUON_TRITON):
        found = f"{version} is installed" if version else "it is not installed"
        return (f"was made for triton {GLUON_TRITON}x, {found}",)
    reasons = _common_reasons(request)
    if request.device_type != "cuda" or request.rocm:
        reasons.append(f"needs an NVIDIA GPU, the tensors are on {request.device_type}")
    elif request.capability != (9, 0):
        reasons.append(f"needs compute capability 9.0, this GPU has {_dotted(request.capability)}")
    if request.causal:
        reasons.append("has no causal variant")
    return tuple(reasons)


def _reference_reasons(request: QuantisedRequest) -> tuple[str, ...]:
    if request.head_size > MAX_HEAD_SIZE:
        return (f"needs a head size of at most {MAX_HEAD_SIZE}, got {request.head_size}",)
    return ()


def _outputs(call: Call) -> Result:
    """Return out and lse to write into; rows outside every query block hold 0 and -inf already."""
    q, plan = call.q, call.plan
    # Only blocks with starts of their own may leave rows out.
    make = torch.empty if plan.q.starts is None else torch.zeros
    out = make(q.shape, dtype=q.dtype, device=q.device)
    if not call.return_lse:
        return out, None
    shape = (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    return out, lse if plan.q.starts is None else lse.fill_(float("-inf"))


def _run_gluon(call: Call) -> Result:
    from multimodal_gen.kernels.quantized_attention.gluon_kernel import attend
    from multimodal_gen.kernels.quantized_attention.quantise_kernel import key_mean, quantise

    blocks = call.plan.kv
    tile = gluon_tile(
        q_size=call.plan.q.size, kv_size=blocks.size, regular=blocks.is_regular, e4m3=call.e4m3
    )
    kv_slots = slots_of(call.plan.kv, tile.unit)
    in_place = kv_slots.in_place and call.v.dtype == torch.bfloat16 and loadable(call.v)
    packed = quantise(
        call.q,
        call.k,
        call.v,
        slots_of(call.plan.q, 64 * tile.consumers),
        kv_slots,
        scale=call.scale,
        mean=key_mean(call.k, kv_slots) if call.mean is None else call.mean,
        shift=call.return_lse,
        e4m3=call.e4m3,
        permuted=call.e4m3,
        copied=None if in_place else torch.bfloat16,
    )
    out, lse = _outputs(call)
    attend(packed, call.plan, out, lse, tile=tile)
    return out, lse


def _run_triton(call: Call) -> Result:
    from multimodal_gen.kernels.quantized_attention.quantise_kernel import key_mean, quantise
    from multimodal_gen.kernels.quantized_attention.triton_kernel import attend

    tile = triton_tile(q_size=call.plan.q.size)
    kv_slots = slots_of(call.plan.kv, tile.keys)
    packed = quantise(
        call.q,
        call.k,
        call.v,
        slots_of(call.plan.q, tile.rows),
        kv_slots,
        scale=call.scale,
        mean=key_mean(call.k, kv_slots) if call.mean is None else call.mean,
        shift=call.return_lse,
        e4m3=call.e4m3,
        permuted=False,
    )
    out, lse = _outputs(call)
    attend(packed, call.plan, out, lse, tile=tile)
    return out, lse


def _run_reference(call: Call) -> Result:
    q_slots = slots_of(call.plan.q, _REFERENCE_TILE)
    kv_slots = slots_of(call.plan.kv, _REFERENCE_TILE)
    packed = quantise_reference(
        call.q,
        call.k,
        call.v,
        q_slots,
        kv_slots,
        scale=call.scale,
        mean=key_mean_reference(call.k, kv_slots) if call.mean is None else call.mean,
        e4m3=call.e4m3,
        permuted=False,
    )
    out, lse = quantized_reference(packed, call.plan, q_slots, kv_slots, call.q.shape[3])
    return out.to(call.q.dtype), lse if call.return_lse else None


PROVIDERS = (
    Provider(name="gluon", unsupported_reasons=_gluon_reasons, run=_run_gluon),
    Provider(name="triton", unsupported_reasons=_triton_reasons, run=_run_triton),
    Provider(name="reference", unsupported_reasons=_reference_reasons, run=_run_reference),
)
"""Fastest first."""


@cache
def choose(kernel: str, request: QuantisedRequest) -> Provider:
    """Return the provider that serves `request`.

    "auto" takes the reference on the CPU only: elsewhere a slow answer helps less than the reasons.

    Args:
        kernel: a provider's name, which is honoured or refused, or "auto" for the fastest one.
        request: what is needed.

    Raises:
        UnsupportedBackendError: no provider, or not the one named, can serve the request.
    """
    names = [provider.name for provider in PROVIDERS]
    if kernel not in (AUTO, *names):
        raise UnsupportedBackendError(
            f"`kernel` must be one of {', '.join((AUTO, *names))}, got {kernel!r}"
            f"{nearest(kernel, names)}"
        )
    refused = []
    for provider in PROVIDERS:
        on_cpu = request.device_type == "cpu"
        if kernel == AUTO and on_cpu != (provider.name == "reference"):
            continue
        if kernel not in (AUTO, provider.name):
            continue
        reasons = provider.unsupported_reasons(request)
        if not reasons:
            return provider
        refused.append(f"{provider.name}: {'; '.join(reasons)}")
    raise UnsupportedBackendError(f"8-bit attention cannot serve this call ({' | '.join(refused)})")
