"""What the kernels of the package can serve, and the choice among those of an operation.

A kernel is declared here and nowhere else. Backends derive from it what they declare themselves,
and pass the kernel that selection took on to the operation, which asks here whether it can serve
the call.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from multimodal_gen.errors import UnsupportedBackendError, nearest
from multimodal_gen.kernels.requirements import (
    ANY_CAPABILITY,
    Capability,
    HeadSizes,
    PackageProbe,
    dtype_reason,
    installed,
    platform_reason,
)
from multimodal_gen.kernels.self_check import SelfCheck, forget_self_checks, self_check
from multimodal_gen.kernels.tensors import loadable, place_of, records_gradient

__all__ = [
    "AUTO",
    "BLOCK_SPARSE",
    "FLASH_ATTN_4",
    "FLASH_KMEANS",
    "KMEANS",
    "POOLED_TAIL",
    "QUANTIZED",
    "TRITON",
    "TRITON_WITH_GLUON",
    "KernelChoice",
    "KernelDeclaration",
    "Operation",
    "Request",
    "SelectedKernel",
    "choose",
    "e4m3_reason",
    "fa4_keys",
    "forget_choices",
    "kernel_name",
    "loadable",
    "place_of",
    "records_gradient",
    "runs_triton",
    "serves",
]

AUTO = "auto"


class Request(NamedTuple):
    """Everything the choice of a kernel may depend on.

    Attributes:
        platform: where the tensors lie: "cuda", "rocm", "cpu", ...
        capability: compute capability of an NVIDIA GPU, else None.
        dtype: dtype of the tensors.
        head_size: D.
        q_size: rows of a query block, or their upper bound; 0 where that does not matter.
        kv_size: keys of a key block, likewise.
        ragged: whether blocks have lengths of their own.
        row_bits: whether rows choose among the blocks of their list.
        causal: whether the plan is causal.
        masked: whether tokens are left out one by one.
        unaligned: whether a tensor has another stride than 1 along D, or other strides or an
            address that are no multiples of 16 bytes, as the copy engine needs.
        backward: whether a gradient will be asked for.
        skip_below: whether products are left out that cannot count for much.
        e4m3: whether weights and values are rounded to e4m3 numbers.
        device: which of the GPUs, where a kernel is checked on each; None for the current one.
    """

    platform: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_size: int
    q_size: int = 0
    kv_size: int = 0
    ragged: bool = False
    row_bits: bool = False
    causal: bool = False
    masked: bool = False
    unaligned: bool = False
    backward: bool = False
    skip_below: bool = False
    e4m3: bool = False
    device: int | None = None


_Rule: TypeAlias = Callable[[Request], str | None]

# Field of a request -> why a kernel refuses what it asks for, unless it declares to serve it.
_REFUSALS = MappingProxyType(
    {
        "ragged": "needs regular blocks, and the plan's have lengths of their own",
        "row_bits": "has no choice per row, and the plan has row bits",
        "causal": "has no causal variant, and the plan is causal",
        "masked": "leaves no tokens out, and some are masked",
        "unaligned": "needs q, k and v in rows of 16 bytes; call .contiguous() on them",
        "skip_below": "leaves no products out, and `skip_below` asks for it",
        "backward": "has no backward pass, and an input requires grad",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelDeclaration:
    """A kernel and what it can serve.

    Attributes:
        name: what the argument `kernel` takes, and reports say.
        platforms: where it runs; None for every device.
        dtypes: dtypes it takes.
        head_sizes: head sizes it takes.
        serves: fields of a request that it serves, of those that many kernels refuse.
        packages: packages that must all be installed.
        capability: compute capabilities, on NVIDIA GPUs.
        rules: what else it refuses: each returns requirement and actual, or None.
        interpreted: whether Triton's interpreter stands in for a GPU on the CPU.
        unasked: where it is taken when no kernel is named; None for all of `platforms`.
        check: "module:function" of its self-check, see `self_check`, which decides where a package
            is of a release that the kernel has not been tried with.
    """

    name: str
    dtypes: frozenset[torch.dtype]
    head_sizes: HeadSizes
    platforms: frozenset[str] | None = None
    serves: frozenset[str] = frozenset()
    packages: tuple[PackageProbe, ...] = ()
    capability: Capability = ANY_CAPABILITY
    rules: tuple[_Rule, ...] = ()
    interpreted: bool = False
    unasked: frozenset[str] | None = None
    check: str = ""

    def unsupported_reasons(self, request: Request) -> tuple[str, ...]:
        """Return every reason it cannot serve `request`, requirement then actual."""
        reasons = [
            self._place_reason(request),
            *(probe.unsupported_reason(installed(probe)) for probe in self.packages),
            dtype_reason(self.dtypes, request.dtype),
            self.head_sizes.unsupported_reason(request.head_size),
            *(rule(request) for rule in self.rules),
        ]
        asked = {name for name in _REFUSALS if getattr(request, name)}
        refused = (text for name, text in _REFUSALS.items() if name in asked - self.serves)
        found = (*filter(None, reasons), *refused)
        return found or self.faults(request)

    def faults(
        self, request: Request, version_of: Callable[[PackageProbe], str | None] | None = None
    ) -> tuple[str, ...]:
        """Return what a self-check found wrong; runs it where it must, and has not run yet.

        Asked last: a kernel that cannot serve a request anyway is not checked for it.

        Args:
            request: what is needed.
            version_of: says which version of a package there is; that installed by default.
        """
        found = self.checked(request, version_of)
        if found is None or found.fault is None:
            return ()
        return (f"failed its self-check with {found.release}: {found.fault}",)

    def checked(
        self, request: Request, version_of: Callable[[PackageProbe], str | None] | None = None
    ) -> SelfCheck | None:
        """Return what a self-check said; None where no GPU or no untried release asks for one."""
        if not self.check or request.platform != "cuda" or not torch.cuda.is_available():
            return None
        for probe in self.packages:
            version = (version_of or installed)(probe)
            if version and not probe.was_tried(version):
                release = f"{probe.distribution} {version}"
                return self_check(self.check, f"kernel {self.name}", release, request.device)
        return None

    def is_taken_unasked(self, platform: str) -> bool:
        """Whether it is taken on a platform when no kernel is named."""
        where = self.platforms if self.unasked is None else self.unasked
        return where is None or platform in where

    def _place_reason(self, request: Request) -> str | None:
        if self.platforms is None or request.platform in self.platforms:
            return self.capability.unsupported_reason(request.capability)
        if self.interpreted and request.platform == "cpu" and _interpreted():
            return None
        return platform_reason(self.platforms, request.platform)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """What several kernels compute.

    Attributes:
        label: its name in messages.
        kernels: fastest first.
    """

    label: str
    kernels: tuple[KernelDeclaration, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels' names."""
        return tuple(kernel.name for kernel in self.kernels)

    def kernel(self, name: str) -> KernelDeclaration:
        """Return the kernel of a name.

        Raises:
            UnsupportedBackendError: there is none.
        """
        for declaration in self.kernels:
            if declaration.name == name:
                return declaration
        raise UnsupportedBackendError(
            f"`kernel` must be one of {', '.join((AUTO, *self.names))}, got {name!r}"
            f"{nearest(name, self.names)}"
        )


