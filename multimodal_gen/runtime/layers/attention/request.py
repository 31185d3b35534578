"""What selection may depend on: the environment and one layer's request, as hashable data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.launch.self_check import SelfCheck
from multimodal_gen.kernels.requirements import PackageProbe, installed
from multimodal_gen.runtime.backend_names import NamedEnum
from multimodal_gen.runtime.platforms import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)


class AttentionRole(NamedEnum):
    """What a layer attends to; keys such as `transformer.cross` name it."""

    SELF = "self"
    CROSS = "cross"
    ENCODER = "encoder"


class Feature(NamedEnum):
    """What a call may need beyond plain softmax attention with a scale."""

    GQA = "gqa"
    CAUSAL = "causal"
    KEY_MASK = "key_mask"
    DENSE_MASK = "dense_mask"
    VARLEN = "varlen"
    LSE = "lse"
    BACKWARD = "backward"
    RING = "ring"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSite:
    """Where a layer sits in a pipeline.

    Attributes:
        name: dotted path of the attention module within its component.
        component: key of `model_index.json`, e.g. "transformer_2", or None outside a pipeline.
        role: what the layer attends to.
        layer: index of the layer among those of its role in its component, or None. Layers built
            with a `prefix` and no site have the first number of that path: 2 in `blocks.2.attn1`.
        num_layers: how many layers of its role its component has, or None when unknown.
    """

    name: str = ""
    component: str | None = None
    role: AttentionRole = AttentionRole.SELF
    layer: int | None = None
    num_layers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A device and the optional packages that are installed.

    Attributes:
        platform: kind of device.
        device_name: readable name.
        capability: compute capability, or None where the notion does not exist.
        priority: dense backends the platform prefers, best first.
        always: backend that serves every request on this platform, or None.
        dense_fallback: what unsupported explicit requests fall back to here, or None.
        packages: (module, distribution, version) of every probed package that is installed.
        broken: (module, what is wrong) of packages that are installed and turned out unusable.
        checked: (path, what it said) of the self-checks that ran of kernels that were selected.
    """

    platform: PlatformEnum
    device_name: str = ""
    capability: DeviceCapability | None = None
    priority: tuple[AttentionBackendEnum, ...] = ()
    always: AttentionBackendEnum | None = None
    dense_fallback: AttentionBackendEnum | None = None
    packages: frozenset[tuple[str, str, str]] = frozenset()
    broken: frozenset[tuple[str, str]] = frozenset()
    checked: tuple[tuple[str, SelfCheck], ...] = ()

    @classmethod
    def of(cls, platform: Platform, probes: Iterable[PackageProbe]) -> "Environment":
        """Look at `platform` and at which of `probes` are installed; imports none of them."""
        capability = platform.get_device_capability()
        found = [(p.module, p.distribution, installed(p)) for p in set(probes)]
        return cls(
            platform=platform.name,
            device_name=platform.get_device_name(),
            capability=capability,
            priority=tuple(platform.attention_priority(capability)),
            always=platform.always,
            dense_fallback=platform.dense_fallback,
            packages=frozenset((m, d, v) for m, d, v in found if v is not None),
        )

    def version(self, probe: PackageProbe) -> str | None:
        """Return the version found for `probe`, "" when it has none, or None when absent."""
        found = {(module, distribution): version for module, distribution, version in self.packages}
        return found.get((probe.module, probe.distribution))

    def lacks(self, probe: PackageProbe) -> str | None:
        """Return why a package is not usable here, or None when it is."""
        error = dict(self.broken).get(probe.module)
        if error is not None:
            return f"{probe.module} {error}"
        return probe.unsupported_reason(self.version(probe))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one backend took for a call.

    Attributes:
        backend: its name.
        variant: the kernel library behind it.
        device_ms: milliseconds of the device, with calls waiting for it.
        host_ms: milliseconds of the host until the call returns, or None where it was not measured.

    Raises:
        ConfigError: a time is not above 0.
    """

    backend: str
    variant: str
    device_ms: float
    host_ms: float | None = None

    def __post_init__(self) -> None:
        if not all(0 < ms < math.inf for ms in (self.device_ms, self.ms)):
            raise ConfigError(
                f"times of {self.backend} must be above 0 ms, got {self.device_ms} and "
                f"{self.host_ms}"
            )

    @property
    def ms(self) -> float:
        """Milliseconds from call to call where calls follow each other: the slower of the two."""
        return max(self.device_ms, self.host_ms or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """What backends took for calls of one shape.

    Attributes:
        timings: fastest first.
        source: where it was measured, and at which shape.
    """

    timings: tuple[Timing, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """Everything the choice of a backend may depend on; the only cache key.

    Attributes:
        environment: device and installed packages.
        head_size: channels per head.
        num_heads: query heads.
        num_kv_heads: key and value heads; fewer than `num_heads` is grouped-query attention.
        dtype: dtype of q, k and v.
        role: what the layer attends to.
        needs: features every call of the layer needs.
        ranking: what was measured for calls of one shape, where the request is about these.
    """

    environment: Environment
    head_size: int
    num_heads: int
    num_kv_heads: int
    dtype: torch.dtype
    role: AttentionRole = AttentionRole.SELF
    needs: frozenset[Feature] = field(default_factory=frozenset)
    ranking: Ranking | None = None

    def with_needs(self, *features: Feature) -> "AttentionRequest":
        """Return this request with `features` added to what it needs."""
        return replace(self, needs=self.needs | frozenset(features))
