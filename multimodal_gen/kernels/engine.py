"""What the kernels of the package can serve, and the choice among those of an operation.

A kernel is declared here and nowhere else. Backends derive from it what they declare themselves,
and pass the kernel that selection took on to the operation, which asks here whether it can serve
the call.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, TypedDict

import torch
from typing_extensions import Unpack

from multimodal_gen.errors import UnsupportedBackendError, nearest
from multimodal_gen.kernels.launch.self_check import SelfCheck, forget_self_checks, self_check
from multimodal_gen.kernels.requirements import (
    ANY_CAPABILITY,
    Capability,
    HeadSizes,
    PackageProbe,
    dtype_reason,
    installed,
    platform_reason,
)
from multimodal_gen.kernels.tensors import place_of

AUTO = "auto"


class Request(NamedTuple):
    """Everything the choice of a kernel may depend on.

    Attributes:
        platform: where the tensors lie: "cuda", "rocm", "cpu", ...
        capability: compute capability of an NVIDIA GPU, else None.
        dtype: dtype of the tensors.
        head_size: D; 0 where that does not matter.
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
        padded: whether blocks end in padding.
        grouped: whether query heads share key heads.
        deterministic: whether sums must be added up in the same order every time.
        num_kv: key blocks, chunks or clusters that there are; 0 where that does not matter.
        together: whether what a row keeps depends on other rows or heads.
        exact: whether a log-sum-exp is of another precision than fp32.
        device: which of the GPUs, where a kernel is checked on each; None for the current one.
    """

    platform: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_size: int = 0
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
    padded: bool = False
    grouped: bool = False
    deterministic: bool = False
    num_kv: int = 0
    together: bool = False
    exact: bool = False
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
        "padded": "reads padding, and blocks end in some",
        "grouped": "needs as many key heads as query heads, and some share keys",
        "deterministic": "adds up in an order that varies, and a fixed one is asked for",
        "together": "chooses for every row and head apart, and the rule ranks them together",
        "exact": "sums in fp32, and the log-sum-exp is of another dtype",
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
        gradients: computes the gradients of its results, where it serves `backward`.
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
    gradients: "Operation | None" = None

    def unsupported_reasons(self, request: Request) -> tuple[str, ...]:
        """Return every reason it cannot serve `request`, requirement then actual."""
        found = self.refusals(request)
        if found:
            return found  # a kernel that cannot serve a request anyway is not checked for it
        check = self.checked(request)
        return () if check is None or check.reason is None else (check.reason,)

    def refusals(self, request: Request) -> tuple[str, ...]:
        """Return the reasons that follow from what it declares, without a self-check."""
        reasons = [
            self._place_reason(request),
            *(probe.unsupported_reason(installed(probe)) for probe in self.packages),
            dtype_reason(self.dtypes, request.dtype),
            self.head_sizes.unsupported_reason(request.head_size),
            *(rule(request) for rule in self.rules),
        ]
        asked = {name for name in _REFUSALS if getattr(request, name)}
        refused = (text for name, text in _REFUSALS.items() if name in asked - self.serves)
        return (*filter(None, reasons), *refused)

    def checked(
        self, request: Request, version_of: Callable[[PackageProbe], str | None] | None = None
    ) -> SelfCheck | None:
        """Return what a self-check said; runs it where it must, and has not run yet.

        Args:
            request: what is needed.
            version_of: says which version of a package there is; that installed by default.

        Returns:
            None where no GPU or no untried release asks for one.
        """
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


@dataclass(slots=True, eq=False)
class SelectedKernel:
    """The kernel that was selected for a layer, and what ran in its calls and backward passes.

    Args:
        name: the kernel, or "auto" where nothing was selected.
        named: whether a user named it: then calls that it cannot serve are refused. Else the
            fastest kernel that can serves them, and `fallbacks` tells.
    """

    name: str
    named: bool = field(default=False, kw_only=True)
    _fallbacks: dict[tuple[str, str], int] = field(default_factory=dict, init=False, repr=False)
    _gradients: set[tuple[str, str]] = field(default_factory=set, init=False, repr=False)
    _counted: bool = field(default=False, init=False, repr=False)

    def begin_call(self) -> None:
        """Tell that a call of the layer begins; what it computes in parts is counted once."""
        self._counted = False

    def fallbacks(self) -> Mapping[tuple[str, str], int]:
        """Return calls of the layer that another kernel had to serve: (kernel, reason) -> calls."""
        return self._fallbacks

    def note(self, kernel: str, reasons: tuple[str, ...]) -> None:
        """Count the call of the layer that `kernel` serves in place of the selected one."""
        if not self._counted:
            key = kernel, f"{self.name} {'; '.join(reasons)}"
            self._fallbacks[key] = self._fallbacks.get(key, 0) + 1
            self._counted = True

    def count_again(self, fallbacks: Mapping[tuple[str, str], int]) -> None:
        """Count such calls once more, or, below 0, take them back."""
        for key, calls in fallbacks.items():
            self._fallbacks[key] = self._fallbacks.get(key, 0) + calls

    def gradients(self, kernel: str = "") -> frozenset[str]:
        """Return the kernels that computed gradients of what `kernel` computed.

        Without one, of all that the calls computed that no other kernel served.
        """
        elsewhere = {name for name, _ in self._fallbacks}
        return frozenset(
            ran
            for forward, ran in self._gradients
            if forward == kernel or (not kernel and forward not in elsewhere)
        )

    def note_gradients(self, kernel: str, gradients: str) -> None:
        """Note which kernel computes gradients of what `kernel` computed."""
        self._gradients.add((kernel, gradients))


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


@cache
def serves(operation: Operation, name: str, request: Request) -> bool:
    """Whether there is a kernel of a name, and it serves a request."""
    return name in operation.names and not _reasons(operation, name, request)


class Asked(TypedDict, total=False):
    """What `choose_for` is given besides tensors; see `Request`."""

    head_size: int
    kv_size: int
    num_kv: int
    together: bool
    exact: bool


def records_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd records what is computed from tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def recording_gradients(wanted: bool) -> AbstractContextManager[object]:
    """Return a context in which autograd records, or not; nothing where it does so already."""
    return nullcontext() if torch.is_grad_enabled() == wanted else torch.set_grad_enabled(wanted)


def choose_for(
    operation: Operation,
    *tensors: torch.Tensor,
    gradients: Sequence[torch.Tensor] = (),
    **asked: Unpack[Asked],
) -> str:
    """Return the name of the fastest kernel for a call, looked up by what tensors are like.

    While a graph is traced that is the definition, which consists of torch's own operators.

    Args:
        operation: what is to be computed.
        *tensors: what kernels read, each of a dtype of its own.
        gradients: tensors that a gradient may be asked for.
        **asked: what else a kernel may refuse.
    """
    if torch.compiler.is_compiling():
        return operation.names[-1]
    forms = tuple([(x.device, x.dtype) for x in tensors])
    recorded = bool(gradients) and records_gradient(*gradients)
    return _choose_for(operation, forms, recorded, **asked)


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


@lru_cache(maxsize=4096)
def _choose_for(
    operation: Operation,
    forms: tuple[tuple[torch.device, torch.dtype], ...],
    backward: bool,
    **asked: Unpack[Asked],
) -> str:
    """Return the slowest of the kernels that the tensors get: it serves all of them."""
    chosen = []
    for device, dtype in forms:
        platform, capability = place_of(device)
        request = Request(platform, capability, dtype, backward=backward, **asked)
        chosen.append(_choose(operation, AUTO, request))
    return max(chosen, key=operation.names.index)


def forget_choices() -> None:
    """Choose anew from here on, which tests need that change what is installed."""
    _reasons.cache_clear()
    _choose.cache_clear()
    _choose_for.cache_clear()
    serves.cache_clear()
    forget_self_checks()


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
# launch/compat.py, and the tests compile the kernels with 3.6 to 3.9; before 3.6 partitions of
# warps were written in another way. Only what has run on a GPU counts as tried.
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
# Its block-sparse kernels have not been run on the GPUs that they are declared for: any release is
# checked first.
CUDNN_FRONTEND = PackageProbe(
    module="cudnn",
    distribution="nvidia-cudnn-frontend",
    install="pip install nvidia-cudnn-frontend",
    minimum="1.32",
    tried=(),
)
FLASH_KMEANS = PackageProbe(
    module="flash_kmeans", distribution="flash-kmeans", install="pip install flash-kmeans"
)

_HALF = frozenset({torch.float16, torch.bfloat16})
_UP_TO_FP32 = _HALF | {torch.float32}
_FLOATING = _UP_TO_FP32 | {torch.float64}
_EVERY_DTYPE = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))
_CUDA = frozenset({"cuda"})
_GPUS = frozenset({"cuda", "rocm"})
_HOPPER = Capability(exact=((9, 0),))
_SM80 = Capability(minimum=(8, 0))
_ANY_HEAD_SIZE = HeadSizes(minimum=0)  # 0 where it does not matter
_E4M3 = (8, 9)

# FlashAttention 4's tile of keys: narrower ones are possible, but no faster than Triton's kernel.
_FA4_NARROWEST = 64
_FA4_STEP = 16


def fa4_keys(request: Request) -> int | None:
    """Return the keys of FlashAttention 4's tile for key blocks, or None when none cuts them."""
    widest = _fa4_widest(request)
    # SM90 narrows its tile to the blocks it is given; SM100 has one width.
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


