"""Platforms: what device this process runs on, and what it prefers.

Packages outside the tree add a platform with an entry point in the group
`multimodal_gen.platforms` that names a `Platform` subclass.
"""

import logging
from functools import cache

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.platforms.devices import (
    CpuPlatform,
    CudaPlatform,
    MpsPlatform,
    MusaPlatform,
    NpuPlatform,
    RocmPlatform,
    XpuPlatform,
)
from multimodal_gen.runtime.platforms.entry_points import registered
from multimodal_gen.runtime.platforms.interface import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)

__all__ = [
    "BUILTIN_PLATFORMS",
    "ENTRY_POINT_GROUP",
    "AttentionBackendEnum",
    "DeviceCapability",
    "Platform",
    "PlatformEnum",
    "broken_platforms",
    "current_platform",
    "detect_platform",
]

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "multimodal_gen.platforms"

# In the order they are tried; the CPU is always there and so comes last.
BUILTIN_PLATFORMS: tuple[type[Platform], ...] = (
    MpsPlatform,
    XpuPlatform,
    RocmPlatform,
    CudaPlatform,
    NpuPlatform,
    MusaPlatform,
    CpuPlatform,
)


def detect_platform() -> Platform:
    """Return the first available platform; those registered by entry points come first.

    An entry point that does not load, or names no `Platform` subclass, is left out with a warning.
    """
    plugins, broken = _read_plugins()
    for error in broken.values():
        logger.warning("leaving out a platform: %s", error)
    candidates = (cls() for cls in (*plugins, *BUILTIN_PLATFORMS))
    return next(platform for platform in candidates if platform.is_available())


def broken_platforms() -> dict[str, ConfigError]:
    """Return what is wrong with the registered platforms that were left out, by their name."""
    return _read_plugins()[1]


@cache
def current_platform() -> Platform:
    """Return this process's platform, detected on first use."""
    return detect_platform()


def _read_plugins() -> tuple[list[type[Platform]], dict[str, ConfigError]]:
    broken: dict[str, ConfigError] = {}
    found = [cls for _, cls in registered(ENTRY_POINT_GROUP, Platform, broken.__setitem__)]
    return found, broken
