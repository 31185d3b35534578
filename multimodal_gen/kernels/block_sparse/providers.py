"""The implementations of block-sparse attention, what each can serve, and the choice among them."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from multimodal_gen.errors import UnsupportedBackendError, nearest
from multimodal_gen.kernels.block_sparse import fa4 as cute
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.reference import attention_reference
from multimodal_gen.kernels.block_sparse.tuning import gluon_tile, triton_tile

__all__ = [
    "AUTO",
    "GLUON_TRITON",
    "PROVIDERS",
    "EngineRequest",
    "Provider",
    "choose",
    "loadable",
    "request_for",
    "serves",
]

AUTO = "auto"
_MAX_HEAD_SIZE = 256
# Gluon is experimental: its interface changes with every minor release.
GLUON_TRITON = "3.6."
# The first beta known to fit its tiles to the blocks; later ones keep the interface.
_FLASH_ATTN_4 = (4, 0, 0, 36)
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Everything the choice of a provider depends on.

    Attributes:
        device_type: "cuda" (ROCm included), "cpu", ...
        capability: compute capability of a CUDA device, else None.
        rocm: whether the device is an AMD GPU.
        dtype: dtype of q, k and v.
        head_size: D.
        q_size: rows of a query block, or their upper bound.
        kv_size: keys of a key block, or their upper bound.
        regular: whether queries and keys are cut in regular blocks.
        row_bits: whether the plan chooses per row.
        causal: whether the plan is causal.
        backward: whether a gradient will be asked for.
        aligned: whether q, k and v have stride 1 along D and their other strides and addresses are
            multiples of 16 bytes, as the copy engine needs.
    """

    device_type: str
    capability: tuple[int, int] | None = None
    rocm: bool = False
    dtype: torch.dtype
    head_size: int
    q_size: int
    kv_size: int = 128
    regular: bool = True
    row_bits: bool = False
    causal: bool = False
    backward: bool = False
    aligned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One implementation.

    Attributes:
        name: what the `kernel` argument takes.
        unsupported_reasons: every reason why a request cannot be served; none if it can.
        run: computes (q, k, v, plan, scale, return_lse, deterministic) -> (out, lse or None).
    """

    name: str
    unsupported_reasons: Callable[[EngineRequest], tuple[str, ...]]
    run: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, BlockPlan, float, bool, bool],
        tuple[torch.Tensor, torch.Tensor | None],
    ]


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def loadable(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can read the tensor, [B, S, H, D]: in rows of 16 bytes."""
    size = tensor.element_size()
    strides = [s for s, n in zip(tensor.stride()[:3], tensor.shape, strict=False) if n > 1]
    rows = all(s > 0 and s * size % 16 == 0 for s in strides)
    return tensor.stride(3) == 1 and rows and tensor.data_ptr() % 16 == 0


@cache
def _interpreted() -> bool:
    from multimodal_gen.kernels.block_sparse import triton_kernel as kernel

    return kernel.interpreted()


@cache
def _limits(index: int) -> tuple[tuple[int, int] | None, int]:
    """Return compute capability and shared memory per thread block; index -1 is the CPU."""
    if index < 0:
        return (9, 0), 232448  # the interpreter follows the path that is measured
    if torch.version.hip is not None:
        return None, 65536
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    # Older releases of torch do not tell the limit; 99 KiB is the least of SM80 and later.
    return capability, int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024))


def _sixteen_bit_reasons(request: EngineRequest) -> list[str]:
    """Return what the 16-bit GPU kernels have in common."""
    reasons = []
    if request.dtype not in _SIXTEEN_BIT:
        reasons.append(f"needs float16 or bfloat16, got {request.dtype}")
    if request.head_size > _MAX_HEAD_SIZE:
        reasons.append(f"needs a head size of at most {_MAX_HEAD_SIZE}, got {request.head_size}")
    if request.backward:
        reasons.append("has no backward pass, and an input requires grad")
    return reasons


