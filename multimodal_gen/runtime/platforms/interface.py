"""The vocabulary shared by every layer above: backend names, device capability, platforms.

Importing this module imports nothing heavy, so the command line can list names without torch.
"""

from abc import ABC, abstractmethod
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from multimodal_gen.errors import ConfigError, nearest


class AttentionBackendEnum(Enum):
    """Attention backends by name; the value is the spelling used on the command line.

    Installed plug-ins add names through `register_plugin_name`. `AttentionBackendEnum(value)` finds
    them, while iteration lists the built-in ones only.
    """

    FA = "fa"
    TORCH_SDPA = "torch_sdpa"
    TORCH_CUDNN_SDPA = "torch_cudnn_sdpa"
    SAGE_ATTN = "sage_attn"
    SAGE_ATTN_3 = "sage_attn_3"
    AITER = "aiter"
    AITER_SAGE = "aiter_sage"
    FLEX_ATTN = "flex_attn"
    FLASHINFER = "flashinfer"
    XFORMERS = "xformers"
    TRITON_ATTN = "triton_attn"
    SLIDING_TILE_ATTN = "sliding_tile_attn"
    VIDEO_SPARSE_ATTN = "video_sparse_attn"
    VMOBA_ATTN = "vmoba_attn"
    SLA_ATTN = "sla_attn"
    SAGE_SLA_ATTN = "sage_sla_attn"
    SPARSE_VIDEO_GEN_2_ATTN = "sparse_video_gen_2_attn"
    SOL_ATTN = "sol_attn"
    SUBBLOCK_SPARSE_ATTN = "subblock_sparse_attn"
    PISA_ATTN = "pisa_attn"
    STATIC_SPARSE_ATTN = "static_sparse_attn"
    SPARGE_ATTN = "sparge_attn"
    CUBE_SPARSE_ATTN = "cube_sparse_attn"

    def __str__(self) -> str:
        return str(self.value)

    def __reduce_ex__(self, protocol: object) -> tuple[type["AttentionBackendEnum"], tuple[str]]:
        # By value: some releases of Python pickle by name, and the class has no plug-in's name.
        return type(self), (self._value_,)

    @property
    def is_sparse(self) -> bool:
        """Whether the backend skips part of the attention matrix."""
        return self in _SPARSE or _PLUGINS.get(self.value, _NO_PLUGIN).sparse

    @classmethod
    def parse(cls, text: str) -> "AttentionBackendEnum":
        """Return the member a user means by `text`.

        Case, surrounding blanks and `-` against `_` do not matter; `fa3`, `fa4` and `flash_attn`
        mean `fa`, `cudnn_sdpa` means `torch_cudnn_sdpa`, `sdpa` means `torch_sdpa`.

        Raises:
            ConfigError: no backend has that name; the message lists the names.
        """
        name = text.strip().lower().replace("-", "_")
        name = _ALIASES.get(name, name)
        try:
            return cls(name)
        except ValueError:
            valid = [str(member) for member in cls] + sorted(_PLUGINS)
            raise ConfigError(
                f"attention backend must be one of {', '.join(valid)}, got {text!r}"
                f"{nearest(name, valid)}"
            ) from None

    @classmethod
    def register_plugin_name(cls, name: str, *, sparse: bool = False) -> "AttentionBackendEnum":
        """Make `name` a value of this enum and return its member; calling again is harmless.

        Args:
            name: what users type.
            sparse: whether the backend skips part of the attention matrix; who says so once, as
                the class of the backend does, says it for all who know the name.
        """
        name = name.strip().lower()
        if not name.isidentifier():
            raise ConfigError(f"plug-in backend name must be an identifier, got {name!r}")
        if name in cls._value2member_map_:
            return cls(name)
        if name in _PLUGINS:
            if sparse:
                _PLUGINS[name] = _PLUGINS[name]._replace(sparse=True)
            return cls(name)
        member = object.__new__(cls)
        member._name_ = name.upper()
        member._value_ = name
        _PLUGINS[name] = _Plugin(member, sparse)
        return member

    @classmethod
    def _missing_(cls, value: object) -> "AttentionBackendEnum | None":
        return _PLUGINS.get(value, _NO_PLUGIN).member if isinstance(value, str) else None


class _Plugin(NamedTuple):
    """A name that an installed plug-in added."""

    member: AttentionBackendEnum | None
    sparse: bool


_NO_PLUGIN = _Plugin(None, False)

# Process-wide, because enum members are.
_PLUGINS: dict[str, _Plugin] = {}

_ALIASES = MappingProxyType(
    {
        "fa3": "fa",
        "fa4": "fa",
        "flash_attn": "fa",
        "sdpa": "torch_sdpa",
        "cudnn_sdpa": "torch_cudnn_sdpa",
    }
)

_SPARSE = frozenset(
    {
        AttentionBackendEnum.SLIDING_TILE_ATTN,
        AttentionBackendEnum.VIDEO_SPARSE_ATTN,
        AttentionBackendEnum.VMOBA_ATTN,
        AttentionBackendEnum.SLA_ATTN,
        AttentionBackendEnum.SAGE_SLA_ATTN,
        AttentionBackendEnum.SPARSE_VIDEO_GEN_2_ATTN,
        AttentionBackendEnum.SOL_ATTN,
        AttentionBackendEnum.SUBBLOCK_SPARSE_ATTN,
        AttentionBackendEnum.PISA_ATTN,
        AttentionBackendEnum.STATIC_SPARSE_ATTN,
        AttentionBackendEnum.SPARGE_ATTN,
        AttentionBackendEnum.CUBE_SPARSE_ATTN,
    }
)


class PlatformEnum(Enum):
    """Kinds of accelerator; `OOT` stands for platforms registered by installed packages."""

    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MUSA = "musa"
    MPS = "mps"
    NPU = "npu"
    CPU = "cpu"
    OOT = "oot"

    def __str__(self) -> str:
        return str(self.value)


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
