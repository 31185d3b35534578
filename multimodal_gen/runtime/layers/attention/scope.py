"""Who asked for which backend: precedence, resolved before anything is looked up or cached.

From the strongest: forced (process-wide or by context manager), component with role, component,
the command line (`--attention-backend`, or the rules of `--attention-config`), the layer's own
default, automatic choice.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from multimodal_gen.errors import ComponentAttentionBackendNotAppliedError, ConfigError
from multimodal_gen.runtime.layers.attention.auto_table import AutoTable
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    IndexSelector,
    SigmaSelector,
    StepSet,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.warn_once import PROCESS, WarnOnce
from multimodal_gen.runtime.platforms import AttentionBackendEnum


class Source(Enum):
    """Who asked for a backend, from the strongest."""

    ARGUMENT = "argument"
    FORCED = "forced"
    COMPONENT = "component"
    SETTINGS = "settings"
    LAYER_DEFAULT = "layer default"
    AUTO = "auto"

    def __str__(self) -> str:
        return str(self.value)

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
class LayerSite:
    """Where a layer sits in a pipeline.

    Attributes:
        name: dotted path of the attention module within its component.
        component: key of `model_index.json`, e.g. "transformer_2", or None outside a pipeline.
        role: what the layer attends to.
        layer: index of the layer among those of its role in its component, or None. Layers built
            with a `prefix` and no site have the first number of that path: 2 in `blocks.2.attn1`.
        num_layers: how many layers of its role its component has, or None when unknown.
    """

    name: str = ""
    component: str | None = None
    role: AttentionRole = AttentionRole.SELF
    layer: int | None = None
    num_layers: int | None = None


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
        if self.component is not None and self.component not in component_names(site.component):
            return False
        if self.role is not None and self.role is not site.role:
            return False
        if self.when is not None and site.role is AttentionRole.ENCODER:
            return False
        return self.layers is None or (site.layer is not None and site.layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionScope:
    """What a user configured for a whole run.

    Attributes:
        default: `--attention-backend`, or the top of `--attention-config`; None for automatic.
        components: overrides by "component" or "component.role".
        rules: rules of `--attention-config`, tried in order.
        strict: refuse the documented fallbacks too.
        auto_table: what automatic choices go by, in place of the package's own table.
        spare_gates: give layers without a coarse branch the gates of their checkpoint too, for
            those who look at their calls.
        warnings: what the user was warned of.
    """

    default: BackendPreference | None = None
    components: Mapping[str, BackendPreference] = field(
        default_factory=lambda: MappingProxyType({})
    )
    rules: tuple[Rule, ...] = ()
    strict: bool = False
    auto_table: AutoTable | None = None
    spare_gates: bool = False
    warnings: WarnOnce = field(default=PROCESS, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be copied or pickled, and models with their layers can be.
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return partial(SelectionScope, **given | {"components": dict(self.components)}), ()

    def component_override(self, site: LayerSite) -> tuple[str, BackendPreference] | None:
        """Return the override that applies to `site` and its key; a role beats its component."""
        names = component_names(site.component)
        for key in (*(f"{name}.{site.role}" for name in names), *names):
            if key in self.components:
                return key, self.components[key]
        return None


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
    if forced is not None:
        return ((None, BackendPreference(source=Source.FORCED, backend=forced)),)
    if construction is not None:
        return ((None, construction),)
    override = scope.component_override(site)
    if override is not None:
        return ((None, override[1]),)
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
        used: number of layers that took an override.
        used_keys: the keys of `by_role` that a layer took.
    """

    name: str
    by_role: Mapping[str, BackendPreference]
    used: int = 0
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
    if not isinstance(backend, str):
        raise ConfigError(
            f"attention backend must be an AttentionBackendEnum member or its name, got {backend!r}"
        )
    return AttentionBackendEnum.parse(backend)


def forced_backend() -> AttentionBackendEnum | None:
    """Return the forced backend of this thread or process, or None."""
    local = FORCED.in_context.get()
    return FORCED.in_process if local is None else local[0]


def global_force_attn_backend(backend: AttentionBackendEnum | str | None) -> None:
    """Force every attention layer of the process to `backend`, at once; None ends it."""
    FORCED.in_process = None if backend is None else as_backend(backend)


@contextmanager
def global_force_attn_backend_context_manager(
    backend: AttentionBackendEnum | str | None,
) -> Iterator[None]:
    """Force `backend` inside the `with` block; other threads do not see it."""
    token = FORCED.in_context.set((None if backend is None else as_backend(backend),))
    try:
        yield
    finally:
        FORCED.in_context.reset(token)


def current_scope() -> SelectionScope:
    """Return the scope layers under construction take; the empty one unless set."""
    return _SCOPE.get() or SelectionScope()


@contextmanager
def use_scope(scope: SelectionScope) -> Iterator[None]:
    """Make `scope` the one that layers constructed inside the `with` block take."""
    token = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(token)


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
        construction.used += 1
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
    token = _COMPONENT.set(construction)
    try:
        yield construction
    finally:
        _COMPONENT.reset(token)
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
        valid = ", ".join(str(member) for member in AttentionRole)
        raise ConfigError(f"backend_by_role must have keys among {valid}, got {role!r}") from None


def _component_asked(backend: AttentionBackendEnum | str, detail: str) -> BackendPreference:
    return BackendPreference(source=Source.COMPONENT, backend=as_backend(backend), detail=detail)