def cudnn_size(request: Request) -> int | None:
    """Return the tokens of cuDNN's blocks for those of a plan, or None when none cuts them."""
    fitting = (n for n in (128, 64) if request.q_size % n == request.kv_size % n == 0)
    return next(fitting, None)


def _cudnn_blocks(request: Request) -> str | None:
    if cudnn_size(request):
        return None
    return (
        f"needs query and key blocks of a multiple of 64, got {request.q_size} and "
        f"{request.kv_size}"
    )


def _cudnn_small_blocks(request: Request) -> str | None:
    if cudnn_size(request) != 64:
        return None
    if request.dtype != torch.bfloat16 or request.head_size != 128:
        return (
            f"needs bfloat16 and head size 128 for blocks of no multiple of 128, got "
            f"{str(request.dtype).removeprefix('torch.')} and {request.head_size}"
        )
    if request.grouped:
        return "shares keys among heads in blocks of a multiple of 128 only, and some share them"
    return None


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


def _fused_blocks(request: Request) -> str | None:
    if request.q_size % 64 or request.kv_size % 128:
        return (
            f"needs blocks of multiples of 64 queries and 128 keys, got {request.q_size} and "
            f"{request.kv_size}"
        )
    return None


def _linear_blocks(request: Request) -> str | None:
    if request.kv_size in (0, 16, 32, 64, 128, 256):
        return None
    return f"needs key blocks of 16, 32, 64, 128 or 256 keys, got {request.kv_size}"


