"""What ModelOpt found of skip-softmax for a model, as its checkpoint's config.json keeps it.

`sparse_attention_config` of a component has a curve,

    threshold_scale_factor = a * exp(b * target_sparsity)

in one of the forms that ModelOpt writes, and which modules and steps stay dense. What a factor does
is in `methods/skip_softmax.py`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any, ClassVar

from multimodal_gen.errors import ConfigError, short
from multimodal_gen.files import MalformedError
from multimodal_gen.settings import MismatchError, converted, read_json

FORMULA = "a * exp(b * target_sparsity)"
# Formulas that are written, and the coefficient that each has beside b.
_FORMULAS = MappingProxyType(
    {
        FORMULA: "a",
        "exp(log_a + b * target_sparsity)": "log_a",
        "log_a + b * target_sparsity": "log_a",  # the same, as its logarithm
    }
)
_ALGORITHMS = ("skip_softmax", "softmax_skip")
_KEYS = (
    "algorithm",
    "targets",  # classes of the modules, which their names say better
    "threshold_scale_factor",
    "ignore",
    "target_sparsity",
    "disabled_until_timestep",
    "initial_disabled_steps",
)
_OTHER_NAMES = MappingProxyType({"sparse_algo": "algorithm", "disabled_layers": "ignore"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipCurve:
    """What ModelOpt found for a model: `sparse_attention_config` of a component's config.json.

    Attributes:
        a: of `FORMULA`.
        b: of `FORMULA`.
        ignore: names of attention modules that stay dense, as patterns of `fnmatch`, within the
            component or with its name in front.
        target_sparsity: what is asked for where nothing else is; None for nothing.
        disabled_until_timestep: the same of that parameter.
        initial_disabled_steps: how many of the first steps stay dense; None for none.
    """

    a: float
    b: float
    ignore: tuple[str, ...] = ()
    target_sparsity: float | None = None
    disabled_until_timestep: float | None = None
    initial_disabled_steps: int | None = None

    expected: ClassVar[str] = "a mapping as ModelOpt's sparse_attention_config"

    @classmethod
    def parse(cls, value: object, *, name: str = "sparse_attention_config") -> "SkipCurve":
        """Read a curve from ModelOpt's mapping, or its JSON text.

        Raises:
            MismatchError: `value` is no mapping.
            ConfigError: it has no curve, several, one of another formula, or more than is known.
        """
        if isinstance(value, SkipCurve):
            return value
        try:
            mapping = read_json(value) if isinstance(value, str) else value
        except MalformedError as error:
            raise ConfigError(f"{name} must be {cls.expected}; {error}") from None
        if not isinstance(mapping, Mapping):
            raise MismatchError
        group = _group_of(mapping, name)
        a, b = _coefficients(group.get("threshold_scale_factor"), name)
        ignore = group.get("ignore") or ()
        if isinstance(ignore, str) or not all(isinstance(each, str) for each in ignore):
            raise ConfigError(f"{name} must have names of modules in `ignore`, got {short(ignore)}")
        steps = group.get("initial_disabled_steps")
        if steps is not None and (type(steps) is not int or steps < 0):
            raise ConfigError(
                f"{name}: initial_disabled_steps must be an integer >= 0, got {short(steps)}"
            )
        until = _number(group, "disabled_until_timestep", name, most=1)
        if until == 0:
            raise ConfigError(
                f"{name}: disabled_until_timestep must be above 0, got 0, by which vllm-omni "
                f"leaves no step dense, and TensorRT-LLM all of them; leave it out for none"
            )
        return cls(
            a=a,
            b=b,
            ignore=tuple(ignore),
            target_sparsity=_number(group, "target_sparsity", name, most=1),
            disabled_until_timestep=until,
            initial_disabled_steps=steps or None,
        )

    def __str__(self) -> str:
        return json.dumps(self.as_mapping())

    def as_mapping(self) -> dict[str, Any]:
        """Return it as ModelOpt writes it."""
        group: dict[str, Any] = {
            "algorithm": "skip_softmax",
            "threshold_scale_factor": {
                "formula": FORMULA,
                "coefficients": {"a": self.a, "b": self.b},
            },
        }
        given = {
            "ignore": list(self.ignore) or None,
            "target_sparsity": self.target_sparsity,
            "disabled_until_timestep": self.disabled_until_timestep,
            "initial_disabled_steps": self.initial_disabled_steps,
        }
        group |= {key: value for key, value in given.items() if value is not None}
        return {"config_groups": {"group_0": group}}

    def factor(self, target_sparsity: float) -> float:
        """Return the `threshold_scale_factor` of a share of steps to leave out.

        It is 0 or infinity where it is out of what a float holds.
        """
        return self.a * _exp(self.b * target_sparsity)

    def ignores(self, component: str | None, name: str) -> bool:
        """Whether a module of a component stays dense."""
        names = (name, f"{component}.{name}")
        return any(fnmatch(each, pattern) for pattern in self.ignore for each in names)


def _group_of(mapping: Mapping[Any, Any], name: str) -> Mapping[str, Any]:
    """Return what is about skip-softmax, in its group or beside the groups, by `_KEYS`."""
    parts: list[Mapping[Any, Any]] = [
        {key: mapping[key] for key in mapping if key not in ("config_groups", "producer")}
    ]
    groups = mapping.get("config_groups")
    if groups is not None:
        every = list(groups.values()) if isinstance(groups, Mapping) else []
        held = [group for group in every if isinstance(group, Mapping) and _is_skipping(group)]
        if len(held) != 1:
            raise ConfigError(
                f"{name} must have one group whose `algorithm` is skip_softmax, or `sparse_algo` "
                f"softmax_skip, got {len(held)} of {len(every)} groups"
            )
        parts += held
    found: dict[str, Any] = {}
    for given, value in (pair for part in parts for pair in part.items()):
        key = _OTHER_NAMES.get(given, given)
        if key not in _KEYS:
            raise ConfigError(
                f"{name} must have no keys but {', '.join(_KEYS)}, got {short(given)}"
            )
        if found.setdefault(key, value) != value:
            raise ConfigError(
                f"{name} must have one value of {key}, got {short(found[key])} and {short(value)}"
            )
    if not _is_skipping({"algorithm": _ALGORITHMS[0], **found}):
        raise ConfigError(
            f"{name} must have the algorithm skip_softmax, got {short(found['algorithm'])}"
        )
    return found


def _is_skipping(group: Mapping[Any, Any]) -> bool:
    return group.get("algorithm", group.get("sparse_algo")) in _ALGORITHMS


def _coefficients(factor: object, name: str) -> tuple[float, float]:
    """Return a and b of `FORMULA`, whichever of `_FORMULAS` they are written for."""
    given = dict(factor) if isinstance(factor, Mapping) else {}
    formulas = {text.replace(" ", ""): first for text, first in _FORMULAS.items()}
    formula = given.pop("formula", None)
    if formula is not None and str(formula).replace(" ", "") not in formulas:
        raise ConfigError(
            f"{name} must have the formula {' or '.join(_FORMULAS)}, got {short(formula)}"
        )
    given.pop("decode", None)  # a phase that denoisers do not have
    for key in ("coefficients", "prefill"):
        if list(given) == [key] and isinstance(given[key], Mapping):
            given = given[key]
    first = "log_a" if "log_a" in given else "a"
    a, b = (_number(given, key, name) for key in (first, "b"))
    if a is not None and first == "log_a":
        a = _exp(a)
    fits = formula is None or formulas[str(formula).replace(" ", "")] == first
    if a is None or b is None or not fits or set(given) != {first, "b"} or not 0 < a < math.inf:
        raise ConfigError(
            f"{name} must have the coefficients a, above 0, and b of {FORMULA} under "
            f"threshold_scale_factor, or log_a and b of its other forms, got {short(factor)}"
        )
    return a, b


def _exp(value: float) -> float:
    """Return exp(value), infinity where it is too large for a float."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _number(
    mapping: Mapping[Any, Any], key: str, name: str, most: float | None = None
) -> float | None:
    """Return a number; of phases, which denoisers have none of, that of the first."""
    value = mapping.get(key)
    if isinstance(value, Mapping):
        value = value.get("prefill")
    if value is None:
        return None
    try:
        number = converted(value, float, None if most is None else 0, most)
    except MismatchError:
        within = "" if most is None else f" in [0, {most:g}]"
        raise ConfigError(f"{name}: {key} must be a number{within}, got {short(value)}") from None
    assert isinstance(number, float), "it was converted to one"
    return number
