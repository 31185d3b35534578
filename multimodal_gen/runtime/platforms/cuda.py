"""NVIDIA GPUs."""

from typing import ClassVar

from multimodal_gen.runtime.platforms.interface import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)


class CudaPlatform(Platform):
    """NVIDIA GPUs: the kernel that was measured to be the fastest, else SDPA."""

    name: ClassVar[PlatformEnum] = PlatformEnum.CUDA
    device_type: ClassVar[str] = "cuda"

    def is_available(self) -> bool:
        """Whether torch is built with CUDA and sees a GPU."""
        import torch

        return torch.version.cuda is not None and torch.cuda.is_available()

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability:
        """Return the compute capability."""
        import torch

        return DeviceCapability(*torch.cuda.get_device_capability(device_id))

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the GPU's marketing name."""
        import torch

        return torch.cuda.get_device_name(device_id)

    def attention_priority(
        self, capability: DeviceCapability | None
    ) -> tuple[AttentionBackendEnum, ...]:
        """Prefer our own kernel on SM90 and FlashAttention from SM80 on; others take SDPA."""
        if capability is None or capability.major < 8 or capability.major == 12:
            return (AttentionBackendEnum.TORCH_SDPA,)
        packaged = (AttentionBackendEnum.FA, AttentionBackendEnum.TORCH_SDPA)
        if capability == DeviceCapability(9, 0):
            return (AttentionBackendEnum.TRITON_ATTN, *packaged)
        return packaged
