"""What a backend declares, as plain data: the kernels behind it and what each of them can serve.

A declaration imports without CUDA, Triton or any optional package. The choice, the reasons in
errors, `sglang attention list`, the generated support table and the test matrix all read it.
"""

from dataclasses import dataclass, replace

import torch

from multimodal_gen.kernels.engine import POOLED_TAIL, KernelDeclaration, Request
from multimodal_gen.kernels.requirements import (
    ANY_CAPABILITY,
    Capability,
    HeadSizes,
    PackageProbe,
    dtype_reason,
    platform_reason,
)
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
)
from multimodal_gen.runtime.platforms import PlatformEnum

ALL_ROLES = frozenset(AttentionRole)
CUDA_ONLY = frozenset({PlatformEnum.CUDA})
FP8 = "fp8"
"""What `kernel` is called where operands are rounded to e4m3, and what such variants end in."""
SAGE = "_sage"
"""What variants end in that multiply queries and keys in 8 bits where `compute_mode` says so."""
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})

BASIC = frozenset({Feature.GQA, Feature.CAUSAL})
MASKS = frozenset({Feature.KEY_MASK, Feature.DENSE_MASK})
MERGEABLE = frozenset({Feature.LSE, Feature.RING})
"""What a library can honour that returns the log-sum-exp, by which parts are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel library behind a backend, e.g. FlashAttention 3 behind `fa`.

    Attributes:
        name: short name shown in reports, e.g. "fa3".
        platforms: platforms it runs on; CUDA by default.
        dtypes: dtypes of q, k and v; by default those of 16 bits.
        head_sizes: head sizes it takes.
        features: what it can honour; a call that needs more is refused or rerouted.
        packages: packages that must all be installed.
        capability: compute capabilities, checked on CUDA only.
        roles: layer roles it serves.
        kernel: the kernel of this package that it stands for, or None.
        operand_bits: to how many bits it rounds operands, where those are less than 16 and it is
            the only one of its backend that does; see `AttentionBackend.operand_bits`.
    """

    name: str
    platforms: frozenset[PlatformEnum] = CUDA_ONLY
    dtypes: frozenset[torch.dtype] = HALF_DTYPES
    head_sizes: HeadSizes
    features: frozenset[Feature]
    packages: tuple[PackageProbe, ...] = ()
    capability: Capability = ANY_CAPABILITY
    roles: frozenset[AttentionRole] = ALL_ROLES
    kernel: KernelDeclaration | None = None
    operand_bits: int = 16

    def unsupported_reasons(
        self, request: AttentionRequest, blocks: tuple[int, int] = (0, 0)
    ) -> tuple[str, ...]:
        """Return every reason this variant cannot serve `request`, requirement then actual.

        Args:
            request: what the layer needs.
            blocks: queries and keys of a block of a sparse method's plans; 0 where not known.
        """
        environment = request.environment
        reasons = [
            platform_reason(self.platforms, environment.platform)
            or self.capability_reason(request),
            *(environment.lacks(probe) for probe in self.packages),
            dtype_reason(self.dtypes, request.dtype),
            self.head_sizes.unsupported_reason(request.head_size),
        ]
        if request.role not in self.roles:
            wanted = ", ".join(sorted(str(r) for r in self.roles))
            reasons.append(f"serves {wanted} attention, this layer is {request.role} attention")
        needs = set(request.needs)
        if request.num_kv_heads != request.num_heads:
            needs.add(Feature.GQA)
        kernel = self.kernel
        if kernel is not None:
            # What the kernel refuses that the fields of a variant cannot say.
            reasons += [rule(kernel_request(request, blocks)) for rule in kernel.rules]
        missing = sorted(str(feature) for feature in needs - self.features)
        reasons += [f"does not support {feature}" for feature in missing]
        found = tuple(reason for reason in reasons if reason)
        if found or kernel is None:
            return found
        check = dict(environment.checked).get(kernel.check)
        return () if check is None or check.reason is None else (check.reason,)

    def after_self_checks(
        self, request: AttentionRequest, *, tail: bool = False
    ) -> AttentionRequest:
        """Return `request` with what the self-checks of its kernels say; runs those that have not.

        Args:
            request: what the layer needs.
            tail: whether a pooled tail is computed, too, which has kernels of its own.

        Raises:
            UsageError: a CUDA graph is being captured, which a check would break.
            torch.OutOfMemoryError: a check found no memory.
        """
        if self.kernel is None or self.unsupported_reasons(request):
            return request
        kernels = [self.kernel]
        if tail:
            same = (kernel for kernel in POOLED_TAIL.kernels if kernel.name == self.kernel.name)
            kernels += [kernel for kernel in same if request.dtype in kernel.dtypes]
        asked, environment = kernel_request(request), request.environment
        said = dict(environment.checked)
        for kernel in kernels:
            check = kernel.checked(asked, environment.version)
            if check is not None:
                said[kernel.check] = check
            if check is not None and check.fault is not None:
                break  # nothing runs on it, so what it would run with does not matter
        return replace(request, environment=replace(environment, checked=tuple(said.items())))

    def capability_reason(self, request: AttentionRequest) -> str | None:
        """Return what the GPU of `request` lacks, or None when it will do or is not by NVIDIA."""
        if request.environment.platform is not PlatformEnum.CUDA:
            return None
        return self.capability.unsupported_reason(request.environment.capability)


def kernel_request(request: AttentionRequest, blocks: tuple[int, int] = (0, 0)) -> Request:
    """Return what a layer needs as a kernel is asked for it."""
    return Request(
        platform=str(request.environment.platform),
        capability=request.environment.capability,
        dtype=request.dtype,
        head_size=request.head_size,
        q_size=blocks[0],
        kv_size=blocks[1],
        grouped=request.num_kv_heads != request.num_heads,
    )
