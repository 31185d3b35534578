"""Turns what a user asked for into the scope that layers select by.

`--attention-config` is a mapping, here with everything it may hold:

    backend: fa              # what runs where no rule matches; auto or absent: automatic
    config: {}               # parameters of that backend
    strict: false            # refuse the documented fallbacks too
    rules:                   # the first rule that matches a layer and a step wins
      - component: transformer
        role: self           # self, cross or encoder
        layers: 0-3,38
        steps: 0-9           # or, by the noise level of the scheduler, sigma: ">0.9"
        backend: torch_sdpa
        config: {}
"""

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from multimodal_gen.errors import ConfigError, nearest
from multimodal_gen.runtime.backend_names import (
    check_exclusive,
    parse_attention_backend,
    parse_component_backends,
    parse_component_key,
)
from multimodal_gen.runtime.layers.attention.auto_table import AutoTable, table_for
from multimodal_gen.runtime.layers.attention.backends.registry import (
    cpu_environment,
    current_environment,
    find_backend,
)
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    IndexSelector,
    SigmaSelector,
    build_config,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    Rule,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import as_flag, read_mapping, short

__all__ = ["scope_from", "scope_from_args"]

_RawConfig = str | os.PathLike[str] | Mapping[str, object]

_TOP_KEYS = ("backend", "config", "strict", "rules")
_RULE_KEYS = ("component", "role", "layers", "steps", "sigma", "backend", "config")


def scope_from_args(args: ServerArgs) -> SelectionScope:
    """Return the scope a run's arguments ask for; empty with backend `diffusers`.

    Raises:
        ConfigError: a configuration cannot be read or does not fit its backend.
    """
    if args.backend == "diffusers":
        return SelectionScope(strict=args.strict_attention)
    return scope_from(
        attention_backend=args.attention_backend,
        attention_backend_config=args.attention_backend_config,
        component_attention_backends=args.component_attention_backends,
        attention_config=args.attention_config,
        attention_auto_table=args.attention_auto_table,
        strict=args.strict_attention,
        spell=as_flag,
    )


def scope_from(
    *,
    attention_backend: AttentionBackendEnum | str | None = None,
    attention_backend_config: _RawConfig | BackendConfig | None = None,
    component_attention_backends: Mapping[str, AttentionBackendEnum | str | None]
    | str
    | None = None,
    attention_config: _RawConfig | None = None,
    attention_auto_table: str | os.PathLike[str] | None = None,
    strict: bool = False,
    spell: Callable[[str], str] = str,
) -> SelectionScope:
    """Return the scope these settings ask for.

    Args:
        attention_backend: backend of every layer; None or "auto" for an automatic choice.
        attention_backend_config: its parameters: its configuration object, a mapping, a path to
            a JSON or YAML file, a JSON object, or `k=v,k=v`.
        component_attention_backends: backend by `component` or `component.role`, stronger than
            everything else here: a mapping, a JSON object or `a=x,b=y`.
        attention_config: rules over component, role, layers and steps, in the same forms as
            `attention_backend_config`; excludes `attention_backend`.
        attention_auto_table: a file that `sglang attention bench --save` wrote on this machine,
            which automatic choices then go by.
        strict: refuse the documented fallbacks too.
        spell: what messages call the setting of a name; by default that name.

    Raises:
        ConfigError: settings contradict each other, cannot be read or do not fit their backend.
    """
    backend = parse_attention_backend(attention_backend, name=spell("attention_backend"))
    # Empty text and empty mappings ask for nothing.
    given = attention_backend_config or None
    structured = attention_config or None
    check_exclusive(backend, given, structured, spell=spell)
    overrides = parse_component_backends(
        component_attention_backends, name=spell("component_attention_backends")
    )
    name = spell("attention_backend_config")
    components = {
        key: BackendPreference(
            source=Source.COMPONENT,
            backend=override,
            config=_config(override, None, name=name),
            detail=key,
        )
        for key, override in overrides.items()
    }
    if structured is not None:
        default, rules, strict_too = _structured(structured, spell("attention_config"))
    else:
        default = _asked(backend, _config(backend, given, name=name))
        rules, strict_too = (), False
    return SelectionScope(
        default=default,
        components=MappingProxyType(components),
        rules=rules,
        strict=strict or strict_too,
        auto_table=_table(attention_auto_table, name=spell("attention_auto_table")),
    )


