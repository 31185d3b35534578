"""What a backend declares, as plain data: the kernels behind it and what each of them can serve.

A declaration imports without CUDA, Triton or any optional package. The choice, the reasons in
errors, `sglang attention list`, the generated support table and the test matrix all read it.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
    PackageProbe,
)
from multimodal_gen.runtime.platforms import DeviceCapability, PlatformEnum

ALL_ROLES = frozenset(AttentionRole)
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Head sizes a kernel takes: listed ones, or every multiple of `multiple_of` in a range.

    Attributes:
        listed: exact sizes; when given, the range is not used.
        minimum: smallest size of the range.
        maximum: largest size of the range, or None for no limit.
        multiple_of: step of the range.
    """

    listed: tuple[int, ...] = ()
    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1

    def __contains__(self, size: object) -> bool:
        if not isinstance(size, int):
            return False
        if self.listed:
            return size in self.listed
        above = size >= self.minimum and size % self.multiple_of == 0
        return above and (self.maximum is None or size <= self.maximum)

    def __str__(self) -> str:
        if self.listed:
            return "/".join(str(size) for size in self.listed)
        if self.maximum is None:
            text = "any" if self.minimum <= self.multiple_of else f">= {self.minimum}"
        elif self.minimum <= self.multiple_of:
            text = f"<= {self.maximum}"
        else:
            text = f"{self.minimum} to {self.maximum}"
        return text if self.multiple_of == 1 else f"{text}, multiple of {self.multiple_of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Compute capabilities a kernel runs on; applies to CUDA only.

    Attributes:
        minimum: lowest capability, inclusive.
        below: first capability that is too new, or None.
        exact: when given, the only capabilities.
    """

    minimum: tuple[int, int] = (0, 0)
    below: tuple[int, int] | None = None
    exact: tuple[tuple[int, int], ...] = ()

    def unsupported_reason(self, actual: DeviceCapability | None) -> str | None:
        """Return requirement and actual, or None when `actual` will do."""
        if actual is None:
            return None
        have = f"this GPU has {actual.as_version_str()}"
        if self.exact:
            wanted = " or ".join(f"{major}.{minor}" for major, minor in self.exact)
            ok = tuple(actual) in self.exact
            return None if ok else f"needs compute capability {wanted}, {have}"
        if actual < self.minimum:
            return f"needs compute capability >= {self.minimum[0]}.{self.minimum[1]}, {have}"
        if self.below and actual >= self.below:
            return f"needs compute capability < {self.below[0]}.{self.below[1]}, {have}"
        return None

    def __str__(self) -> str:
        if self.exact:
            return "/".join(f"{major}.{minor}" for major, minor in self.exact)
        text = f">= {self.minimum[0]}.{self.minimum[1]}" if self.minimum > (0, 0) else "any"
        return text if self.below is None else f"{text}, < {self.below[0]}.{self.below[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel library behind a backend, e.g. FlashAttention 3 behind `fa`.

    Attributes:
        name: short name shown in reports, e.g. "fa3".
        platforms: platforms it runs on.
        dtypes: dtypes of q, k and v.
        head_sizes: head sizes it takes.
        features: what it can honour; a call that needs more is refused or rerouted.
        packages: packages that must all be installed.
        capability: compute capabilities, checked on CUDA only.
        roles: layer roles it serves.
    """

    name: str
    platforms: frozenset[PlatformEnum]
    dtypes: frozenset[torch.dtype]
    head_sizes: HeadSizes
    features: frozenset[Feature]
    packages: tuple[PackageProbe, ...] = ()
    capability: Capability = Capability()
    roles: frozenset[AttentionRole] = ALL_ROLES

    def unsupported_reasons(self, request: AttentionRequest) -> tuple[str, ...]:
        """Return every reason this variant cannot serve `request`, requirement then actual."""
        environment = request.environment
        reasons: list[str | None] = []
        if environment.platform not in self.platforms:
            served = sorted(str(name) for name in self.platforms)
            reasons.append(needs_platform(served, environment.platform))
        else:
            reasons.append(self.capability_reason(request))
        reasons += [probe.unsupported_reason(environment) for probe in self.packages]
        if request.dtype not in self.dtypes:
            reasons.append(f"needs dtype {_names(self.dtypes)}, got {_dtype_name(request.dtype)}")
        if request.head_size not in self.head_sizes:
            reasons.append(f"needs head size {self.head_sizes}, got {request.head_size}")
        if request.role not in self.roles:
            wanted = ", ".join(sorted(str(r) for r in self.roles))
            reasons.append(f"serves {wanted} attention, this layer is {request.role} attention")
        needs = set(request.needs)
        if request.num_kv_heads != request.num_heads:
            needs.add(Feature.GQA)
        missing = sorted(str(feature) for feature in needs - self.features)
        reasons += [f"does not support {feature}" for feature in missing]
        return tuple(reason for reason in reasons if reason)

    def capability_reason(self, request: AttentionRequest) -> str | None:
        """Return what the GPU of `request` lacks, or None when it will do or is not by NVIDIA."""
        if request.environment.platform is not PlatformEnum.CUDA:
            return None
        return self.capability.unsupported_reason(request.environment.capability)


def needs_platform(served: list[str], actual: PlatformEnum) -> str:
    """Return the reason of what runs on the platforms `served` alone."""
    return f"needs platform {' or '.join(served)}, this is {actual}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return " or ".join(sorted(_dtype_name(dtype) for dtype in dtypes))
