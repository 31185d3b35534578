"""Backend configuration: one frozen dataclass per backend, built from untyped mappings.

A backend declares its parameters once:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class VideoSparseConfig(SparseConfig):
        sparsity: float = option(0.0, "share of key blocks to skip", ge=0, le=1)

`build_config` turns a mapping into such an object; `settings.py` reads the mapping from a file, a
JSON string or `k=v` pairs, and says which annotations there are. Here are those of its own:
`IndexSelector` and `SigmaSelector`, which name steps and layers by index (`0-3,38`) or by the noise
levels of the run's scheduler (`>0.9`, `0.4-0.7`), and `RatioSchedule`, a number by share of the
schedule (`{0: 0.5, 0.4: 0.9}`). Values are checked however the object is made.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from multimodal_gen.errors import ConfigError, UsageError, nearest, short
from multimodal_gen.settings import MismatchError, as_plain, converted
from multimodal_gen.settings import option as option
from multimodal_gen.settings import parameters_of as parameters_of

_MOST = 240

# Nine digits are plenty for an index.
_RANGE = re.compile(r"([0-9]{1,9})?\s*(?:(-)\s*([0-9]{1,9})?)?")


@dataclass(frozen=True, slots=True)
class IndexSelector:
    """A set of indices from 0, as inclusive ranges; an open end reaches to the last index.

    Attributes:
        ranges: (first, last) pairs; `last` is None for an open range.
    """

    ranges: tuple[tuple[int, int | None], ...]

    expected: ClassVar[str] = "indices from 0 such as '0-3,38'"

    @classmethod
    def parse(cls, value: object, *, name: str = "selector") -> "IndexSelector":
        """Read a selector from text (`0-3,38`, `10-`, `-5`), an int, or a list of both.

        Raises:
            ConfigError: `value` is none of these, or a range runs backwards.
        """
        if isinstance(value, IndexSelector):
            return value
        given = list(value) if isinstance(value, (list, tuple)) else [value]
        # As text, "-5" is a range from the start; a number may be meant to count from the end.
        if type(value) is int and value < 0:
            raise ConfigError(
                f"{name} must be {cls.expected}, got {short(value)}; the range from the start "
                f"is '0{value}', and nothing counts from the end"
            )
        # Python refuses to write numbers of thousands of digits.
        if not all(type(i) is str or (type(i) is int and 0 <= i < 10**9) for i in given):
            raise _malformed(name, value)
        text = ",".join(map(str, given))
        return cls(tuple(_parse_range(part.strip(), name, text) for part in text.split(",")))

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and any(
            first <= index and (last is None or index <= last) for first, last in self.ranges
        )

    def __and__(self, other: "IndexSelector") -> "IndexSelector | None":
        """Return the indices in both, or None where there are none."""
        shared = []
        for (first, last), (start, stop) in product(self.ranges, other.ranges):
            low = max(first, start)
            high = min((end for end in (last, stop) if end is not None), default=None)
            if high is None or low <= high:
                shared.append((low, high))
        return IndexSelector(tuple(shared)) if shared else None

    def __str__(self) -> str:
        return ",".join(_range_text(first, last) for first, last in self.ranges)


def _parse_range(part: str, name: str, value: object) -> tuple[int, int | None]:
    match = _RANGE.fullmatch(part)
    if match is None or not (match[1] or match[3]):
        raise _malformed(name, value)
    first, dash, last = match.groups()
    if not dash:
        return int(first), int(first)
    low, high = int(first or 0), int(last) if last else None
    if high is not None and high < low:
        raise ConfigError(f"{name} must have ranges that run upwards, got {part!r} in {value!r}")
    return low, high


def _range_text(first: int, last: int | None) -> str:
    if last is None:
        return f"{first}-"
    return str(first) if first == last else f"{first}-{last}"


def _malformed(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"{name} must be {IndexSelector.expected}, '10-' or [0, 1, 38], got {short(value)}"
    )


Axis: TypeAlias = Literal["steps", "layers"]


def in_decimals(share: float) -> Fraction:
    """Return a share in decimals, as people write it: 1 - 0.7 is more than 0.3 in binary."""
    return Fraction(repr(float(share)))


def first_of(share: float, total: int) -> int:
    """Return floor(share * total), the share read in decimals."""
    return math.floor(in_decimals(share) * total)


_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_BOUND = re.compile(rf"(>=|<=|>|<)\s*({_NUMBER})")
_BETWEEN = re.compile(rf"({_NUMBER})\s*-\s*({_NUMBER})")

# Schedulers keep sigmas in float32: what they print as 0.9 may be a little more or less.
_NEAR = 1e-6

_SigmaRange: TypeAlias = tuple[float, bool, float, bool]


@dataclass(frozen=True, slots=True)
class SigmaSelector:
    """Noise levels, as ranges in the units of a scheduler's sigmas.

    Attributes:
        ranges: (low, whether low is one of them, high, whether high is).
    """

    ranges: tuple[_SigmaRange, ...]

    expected: ClassVar[str] = "sigmas such as '>0.9' or '0.4-0.7'"

    @classmethod
    def parse(cls, value: object, *, name: str = "sigma") -> "SigmaSelector":
        """Read a selector from text (`>0.9`, `<=0.1`, `0.4-0.7`, with commas), or a list of it.

        Ranges with a dash hold both of their ends.

        Raises:
            ConfigError: `value` is neither, or a range runs backwards.
        """
        if isinstance(value, SigmaSelector):
            return value
        if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
            value = ",".join(value)
        if not isinstance(value, str) or not value.strip():
            raise _malformed_sigma(name, value)
        return cls(tuple(_sigma_range(part.strip(), name, value) for part in value.split(",")))

    def __contains__(self, sigma: float) -> bool:
        return any(
            (_is_near(sigma, low) and low_held)
            or (_is_near(sigma, high) and high_held)
            or (low < sigma < high and not _is_near(sigma, low) and not _is_near(sigma, high))
            for low, low_held, high, high_held in self.ranges
        )

    def __and__(self, other: "SigmaSelector") -> "SigmaSelector | None":
        """Return the noise levels in both, or None where there are none."""
        shared = []
        for one, two in product(self.ranges, other.ranges):
            low, low_open = max((held[0], not held[1]) for held in (one, two))
            high, high_held = min(held[2:] for held in (one, two))
            if low < high or (low == high and high_held and not low_open):
                shared.append((low, not low_open, high, high_held))
        return SigmaSelector(tuple(shared)) if shared else None

    def __str__(self) -> str:
        return ",".join(map(_sigma_text, self.ranges))


def _is_near(sigma: float, bound: float) -> bool:
    return abs(sigma - bound) <= _NEAR * max(1.0, abs(bound)) and math.isfinite(bound)


def _sigma_range(part: str, name: str, value: object) -> _SigmaRange:
    bound, between = _BOUND.fullmatch(part), _BETWEEN.fullmatch(part)
    if bound is not None:
        limit, held = float(bound[2]), "=" in bound[1]
        if math.isfinite(limit):
            return (limit, held, math.inf, False) if part[0] == ">" else (0.0, True, limit, held)
    if between is not None:
        low, high = float(between[1]), float(between[2])
        if high < low:
            raise ConfigError(
                f"{name} must have ranges that run upwards, got {part!r} in {value!r}"
            )
        if math.isfinite(high):
            return low, True, high, True
    raise _malformed_sigma(name, value)


def _sigma_text(held: _SigmaRange) -> str:
    low, low_held, high, high_held = held
    if math.isinf(high):
        return f"{'>=' if low_held else '>'}{low:.10g}"
    if low == 0 and low_held:
        return f"{'<=' if high_held else '<'}{high:.10g}"
    return f"{low:.10g}-{high:.10g}"


def _malformed_sigma(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"{name} must be ranges of sigmas such as '>0.9', '<=0.1' or '0.4-0.7', got {short(value)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSet:
    """Denoising steps, or layers; what is given must all hold.

    Attributes:
        indices: their indices, or None for any.
        first: the first share of them in (0, 1], floor(share * n) of n; None for all.
        sigma: the noise levels of steps, or None for any.
    """

    indices: IndexSelector | None = None
    first: float | None = None
    sigma: SigmaSelector | None = None

    def holds(self, step: int, total: int, sigmas: tuple[float, ...] | None = None) -> bool:
        """Return whether a step is one of them.

        Args:
            step: its index.
            total: how many the run has; makes no difference without `first`.
            sigmas: the sigma of every step of the run; where they are unknown, no step has any.
        """
        if self.indices is not None and step not in self.indices:
            return False
        if self.first is not None and step >= first_of(self.first, total):
            return False
        if self.sigma is None:
            return True
        return sigmas is not None and step < len(sigmas) and sigmas[step] in self.sigma

    def __and__(self, other: "StepSet") -> "StepSet | None":
        """Return the steps in both, or None where it is certain that there are none."""
        indices, sigma = self.indices or other.indices, self.sigma or other.sigma
        if self.indices and other.indices:
            indices = self.indices & other.indices
        if self.sigma and other.sigma:
            sigma = self.sigma & other.sigma
        if (self.indices and indices is None) or (self.sigma and sigma is None):
            return None
        shares = [one.first for one in (self, other) if one.first is not None]
        return StepSet(indices=indices, first=min(shares, default=None), sigma=sigma)

    def __str__(self) -> str:
        parts = [] if self.first is None else [f"first {self.first:.4g} of all"]
        if self.sigma is not None:
            parts.append(f"of sigma {self.sigma}")
        if self.indices is not None:
            parts.append(f"among {self.indices}" if parts else str(self.indices))
        return ", ".join(parts)


_SCHEDULE = "{0: 0.5, 0.4: 0.9}"


@dataclass(frozen=True, slots=True)
class RatioSchedule:
    """A ratio that changes over the steps of a run.

    Attributes:
        parts: (share of the schedule at which it begins, the ratio), in order; the first begins
            at 0. Of n steps, a part begins at step floor(share * n).
    """

    parts: tuple[tuple[float, float], ...]

    expected: ClassVar[str] = f"one for each part of the schedule such as {_SCHEDULE}"

    @classmethod
    def parse(cls, value: object, *, name: str) -> "RatioSchedule":
        """Read a schedule from a mapping of shares, which JSON has as text, to ratios.

        Raises:
            MismatchError: `value` is none, or a share is not in [0, 1).
            ConfigError: it leaves the first steps out, or gives a share twice.
        """
        if isinstance(value, RatioSchedule):
            return value
        if not isinstance(value, Mapping):
            raise MismatchError
        parts: list[tuple[float, Any]] = sorted(
            (_share(key), converted(number, float)) for key, number in value.items()
        )
        if not parts or parts[0][0] != 0:
            raise ConfigError(
                f"{name} must say what it is from the first step on, such as {_SCHEDULE}, "
                f"got {short(value)}"
            )
        if len({start for start, _ in parts}) < len(parts):
            raise ConfigError(
                f"{name} must have one number for each share of the schedule, got {short(value)}"
            )
        return cls(tuple(parts))

    def at(self, step: int, total: int) -> float:
        """Return the ratio of a step of a run that has `total`."""
        return [ratio for start, ratio in self.parts if first_of(start, total) <= step][-1]

    @property
    def numbers(self) -> tuple[float, ...]:
        """The ratios, which a parameter has bounds for."""
        return tuple(ratio for _, ratio in self.parts)

    def as_dict(self) -> dict[str, float]:
        """Return it as JSON has it, which has text as keys."""
        return {f"{start:.10g}": ratio for start, ratio in self.parts}

    def __str__(self) -> str:
        return "{" + ", ".join(f"{start:.10g}: {ratio:.10g}" for start, ratio in self.parts) + "}"


def _share(key: object) -> float:
    """Return a share of the schedule, which JSON has as text."""
    try:
        share = float(key) if isinstance(key, (str, int, float)) else math.nan
    except (ValueError, OverflowError):
        share = math.nan
    if isinstance(key, bool) or not 0 <= share < 1:
        raise MismatchError
    return share


Ratio: TypeAlias = float | RatioSchedule


def ratio_now(ratio: Ratio) -> float:
    """Return a ratio of the parameters of one step, which has no schedule any more."""
    assert not isinstance(ratio, RatioSchedule), "`config_at` makes numbers of schedules"
    return ratio


_ConfigT = TypeVar("_ConfigT", bound="BackendConfig")

# What the parameter `kernel` names where `skip_below` or 8 bits are asked for.
_OWN = frozenset({"auto", "gluon", "triton", "reference"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """Parameters of one backend; this base has none.

    Lists become tuples, so that every configuration is hashable. Subclasses check what holds
    between parameters in `check`.

    Attributes:
        groups: keys whose mapping `build_config` merges into the parameters themselves.
        example: parameters as `k=v,k=v` where the defaults alone are not enough, for help.

    Raises:
        ConfigError: a value has the wrong type, is out of range or contradicts another.
    """

    groups: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, parameter in parameters_of(type(self)).items():
            value = parameter.convert(getattr(self, name), type(self).__name__)
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` when parameters contradict each other; they are converted by now."""


