"""What a user configured, as far as it concerns stock models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from multimodal_gen.errors import (
    ComponentAttentionBackendNotAppliedError,
    ConfigError,
    nearest,
    short,
)
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    Rule,
    SelectionScope,
    component_names,
)
from multimodal_gen.settings import MismatchError

_Asked = TypeVar("_Asked", BackendPreference, Rule)


def without_sparse(scope: SelectionScope) -> tuple[SelectionScope, bool]:
    """Return `scope` with sparse backends left to automatic choice, and whether it had any.

    Sparse backends work on a latent grid; a model whose grid is unknown runs dense.
    """

    def dense(asked: _Asked) -> _Asked:
        if asked.backend is None or not asked.backend.is_sparse:
            return asked
        return replace(asked, backend=None, config=None)

    changed = _with_all(scope, dense)
    return changed, changed != scope


def _with_all(scope: SelectionScope, change: Callable[[Any], Any]) -> SelectionScope:
    """Return `scope` with a change of all preferences and rules."""
    return replace(
        scope,
        default=scope.default and change(scope.default),
        components=MappingProxyType({key: change(a) for key, a in scope.components.items()}),
        rules=tuple(map(change, scope.rules)),
    )


def calibrated(scope: SelectionScope, model: nn.Module, component: str) -> SelectionScope:
    """Return `scope` with the checkpoint's curve where skip-softmax was asked for without one.

    Warns of names that the curve ignores and the component does not have.

    Raises:
        ConfigError: the checkpoint's `sparse_attention_config` cannot be read, and nothing else
            says how much to leave out.
    """
    config = getattr(model, "config", None)
    found = config.get("sparse_attention_config") if isinstance(config, Mapping) else None
    if found is None:
        return scope
    from multimodal_gen.runtime.layers.attention.sparse.methods.skip_softmax import (
        SkipSoftmaxConfig,
    )
    from multimodal_gen.runtime.layers.attention.sparse.skip_curve import SkipCurve

    name = f"sparse_attention_config of {type(model).__name__}"

    def filled(asked: _Asked) -> _Asked:
        own = asked.config
        if not isinstance(own, SkipSoftmaxConfig) or own.sparse_attention_config is not None:
            return asked
        try:
            curve = SkipCurve.parse(found, name=name)
        except (ConfigError, MismatchError) as error:
            reason = str(error) or f"{name} must be {SkipCurve.expected}, got {short(found)}"
            given = own.skips()
            if given is None or given[0] == "target_sparsity":
                raise ConfigError(
                    f"{reason}; give a `threshold`, or a curve as `sparse_attention_config`"
                ) from None
            scope.warnings.warn(
                f"{reason}; it goes by `{given[0]}` alone, and nothing that the calibration leaves "
                f"dense is left dense"
            )
            return asked
        modules = [path.replace("_orig_mod.", "") for path, _ in model.named_modules()]
        for pattern in curve.ignore:
            only = replace(curve, ignore=(pattern,))
            if not any(only.ignores(component, module) for module in modules):
                scope.warnings.warn(
                    f"{name} ignores {short(pattern)}, which no module of {component} is called; "
                    f"nothing is left dense for it"
                )
        return replace(asked, config=replace(own, sparse_attention_config=curve))

    return _with_all(scope, filled)


def check_overrides(scope: SelectionScope, sites: Sequence[LayerSite]) -> None:
    """Refuse component overrides and rules that reach no attention layer.

    Raises:
        ComponentAttentionBackendNotAppliedError: names the override or the rule, and what there is.
    """
    components = {name for site in sites for name in component_names(site.component)}
    reached = components | {
        f"{name}.{site.role}" for site in sites for name in component_names(site.component)
    }
    for key in scope.components:
        if key not in reached:
            raise ComponentAttentionBackendNotAppliedError(
                f"component attention backend override {key!r} must reach at least one attention "
                f"layer, it reaches none; components with attention layers: "
                f"{', '.join(sorted(reached))}{nearest(key, reached)}"
            )
    for index, rule in enumerate(scope.rules):
        matched = [site for site in sites if rule.matches(site)]
        if matched:
            _refuse_hidden(scope.rules, index, matched)
            continue
        named = rule.component is not None and rule.component not in components
        hint = nearest(rule.component or "", components) if named else ""
        steps = " (encoders have no steps)" if rule.when is not None else ""
        raise ComponentAttentionBackendNotAppliedError(
            f"rules[{index}] must match at least one attention layer, {_conditions(rule)} matches "
            f"none{hint}; there are: {_inventory(sites)}{steps}"
        )


def _refuse_hidden(rules: Sequence[Rule], index: int, matched: Sequence[LayerSite]) -> None:
    """Refuse a rule whose layers, at all its steps, have an earlier rule that matches them."""
    rule = rules[index]
    same_steps = [r for r in rules[:index] if r.when is None or r.when == rule.when]
    hiding = [next((r for r in same_steps if r.matches(site)), None) for site in matched]
    if any(earlier is None for earlier in hiding):
        return
    numbers = sorted({rules.index(earlier) for earlier in hiding if earlier is not None})
    raise ComponentAttentionBackendNotAppliedError(
        f"rules[{index}] must match a layer and a step that no earlier rule matches, "
        f"{_conditions(rule)} has none left after "
        f"{', '.join(f'rules[{number}]' for number in numbers)}; the first rule that matches wins, "
        f"so put rules[{index}] before"
    )


def _conditions(rule: Rule) -> str:
    fields = ("component", "role", "layers", "steps", "sigma")
    asked = ((name, getattr(rule, name)) for name in fields)
    return ", ".join(f"{name}={value}" for name, value in asked if value is not None) or "any"


def _inventory(sites: Sequence[LayerSite]) -> str:
    """Return the attention layers there are, as "transformer.self layers 0-29, ..."."""
    last: dict[str, int] = {}
    for site in sites:
        key = f"{site.component}.{site.role}"
        last[key] = max(last.get(key, 0), site.layer or 0)
    return ", ".join(f"{key} layers 0-{layer}" for key, layer in sorted(last.items()))
