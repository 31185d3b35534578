"""Apple GPUs."""

from typing import ClassVar

from multimodal_gen.runtime.platforms.interface import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)


class MpsPlatform(Platform):
    """Apple GPUs: always SDPA."""

    name: ClassVar[PlatformEnum] = PlatformEnum.MPS
    device_type: ClassVar[str] = "mps"
    always: ClassVar[AttentionBackendEnum | None] = AttentionBackendEnum.TORCH_SDPA

    def is_available(self) -> bool:
        """Whether torch sees an Apple GPU."""
        import torch

        return torch.backends.mps.is_available()

    def attention_priority(
        self, capability: DeviceCapability | None
    ) -> tuple[AttentionBackendEnum, ...]:
        """SDPA is all there is."""
        del capability
        return (AttentionBackendEnum.TORCH_SDPA,)