def _most_kv(most: int) -> _Rule:
    """Refuse more than `most` of what is chosen among, which would not fit into registers."""
    return lambda request: (
        f"needs at most {most} to choose among, got {request.num_kv}"
        if request.num_kv > most
        else None
    )


# What most kernels of a language have in common.
_GLUON = KernelDeclaration(
    name="gluon",
    platforms=_CUDA,
    capability=_HOPPER,
    dtypes=_HALF,
    head_sizes=HeadSizes(maximum=128, multiple_of=8),
    packages=(TRITON_WITH_GLUON,),
)
_TRITON = KernelDeclaration(
    name="triton",
    platforms=_GPUS,
    capability=_SM80,
    dtypes=_HALF,
    head_sizes=HeadSizes(maximum=256),
    packages=(TRITON,),
    interpreted=True,
)
_REFERENCE = KernelDeclaration(
    name="reference",
    dtypes=_FLOATING,
    head_sizes=HeadSizes(),
    serves=frozenset(_REFUSALS),
)

_TRITON_GRADIENTS = replace(
    _TRITON,
    serves=frozenset(
        {"ragged", "row_bits", "causal", "unaligned", "padded", "grouped", "deterministic"}
    ),
    unasked=_GPUS | {"cpu"},  # where the interpreter ran the forward pass
)