@dataclass(frozen=True, slots=True)
class DensePart:
    """Steps, or layers, that one parameter of a sparse method keeps on the dense backend.

    Attributes:
        given: the parameter with its value, such as "first_full_step=12".
        indices: which ones.
    """

    given: str
    indices: StepSet


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(BackendConfig):
    """Parameters every sparse backend has.

    Attributes:
        dense_steps: denoising steps that run on the dense backend, e.g. "0-3,38".
        dense_sigma: denoising steps that run on the dense backend, by their noise level, e.g.
            ">0.9"; in the units of the pipeline's scheduler.
        dense_layers: layers that run on the dense backend, e.g. "0-3,38".
        refresh_every: for how many denoising steps a choice of blocks by statistics serves, in one
            process and without gradients.
        dense_above: share of query-key pairs in [0, 1]; a call that would keep more attends to all
            of them, which is faster. 1 never does; None goes by what was measured for the kernel,
            where it was not named. Not under `torch.use_deterministic_algorithms`.
        skip_below: products of weights and values are left out where all weights of a step of the
            kernel lie so many decibels below the largest ones so far; 30 is a thousandth. None
            leaves nothing out. In one process, without a cache and without gradients.
        first_dense_steps: the method's own parameter for first steps that stay dense, or "". A
            float up to 1 is a share of what the run has, other values are numbers.
        first_dense_layers: the same for the layers of the model.
        names_layers: the parameters that name layers of the model.
    """

    first_dense_steps: ClassVar[str] = ""
    first_dense_layers: ClassVar[str] = ""
    names_layers: ClassVar[tuple[str, ...]] = ("dense_layers",)

    dense_steps: IndexSelector | None = option(
        None, "denoising steps that stay dense, e.g. '0-3,38'"
    )
    dense_sigma: SigmaSelector | None = option(
        None, "denoising steps that stay dense, by the scheduler's sigma, e.g. '>0.9'"
    )
    dense_layers: IndexSelector | None = option(None, "layers that stay dense, e.g. '0-3,38'")
    refresh_every: int = option(
        1, "denoising steps for which a choice of blocks serves; 1: each has its own", ge=1
    )
    dense_above: float | None = option(
        None, "share of pairs above which a call is dense; 1: never; none: as measured", ge=0, le=1
    )
    skip_below: float | None = option(
        None, "decibels below the largest weight so far at which products are left out", ge=1
    )

    def __post_init__(self) -> None:
        BackendConfig.__post_init__(self)  # slots make another class, of which super() knows not
        given, kernel = self.skips(), getattr(self, "kernel", "auto")
        if self.in_8_bits and (kernel not in _OWN or given is not None):
            other = f"kernel {kernel}, which multiplies in 16 bits"
            if given is not None:
                other = f"`{given[0]}`, as 8-bit kernels leave no products out"
            raise ConfigError(
                f"`compute_mode` of {type(self).__name__} must be bf16 with {other}, got "
                f"sage_bf16; remove one"
            )
        if given is not None and kernel not in _OWN:
            raise ConfigError(
                f"`{given[0]}` of {type(self).__name__} must not be given with kernel {kernel}, "
                f"which leaves no products out, got {given[1]:g}; remove one"
            )

    @property
    def in_8_bits(self) -> bool:
        """Whether queries and keys are multiplied in 8 bits, by the parameter `compute_mode`."""
        return getattr(self, "compute_mode", "bf16") != "bf16"

    def skips(self) -> tuple[str, float] | None:
        """Return the parameter that leaves products out, with its value; None for none."""
        return None if self.skip_below is None else ("skip_below", self.skip_below)

    def decibels(self, num_keys: int) -> float | None:
        """Return at how many below the largest weight of so many keys products are left out."""
        return self.skip_below

    def dense_parts(self, axis: Axis) -> tuple[DensePart, ...]:
        """Return the steps or the layers that run on the dense backend, by parameter."""
        names: tuple[str, ...] = (self.first_dense_layers, "dense_layers")
        if axis == "steps":
            names = (self.first_dense_steps, "dense_steps", "dense_sigma")
        given = {name: getattr(self, name) for name in names if name}
        return tuple(
            DensePart(f"{name}={value}", _named(value)) for name, value in given.items() if value
        )

    def never_sparse(
        self, axis: Axis, total: int | None, sigmas: tuple[float, ...] | None = None
    ) -> str | None:
        """Return why no step of a run, or no layer of a model, is sparse; None where one is.

        Args:
            axis: which of both.
            total: how many there are, or None when unknown.
            sigmas: of every step, or None when unknown.
        """
        parts = self.dense_parts(axis)
        held = (
            any(p.indices.holds(i, total or 0, sigmas) for p in parts) for i in range(total or 0)
        )
        if not total or not all(held):
            return None
        given = " and ".join(part.given for part in parts)
        whole = "run" if axis == "steps" else "model"
        return (
            f"is sparse in no {axis[:-1]}: {given} keep all {total} {axis} of this {whole} "
            f"dense; give fewer, such as {parts[0].given.partition('=')[0]}=0"
        )

    def layers_beyond(self, total: int | None) -> str | None:
        """Return what is said of layers by name that a model of so many lacks, else None."""
        if total is None:
            return None
        named = {name: getattr(self, name) for name in self.names_layers}
        given = " and ".join(
            f"{name}={layers}"
            for name, layers in named.items()
            if layers and any(max(first, last or 0) >= total for first, last in layers.ranges)
        )
        if not given:
            return None
        return (
            f"is to keep layers dense that this model lacks: {given}, of layers 0-{total - 1}; "
            f"give layers that it has"
        )