def _triton_reasons(request: EngineRequest) -> tuple[str, ...]:
    if not _installed("triton"):
        return ("needs the package triton, which is not installed",)
    reasons = _sixteen_bit_reasons(request)
    if request.device_type == "cpu" and not _interpreted():
        reasons.append(
            "needs a CUDA or ROCm device (or Triton's interpreter), the tensors are on cpu"
        )
    elif request.device_type not in ("cpu", "cuda"):
        reasons.append(f"needs a CUDA or ROCm device, the tensors are on {request.device_type}")
    capability = request.capability
    if capability is not None and not request.rocm and capability < (8, 0):
        reasons.append(f"needs compute capability >= 8.0, this GPU has {_dotted(capability)}")
    return tuple(reasons)


def _gluon_reasons(request: EngineRequest) -> tuple[str, ...]:
    version = _version("triton")
    if not version.startswith(GLUON_TRITON):
        found = f"{version} is installed" if version else "it is not installed"
        return (f"was made for triton {GLUON_TRITON}x, {found}",)
    reasons = _sixteen_bit_reasons(request)
    if request.device_type != "cuda" or request.rocm:
        reasons.append(f"needs an NVIDIA GPU, the tensors are on {request.device_type}")
    elif request.capability != (9, 0):
        reasons.append(
            f"needs compute capability 9.0, this GPU has {_dotted(request.capability or (0, 0))}"
        )
    if request.head_size > 128 or request.head_size % 8:
        reasons.append(
            f"needs a head size that is a multiple of 8 up to 128, got {request.head_size}"
        )
    if request.causal:
        reasons.append("has no causal variant")
    if not request.aligned:
        reasons.append("needs q, k and v in rows of 16 bytes; call .contiguous() on them")
    return tuple(reasons)


def _fa4_reasons(request: EngineRequest) -> tuple[str, ...]:
    version = _version("flash-attn-4").split("+")[0]
    if not version:
        return ("needs the package flash-attn-4, which is not installed",)
    # A beta's number is the fourth; a final release has none and is later.
    numbers = tuple(map(int, re.findall(r"\d+", version)))
    if "b" in version and numbers < _FLASH_ATTN_4:
        return (f"needs flash-attn-4 >= 4.0.0b36, found {version}",)
    reasons = _sixteen_bit_reasons(request)
    capability = request.capability
    if request.device_type != "cuda" or request.rocm or capability is None:
        reasons.append(f"needs an NVIDIA GPU, the tensors are on {request.device_type}")
    elif capability != (9, 0) and capability[0] != 10:
        reasons.append(f"needs compute capability 9.0 or 10.x, this GPU has {_dotted(capability)}")
    else:
        reasons += _fa4_tile_reasons(request, capability)
    if not request.regular:
        reasons.append("needs regular blocks, and the plan's have lengths of their own")
    if request.row_bits:
        reasons.append("has no choice per row, and the plan has row bits")
    if request.causal:
        reasons.append("serves no causal plans, and this one is")
    return tuple(reasons)


