"""AMD GPUs."""

from typing import ClassVar

from multimodal_gen.runtime.platforms.interface import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)


class RocmPlatform(Platform):
    """AMD GPUs: FlashAttention where installed, else SDPA; AITER when asked for."""

    name: ClassVar[PlatformEnum] = PlatformEnum.ROCM
    device_type: ClassVar[str] = "cuda"

    def is_available(self) -> bool:
        """Whether torch is built with HIP and sees a GPU."""
        import torch

        return torch.version.hip is not None and torch.cuda.is_available()

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability:
        """Return the GPU generation as torch reports it (gfx942 is (9, 4))."""
        import torch

        return DeviceCapability(*torch.cuda.get_device_capability(device_id))

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the GPU's marketing name."""
        import torch

        return torch.cuda.get_device_name(device_id)

    def attention_priority(
        self, capability: DeviceCapability | None
    ) -> tuple[AttentionBackendEnum, ...]:
        """Prefer FlashAttention."""
        del capability
        return (AttentionBackendEnum.FA, AttentionBackendEnum.TORCH_SDPA)