def _gradients(*kernels: KernelDeclaration) -> Operation:
    return Operation(label="gradients of block-sparse attention", kernels=kernels)


BLOCK_SPARSE = Operation(
    label="block-sparse attention",
    kernels=(
        replace(
            _GLUON,
            serves=frozenset({"ragged", "row_bits", "backward", "skip_below", "grouped"}),
            check="multimodal_gen.kernels.gluon_check:block_sparse",
            gradients=_gradients(
                replace(
                    _GLUON,
                    name="gluon_fused",
                    head_sizes=HeadSizes(minimum=72, maximum=128, multiple_of=8),
                    rules=(_fused_blocks,),
                    check="multimodal_gen.kernels.gluon_check:gradients",
                ),
                replace(
                    _GLUON,
                    serves=frozenset({"ragged", "deterministic"}),
                    check="multimodal_gen.kernels.gluon_check:gradients",
                ),
                _TRITON_GRADIENTS,
            ),
        ),
        KernelDeclaration(
            name="fa4",
            platforms=_CUDA,
            capability=Capability(exact=((9, 0), (10, 0), (10, 1), (10, 3))),
            dtypes=_HALF,
            head_sizes=HeadSizes(maximum=256, multiple_of=8),
            serves=frozenset({"unaligned", "grouped"}),
            packages=(FLASH_ATTN_4,),
            rules=(_fa4_head_size, _fa4_rows, _fa4_tiles),
        ),
        KernelDeclaration(
            name="cudnn",
            platforms=_CUDA,
            # On 9.0 its blocks are gluon's; on 12.0 it compiles anew for every shape.
            capability=Capability(minimum=(10, 0), below=(12, 0)),
            dtypes=_HALF,
            head_sizes=HeadSizes(listed=(64, 96, 128)),
            serves=frozenset({"unaligned", "grouped"}),
            packages=(CUDNN_FRONTEND,),
            rules=(_cudnn_blocks, _cudnn_small_blocks),
            check="multimodal_gen.kernels.gluon_check:cudnn",
        ),
        replace(
            _TRITON,
            serves=frozenset(
                {"ragged", "row_bits", "causal", "unaligned", "backward", "skip_below", "grouped"}
            ),
            gradients=_gradients(_TRITON_GRADIENTS),
        ),
        replace(_REFERENCE, gradients=_gradients(_REFERENCE)),
    ),
)
"""Attention over a `BlockPlan`."""

CLUSTERS = Operation(
    label="attention of clusters",
    kernels=(
        replace(
            _GLUON,
            serves=frozenset({"ragged"}),
            # A list of keys is made by one program, which holds all clusters of keys.
            rules=(_most_kv(8192),),
            check="multimodal_gen.kernels.gluon_check:block_sparse",
        ),
    ),
)
"""Attention of clusters to clusters, in place of a kernel of `BLOCK_SPARSE` of the same name."""

POOLED_TAIL = Operation(
    label="the pooled tail",
    kernels=(
        replace(
            _GLUON,
            # Its weights need the exponents of fp32.
            dtypes=frozenset({torch.bfloat16}),
            check="multimodal_gen.kernels.gluon_check:pooled_tail",
        ),
        replace(_TRITON, serves=frozenset({"ragged", "unaligned"})),
        _REFERENCE,
    ),
)
"""The means of blocks that a `BlockPlan` leaves out, on top of attention over it."""

