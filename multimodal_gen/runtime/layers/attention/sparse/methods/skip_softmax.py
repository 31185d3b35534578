"""Skip-softmax: every score is computed, and what cannot count for much goes no further (BLASST).

A step of the kernel over keys is left out, its softmax and its product with the values, where all
of its weights are at most lambda of the largest that their rows have seen so far
(arXiv:2512.12087). lambda is given, or follows from the number of keys,

    lambda = threshold_scale_factor / keys

or from a share of steps to leave out on a curve that ModelOpt fits to a model and keeps in its
config.json, under `sparse_attention_config`:

    threshold_scale_factor = a * exp(b * target_sparsity)

`skip_below`, which every method has, is the same in decibels: -10 log10(lambda).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch

from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.files import MalformedError
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import engine_variants
from multimodal_gen.runtime.layers.attention.config import (
    Axis,
    DensePart,
    IndexSelector,
    SigmaSelector,
    SparseConfig,
    StepSet,
    option,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.pattern import Pattern, Patterns
from multimodal_gen.runtime.layers.attention.sparse.router import Cut, Router
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.settings import MismatchError, converted, read_json

BLOCK = 128  # rows that must agree, and keys that are left out together, as the authors have it
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


_SETTINGS = ("threshold", "threshold_scale_factor", "target_sparsity", "skip_below")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipSoftmaxConfig(SparseConfig):
    """Parameters of `skip_softmax`; one of the first three, or `skip_below`, says how much.

    Attributes:
        threshold: lambda in (0, 1): weights at most this share of the largest one so far.
        threshold_scale_factor: lambda times the number of keys, as NVIDIA's kernels take it.
        target_sparsity: share of steps to leave out, by the curve of `sparse_attention_config`.
        disabled_until_timestep: noise levels above this stay dense, in (0, 1]; those of
            schedulers of flows, which run from 1 to 0.
        sparse_attention_config: what ModelOpt, or `sglang attention calibrate`, found; by default
            that of the checkpoint.
        kernel: which kernel runs; `auto` takes the fastest one supported.

    Raises:
        ConfigError: several settings are given.
    """

    example: ClassVar[str] = "threshold=0.01"

    threshold: float | None = option(
        None, "lambda: weights at most this share of the largest so far are left out", gt=0, lt=1
    )
    threshold_scale_factor: float | None = option(None, "lambda times the number of keys", gt=0)
    target_sparsity: float | None = option(
        None, "share of steps to leave out, by the calibrated curve", ge=0, le=1
    )
    disabled_until_timestep: float | None = option(
        None, "noise levels above this stay dense", gt=0, le=1
    )
    sparse_attention_config: SkipCurve | None = option(
        None, "the calibrated curve, as ModelOpt writes it; by default the checkpoint's"
    )
    kernel: Literal["auto", "gluon", "triton", "reference"] = option("auto", "kernel that runs")

    def check(self) -> None:
        """There is one setting."""
        given = [name for name in _SETTINGS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(f'`{name}`' for name in given)} of skip_softmax say the same, one "
                f"must be given; remove the others"
            )
        if self.dense_above is not None:
            raise ConfigError(
                f"`dense_above` of skip_softmax must be left out, got {self.dense_above:g}: every "
                f"pair has a score"
            )

    def skips(self) -> tuple[str, float] | None:
        """Return the setting that was given, or that of the curve."""
        curve = self.sparse_attention_config
        values = [(name, getattr(self, name)) for name in _SETTINGS]
        values += [("target_sparsity", None if curve is None else curve.target_sparsity)]
        return next((each for each in values if each[1] is not None), None)

    def check_settings(self) -> None:
        """Refuse what does not say how much to leave out, whatever the checkpoint.

        Raises:
            ConfigError: no setting is given, or a share without a curve.
        """
        given, curve = self.skips(), self.sparse_attention_config
        if given is not None and (given[0] != "target_sparsity" or curve is not None):
            return
        got, remedy = "none", "give a `threshold`"
        if given is not None:
            got = f"`target_sparsity` {given[1]:g} without a curve"
            remedy += ", or the file of `sglang attention calibrate`"
        elif curve is not None:
            got, remedy = "a curve alone", "give a `target_sparsity` on it"
        raise ConfigError(
            f"skip_softmax must be told how much to leave out by `threshold`, "
            f"`threshold_scale_factor`, `skip_below`, or by `target_sparsity` with a calibrated "
            f"curve, got {got}; {remedy}"
        )

    def decibels(self, num_keys: int) -> float | None:
        """Return -10 log10(lambda) for so many keys.

        Raises:
            UsageError: lambda would be 0, or 1 or more.
        """
        if self.skip_below is not None:
            return self.skip_below
        share = self.threshold
        factor, given = self.threshold_scale_factor, self.skips()
        if given is not None and given[0] == "target_sparsity":
            assert self.sparse_attention_config is not None, "others are refused"
            factor = self.sparse_attention_config.factor(given[1])
        if factor is not None:
            share = factor / num_keys
            if not 0 < share < 1:
                raise UsageError(
                    f"`threshold_scale_factor` of skip_softmax, given or of a curve, must be above "
                    f"0 and less than the number of keys, which it is divided by, got {factor:g} "
                    f"for {num_keys} keys; give a `threshold`"
                )
        return None if share is None else -10 * math.log10(share)

    def dense_parts(self, axis: Axis) -> tuple[DensePart, ...]:
        """Add the first steps of a curve, and the noise levels that stay dense."""
        parts, until = SparseConfig.dense_parts(self, axis), self.disabled_until_timestep
        curve = self.sparse_attention_config
        if axis != "steps":
            return parts
        if curve is not None and curve.initial_disabled_steps is not None:
            first = StepSet(indices=IndexSelector(((0, curve.initial_disabled_steps - 1),)))
            given = f"initial_disabled_steps={curve.initial_disabled_steps}"
            parts = (*parts, DensePart(given, first))
        if until is None and curve is not None:
            until = curve.disabled_until_timestep
        if until is None:
            return parts
        noise = StepSet(sigma=SigmaSelector.parse(f">{until:.10g}"))
        return (*parts, DensePart(f"disabled_until_timestep={until:g}", noise))


class SkipSoftmaxRouter(Router[SkipSoftmaxConfig]):
    """Every block."""

    chooses = "pattern"

    def cut(self, settings: SkipSoftmaxConfig, grid: Window) -> Cut:
        """Return pieces of the sequence, in whose order the largest weight is sought."""
        return Cut.rows(BLOCK)

    def pattern(
        self, settings: SkipSoftmaxConfig, grid: Window, heads: slice, context: ForwardContext
    ) -> Patterns:
        """Return the pattern that keeps everything."""
        return (_everything(-(-math.prod(grid) // BLOCK)),)

    def prepare(self, settings: SkipSoftmaxConfig) -> None:
        """Refuse settings that do not say how much to leave out."""
        settings.check_settings()

    def dense_reason(
        self, settings: SkipSoftmaxConfig, tokens: int, frames: int | None
    ) -> str | None:
        """Modules that a curve ignores are dense."""
        curve, site = settings.sparse_attention_config, self.layer.site
        if curve is None or site is None or not curve.ignores(site.component, site.name):
            return None
        return f"{self.layer.label} leaves {site.name} dense (`ignore` of its calibration)"


@static_cache(maxsize=64)
def _everything(num: int) -> Pattern:
    with torch.inference_mode(False), torch.device("cpu"):
        return Pattern.of_lists(torch.arange(num, dtype=torch.int32).repeat(num, 1))


class SkipSoftmaxBackend(SparseBackend):
    """Skip-softmax."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SKIP_SOFTMAX
    summary: ClassVar[str] = "Skip-softmax (BLASST): all scores, and only the weights that count"
    config_cls: ClassVar[type[SkipSoftmaxConfig]] = SkipSoftmaxConfig
    router: ClassVar[type[SkipSoftmaxRouter]] = SkipSoftmaxRouter
    variants: ClassVar[tuple[Variant, ...]] = engine_variants(
        BLOCK_SPARSE,
        (Feature.GQA, Feature.KEY_MASK),
        kernels=("gluon", "triton", "reference"),  # those that leave products out
        trains=False,
    )
