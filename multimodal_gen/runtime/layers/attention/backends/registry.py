"""Finds backends by name: the built-in files of this folder, and installed plug-ins.

A plug-in package declares an entry point in the group `multimodal_gen.attention_backends` whose
name is the backend's name and whose object is an `AttentionBackend` subclass. Under a built-in name
it serves the platforms that the built-in classes do not.
"""

import logging
from functools import cache
from pkgutil import resolve_name
from types import MappingProxyType

import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.requirements import PackageProbe
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend
from multimodal_gen.runtime.layers.attention.backends.packages import ALL_PACKAGES
from multimodal_gen.runtime.layers.attention.request import Environment
from multimodal_gen.runtime.platforms import (
    AttentionBackendEnum,
    PlatformEnum,
    current_platform,
)
from multimodal_gen.runtime.platforms.entry_points import registered

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "multimodal_gen.attention_backends"

_FOLDER = "multimodal_gen.runtime.layers.attention"

# Several classes under one name serve different platforms; the first is the one users mean.
_BUILTIN: MappingProxyType[AttentionBackendEnum, tuple[str, ...]] = MappingProxyType(
    {
        AttentionBackendEnum.FA: (
            "backends.flash_attn:FlashAttentionBackend",
            "backends.vendor_flash_attn:XpuFlashAttentionBackend",
            "backends.vendor_flash_attn:MusaFlashAttentionBackend",
            "backends.vendor_flash_attn:NpuFlashAttentionBackend",
        ),
        AttentionBackendEnum.TORCH_SDPA: ("backends.sdpa:SDPABackend",),
        AttentionBackendEnum.TORCH_CUDNN_SDPA: ("backends.sdpa:CudnnSDPABackend",),
        AttentionBackendEnum.SAGE_ATTN: ("backends.sage_attn:SageAttentionBackend",),
        AttentionBackendEnum.SAGE_ATTN_3: ("backends.sage_attn:SageAttention3Backend",),
        AttentionBackendEnum.AITER: ("backends.aiter:AiterBackend",),
        AttentionBackendEnum.AITER_SAGE: ("backends.aiter:AiterSageBackend",),
        AttentionBackendEnum.FLEX_ATTN: ("backends.flex_attn:FlexAttentionBackend",),
        AttentionBackendEnum.FLASHINFER: ("backends.flashinfer:FlashInferBackend",),
        AttentionBackendEnum.XFORMERS: ("backends.xformers:XFormersBackend",),
        AttentionBackendEnum.TRITON_ATTN: ("backends.triton_attn:TritonAttentionBackend",),
        AttentionBackendEnum.SLIDING_TILE_ATTN: ("sparse.methods.sta.router:SlidingTileBackend",),
        AttentionBackendEnum.VIDEO_SPARSE_ATTN: ("sparse.methods.vsa:VideoSparseBackend",),
        AttentionBackendEnum.VMOBA_ATTN: ("sparse.methods.vmoba:VMoBABackend",),
        AttentionBackendEnum.SLA_ATTN: ("sparse.methods.sla:SLABackend",),
        AttentionBackendEnum.SAGE_SLA_ATTN: ("sparse.methods.sla:SageSLABackend",),
        AttentionBackendEnum.SPARSE_VIDEO_GEN_2_ATTN: ("sparse.methods.svg2:SVG2Backend",),
        AttentionBackendEnum.SOL_ATTN: ("sparse.methods.sol:SolBackend",),
        AttentionBackendEnum.SUBBLOCK_SPARSE_ATTN: ("sparse.methods.subblock:SubblockBackend",),
        AttentionBackendEnum.PISA_ATTN: ("sparse.methods.pisa:PisaBackend",),
        AttentionBackendEnum.STATIC_SPARSE_ATTN: ("sparse.methods.static:StaticBackend",),
        AttentionBackendEnum.SPARGE_ATTN: ("sparse.methods.sparge:SpargeBackend",),
        AttentionBackendEnum.CUBE_SPARSE_ATTN: ("sparse.methods.cube:CubeBackend",),
        AttentionBackendEnum.NABLA_ATTN: ("sparse.methods.nabla:NablaBackend",),
        AttentionBackendEnum.DRAFT_ATTN: ("sparse.methods.draft:DraftBackend",),
        AttentionBackendEnum.BSA_ATTN: ("sparse.methods.bsa:BsaBackend",),
        AttentionBackendEnum.VIDEO_SPARSE_ATTN_H3: ("sparse.methods.vsa_h3:VideoSparseH3Backend",),
        AttentionBackendEnum.SKIP_SOFTMAX: ("sparse.methods.skip_softmax:SkipSoftmaxBackend",),
    }
)


