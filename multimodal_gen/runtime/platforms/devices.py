"""The platforms that come with the package."""

from typing import ClassVar, TypeAlias

from multimodal_gen.runtime.platforms.interface import (
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)

_Backends: TypeAlias = tuple[AttentionBackendEnum, ...]
_FA_FIRST: _Backends = (AttentionBackendEnum.FA, AttentionBackendEnum.TORCH_SDPA)


class MpsPlatform(Platform):
    """Apple GPUs: always SDPA."""

    name: ClassVar[PlatformEnum] = PlatformEnum.MPS
    device_type: ClassVar[str] = "mps"
    always: ClassVar[AttentionBackendEnum | None] = AttentionBackendEnum.TORCH_SDPA

    def is_available(self) -> bool:
        """Whether torch sees an Apple GPU."""
        import torch

        return torch.backends.mps.is_available()


class _TorchModulePlatform(Platform):
    """A device whose module of torch, perhaps an extension's, is called as the device is."""

    dense_fallback: ClassVar[AttentionBackendEnum | None] = AttentionBackendEnum.TORCH_SDPA

    def is_available(self) -> bool:
        """Whether torch has the module and sees a device."""
        import torch

        module = getattr(torch, self.device_type, None)
        return module is not None and bool(module.is_available())


class XpuPlatform(_TorchModulePlatform):
    """Intel GPUs: their own FlashAttention for fp16 and bf16 at its head sizes, else SDPA."""

    name: ClassVar[PlatformEnum] = PlatformEnum.XPU
    device_type: ClassVar[str] = "xpu"
    priority: ClassVar[_Backends] = _FA_FIRST


class _TorchCudaPlatform(Platform):
    """GPUs that torch knows as "cuda"."""

    device_type: ClassVar[str] = "cuda"
    _built_for: ClassVar[str]

    def is_available(self) -> bool:
        """Whether torch is built for such GPUs and sees one."""
        import torch

        return getattr(torch.version, self._built_for) is not None and torch.cuda.is_available()

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability:
        """Return the compute capability; of AMD, the generation (gfx942 is (9, 4))."""
        import torch

        return DeviceCapability(*torch.cuda.get_device_capability(device_id))

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the GPU's marketing name."""
        import torch

        return torch.cuda.get_device_name(device_id)


class RocmPlatform(_TorchCudaPlatform):
    """AMD GPUs: FlashAttention where installed, else SDPA; AITER when asked for."""

    name: ClassVar[PlatformEnum] = PlatformEnum.ROCM
    priority: ClassVar[_Backends] = _FA_FIRST
    _built_for: ClassVar[str] = "hip"


class CudaPlatform(_TorchCudaPlatform):
    """NVIDIA GPUs: the kernel that was measured to be the fastest, else SDPA."""

    name: ClassVar[PlatformEnum] = PlatformEnum.CUDA
    _built_for: ClassVar[str] = "cuda"

    def attention_priority(
        self, capability: DeviceCapability | None
    ) -> tuple[AttentionBackendEnum, ...]:
        """Prefer our own kernel on SM90 and FlashAttention from SM80 on; others take SDPA."""
        if capability is None or capability.major < 8 or capability.major == 12:
            return (AttentionBackendEnum.TORCH_SDPA,)
        if capability == DeviceCapability(9, 0):
            return (AttentionBackendEnum.TRITON_ATTN, *_FA_FIRST)
        return _FA_FIRST


class NpuPlatform(_TorchModulePlatform):
    """Ascend NPUs: SDPA; the NPU's own FlashAttention for ring attention or when asked for."""

    name: ClassVar[PlatformEnum] = PlatformEnum.NPU
    device_type: ClassVar[str] = "npu"
    # Ring attention needs a log-sum-exp, which only FlashAttention has here.
    priority: ClassVar[_Backends] = (
        AttentionBackendEnum.TORCH_SDPA,
        AttentionBackendEnum.FA,
    )


class MusaPlatform(_TorchModulePlatform):
    """Moore Threads GPUs: FlashAttention where installed, else SDPA; SageAttention on request."""

    name: ClassVar[PlatformEnum] = PlatformEnum.MUSA
    device_type: ClassVar[str] = "musa"
    priority: ClassVar[_Backends] = _FA_FIRST


class CpuPlatform(Platform):
    """The CPU: SDPA."""

    name: ClassVar[PlatformEnum] = PlatformEnum.CPU
    device_type: ClassVar[str] = "cpu"
    dense_fallback: ClassVar[AttentionBackendEnum | None] = AttentionBackendEnum.TORCH_SDPA

    def is_available(self) -> bool:
        """Always."""
        return True
