"""Moore Threads GPUs."""

from typing import ClassVar

from multimodal_gen.runtime.platforms.interface import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)


class MusaPlatform(Platform):
    """Moore Threads GPUs: FlashAttention where installed, else SDPA; SageAttention on request."""

    name: ClassVar[PlatformEnum] = PlatformEnum.MUSA
    device_type: ClassVar[str] = "musa"
    dense_fallback: ClassVar[AttentionBackendEnum | None] = AttentionBackendEnum.TORCH_SDPA

    def is_available(self) -> bool:
        """Whether torch_musa is loaded and sees a device."""
        import torch

        musa = getattr(torch, "musa", None)
        return musa is not None and bool(musa.is_available())

    def attention_priority(
        self, capability: DeviceCapability | None
    ) -> tuple[AttentionBackendEnum, ...]:
        """Prefer FlashAttention."""
        del capability
        return (
            AttentionBackendEnum.FA,
            AttentionBackendEnum.TORCH_SDPA,
        )