QUANTIZED = Operation(
    label="8-bit attention",
    kernels=(
        replace(
            _GLUON,
            serves=frozenset({"ragged", "unaligned"}),
            rules=(e4m3_reason,),
            check="multimodal_gen.kernels.gluon_check:quantized",
        ),
        replace(
            _TRITON,
            platforms=_CUDA,
            head_sizes=_GLUON.head_sizes,
            serves=frozenset({"ragged", "causal", "unaligned"}),
            rules=(e4m3_reason, _causal_blocks),
        ),
        replace(
            _REFERENCE,
            head_sizes=HeadSizes(maximum=128),
            serves=frozenset({"ragged", "causal", "unaligned"}),
            # Elsewhere a slow answer helps less than the reasons.
            unasked=frozenset({"cpu"}),
        ),
    ),
)
"""Attention over a `BlockPlan` on int8 queries and keys."""

CODED = Operation(
    label="attention to codes",
    kernels=(replace(_TRITON, serves=frozenset({"unaligned"})), _REFERENCE),
)
"""Attention to keys and values that are kept in 4 or 2 bits."""

KMEANS = Operation(
    label="k-means",
    kernels=(
        replace(
            _TRITON,
            capability=ANY_CAPABILITY,
            dtypes=_UP_TO_FP32,
            serves=frozenset({"masked", "unaligned"}),
        ),
        KernelDeclaration(
            name="flash_kmeans",
            platforms=_GPUS,
            dtypes=_UP_TO_FP32,
            head_sizes=HeadSizes(),
            serves=frozenset({"unaligned"}),
            packages=(FLASH_KMEANS, TRITON),
            # It waits for the device in every iteration.
            unasked=frozenset(),
        ),
        replace(_REFERENCE, dtypes=_UP_TO_FP32, serves=frozenset({"masked", "unaligned"})),
    ),
)
"""Clusters of the tokens of every head."""


def _triton_or_reference(
    label: str,
    dtypes: frozenset[torch.dtype],
    *rules: _Rule,
    head_sizes: HeadSizes = _ANY_HEAD_SIZE,
) -> Operation:
    """Declare a kernel in Triton that serves every GPU, and the definition everything else."""
    kernel = KernelDeclaration(
        name="triton",
        platforms=_GPUS,
        dtypes=dtypes,
        head_sizes=head_sizes,
        packages=(TRITON,),
        rules=rules,
    )
    reference = replace(_REFERENCE, dtypes=_EVERY_DTYPE, head_sizes=_ANY_HEAD_SIZE)
    return Operation(label=label, kernels=(kernel, reference))


# A row of scores must fit into the registers of 16 warps; products of fp32 do not.
CELL_CHOICE = _triton_or_reference(
    "the choice of tiles by cells", _HALF, _most_kv(2**15), head_sizes=HeadSizes(maximum=256)
)
TILE_CHOICE = _triton_or_reference("the choice of tiles", _UP_TO_FP32, _most_kv(2**15))
TILE_MEANS = _triton_or_reference("the means of tiles", _UP_TO_FP32)
CHUNK_CHOICE = _triton_or_reference("the choice of chunks", _HALF, _most_kv(1024))
CHUNK_MEANS = _triton_or_reference("the means of chunks", _HALF)
ROW_ORDER = _triton_or_reference("sorting rows by their choices", frozenset({torch.int32}))
ROW_MOVES = _triton_or_reference("moving rows in that order", _UP_TO_FP32)
MAP_LISTS = _triton_or_reference("the lists of a map", frozenset({torch.bool}))
PART_MERGE = _triton_or_reference("merging attention to two sets of keys", _UP_TO_FP32)
TOKEN_MOVES = _triton_or_reference("moving tokens", _FLOATING)
LINEAR = _triton_or_reference("linear attention", _HALF, _linear_blocks)
# A state must fit into the registers of one program.
LINEAR_REST = _triton_or_reference(
    "linear attention to the rest", _HALF, _linear_blocks, head_sizes=HeadSizes(maximum=128)
)
