"""The CPU."""

from typing import ClassVar

from multimodal_gen.runtime.platforms.interface import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)


class CpuPlatform(Platform):
    """The CPU: SDPA."""

    name: ClassVar[PlatformEnum] = PlatformEnum.CPU
    device_type: ClassVar[str] = "cpu"
    dense_fallback: ClassVar[AttentionBackendEnum | None] = AttentionBackendEnum.TORCH_SDPA

    def is_available(self) -> bool:
        """Always."""
        return True

    def attention_priority(
        self, capability: DeviceCapability | None
    ) -> tuple[AttentionBackendEnum, ...]:
        """SDPA is all there is."""
        del capability
        return (AttentionBackendEnum.TORCH_SDPA,)