def _named(value: IndexSelector | SigmaSelector | float) -> StepSet:
    """Return what a selector names; of a share or a number it is the first indices."""
    if isinstance(value, SigmaSelector):
        return StepSet(sigma=value)
    if isinstance(value, float) and value <= 1:
        return StepSet(first=value)
    first = value if isinstance(value, IndexSelector) else IndexSelector(((0, int(value) - 1),))
    return StepSet(indices=first)


Tail = Literal["none", "pooled"]
"""What becomes of keys that a query does not keep: they are dropped, or count by their means."""

ComputeMode = Literal["bf16", "sage_bf16"]
"""What attention over blocks is computed in: the dtype of the inputs, or queries and keys in int8.

Named as sglang's parameter is; its `sage_fp8`, with values in e4m3, is none of them.
"""


def compute_mode_option() -> Any:
    """Declare the parameter `compute_mode` of a method that chooses lists, or a map, of blocks."""
    return option("bf16", "bf16: in the inputs' dtype; sage_bf16: queries and keys in 8 bits")


EngineKernel: TypeAlias = Literal["auto", "gluon", "fa4", "cudnn", "triton", "reference"]
"""The parameter `kernel` of a method that every kernel of the block-sparse engine serves."""


def tail_option(default: Tail = "none") -> Any:
    """Declare the parameter `tail` of a method."""
    return option(default, "what is not kept: dropped (none), or counted by its means (pooled)")