class SelectedKernel:
    """The kernel that was selected for a layer, and what single calls forced to differ.

    Args:
        name: the kernel, or "auto" where nothing was selected.
        named: whether a user named it: then calls that it cannot serve are refused. Else the
            fastest kernel that can serves them, and `detours` tells.
    """

    __slots__ = ("_detours", "_told", "name", "named")

    def __init__(self, name: str, *, named: bool = False) -> None:
        self.name = name
        self.named = named
        self._detours: dict[tuple[str, str], int] = {}
        self._told = False

    def __repr__(self) -> str:
        return f"SelectedKernel({self.name!r}, named={self.named})"

    def begin_call(self) -> None:
        """Tell that a call of the layer begins; what it computes in parts is counted once."""
        self._told = False

    def detours(self) -> Mapping[tuple[str, str], int]:
        """Return calls of the layer that another kernel had to serve: (kernel, reason) -> calls."""
        return self._detours

    def note(self, kernel: str, reasons: tuple[str, ...]) -> None:
        """Count the call of the layer that `kernel` serves in place of the selected one."""
        if not self._told:
            key = kernel, f"{self.name} {'; '.join(reasons)}"
            self._detours[key] = self._detours.get(key, 0) + 1
            self._told = True


KernelChoice: TypeAlias = str | SelectedKernel
"""What operations take as `kernel`: a name, which is honoured or refused, "auto", or what was
selected for a layer."""


