"""Intel GPUs."""

from typing import ClassVar

from multimodal_gen.runtime.platforms.interface import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)


class XpuPlatform(Platform):
    """Intel GPUs: their own FlashAttention for fp16 and bf16 at its head sizes, else SDPA."""

    name: ClassVar[PlatformEnum] = PlatformEnum.XPU
    device_type: ClassVar[str] = "xpu"
    dense_fallback: ClassVar[AttentionBackendEnum | None] = AttentionBackendEnum.TORCH_SDPA

    def is_available(self) -> bool:
        """Whether torch is built with XPU support and sees a device."""
        import torch

        return hasattr(torch, "xpu") and torch.xpu.is_available()

    def attention_priority(
        self, capability: DeviceCapability | None
    ) -> tuple[AttentionBackendEnum, ...]:
        """Prefer FlashAttention."""
        del capability
        return (
            AttentionBackendEnum.FA,
            AttentionBackendEnum.TORCH_SDPA,
        )