def refuse_foreign_tail(backend: str, tail: Tail, kernel: str, *foreign: str) -> None:
    """Raise `ConfigError` where a tail was asked of another package's kernel.

    Args:
        backend: the backend's name, for the message.
        tail: the parameter `tail`.
        kernel: the parameter `kernel`.
        *foreign: kernels of other packages.
    """
    if tail != "none" and kernel in foreign:
        raise ConfigError(
            f"`tail` of {backend} must be none with `kernel` {kernel}, which drops what is not "
            f"kept, got {tail}; leave `kernel` out"
        )


def varying(config: BackendConfig) -> tuple[str, ...]:
    """Return the parameters whose values change over the steps of a run."""
    given = ((name, getattr(config, name)) for name in parameters_of(type(config)))
    return tuple(name for name, value in given if isinstance(value, RatioSchedule))


@lru_cache(maxsize=1024)
def config_at(config: _ConfigT, step: int, num_steps: int | None) -> _ConfigT:
    """Return a configuration as it is at one step: what changes over the steps is a number there.

    Args:
        config: a backend's parameters.
        step: index of the denoising step.
        num_steps: of the run, or None when unknown.

    Raises:
        UsageError: a parameter changes over the steps, and their number is unknown.
    """
    names = varying(config)
    if names and num_steps is None:
        raise UsageError(
            f"{names[0]}={getattr(config, names[0])} must be used in a run whose number of steps "
            f"is known, got none; pass num_steps to set_forward_context, or give one number"
        )
    now: dict[str, Any] = {n: getattr(config, n).at(step, num_steps) for n in names}
    return dataclasses.replace(config, **now) if now else config