def kernel_name(kernel: KernelChoice) -> str:
    """Return the name in what operations take as `kernel`."""
    return kernel if isinstance(kernel, str) else kernel.name


def choose(operation: Operation, kernel: KernelChoice, request: Request) -> str:
    """Return the name of the kernel that serves a request.

    Args:
        operation: what is to be computed.
        kernel: what was asked for.
        request: what is needed.

    Raises:
        UnsupportedBackendError: no kernel, or not the one named, can serve the request; lists the
            reasons.
    """
    if isinstance(kernel, str):
        return _choose(operation, kernel, request)
    if kernel.named or kernel.name == AUTO:
        return _choose(operation, kernel.name, request)
    reasons = _reasons(operation, kernel.name, request)
    if not reasons:
        return kernel.name
    chosen = _choose(operation, AUTO, request)
    kernel.note(chosen, reasons)
    return chosen


def serves(operation: Operation, name: str, request: Request) -> bool:
    """Whether the kernel of a name serves a request."""
    return not _reasons(operation, name, request)


@cache
def _reasons(operation: Operation, name: str, request: Request) -> tuple[str, ...]:
    return operation.kernel(name).unsupported_reasons(request)


@cache
def _choose(operation: Operation, kernel: str, request: Request) -> str:
    if kernel != AUTO:
        reasons = _reasons(operation, kernel, request)
        if reasons:
            raise UnsupportedBackendError(
                f"kernel {kernel!r} of {operation.label} cannot serve this call: "
                f"{'; '.join(reasons)}; use kernel='auto'"
            )
        return kernel
    refused = []
    for declaration in operation.kernels:
        reasons = _reasons(operation, declaration.name, request)
        if reasons:
            refused.append(f"{declaration.name}: {'; '.join(reasons)}")
        elif declaration.is_taken_unasked(request.platform):
            return declaration.name
    raise UnsupportedBackendError(
        f"{operation.label} cannot serve this call ({' | '.join(refused)})"
    )


def forget_choices() -> None:
    """Choose anew from here on, which tests need that change what is installed."""
    _reasons.cache_clear()
    _choose.cache_clear()
    forget_self_checks()


def runs_triton(
    tensors: Iterable[torch.Tensor],
    dtypes: frozenset[torch.dtype],
    *,
    gradients: Iterable[torch.Tensor] = (),
) -> bool:
    """Whether the Triton kernel of an operation that has one and a reference can serve a call.

    Args:
        tensors: must all lie on a GPU.
        dtypes: that the kernel takes.
        gradients: must not need a gradient, which the kernel has not.
    """
    if not all(isinstance(x, torch.Tensor) and x.is_cuda and x.dtype in dtypes for x in tensors):
        return False
    if records_gradient(*gradients):
        return False
    return installed(TRITON) is not None


@cache
def _interpreted() -> bool:
    if installed(TRITON) is None:
        return False
    from multimodal_gen.kernels.shared_kernel import interpreted

    return interpreted()


# The kernels. What a package or a GPU cannot do is tested with the versions named in
# scripts/triton.txt and scripts/constraints.txt.

TRITON = PackageProbe(module="triton", distribution="triton", install="pip install triton")
# Gluon is experimental: its interface changes with every minor release. What differs is in
# gluon_compat.py, and the tests compile the kernels with 3.6 to 3.9; before 3.6 partitions of warps
# were written in another way. Only what has run on a GPU counts as tried.
TRITON_WITH_GLUON = PackageProbe(
    module="triton",
    distribution="triton",
    install="pip install 'torch>=2.10'",
    minimum="3.6",
    needs_version=True,
    tried=("3.6", "3.9"),
)
# The first beta known to fit its tiles to the blocks; later ones keep the interface.
FLASH_ATTN_4 = PackageProbe(
    module="flash_attn.cute",
    distribution="flash-attn-4",
    install="pip install --pre flash-attn-4",
    minimum="4.0.0b36",
)
FLASH_KMEANS = PackageProbe(
    module="flash_kmeans", distribution="flash-kmeans", install="pip install flash-kmeans"
)

