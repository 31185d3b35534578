"""What a kernel may require, as plain data that imports without CUDA, Triton or any package."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from functools import cache
from importlib.machinery import PathFinder

import torch

# The numbers of a release, and what makes it a pre-release: PEP 440.
_VERSION = re.compile(r"(\d+(?:\.\d+)*)(?:[._-]?(dev|a|b|rc)(\d*))?")
_STAGES = ("dev", "a", "b", "rc")
_RELEASED = (len(_STAGES), 0)


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

    def unsupported_reason(self, size: int) -> str | None:
        """Return requirement and actual, or None when `size` will do."""
        return None if size in self else f"needs head size {self}, got {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Compute capabilities a kernel runs on; applies to NVIDIA GPUs only.

    Attributes:
        minimum: lowest capability, inclusive.
        below: first capability that is too new, or None.
        exact: when given, the only capabilities.
    """

    minimum: tuple[int, int] = (0, 0)
    below: tuple[int, int] | None = None
    exact: tuple[tuple[int, int], ...] = ()

    def unsupported_reason(self, actual: tuple[int, int] | None) -> str | None:
        """Return requirement and actual, or None when `actual` will do."""
        if actual is None:
            return None
        have = f"this GPU has {_dotted(actual)}"
        if self.exact:
            wanted = " or ".join(map(_dotted, self.exact))
            known = tuple(actual) in self.exact
            return None if known else f"needs compute capability {wanted}, {have}"
        if actual < self.minimum:
            return f"needs compute capability >= {_dotted(self.minimum)}, {have}"
        if self.below and actual >= self.below:
            return f"needs compute capability < {_dotted(self.below)}, {have}"
        return None

    def __str__(self) -> str:
        if self.exact:
            return "/".join(map(_dotted, self.exact))
        text = f">= {_dotted(self.minimum)}" if self.minimum > (0, 0) else "any"
        return text if self.below is None else f"{text}, < {_dotted(self.below)}"


ANY_CAPABILITY = Capability()


@dataclass(frozen=True, slots=True)
class PackageProbe:
    """An optional package, and how to find it without importing it.

    Attributes:
        module: dotted module that must exist; its parents are located on disk, never imported.
        distribution: distribution that owns the module, for its version.
        install: the command that installs it.
        minimum: lowest version that works, e.g. "2.0", or None.
        below: first version that no longer works, or None.
        needs_version: whether an unknown version counts as one that does not work.
        tried: releases that the kernels on it were run with, e.g. "3.6" for all of 3.6.x; None
            where every version that works will do.
    """

    module: str
    distribution: str
    install: str
    _: KW_ONLY
    minimum: str | None = None
    below: str | None = None
    needs_version: bool = False
    tried: tuple[str, ...] | None = None

    def find(self) -> str | None:
        """Return the installed version, "" when it has none, or None when absent."""
        if not _module_exists(self.module):
            return None
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def was_tried(self, version: str) -> bool:
        """Whether kernels on the package were run with this version, or need not have been."""
        if self.tried is None:
            return True
        return _minor(version) in map(_minor, self.tried)

    def unsupported_reason(self, version: str | None) -> str | None:
        """Return requirement and actual, or None when `version`, as `find` returns it, will do."""
        if version is None:
            return f"needs the package {self.module}, which is not installed ({self.install})"
        found = f"found {version} ({self.install})"
        if not version:
            if not self.needs_version:
                return None
            return f"needs a known version of {self.distribution}, found none ({self.install})"
        if self.minimum and _precedes(version, self.minimum):
            return f"needs {self.distribution} >= {self.minimum}, {found}"
        if self.below and _numbers(version) >= _numbers(self.below):
            return f"needs {self.distribution} < {self.below}, {found}"
        return None


@cache
def installed(probe: PackageProbe) -> str | None:
    """Return what `probe.find` found when this process first asked."""
    return probe.find()


def platform_reason(served: Collection[object], actual: object) -> str | None:
    """Return requirement and actual, or None when `actual` is among the platforms `served`."""
    if actual in served:
        return None
    return f"needs platform {' or '.join(sorted(map(str, served)))}, this is {actual}"


def dtype_reason(served: Collection[torch.dtype], actual: torch.dtype) -> str | None:
    """Return requirement and actual, or None when `actual` is among the dtypes `served`."""
    if actual in served:
        return None
    wanted, got = sorted(map(_dtype_name, served)), _dtype_name(actual)
    return f"needs dtype {' or '.join(wanted)}, got {got}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _module_exists(dotted: str) -> bool:
    top, *rest = dotted.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    for part in rest:
        if spec is None:
            return False
        # Not by its dotted name, for which the parents would have to be imported.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    return spec is not None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; 2.0 and 2.0.0 are the same."""
    found = _VERSION.match(version)
    numbers = [int(number) for number in found[1].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a release."""
    return (*_numbers(version), 0, 0)[:2]


def _precedes(version: str, minimum: str) -> bool:
    """Whether a version is lower than the lowest that works.

    Its pre-releases count as the release itself, unless the lowest is a pre-release.
    """
    numbers, least = _numbers(version), _numbers(minimum)
    stage = _stage(minimum)
    if numbers != least or stage == _RELEASED:
        return numbers < least
    return _stage(version) < stage


def _stage(version: str) -> tuple[int, int]:
    """Return what pre-releases of a release, and it, sort by."""
    found = _VERSION.match(version)
    if found is None or found[2] is None:
        return _RELEASED
    return _STAGES.index(found[2]), int(found[3] or 0)
