"""Who asked for which backend: what a user configured, and what that is for one layer.

`scope_from` reads settings into a `SelectionScope`; `decide` says what they ask for at a layer,
before anything is looked up or cached. From the strongest: forced (process-wide or by context
manager), component with role, component, the command line (`--attention-backend`, or the rules of
`--attention-config`), the layer's own default, automatic choice.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from multimodal_gen.errors import (
    ComponentAttentionBackendNotAppliedError,
    ConfigError,
    nearest,
    short,
)
from multimodal_gen.runtime.backend_names import (
    ROLES,
    NamedEnum,
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
    DensePart,
    IndexSelector,
    SigmaSelector,
    SparseConfig,
    StepSet,
    build_config,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole, LayerSite
from multimodal_gen.runtime.layers.attention.warn_once import PROCESS, WarnOnce
from multimodal_gen.runtime.managers.forward_context import set_for_block
from multimodal_gen.runtime.platforms import (
    AttentionBackendEnum,
    PlatformEnum,
    current_platform,
)
from multimodal_gen.settings import as_flag, expect, read_mapping

if TYPE_CHECKING:
    from multimodal_gen.runtime.server_args import ServerArgs


class Source(NamedEnum):
    """Who asked for a backend, from the strongest."""

    ARGUMENT = "argument"
    FORCED = "forced"
    COMPONENT = "component"
    SETTINGS = "settings"
    LAYER_DEFAULT = "layer default"
    AUTO = "auto"

    @property
    def explicit(self) -> bool:
        """Whether a user named the backend, so that it is honoured or refused."""
        return self not in (Source.LAYER_DEFAULT, Source.AUTO)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendPreference:
    """One request for a backend.

    Attributes:
        source: who asked.
        backend: the backend, or None for an automatic choice.
        config: the backend's configuration, or None for its defaults.
        detail: what exactly asked, e.g. "transformer.cross" or "rule 2".
        narrow: a rule that names the component or the role it is for.
        dense_reason: why this part of a sparse backend's schedule runs on a dense one; "" where
            the backend itself runs.
    """

    source: Source
    backend: AttentionBackendEnum | None = None
    config: BackendConfig | None = None
    detail: str = ""
    narrow: bool = False
    dense_reason: str = ""

    @property
    def who(self) -> str:
        """The source with what exactly asked, e.g. "component transformer.cross"."""
        return f"{self.source} {self.detail}".rstrip()


AUTO = BackendPreference(source=Source.AUTO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of `--attention-config`; a field that is None matches everything.

    Attributes:
        backend: what matching layers and steps run; None for an automatic choice.
        config: its configuration.
        component: component name, with or without its numbered suffix.
        role: layer role.
        layers: layer indices.
        steps: denoising steps; a rule with some speaks of no encoder. Text and image encoders run
            before the first step. A text refiner inside a denoiser has their role and works on
            the prompt alone, so what it runs does not change from step to step either.
        sigma: denoising steps by their noise level; with `steps`, those that both name.
    """

    backend: AttentionBackendEnum | None
    config: BackendConfig | None = None
    component: str | None = None
    role: AttentionRole | None = None
    layers: IndexSelector | None = None
    steps: IndexSelector | None = None
    sigma: SigmaSelector | None = None

    @property
    def when(self) -> StepSet | None:
        """The denoising steps it speaks of, or None for all."""
        if self.steps is None and self.sigma is None:
            return None
        return StepSet(indices=self.steps, sigma=self.sigma)

    def matches(self, site: LayerSite) -> bool:
        """Whether the rule speaks of `site`, whatever the step."""
        return (
            (self.component is None or self.component in component_names(site.component))
            and (self.role is None or self.role is site.role)
            and (self.when is None or site.role is not AttentionRole.ENCODER)
            and (self.layers is None or (site.layer is not None and site.layer in self.layers))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionScope:
    """What a user configured for a whole run.

    Attributes:
        default: `--attention-backend`, or the top of `--attention-config`; None for automatic.
        components: overrides by "component" or "component.role".
        rules: rules of `--attention-config`, tried in order.
        strict: refuse the documented fallbacks too.
        auto_table: what automatic choices go by, in place of the package's own table.
        spare: what layers that need none of it get too, for those who look at their calls: trained
            parts of their checkpoint, "gate" and "projection", and a scheduler's "sigmas".
        warnings: what the user was warned of.
    """

    default: BackendPreference | None = None
    components: Mapping[str, BackendPreference] = field(
        default_factory=lambda: MappingProxyType({})
    )
    rules: tuple[Rule, ...] = ()
    strict: bool = False
    auto_table: AutoTable | None = None
    spare: frozenset[str] = frozenset()
    warnings: WarnOnce = field(default=PROCESS, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be copied or pickled, and models with their layers can be.
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return partial(SelectionScope, **given | {"components": dict(self.components)}), ()

    def component_override(self, site: LayerSite) -> BackendPreference | None:
        """Return the override that applies to `site`; a role beats its component."""
        names = component_names(site.component)
        keys = (*(f"{name}.{site.role}" for name in names), *names)
        return next((self.components[key] for key in keys if key in self.components), None)


# A schedule as asked for: the first entry whose steps hold (None: every step) is the one that runs.
PreferenceSchedule = tuple[tuple[StepSet | None, BackendPreference], ...]


def component_names(component: str | None) -> tuple[str, ...]:
    """Return the names a component answers to: its own, then without a numbered suffix."""
    if component is None:
        return ()
    stem, _, number = component.rpartition("_")
    return (component, stem) if stem and number.isdigit() else (component,)


def layer_of(prefix: str) -> int | None:
    """Return the first number among the parts of a dotted path, or None."""
    return next((int(p) for p in prefix.split(".") if p.isascii() and p.isdigit()), None)


def decide(
    site: LayerSite,
    scope: SelectionScope,
    *,
    forced: AttentionBackendEnum | None = None,
    construction: BackendPreference | None = None,
    layer_default: AttentionBackendEnum | None = None,
) -> PreferenceSchedule:
    """Return who asks for what at `site`, by the order of precedence above; pure.

    Args:
        site: where the layer sits.
        scope: what the user configured for the run.
        forced: the forced backend, or None.
        construction: the override of the component the layer was constructed in, or None.
        layer_default: the layer's own preference, or None.
    """
    override = construction or scope.component_override(site)
    if forced is not None:
        override = BackendPreference(source=Source.FORCED, backend=forced)
    if override is not None:
        return ((None, override),)
    schedule: list[tuple[StepSet | None, BackendPreference]] = []
    for number, rule in enumerate(scope.rules, start=1):
        if rule.matches(site):
            asked = BackendPreference(
                source=Source.SETTINGS if rule.backend else Source.AUTO,
                backend=rule.backend,
                config=rule.config,
                detail=f"rule {number}",
                narrow=rule.component is not None or rule.role is not None,
            )
            schedule.append((rule.when, asked))
            if rule.when is None:
                return tuple(schedule)
    if scope.default is not None and scope.default.backend is not None:
        last = scope.default
    elif layer_default is not None:
        last = BackendPreference(source=Source.LAYER_DEFAULT, backend=layer_default)
    else:
        last = AUTO
    return (*schedule, (None, last))


def with_dense_parts(
    schedule: PreferenceSchedule,
    site: LayerSite,
    platform: PlatformEnum,
    warnings: WarnOnce = PROCESS,
) -> PreferenceSchedule:
    """Add to a schedule the parts that sparse backends leave to a dense one.

    Args:
        schedule: who asks for what; the first entry whose steps hold is the one that runs.
        site: where the layer sits.
        platform: where it runs.
        warnings: of the pipeline, which gets one where all of its layers are dense, or some that
            it lacks are to be.

    Raises:
        ConfigError: a sparse backend was asked for without parameters it must have, or with a share
            of layers whose number is unknown.
    """
    if site.role is not AttentionRole.SELF:
        return schedule
    found: list[tuple[StepSet | None, BackendPreference]] = []
    for steps, asked in schedule:
        config = _sparse_config(asked, platform)
        total = site.num_layers
        odd = config and (config.never_sparse("layers", total) or config.layers_beyond(total))
        if odd is not None:
            warnings.warn(f"{asked.backend} {odd}")
        found += [(steps, asked)] if config is None else _parts(steps, asked, site, config)
    return tuple(found)


def _parts(
    steps: StepSet | None, asked: BackendPreference, site: LayerSite, config: SparseConfig
) -> Iterator[tuple[StepSet | None, BackendPreference]]:
    for part in config.dense_parts("layers"):
        if site.layer is not None and _holds_layer(part, site.layer, site, asked):
            yield steps, replace(asked, dense_reason=_reason("layers", str(part.indices), part))
            return
    for part in config.dense_parts("steps"):
        shared = part.indices if steps is None else part.indices & steps
        if shared is not None:
            yield shared, replace(asked, dense_reason=_reason("steps", str(shared), part))
    yield steps, asked


def _reason(axis: str, indices: str, part: DensePart) -> str:
    if part.indices.first is not None:
        return f"the {indices} {axis} are dense (`{part.given}`)"
    single = indices.isdigit()
    verb = f"{axis[:-1]} {indices} is" if single else f"{axis} {indices} are"
    return f"{verb} dense (`{part.given}`)"


def _holds_layer(part: DensePart, layer: int, site: LayerSite, asked: BackendPreference) -> bool:
    if site.num_layers is None and part.indices.first is not None:
        raise ConfigError(
            f"{asked.backend} must know how many layers a model has to keep a share of them dense, "
            f"got layer {layer} of an unknown number; pass site=LayerSite(layer=..., "
            f"num_layers=...), or give a number of layers above 1 or 0"
        )
    return part.indices.holds(layer, site.num_layers or 0)


def _sparse_config(asked: BackendPreference, platform: PlatformEnum) -> SparseConfig | None:
    if asked.backend is None or not asked.backend.is_sparse:
        return None
    config = asked.config or find_backend(asked.backend, platform).config_cls()
    return config if isinstance(config, SparseConfig) else None


class _Forced:
    """The backend that every layer is forced to.

    Attributes:
        in_process: for every thread, as `global_force_attn_backend` is documented; None for none.
        in_context: inside a context manager, a tuple of one, so that forcing None there ends an
            outer force; None outside.
    """

    def __init__(self) -> None:
        self.in_process: AttentionBackendEnum | None = None
        self.in_context: ContextVar[tuple[AttentionBackendEnum | None] | None] = ContextVar(
            "multimodal_gen_forced", default=None
        )


FORCED: Final = _Forced()
_SCOPE: ContextVar[SelectionScope | None] = ContextVar("multimodal_gen_scope", default=None)


@dataclass(slots=True, kw_only=True)
class ComponentConstruction:
    """A component under construction: its name, its overrides, and the layers they reached.

    Attributes:
        name: component name.
        by_role: override per role name; the key "" holds for every role.
        used_keys: the keys of `by_role` that a layer took.
    """

    name: str
    by_role: Mapping[str, BackendPreference]
    used_keys: set[str] = field(default_factory=set)


_COMPONENT: ContextVar[ComponentConstruction | None] = ContextVar(
    "multimodal_gen_component", default=None
)


def as_backend(backend: AttentionBackendEnum | str) -> AttentionBackendEnum:
    """Return a backend given by member or by name.

    Raises:
        ConfigError: no backend has that name, or it is neither.
    """
    if isinstance(backend, AttentionBackendEnum):
        return backend
    expect("attention backend", backend, str, "an AttentionBackendEnum member or its name")
    return AttentionBackendEnum.parse(backend)


def forced_backend() -> AttentionBackendEnum | None:
    """Return the forced backend of this thread or process, or None."""
    local = FORCED.in_context.get()
    return FORCED.in_process if local is None else local[0]


def global_force_attn_backend(backend: AttentionBackendEnum | str | None) -> None:
    """Force every attention layer of the process to `backend`, at once; None ends it."""
    FORCED.in_process = None if backend is None else as_backend(backend)


def global_force_attn_backend_context_manager(
    backend: AttentionBackendEnum | str | None,
) -> AbstractContextManager[None]:
    """Force `backend` inside the `with` block; other threads do not see it."""
    return set_for_block(FORCED.in_context, (None if backend is None else as_backend(backend),))


def current_scope() -> SelectionScope:
    """Return the scope layers under construction take; the empty one unless set."""
    return _SCOPE.get() or SelectionScope()


def use_scope(scope: SelectionScope) -> AbstractContextManager[None]:
    """Make `scope` the one that layers constructed inside the `with` block take."""
    return set_for_block(_SCOPE, scope)


def current_component() -> ComponentConstruction | None:
    """Return the component under construction, or None."""
    return _COMPONENT.get()


def claim_component_override(role: AttentionRole) -> BackendPreference | None:
    """Return the override for a layer of `role` constructed here, and count it as used."""
    construction = _COMPONENT.get()
    if construction is None:
        return None
    key = str(role) if str(role) in construction.by_role else ""
    asked = construction.by_role.get(key)
    if asked is not None:
        construction.used_keys.add(key)
    return asked


@contextmanager
def component_attn_backend_context_manager(
    attn_backend: AttentionBackendEnum | str | None,
    component_name: str = "component",
    backend_by_role: Mapping[str | AttentionRole, AttentionBackendEnum | str] | None = None,
) -> Iterator[ComponentConstruction]:
    """Override the backend of the attention layers constructed inside the `with` block.

    Args:
        attn_backend: backend of every layer, or None to override only the roles given.
        component_name: name for messages and for `component.role` keys.
        backend_by_role: backend by role; stronger than `attn_backend`.

    Raises:
        ConfigError: a key of `backend_by_role` names no role.
        ComponentAttentionBackendNotAppliedError: on exit, for every override given that no layer
            constructed in the block took.
    """
    by_role: dict[str, BackendPreference] = {}
    if attn_backend is not None:
        by_role[""] = _component_asked(attn_backend, component_name)
    for role, backend in (backend_by_role or {}).items():
        key = _role_name(role)
        by_role[key] = _component_asked(backend, f"{component_name}.{key}")
    construction = ComponentConstruction(name=component_name, by_role=MappingProxyType(by_role))
    with set_for_block(_COMPONENT, construction):
        yield construction
    idle = [asked.detail for key, asked in by_role.items() if key not in construction.used_keys]
    if idle:
        raise ComponentAttentionBackendNotAppliedError(
            f"each attention backend override of component {component_name!r} must reach at least "
            f"one attention layer, none was reached by {', '.join(idle)}; check the component's "
            f"name, or construct its layers inside the context manager"
        )


def _role_name(role: str | AttentionRole) -> str:
    try:
        return str(AttentionRole(role))
    except ValueError:
        roles = ", ".join(ROLES)
        raise ConfigError(f"backend_by_role must have keys among {roles}, got {role!r}") from None


def _component_asked(backend: AttentionBackendEnum | str, detail: str) -> BackendPreference:
    return BackendPreference(source=Source.COMPONENT, backend=as_backend(backend), detail=detail)


_RawConfig = str | os.PathLike[str] | Mapping[str, object]

_TOP_KEYS = ("backend", "config", "strict", "rules")
_RULE_KEYS = ("component", "role", "layers", "steps", "sigma", "backend", "config")


def scope_from_args(args: "ServerArgs") -> SelectionScope:
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
    expect("strict", strict, bool, "true or false")
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
        scope = _structured(structured, spell("attention_config"))
    else:
        scope = SelectionScope(default=_asked(backend, _config(backend, given, name=name)))
    table = None
    if attention_auto_table is not None:
        here = (current_environment(), cpu_environment())
        table = table_for(attention_auto_table, here, name=spell("attention_auto_table"))
    return replace(
        scope,
        components=MappingProxyType(components),
        strict=strict or scope.strict,
        auto_table=table,
    )


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


def _structured(raw: _RawConfig, name: str) -> SelectionScope:
    mapping = read_mapping(raw, name=name)
    _check_keys(mapping, _TOP_KEYS, name)
    strict: Any = mapping.get("strict", False)
    expect(f"{name}: strict", strict, bool, "true or false")
    backend, config = _backend_and_config(mapping, f"{name}: ")
    rules = mapping.get("rules", ())
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise ConfigError(f"{name}: rules must be a list of mappings, got {short(rules)}")
    parsed = tuple(_rule(rule, f"{name}: rules[{i}]") for i, rule in enumerate(rules))
    return SelectionScope(default=_asked(backend, config), rules=parsed, strict=strict)


def _rule(raw: Any, where: str) -> Rule:
    expect(where, raw, Mapping, "a mapping")
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
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in ROLES:
        raise ConfigError(
            f"{where} must be one of {', '.join(ROLES)}, got {short(value)}{nearest(text, ROLES)}"
        )
    return AttentionRole(text)


def _selector(value: object, where: str) -> IndexSelector | None:
    return None if value is None else IndexSelector.parse(value, name=where)