_HALF = frozenset({torch.float16, torch.bfloat16})
_FLOATING = _HALF | {torch.float32, torch.float64}
_CUDA = frozenset({"cuda"})
_GPUS = frozenset({"cuda", "rocm"})
_HOPPER = Capability(exact=((9, 0),))
_SM80 = Capability(minimum=(8, 0))
_EIGHT_BIT_HEAD_SIZES = HeadSizes(maximum=128, multiple_of=8)
_E4M3 = (8, 9)

# FlashAttention 4's tile of keys: narrower ones are possible, but no faster than Triton's kernel.
_FA4_NARROWEST = 64
_FA4_STEP = 16


def fa4_keys(request: Request) -> int | None:
    """Return the keys of FlashAttention 4's tile for key blocks, or None when none cuts them."""
    widest = _fa4_widest(request)
    # SM90 narrows its tile to the blocks it is told; SM100 has one width.
    narrowest = widest if _is_sm100(request) else _FA4_NARROWEST
    fitting = (n for n in range(widest, narrowest - 1, -_FA4_STEP) if request.kv_size % n == 0)
    return next(fitting, None)


def _is_sm100(request: Request) -> bool:
    return (request.capability or (0, 0)) >= (10, 0)


def _fa4_widest(request: Request) -> int:
    if _is_sm100(request) or request.head_size <= 64:
        return 128
    if request.head_size <= 96:
        return 144 if request.q_size % 192 == 0 else 128
    if request.head_size <= 128:
        return 128
    return 112 if request.head_size <= 192 else 80


def _fa4_head_size(request: Request) -> str | None:
    if _is_sm100(request) and request.head_size > 128:
        return f"needs head size <= 128 from compute capability 10.0 on, got {request.head_size}"
    return None


def _fa4_rows(request: Request) -> str | None:
    rows = 256 if _is_sm100(request) else 64
    if request.q_size % rows:
        return f"needs query blocks of a multiple of {rows} rows, got {request.q_size}"
    return None


def _fa4_tiles(request: Request) -> str | None:
    if not request.kv_size or fa4_keys(request):
        return None
    widest = _fa4_widest(request)
    tiles = "128 keys" if _is_sm100(request) else f"64 to {widest} keys (in steps of 16)"
    return f"needs key blocks that tiles of {tiles} cut evenly, got {request.kv_size}"


def e4m3_reason(request: Request) -> str | None:
    """Return what a GPU lacks to multiply e4m3 numbers, or None; the CPU does, by the reference."""
    capability = request.capability
    if not request.e4m3 or capability is None or capability >= _E4M3:
        return None
    return (
        f"needs compute capability >= 8.9 for e4m3 values, this GPU has "
        f"{capability[0]}.{capability[1]}; use values=16-bit"
    )


def _causal_blocks(request: Request) -> str | None:
    if request.causal and (request.q_size % 64 or request.kv_size % 64):
        return (
            f"needs blocks of a multiple of 64 queries and keys to be causal, got "
            f"{request.q_size} and {request.kv_size}"
        )
    return None


BLOCK_SPARSE = Operation(
    label="block-sparse attention",
    kernels=(
        KernelDeclaration(
            name="gluon",
            platforms=_CUDA,
            capability=_HOPPER,
            dtypes=_HALF,
            head_sizes=HeadSizes(maximum=128, multiple_of=8),
            serves=frozenset({"ragged", "row_bits", "backward", "skip_below"}),
            packages=(TRITON_WITH_GLUON,),
            check="multimodal_gen.kernels.gluon_check:block_sparse",
        ),
        KernelDeclaration(
            name="fa4",
            platforms=_CUDA,
            capability=Capability(exact=((9, 0), (10, 0), (10, 1), (10, 3))),
            dtypes=_HALF,
            head_sizes=HeadSizes(maximum=256, multiple_of=8),
            serves=frozenset({"unaligned"}),
            packages=(FLASH_ATTN_4,),
            rules=(_fa4_head_size, _fa4_rows, _fa4_tiles),
        ),
        KernelDeclaration(
            name="triton",
            platforms=_GPUS,
            capability=_SM80,
            dtypes=_HALF,
            head_sizes=HeadSizes(maximum=256),
            serves=frozenset(
                {"ragged", "row_bits", "causal", "unaligned", "backward", "skip_below"}
            ),
            packages=(TRITON,),
            interpreted=True,
        ),
        KernelDeclaration(
            name="reference",
            dtypes=_FLOATING,
            head_sizes=HeadSizes(),
            serves=frozenset(_REFUSALS),
        ),
    ),
)
"""Attention over a `BlockPlan`."""