@cache
def backends_of(backend: AttentionBackendEnum) -> tuple[type[AttentionBackend], ...]:
    """Return the classes registered under a name, the one users mean first.

    Raises:
        ConfigError: the plug-in that declares `backend` is broken, or none declares it.
    """
    builtin = tuple(resolve_name(f"{_FOLDER}.{path}") for path in _BUILTIN.get(backend, ()))
    classes = builtin + load_plugins().get(str(backend), ())
    if not classes and str(backend) in broken_plugins():
        raise broken_plugins()[str(backend)]
    if not classes:
        raise ConfigError(
            f"attention backend {backend} must be registered by an installed package, none "
            f"declares it in the entry-point group {ENTRY_POINT_GROUP!r}"
        )
    return classes


def find_backend(backend: AttentionBackendEnum, platform: PlatformEnum) -> type[AttentionBackend]:
    """Return the class behind a name on a platform, or the main one where none serves it."""
    classes = backends_of(backend)
    for cls in classes:
        if any(platform in variant.platforms for variant in cls.variants):
            return cls
    return classes[0]


def all_backends() -> tuple[AttentionBackendEnum, ...]:
    """Return every known name: built-in ones in order of declaration, then plug-ins."""
    plugins = (AttentionBackendEnum(name) for name in load_plugins())
    return tuple(dict.fromkeys((*AttentionBackendEnum, *plugins)))


def load_plugins() -> MappingProxyType[str, tuple[type[AttentionBackend], ...]]:
    """Make the names of plug-ins known to `AttentionBackendEnum`, and return their classes."""
    return _read_plugins()[0]


@cache
def current_environment() -> Environment:
    """Return this process's environment: device and installed packages, probed on first use."""
    return Environment.of(current_platform(), _probes())


@cache
def cpu_environment() -> Environment:
    """Return the environment of tensors that live on the CPU of this process."""
    from multimodal_gen.runtime.platforms.devices import CpuPlatform

    return Environment.of(CpuPlatform(), _probes())


def environment_for(device: torch.device, environment: Environment) -> Environment:
    """Return the environment a tensor's device lives in: `environment`, or the CPU's."""
    if device.type == "cpu" and environment.platform is not PlatformEnum.CPU:
        return cpu_environment()
    return environment


def _probes() -> frozenset[PackageProbe]:
    plugged = (cls for classes in load_plugins().values() for cls in classes)
    return ALL_PACKAGES.union(*(cls.declared_packages() for cls in plugged))


def broken_plugins() -> MappingProxyType[str, ConfigError]:
    """Return what is wrong with the plug-ins that were left out, by the name of their entry."""
    return _read_plugins()[1]


@cache
def _read_plugins() -> tuple[
    MappingProxyType[str, tuple[type[AttentionBackend], ...]], MappingProxyType[str, ConfigError]
]:
    """Return the classes of installed plug-ins by name, and what is wrong with the broken ones.

    A broken one is left out with a warning: its error concerns only who asks for its name.
    """
    found: dict[str, tuple[type[AttentionBackend], ...]] = {}
    broken: dict[str, ConfigError] = {}

    def leave_out(name: str, error: ConfigError) -> None:
        logger.warning("leaving out an attention backend: %s", error)
        if name.isidentifier():
            name = str(AttentionBackendEnum.register_plugin_name(name))
        broken[name] = error

    for name, cls in registered(ENTRY_POINT_GROUP, AttentionBackend, leave_out):
        try:
            backend = _name_of(name, cls)
        except ConfigError as error:
            leave_out(name, error)
        else:
            found[str(backend)] = (*found.get(str(backend), ()), cls)
    return MappingProxyType(found), MappingProxyType(broken)


def _name_of(entry_name: str, cls: type[AttentionBackend]) -> AttentionBackendEnum:
    backend = AttentionBackendEnum.register_plugin_name(entry_name)
    if cls.backend is not backend:
        raise ConfigError(
            f"entry point {entry_name!r} in group {ENTRY_POINT_GROUP!r} must name a class "
            f"whose `backend` is {backend}, {cls.__name__} has {cls.backend}"
        )
    return backend