def build_config(
    config_cls: type[_ConfigT], raw: Mapping[str, object], *, backend: str
) -> _ConfigT:
    """Build a backend's configuration from what a user wrote.

    Args:
        config_cls: the backend's configuration dataclass.
        raw: parameters by name or alias; the mappings under `config_cls.groups` are merged in.
        backend: the backend's name, for messages.

    Raises:
        ConfigError: an unknown or repeated key, a missing required parameter, a value of the wrong
            type or out of range, or values that contradict each other.
    """
    parameters = parameters_of(config_cls)
    canonical = {name: p.name for p in parameters.values() for name in (p.name, *p.aliases)}
    given: dict[str, tuple[str, object]] = {}
    for shown, key, value in _flatten(config_cls, raw, backend):
        name = canonical.get(key) if isinstance(key, str) else None
        if name is None:
            raise _unknown(key, config_cls, backend)
        if name in given:
            raise ConfigError(
                f"`{name}` of {backend} must be given once, got it as {given[name][0]!r} and as "
                f"{shown!r}; remove one"
            )
        given[name] = shown, value
    for name, parameter in parameters.items():
        if parameter.required and name not in given:
            raise ConfigError(
                f"`{name}` of {backend} must be given: {parameter.help or parameter.expected}"
            )
    values = {n: parameters[n].convert(value, backend) for n, (_, value) in given.items()}
    return config_cls(**values)