POOLED_TAIL = Operation(
    label="the pooled tail",
    kernels=(
        KernelDeclaration(
            name="gluon",
            platforms=_CUDA,
            capability=_HOPPER,
            # Its weights need the exponents of fp32.
            dtypes=frozenset({torch.bfloat16}),
            head_sizes=HeadSizes(maximum=128, multiple_of=8),
            packages=(TRITON_WITH_GLUON,),
            check="multimodal_gen.kernels.gluon_check:pooled_tail",
        ),
        KernelDeclaration(
            name="triton",
            platforms=_GPUS,
            capability=_SM80,
            dtypes=_HALF,
            head_sizes=HeadSizes(maximum=256),
            serves=frozenset({"ragged", "unaligned"}),
            packages=(TRITON,),
            interpreted=True,
        ),
        KernelDeclaration(
            name="reference",
            dtypes=_FLOATING,
            head_sizes=HeadSizes(),
            serves=frozenset(_REFUSALS),
        ),
    ),
)
"""The means of blocks that a `BlockPlan` leaves out, on top of attention over it."""

_EIGHT_BIT_TRITON = KernelDeclaration(
    name="triton",
    platforms=_CUDA,
    capability=_SM80,
    dtypes=_HALF,
    head_sizes=_EIGHT_BIT_HEAD_SIZES,
    serves=frozenset({"ragged", "causal", "unaligned"}),
    packages=(TRITON,),
    rules=(e4m3_reason, _causal_blocks),
    interpreted=True,
)

QUANTIZED = Operation(
    label="8-bit attention",
    kernels=(
        KernelDeclaration(
            name="gluon",
            platforms=_CUDA,
            capability=_HOPPER,
            dtypes=_HALF,
            head_sizes=_EIGHT_BIT_HEAD_SIZES,
            serves=frozenset({"ragged", "unaligned"}),
            packages=(TRITON_WITH_GLUON,),
            rules=(e4m3_reason,),
            check="multimodal_gen.kernels.gluon_check:quantized",
        ),
        _EIGHT_BIT_TRITON,
        KernelDeclaration(
            name="reference",
            dtypes=_FLOATING,
            head_sizes=HeadSizes(maximum=128),
            serves=frozenset({"ragged", "causal", "unaligned"}),
            # Elsewhere a slow answer helps less than the reasons.
            unasked=frozenset({"cpu"}),
        ),
    ),
)
"""Attention over a `BlockPlan` on int8 queries and keys."""

KMEANS = Operation(
    label="k-means",
    kernels=(
        KernelDeclaration(
            name="triton",
            platforms=_GPUS,
            dtypes=_HALF | {torch.float32},
            head_sizes=HeadSizes(maximum=256),
            serves=frozenset({"masked", "unaligned"}),
            packages=(TRITON,),
            interpreted=True,
        ),
        KernelDeclaration(
            name="flash_kmeans",
            platforms=_GPUS,
            dtypes=_HALF | {torch.float32},
            head_sizes=HeadSizes(),
            serves=frozenset({"unaligned"}),
            packages=(FLASH_KMEANS, TRITON),
            # It waits for the device in every iteration.
            unasked=frozenset(),
        ),
        KernelDeclaration(
            name="reference",
            dtypes=_HALF | {torch.float32},
            head_sizes=HeadSizes(),
            serves=frozenset({"masked", "unaligned"}),
        ),
    ),
)
"""Clusters of the tokens of every head."""
