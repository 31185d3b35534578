"""Ascend NPUs."""

from typing import ClassVar

from multimodal_gen.runtime.platforms.interface import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)


class NpuPlatform(Platform):
    """Ascend NPUs: SDPA; the NPU's own FlashAttention for ring attention or when asked for."""

    name: ClassVar[PlatformEnum] = PlatformEnum.NPU
    device_type: ClassVar[str] = "npu"
    dense_fallback: ClassVar[AttentionBackendEnum | None] = AttentionBackendEnum.TORCH_SDPA

    def is_available(self) -> bool:
        """Whether torch_npu is loaded and sees a device."""
        import torch

        npu = getattr(torch, "npu", None)
        return npu is not None and bool(npu.is_available())

    def attention_priority(
        self, capability: DeviceCapability | None
    ) -> tuple[AttentionBackendEnum, ...]:
        """Prefer SDPA; ring attention needs a log-sum-exp, which only FlashAttention has here."""
        del capability
        return (
            AttentionBackendEnum.TORCH_SDPA,
            AttentionBackendEnum.FA,
        )
