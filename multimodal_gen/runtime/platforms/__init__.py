"""Platforms: what device this process runs on, and what it prefers.

Packages outside the tree add a platform with an entry point in the group
`multimodal_gen.platforms` that names a `Platform` subclass.
"""

from functools import cache

from multimodal_gen.runtime.platforms.cpu import CpuPlatform
from multimodal_gen.runtime.platforms.cuda import CudaPlatform
from multimodal_gen.runtime.platforms.entry_points import registered
from multimodal_gen.runtime.platforms.interface import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)
from multimodal_gen.runtime.platforms.mps import MpsPlatform
from multimodal_gen.runtime.platforms.musa import MusaPlatform
from multimodal_gen.runtime.platforms.npu import NpuPlatform
from multimodal_gen.runtime.platforms.rocm import RocmPlatform
from multimodal_gen.runtime.platforms.xpu import XpuPlatform

__all__ = [
    "BUILTIN_PLATFORMS",
    "ENTRY_POINT_GROUP",
    "AttentionBackendEnum",
    "DeviceCapability",
    "Platform",
    "PlatformEnum",
    "current_platform",
    "detect_platform",
]

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

    Raises:
        ConfigError: an entry point does not load, or names no `Platform` subclass.
    """
    return next(platform for platform in _candidates() if platform.is_available())


@cache
def current_platform() -> Platform:
    """Return this process's platform, detected on first use."""
    return detect_platform()


def _candidates() -> list[Platform]:
    plugins = [cls for _, cls in registered(ENTRY_POINT_GROUP, Platform)]
    return [cls() for cls in (*plugins, *BUILTIN_PLATFORMS)]
