"""The vocabulary shared by every layer above: device capability, platforms, backend names.

Importing this module imports nothing heavy, so the command line can list names without torch.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from multimodal_gen.runtime.backend_names import AttentionBackendEnum as AttentionBackendEnum
from multimodal_gen.runtime.backend_names import NamedEnum


class PlatformEnum(NamedEnum):
    """Kinds of accelerator; `OOT` stands for platforms registered by installed packages."""

    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MUSA = "musa"
    MPS = "mps"
    NPU = "npu"
    CPU = "cpu"
    OOT = "oot"


class DeviceCapability(NamedTuple):
    """Compute capability of a GPU, e.g. (9, 0) for Hopper."""

    major: int
    minor: int

    def as_version_str(self) -> str:
        """Return the capability as "9.0"."""
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        """Return the capability as 90; the minor part is one digit."""
        return self.major * 10 + self.minor


class Platform(ABC):
    """One kind of device: how to detect it, and which dense backends it prefers.

    Attributes:
        name: the platform's kind.
        device_type: the string torch uses in `torch.device`.
        priority: the dense backends to try when nothing was asked, best first.
        always: a backend that serves every request on this platform, whatever was asked, or None.
        dense_fallback: what an unsupported explicit request falls back to here, or None to refuse.
    """

    name: ClassVar[PlatformEnum]
    device_type: ClassVar[str]
    priority: ClassVar[tuple[AttentionBackendEnum, ...]] = (AttentionBackendEnum.TORCH_SDPA,)
    always: ClassVar[AttentionBackendEnum | None] = None
    dense_fallback: ClassVar[AttentionBackendEnum | None] = None

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this process can use such a device."""

    def attention_priority(
        self, capability: DeviceCapability | None
    ) -> tuple[AttentionBackendEnum, ...]:
        """Return `priority`; a platform may have another one by compute capability."""
        del capability
        return self.priority

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """Return the compute capability of a device, or None where the notion does not exist."""
        del device_id
        return None

    def get_device_name(self, device_id: int = 0) -> str:
        """Return a readable device name."""
        del device_id
        return str(self.name)

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the device reaches `capability`, given as (9, 0) or 90."""
        current = self.get_device_capability(device_id)
        if current is None:
            return False
        if isinstance(capability, int):
            return current.to_int() >= capability
        return tuple(current) >= tuple(capability)

    def is_cuda(self) -> bool:
        """Whether this is an NVIDIA GPU."""
        return self.name is PlatformEnum.CUDA

    def is_rocm(self) -> bool:
        """Whether this is an AMD GPU."""
        return self.name is PlatformEnum.ROCM

    def is_xpu(self) -> bool:
        """Whether this is an Intel GPU."""
        return self.name is PlatformEnum.XPU

    def is_musa(self) -> bool:
        """Whether this is a Moore Threads GPU."""
        return self.name is PlatformEnum.MUSA

    def is_mps(self) -> bool:
        """Whether this is an Apple GPU."""
        return self.name is PlatformEnum.MPS

    def is_npu(self) -> bool:
        """Whether this is an Ascend NPU."""
        return self.name is PlatformEnum.NPU

    def is_cpu(self) -> bool:
        """Whether this is the CPU."""
        return self.name is PlatformEnum.CPU

    def is_hopper(self, device_id: int = 0) -> bool:
        """Whether the device is an NVIDIA GPU of compute capability 9.0."""
        return self.is_cuda() and self.get_device_capability(device_id) == (9, 0)

    def is_blackwell(self, device_id: int = 0) -> bool:
        """Whether the device is an NVIDIA GPU of compute capability 10.x."""
        return self._major(device_id) == 10

    def is_sm120(self, device_id: int = 0) -> bool:
        """Whether the device is an NVIDIA GPU of compute capability 12.x."""
        return self._major(device_id) == 12

    def _major(self, device_id: int) -> int | None:
        capability = self.get_device_capability(device_id) if self.is_cuda() else None
        return capability.major if capability else None