def config_as_dict(config: BackendConfig) -> dict[str, object]:
    """Return the parameters as JSON-ready values; `build_config` turns them back."""
    values = {name: getattr(config, name) for name in parameters_of(type(config))}
    return {
        name: as_plain(value.as_dict() if isinstance(value, RatioSchedule) else value)
        for name, value in values.items()
    }


def _flatten(
    config_cls: type[BackendConfig], raw: Mapping[str, object], backend: str
) -> Iterator[tuple[str, str, object]]:
    """Yield how each parameter was given, its name or alias, and its value."""
    for key, value in raw.items():
        if key not in config_cls.groups:
            yield key, key, value
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{name}", name, inner) for name, inner in value.items())
        else:
            raise ConfigError(f"`{key}` of {backend} must be a mapping, got {short(value)}")


def _unknown(key: object, config_cls: type[BackendConfig], backend: str) -> ConfigError:
    valid = tuple(parameters_of(config_cls))
    if not valid:
        return ConfigError(f"{backend} takes no parameters, got {short(key)}")
    return ConfigError(
        f"parameters of {backend} must be among {', '.join(valid)}, got {short(key)}"
        f"{nearest(str(key), valid)}"
    )


@lru_cache(maxsize=256)
def settings_text(config: BackendConfig | None) -> str:
    """Return the parameters that are not at their defaults; of files they name, the content.

    A file may lie elsewhere on another host: its digest stands for it, as it was when it was first
    asked for.

    Args:
        config: a backend's parameters, or None for its defaults.

    Returns:
        Text of at most 240 characters; different for different parameters.
    """
    if config is None:
        return "defaults"
    given = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        if field.name.endswith("_path") and Path(str(value)).is_file():
            value = f"file {_digest(Path(str(value)).read_bytes())}"
        given.append(f"{field.name}={value}")
    text = ", ".join(given) or "defaults"
    if len(text) <= _MOST:
        return text
    ending = f"... {_digest(text.encode())}"
    return text[: _MOST - len(ending)] + ending


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