def _table(path: str | os.PathLike[str] | None, *, name: str) -> AutoTable | None:
    """Return the table of a file, which must have been measured on this machine."""
    if path is None:
        return None
    return table_for(path, (current_environment(), cpu_environment()), name=name)


def _asked(
    backend: AttentionBackendEnum | None, config: BackendConfig | None
) -> BackendPreference | None:
    if backend is None:
        return None
    return BackendPreference(source=Source.SETTINGS, backend=backend, config=config)


def _config(
    backend: AttentionBackendEnum | None,
    raw: _RawConfig | BackendConfig | None,
    *,
    name: str,
) -> BackendConfig | None:
    """Return the configuration of `backend`; its defaults are checked too."""
    if backend is None:
        return None
    cls = find_backend(backend, current_platform().name)
    if isinstance(raw, BackendConfig):
        if not isinstance(raw, cls.config_cls):
            raise ConfigError(
                f"{name} must be a {cls.config_cls.__name__} for {backend}, got {short(raw)}"
            )
        return raw
    mapping = {} if raw is None else read_mapping(raw, name=name)
    return build_config(cls.config_cls, mapping, backend=str(backend))


def _structured(
    raw: _RawConfig, name: str
) -> tuple[BackendPreference | None, tuple[Rule, ...], bool]:
    mapping = read_mapping(raw, name=name)
    _check_keys(mapping, _TOP_KEYS, name)
    strict = mapping.get("strict", False)
    if not isinstance(strict, bool):
        raise ConfigError(f"{name}: strict must be true or false, got {short(strict)}")
    backend, config = _backend_and_config(mapping, f"{name}: ")
    rules = mapping.get("rules", ())
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise ConfigError(f"{name}: rules must be a list of mappings, got {short(rules)}")
    parsed = tuple(_rule(rule, f"{name}: rules[{i}]") for i, rule in enumerate(rules))
    return _asked(backend, config), parsed, strict


def _rule(raw: object, where: str) -> Rule:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {short(raw)}")
    _check_keys(raw, _RULE_KEYS, where)
    if "backend" not in raw:
        raise ConfigError(f"{where}.backend must be given: the backend's name, or auto")
    backend, config = _backend_and_config(raw, f"{where}.")
    component, sigma = raw.get("component"), raw.get("sigma")
    if component is not None:
        component = parse_component_key(component, name=f"{where}.component", roles=False)
    return Rule(
        backend=backend,
        config=config,
        component=component,
        role=_role(raw.get("role"), f"{where}.role"),
        layers=_selector(raw.get("layers"), f"{where}.layers"),
        steps=_selector(raw.get("steps"), f"{where}.steps"),
        sigma=None if sigma is None else SigmaSelector.parse(sigma, name=f"{where}.sigma"),
    )


def _backend_and_config(
    mapping: Mapping[str, object], prefix: str
) -> tuple[AttentionBackendEnum | None, BackendConfig | None]:
    named = mapping.get("backend")
    backend = parse_attention_backend(named, name=f"{prefix}backend")
    raw = mapping.get("config")
    if not isinstance(raw, (Mapping, str, type(None))):
        raise ConfigError(f"{prefix}config must be a mapping, got {short(raw)}")
    if raw is not None and backend is None:
        raise ConfigError(
            f"{prefix}config needs {prefix}backend, which says whose parameters they are; name a "
            f"backend"
        )
    return backend, _config(backend, raw, name=f"{prefix}config")


def _check_keys(mapping: Mapping[str, object], valid: tuple[str, ...], where: str) -> None:
    for key in mapping:
        if key not in valid:
            raise ConfigError(
                f"{where} must have keys among {', '.join(valid)}, got {short(key)}"
                f"{nearest(str(key), valid)}"
            )


def _role(value: object, where: str) -> AttentionRole | None:
    if value is None:
        return None
    names = tuple(str(role) for role in AttentionRole)
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in names:
        raise ConfigError(
            f"{where} must be one of {', '.join(names)}, got {short(value)}{nearest(text, names)}"
        )
    return AttentionRole(text)


def _selector(value: object, where: str) -> IndexSelector | None:
    return None if value is None else IndexSelector.parse(value, name=where)
