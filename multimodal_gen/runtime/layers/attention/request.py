"""What selection may depend on: the environment and one layer's request, as hashable data."""

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import torch

from multimodal_gen.runtime.platforms import DeviceCapability, Platform, PlatformEnum


class AttentionRole(Enum):
    """What a layer attends to; keys such as `transformer.cross` name it."""

    SELF = "self"
    CROSS = "cross"
    ENCODER = "encoder"

    def __str__(self) -> str:
        return str(self.value)


class Feature(Enum):
    """What a call may need beyond plain softmax attention with a scale."""

    GQA = "gqa"
    CAUSAL = "causal"
    KEY_MASK = "key_mask"
    DENSE_MASK = "dense_mask"
    VARLEN = "varlen"
    LSE = "lse"
    BACKWARD = "backward"
    RING = "ring"

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageProbe:
    """An optional package a backend needs, and how to find it without importing it.

    Attributes:
        module: dotted module that must exist; its parents are located on disk, never imported.
        distribution: distribution that owns the module, for its version.
        install: the command that installs it.
        minimum: lowest version that works, e.g. "2.0", or None.
        below: first version that no longer works, or None.
    """

    module: str
    distribution: str
    install: str
    minimum: str | None = None
    below: str | None = None

    def find(self) -> str | None:
        """Return the installed version, "" when it has none, or None when absent."""
        if not _module_exists(self.module):
            return None
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def unsupported_reason(self, environment: "Environment") -> str | None:
        """Return why the package is not usable in `environment`, or None when it is."""
        version = environment.version(self)
        error = dict(environment.broken).get(self.module)
        if error is not None:
            return f"{self.module} {error}"
        if version is None:
            return f"needs the package {self.module}, which is not installed ({self.install})"
        if version and self.minimum and _parts(version) < _parts(self.minimum):
            return f"needs {self.distribution} >= {self.minimum}, found {version} ({self.install})"
        if version and self.below and _parts(version) >= _parts(self.below):
            return f"needs {self.distribution} < {self.below}, found {version} ({self.install})"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A device and the optional packages beside it.

    Attributes:
        platform: kind of device.
        device_name: readable name.
        capability: compute capability, or None where the notion does not exist.
        priority: dense backends the platform prefers, as names, best first.
        always: backend that serves every request on this platform, or None.
        dense_fallback: what unsupported explicit requests fall back to here, or None.
        packages: (module, distribution, version) of every probed package that is installed.
        broken: (module, what is wrong) of packages that are installed and turned out unusable.
    """

    platform: PlatformEnum
    device_name: str = ""
    capability: DeviceCapability | None = None
    priority: tuple[str, ...] = ()
    always: str | None = None
    dense_fallback: str | None = None
    packages: frozenset[tuple[str, str, str]] = frozenset()
    broken: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, platform: Platform, probes: Iterable[PackageProbe]) -> "Environment":
        """Look at `platform` and at which of `probes` are installed; imports none of them."""
        capability = platform.get_device_capability()
        found = [(p.module, p.distribution, p.find()) for p in set(probes)]
        return cls(
            platform=platform.name,
            device_name=platform.get_device_name(),
            capability=capability,
            priority=tuple(str(b) for b in platform.attention_priority(capability)),
            always=str(platform.always) if platform.always else None,
            dense_fallback=str(platform.dense_fallback) if platform.dense_fallback else None,
            packages=frozenset((m, d, v) for m, d, v in found if v is not None),
        )

    def version(self, probe: PackageProbe) -> str | None:
        """Return the version found for `probe`, "" when it has none, or None when absent."""
        for module, distribution, version in self.packages:
            if (module, distribution) == (probe.module, probe.distribution):
                return version
        return None


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
    """

    environment: Environment
    head_size: int
    num_heads: int
    num_kv_heads: int
    dtype: torch.dtype
    role: AttentionRole = AttentionRole.SELF
    needs: frozenset[Feature] = field(default_factory=frozenset)

    def with_needs(self, *features: Feature) -> "AttentionRequest":
        """Return this request with `features` added to what it needs."""
        return replace(self, needs=self.needs | frozenset(features))


def _module_exists(dotted: str) -> bool:
    top, *rest = dotted.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    folders = list(spec.submodule_search_locations or ())
    for part in rest:
        # A namespace may span several folders; each may hold the next part.
        folders = [str(Path(f) / part) for f in folders if _holds(Path(f), part)]
        if not folders:
            return False
    return True


def _holds(folder: Path, part: str) -> bool:
    return (
        (folder / part).is_dir()
        or any(folder.glob(f"{part}.py"))
        or any(folder.glob(f"{part}.*.so"))
    )


def _parts(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for piece in version.split("+")[0].split("."):
        digits = ""
        for character in piece:
            if not character.isdigit():
                break
            digits += character
        if not digits:
            break
        numbers.append(int(digits))
    # 2.0 and 2.0.0 are the same version.
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
