"""Backends as users name them: one for all layers, or some for components and roles.

Importing this module imports neither torch nor diffusers.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from multimodal_gen.errors import ConfigError, nearest, short
from multimodal_gen.settings import as_flag, mapping_of

ROLES = ("self", "cross", "encoder")
"""What a layer attends to, as it is written in keys and flags."""

COMPONENT_PAIRS = "component=backend"
"""What pairs that name backends of components look like, for messages."""

_PLUGIN_GROUP = "multimodal_gen.attention_backends"

_ComponentBackends: TypeAlias = "dict[str, AttentionBackendEnum | None]"


class NamedEnum(Enum):
    """An enum whose members are written as their values."""

    def __str__(self) -> str:
        return str(self.value)


class AttentionBackendEnum(NamedEnum):
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
    NABLA_ATTN = "nabla_attn"
    DRAFT_ATTN = "draft_attn"
    BSA_ATTN = "bsa_attn"
    VIDEO_SPARSE_ATTN_H3 = "video_sparse_attn_h3"
    SKIP_SOFTMAX = "skip_softmax"

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # By value: some releases of Python pickle by name, and the class has no plug-in's name. A
        # process that has not looked for plug-ins learns it so.
        plugin = _PLUGINS.get(self._value_)
        if plugin is None:
            return type(self), (self._value_,)
        return partial(type(self).register_plugin_name, sparse=plugin.sparse), (self._value_,)

    @property
    def is_sparse(self) -> bool:
        """Whether the backend skips part of the attention matrix."""
        return self in _SPARSE or _PLUGINS.get(self.value, _NO_PLUGIN).sparse

    @classmethod
    def parse(cls, text: str, *, name: str = "attention backend") -> "AttentionBackendEnum":
        """Return the member a user means by `text`.

        Case, surrounding blanks and `-` against `_` do not matter; `fa3`, `fa4` and `flash_attn`
        mean `fa`, `cudnn_sdpa` means `torch_cudnn_sdpa`, `sdpa` means `torch_sdpa`.

        Args:
            text: what the user gave.
            name: the flag or place it came from, for messages.

        Raises:
            ConfigError: no backend has that name; the message lists the names.
        """
        meant = text.strip().lower().replace("-", "_")
        meant = _ALIASES.get(meant, meant)
        try:
            return cls(meant)
        except ValueError:
            valid = [str(member) for member in cls] + sorted(_PLUGINS)
            raise ConfigError(
                f"{name} must be one of {', '.join(valid)}, got {short(text)}"
                f"{nearest(meant, valid)}"
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
            raise ConfigError(f"plug-in backend name must be an identifier, got {short(name)}")
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
        AttentionBackendEnum.NABLA_ATTN,
        AttentionBackendEnum.DRAFT_ATTN,
        AttentionBackendEnum.BSA_ATTN,
        AttentionBackendEnum.VIDEO_SPARSE_ATTN_H3,
        AttentionBackendEnum.SKIP_SOFTMAX,
    }
)


def parse_attention_backend(
    value: object, *, name: str = "--attention-backend"
) -> AttentionBackendEnum | None:
    """Return the backend `value` names; None and "auto" leave the choice to us.

    Args:
        value: what the user gave.
        name: the flag or place it came from, for messages.

    Raises:
        ConfigError: no backend has that name.
    """
    if value is None or isinstance(value, AttentionBackendEnum):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be the name of an attention backend, got {short(value)}")
    if value.strip().lower() == "auto":
        return None
    # Not with the module, which `--help` imports.
    from importlib.metadata import entry_points

    plugins = {
        AttentionBackendEnum.register_plugin_name(entry.name): entry
        for entry in entry_points(group=_PLUGIN_GROUP)
    }
    backend = AttentionBackendEnum.parse(value, name=name)
    if backend in plugins:
        # Its class says whether it is sparse; an error concerns the layer that selects it.
        with suppress(Exception):
            plugins[backend].load()
    return backend


def parse_component_backends(
    value: Mapping[str, object] | str | None,
    *,
    name: str = "--component-attention-backends",
) -> _ComponentBackends:
    """Return backends by `component` or `component.role`, from any of the accepted forms.

    Args:
        value: a mapping, a JSON object or `a=x,b=y`; `-` in keys means `_`.
        name: the flag or argument it came from, for messages.

    Raises:
        ConfigError: malformed text, a bad or repeated key, an unknown role or backend.
    """
    found: _ComponentBackends = {}
    for key, backend in mapping_of({} if value is None else value, name, COMPONENT_PAIRS).items():
        component = parse_component_key(key, name=name)
        if component in found:
            raise ConfigError(f"{name} must name {short(component)} once, got it twice")
        if not isinstance(backend, (str, AttentionBackendEnum, type(None))):
            raise ConfigError(
                f"{name} must give {short(component)} a backend's name, got {short(backend)}"
            )
        found[component] = parse_attention_backend(backend, name=f"{name}: {component}")
    return found


def parse_component_key(key: object, *, name: str, roles: bool = True) -> str:
    """Return a key such as `text_encoder` or `transformer.cross`, normalised.

    Case, blanks around its parts and `-` for `_` make no difference.

    Args:
        key: what the user wrote.
        name: the flag or place it came from, for messages.
        roles: accept `component.role`, else `component` only.

    Raises:
        ConfigError: the key is empty, or its role is not one of self, cross and encoder.
    """
    if not isinstance(key, str):
        raise ConfigError(f"{name} must have component names as keys, got {short(key)}")
    component, dot, role = (part.strip() for part in key.replace("-", "_").lower().partition("."))
    if not component or (dot and not roles):
        form = "component or component.role" if roles else "component, without a role"
        raise ConfigError(f"{name} must name a {form}, got {short(key)}")
    if dot and role not in ROLES:
        raise ConfigError(
            f"{name} must name one of the roles {', '.join(ROLES)} after the dot, got {short(key)}"
            f"{nearest(role, ROLES)}"
        )
    return component + dot + role


def check_exclusive(
    backend: object,
    backend_config: object,
    attention_config: object,
    *,
    spell: Callable[[str], str] = as_flag,
) -> None:
    """Check that the ways to ask for a backend do not contradict each other.

    Args:
        backend: `--attention-backend`, None when not given.
        backend_config: `--attention-backend-config`, None when not given.
        attention_config: `--attention-config`, None when not given.
        spell: what messages call a setting of that name.

    Raises:
        ConfigError: `--attention-config` is given with one of the others, or a backend's
            parameters are given without the backend.
    """
    structured = spell("attention_config")
    of_backend, parameters = spell("attention_backend"), spell("attention_backend_config")
    for name, value in ((of_backend, backend), (parameters, backend_config)):
        if attention_config is not None and value is not None:
            raise ConfigError(
                f"{structured} must not be given with {name}; move the backend and its "
                f"config into {structured}, or remove one"
            )
    if backend_config is not None and backend is None:
        raise ConfigError(
            f"{parameters} needs {of_backend}, which says whose parameters they are; add it"
        )
