"""Backends as users name them: one for all layers, or some for components and roles.

Importing this module imports neither torch nor diffusers.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress

from multimodal_gen.errors import ConfigError, nearest
from multimodal_gen.runtime.plain_values import MalformedError, read_mapping
from multimodal_gen.runtime.platforms.interface import AttentionBackendEnum
from multimodal_gen.runtime.setting import as_flag

__all__ = [
    "ROLES",
    "check_exclusive",
    "component_mapping",
    "parse_attention_backend",
    "parse_component_backends",
    "parse_component_key",
]

ROLES = ("self", "cross", "encoder")
"""What a layer attends to, as it is written in keys and flags."""

_PLUGIN_GROUP = "multimodal_gen.attention_backends"

_ComponentBackends = dict[str, AttentionBackendEnum | None]


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
        raise ConfigError(f"{name} must be the name of an attention backend, got {value!r}")
    if value.strip().lower() == "auto":
        return None
    # Not with the module, which `--help` imports.
    from importlib.metadata import entry_points

    plugins = {
        AttentionBackendEnum.register_plugin_name(entry.name): entry
        for entry in entry_points(group=_PLUGIN_GROUP)
    }
    try:
        backend = AttentionBackendEnum.parse(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
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
    for key, backend in component_mapping(value, name=name).items():
        component = parse_component_key(key, name=name)
        if component in found:
            raise ConfigError(f"{name} must name {component!r} once, got it twice")
        if not isinstance(backend, (str, AttentionBackendEnum, type(None))):
            raise ConfigError(f"{name} must give {component!r} a backend's name, got {backend!r}")
        found[component] = parse_attention_backend(backend, name=f"{name}: {component}")
    return found


def component_mapping(value: object, *, name: str) -> Mapping[object, object]:
    """Return what `value` says of components, with keys and values as they were written.

    Args:
        value: a mapping, a JSON object or `a=x,b=y`; None and empty text say nothing.
        name: the flag or argument it came from, for messages.

    Raises:
        ConfigError: malformed text, or a repeated key.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a mapping, a JSON object or a=x,b=y, got {value!r}")
    try:
        return read_mapping(value)
    except MalformedError as error:
        raise ConfigError(
            f"{name} must be component=backend pairs, a JSON object or a mapping; {error}"
        ) from None


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
        raise ConfigError(f"{name} must have component names as keys, got {key!r}")
    component, dot, role = (part.strip() for part in key.replace("-", "_").lower().partition("."))
    if not component or (dot and not roles):
        form = "component or component.role" if roles else "component, without a role"
        raise ConfigError(f"{name} must name a {form}, got {key!r}")
    if dot and role not in ROLES:
        raise ConfigError(
            f"{name} must name one of the roles {', '.join(ROLES)} after the dot, got {key!r}"
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
        ConfigError: `--attention-config` stands beside one of the others, or a backend's
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
