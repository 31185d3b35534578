"""What a user configured, as far as it concerns stock models."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from multimodal_gen.errors import ComponentAttentionBackendNotAppliedError, nearest
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import (
    Asked,
    LayerSite,
    SelectionScope,
    component_names,
)


def without_sparse(scope: SelectionScope) -> tuple[SelectionScope, bool]:
    """Return `scope` with sparse backends left to automatic choice, and whether it had any.

    Sparse backends work on a latent grid; a model whose grid is unknown runs dense.
    """
    asked = [scope.default, *scope.components.values(), *scope.rules]
    sparse = [a for a in asked if a is not None and a.backend is not None and a.backend.is_sparse]
    if not sparse:
        return scope, False
    return (
        replace(
            scope,
            default=None if scope.default in sparse else scope.default,
            components=MappingProxyType(
                {key: _dense(asked) for key, asked in scope.components.items()}
            ),
            rules=tuple(
                replace(rule, backend=None, config=None) if rule in sparse else rule
                for rule in scope.rules
            ),
        ),
        True,
    )


def _dense(asked: Asked) -> Asked:
    if asked.backend is None or not asked.backend.is_sparse:
        return asked
    return replace(asked, backend=None, config=None)


def check_overrides(scope: SelectionScope, sites: Sequence[LayerSite]) -> None:
    """Refuse component overrides that reach no attention layer.

    Raises:
        ComponentAttentionBackendNotAppliedError: names the override and the components there are.
    """
    roles: dict[str, set[AttentionRole]] = {}
    for site in sites:
        for name in component_names(site.component):
            roles.setdefault(name, set()).add(site.role)
    reached = set(roles) | {f"{name}.{role}" for name, found in roles.items() for role in found}
    for key in scope.components:
        if key not in reached:
            raise ComponentAttentionBackendNotAppliedError(
                f"component attention backend override {key!r} must reach at least one attention "
                f"layer, it reaches none; components with attention layers: "
                f"{', '.join(sorted(reached))}{nearest(key, reached)}"
            )