def _fa4_tile_reasons(request: EngineRequest, capability: tuple[int, int]) -> list[str]:
    reasons = []
    rows, most = (64, _MAX_HEAD_SIZE) if capability < (10, 0) else (256, 128)
    head_size, q_size, kv_size = request.head_size, request.q_size, request.kv_size
    if head_size > most or head_size % 8:
        reasons.append(f"needs a head size that is a multiple of 8 up to {most}, got {head_size}")
    if q_size % rows:
        reasons.append(f"needs query blocks of a multiple of {rows} rows, got {q_size}")
    if not cute.tile_keys(capability, head_size=head_size, q_size=q_size, kv_size=kv_size):
        widest = cute.widest_tile(capability, head_size=head_size, q_size=q_size)
        tiles = f"64 to {widest} keys (in steps of 16)" if capability < (10, 0) else "128 keys"
        reasons.append(f"needs key blocks that tiles of {tiles} cut evenly, got {kv_size}")
    return reasons


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _outputs(
    q: torch.Tensor, plan: BlockPlan, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and lse to write into; rows outside every query block hold 0 and -inf already."""
    batch, total, heads, _ = q.shape
    # Only blocks with starts of their own may leave rows out.
    make = torch.empty if plan.q.starts is None else torch.zeros
    out = make(q.shape, dtype=q.dtype, device=q.device)
    if not return_lse:
        return out, None
    lse = torch.empty((batch, heads, total), dtype=torch.float32, device=q.device)
    return out, lse if plan.q.starts is None else lse.fill_(float("-inf"))


def _run_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from multimodal_gen.kernels.block_sparse.triton_kernel import attend

    out, lse = _outputs(q, plan, return_lse)
    capability, shared_memory = _limits(q.get_device())
    tile = triton_tile(
        head_size=q.shape[3],
        q_size=plan.q.size,
        kv_size=plan.kv.size if plan.kv.is_regular else 1,
        capability=capability,
        shared_memory=shared_memory,
    )
    engine = capability is not None and capability >= (9, 0) and all(map(loadable, (q, k, v)))
    attend(q, k, v, plan, out, lse, scale=scale, tile=tile, copy_engine=engine)
    return out, lse


def _run_gluon(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from multimodal_gen.kernels.block_sparse.gluon_kernel import attend

    out, lse = _outputs(q, plan, return_lse)
    tile = gluon_tile(
        q_size=plan.q.size,
        kv_size=plan.kv.size,
        regular=plan.kv.is_regular,
        row_bits=plan.row_bits is not None,
        fast=q.dtype == torch.bfloat16,
        deterministic=deterministic,
    )
    attend(q, k, v, plan, out, lse, scale=scale, tile=tile)
    return out, lse


def _run_fa4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    capability, _ = _limits(q.get_device())
    keys = cute.tile_keys(
        capability or (0, 0), head_size=q.shape[3], q_size=plan.q.size, kv_size=plan.kv.size
    )
    assert keys is not None, "the reasons refuse such plans"
    return cute.attend(q, k, v, plan, scale=scale, keys=keys, return_lse=return_lse)


def _run_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, lse = attention_reference(q, k, v, plan, scale=scale)
    return out, lse.float() if return_lse else None


PROVIDERS = (
    Provider(name="gluon", unsupported_reasons=_gluon_reasons, run=_run_gluon),
    Provider(name="fa4", unsupported_reasons=_fa4_reasons, run=_run_fa4),
    Provider(name="triton", unsupported_reasons=_triton_reasons, run=_run_triton),
    Provider(name="reference", unsupported_reasons=lambda _: (), run=_run_reference),
)
"""Fastest first."""


def request_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan, *, backward: bool
) -> EngineRequest:
    """Return the request of one call."""
    on_cuda = q.device.type == "cuda"
    return EngineRequest(
        device_type=q.device.type,
        capability=torch.cuda.get_device_capability(q.device) if on_cuda else None,
        rocm=torch.version.hip is not None,
        dtype=q.dtype,
        head_size=q.shape[3],
        q_size=plan.q.size,
        kv_size=plan.kv.size,
        regular=plan.q.is_regular and plan.kv.is_regular,
        row_bits=plan.row_bits is not None,
        causal=plan.causal,
        backward=backward,
        aligned=all(map(loadable, (q, k, v))),
    )


def serves(name: str, request: EngineRequest) -> bool:
    """Whether the provider of that name can serve `request`."""
    return any(p.name == name and not p.unsupported_reasons(request) for p in PROVIDERS)


@cache
def choose(kernel: str, request: EngineRequest) -> Provider:
    """Return the provider that serves `request`.

    Args:
        kernel: a provider's name, which is honoured or refused, or "auto" for the fastest one.
        request: what is needed.

    Raises:
        UnsupportedBackendError: the named provider does not exist or cannot serve the request.
    """
    names = [provider.name for provider in PROVIDERS]
    if kernel not in (AUTO, *names):
        raise UnsupportedBackendError(
            f"`kernel` must be one of {', '.join((AUTO, *names))}, got {kernel!r}"
            f"{nearest(kernel, names)}"
        )
    for provider in PROVIDERS:
        if kernel == AUTO and request.device_type == "cpu" and provider.name != "reference":
            continue  # the interpreter is for tests
        if kernel not in (AUTO, provider.name):
            continue
        reasons = provider.unsupported_reasons(request)
        if not reasons:
            return provider
        if kernel == provider.name:
            raise UnsupportedBackendError(
                f"block-sparse kernel {kernel!r} cannot serve this call: {'; '.join(reasons)}; "
                f"use kernel='auto'"
            )
    raise AssertionError("the reference serves every request")
