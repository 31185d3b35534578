"""Backend configuration: one frozen dataclass per backend, built from untyped mappings.

A backend declares its parameters once:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class VideoSparseConfig(SparseConfig):
        sparsity: float = option(0.0, "share of key blocks to skip", ge=0, le=1)

`build_config` turns a mapping into such an object; `config_text.py` reads the mapping from a file,
a JSON string or `k=v` pairs. Values are checked however the object is made.

Annotations understood: bool, int, float, str, `IndexSelector`, `SigmaSelector`, `RatioSchedule`,
`Literal[...]`, `tuple[X, ...]` and unions of these with each other or with None. A bool is never an
int; an int is accepted for a float; a list is accepted for a tuple.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from multimodal_gen.errors import ConfigError, UsageError, nearest
from multimodal_gen.runtime.layers.attention.selectors import (
    Axis,
    FirstShare,
    IndexSelector,
    Indices,
    RatioSchedule,
    SigmaSelector,
    first_of,
)
from multimodal_gen.runtime.plain_values import short

__all__ = [
    "Axis",
    "BackendConfig",
    "DensePart",
    "FirstShare",
    "IndexSelector",
    "Indices",
    "Parameter",
    "RatioSchedule",
    "SigmaSelector",
    "SparseConfig",
    "build_config",
    "config_as_dict",
    "config_at",
    "first_of",
    "option",
    "parameters_of",
    "read_selector",
    "settings_text",
    "varying",
]

_MOST = 240


class _MismatchError(Exception):
    """A value is not of the expected type or out of its range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One field of a configuration dataclass, with what `option` declared of it.

    Attributes:
        name: field name.
        annotation: resolved type.
        default: default value, or `dataclasses.MISSING`.
        help: one line with meaning and unit.
        aliases: other accepted spellings.
        ge: smallest value allowed, for each element of a list too, or None.
        le: largest value allowed, for each element of a list too, or None.
        length: exact number of elements of a list, or None.
    """

    name: str
    annotation: Any
    default: Any
    help: str = ""
    aliases: tuple[str, ...] = ()
    ge: float | None = None
    le: float | None = None
    length: int | None = None

    @property
    def required(self) -> bool:
        """Whether the parameter has no default."""
        return self.default is dataclasses.MISSING

    @property
    def expected(self) -> str:
        """What the parameter takes, in words, e.g. "a number in [0, 1]"."""
        return _describe(self.annotation, self)

    def convert(self, value: object, owner: str) -> object:
        """Return `value` in the parameter's type.

        Args:
            value: what the user gave.
            owner: whose parameter it is, for messages.

        Raises:
            ConfigError: `value` has the wrong type or is out of range.
        """
        label = f"`{self.name}` of {owner}"
        try:
            return _convert(value, self.annotation, self, label)
        except _MismatchError:
            hint = nearest(value, _choices(self.annotation)) if isinstance(value, str) else ""
            raise ConfigError(
                f"{label} must be {self.expected}, got {short(value)}{hint}"
            ) from None


def parameters_of(config_cls: type) -> Mapping[str, Parameter]:
    """Return the parameters a configuration dataclass declares, by name, in order."""
    return _parameters_of(config_cls)


@cache
def _parameters_of(config_cls: Any) -> Mapping[str, Parameter]:  # Any: mypy finds it unhashable
    hints = get_type_hints(config_cls)
    found = {
        field.name: Parameter(
            name=field.name,
            annotation=hints[field.name],
            default=field.default,
            **field.metadata,
        )
        for field in dataclasses.fields(config_cls)
        if field.init
    }
    return MappingProxyType(found)


def read_selector(value: object, name: str) -> IndexSelector:
    """Return the selector `value` spells: text, an int, a list of ints, or one already read.

    Raises:
        ConfigError: `value` is none of these.
    """
    if isinstance(value, IndexSelector):
        return value
    # As text, "-5" is a range from the start; as a number it may be meant to count from the end.
    if type(value) is int and value < 0:
        raise ConfigError(
            f"{name} must be {_NAMES[IndexSelector]}, got {short(value)}; the range from the start "
            f"is '0{value}', and nothing counts from the end"
        )
    listed = value if isinstance(value, (list, tuple)) else ()
    if not any(isinstance(item, int) and item < 0 for item in listed):
        try:
            return IndexSelector.parse(value, name=name)
        except ConfigError:
            raise
        except ValueError:  # more digits than Python converts
            pass
    raise ConfigError(f"{name} must be {_NAMES[IndexSelector]}, got {short(value)}")


def _convert(value: object, annotation: Any, bounds: Parameter, label: str) -> object:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return _convert_union(value, annotation, bounds, label)
    if origin is Literal:
        return _convert_choice(value, get_args(annotation))
    if origin is tuple:
        return _convert_list(value, get_args(annotation)[0], bounds, label)
    if annotation in (IndexSelector, SigmaSelector, RatioSchedule):
        return _convert_to_selector(value, annotation, bounds, label)
    if annotation is NoneType and value is None:
        return None
    if annotation in (int, float):
        return _convert_number(value, annotation, bounds)
    if annotation in (bool, str) and isinstance(value, annotation):
        return value
    if annotation not in (bool, str, NoneType):
        raise TypeError(f"{label} has an annotation that is not supported: {annotation!r}")
    raise _MismatchError


def _convert_union(value: object, annotation: Any, bounds: Parameter, label: str) -> object:
    members = get_args(annotation)
    if value is None and NoneType in members:
        return None
    for member in members:
        try:
            return _convert(value, member, bounds, label)
        except _MismatchError:
            continue
    raise _MismatchError


def _convert_choice(value: object, choices: tuple[Any, ...]) -> object:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # `version=3` reads as a number
    if isinstance(value, str):
        name = value.strip().casefold()
        matches = [c for c in choices if isinstance(c, str) and c.casefold() == name]
        if len(matches) == 1:
            return matches[0]
    raise _MismatchError


def _convert_list(value: object, element: Any, bounds: Parameter, label: str) -> object:
    if not isinstance(value, (list, tuple)):
        raise _MismatchError
    if bounds.length is not None and len(value) != bounds.length:
        raise _MismatchError
    return tuple(_convert(item, element, bounds, label) for item in value)


def _convert_number(value: object, annotation: type, bounds: Parameter) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, annotation)):
        raise _MismatchError
    try:
        number = annotation(value)
    except OverflowError:
        raise _MismatchError from None
    if isinstance(number, float) and not math.isfinite(number):
        raise _MismatchError
    if bounds.ge is not None and number < bounds.ge:
        raise _MismatchError
    if bounds.le is not None and number > bounds.le:
        raise _MismatchError
    return number


def _convert_to_selector(value: object, annotation: Any, bounds: Parameter, label: str) -> object:
    if annotation is RatioSchedule:
        return _convert_schedule(value, bounds, label)
    if annotation is SigmaSelector:
        return SigmaSelector.parse(value, name=label)
    return read_selector(value, label)


def _convert_schedule(value: object, bounds: Parameter, label: str) -> RatioSchedule:
    if isinstance(value, RatioSchedule):
        value = dict(value.parts)
    if not isinstance(value, Mapping):
        raise _MismatchError
    numbers = {key: _convert_number(number, float, bounds) for key, number in value.items()}
    parts: list[tuple[float, Any]] = sorted((_share(key), it) for key, it in numbers.items())
    if not parts or parts[0][0] != 0:
        raise ConfigError(
            f"{label} must say what it is from the first step on, such as {_SCHEDULE}, "
            f"got {short(dict(value))}"
        )
    if len({start for start, _ in parts}) < len(parts):
        raise ConfigError(
            f"{label} must have one number for each share of the schedule, got {short(dict(value))}"
        )
    return RatioSchedule(tuple(parts))


def _share(key: object) -> float:
    """Return a share of the schedule, which JSON has as text."""
    try:
        share = float(key) if isinstance(key, (str, int, float)) else math.nan
    except (ValueError, OverflowError):
        share = math.nan
    if isinstance(key, bool) or not 0 <= share < 1:
        raise _MismatchError
    return share


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return tuple(choice for member in get_args(annotation) for choice in _choices(member))
    if get_origin(annotation) is Literal:
        return tuple(choice for choice in get_args(annotation) if isinstance(choice, str))
    return ()


def _describe(annotation: Any, bounds: Parameter) -> str:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_describe(member, bounds) for member in get_args(annotation))
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in get_args(annotation))}"
    if origin is tuple:
        (element, *_) = get_args(annotation)
        count = "a list of" if bounds.length is None else f"a list of {bounds.length}"
        return f"{count} {_plural(element)}{_range(bounds)}"
    name = _NAMES.get(annotation, str(annotation))
    return f"{name}{_range(bounds)}" if annotation in (int, float) else name


def _plural(element: Any) -> str:
    return {int: "integers", float: "numbers", str: "texts"}.get(element, str(element))


def _range(bounds: Parameter) -> str:
    if bounds.ge is not None and bounds.le is not None:
        return f" in [{bounds.ge}, {bounds.le}]"
    if bounds.ge is not None:
        return f" >= {bounds.ge}"
    return f" <= {bounds.le}" if bounds.le is not None else ""


_SCHEDULE = "{0: 0.5, 0.4: 0.9}"
_NAMES = MappingProxyType(
    {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        NoneType: "null",
        IndexSelector: "indices from 0 such as '0-3,38'",
        SigmaSelector: "sigmas such as '>0.9' or '0.4-0.7'",
        RatioSchedule: f"one for each part of the schedule such as {_SCHEDULE}",
    }
)
_ConfigT = TypeVar("_ConfigT", bound="BackendConfig")


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    aliases: tuple[str, ...] = (),
    ge: float | None = None,
    le: float | None = None,
    length: int | None = None,
) -> Any:
    """Declare one parameter of a backend configuration.

    Args:
        default: value when the user gives none; without one the parameter is required.
        help: one line with meaning and unit.
        aliases: other spellings that are accepted.
        ge: smallest value allowed, for each element of a list too.
        le: largest value allowed, for each element of a list too.
        length: exact number of elements of a list.

    Returns:
        A dataclass field.
    """
    metadata = {"help": help, "aliases": aliases, "ge": ge, "le": le, "length": length}
    return dataclasses.field(default=default, metadata=metadata)


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
        indices: which ones; of steps also by their sigmas.
    """

    given: str
    indices: Indices | SigmaSelector


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(BackendConfig):
    """Parameters every sparse backend has.

    Attributes:
        dense_steps: denoising steps that run on the dense backend, e.g. "0-3,38".
        dense_sigma: denoising steps that run on the dense backend, by their noise level, e.g.
            ">0.9"; in the units of the pipeline's scheduler.
        dense_layers: layers that run on the dense backend, e.g. "0-3,38".
        dense_above: share of query-key pairs in [0, 1]; a call that would keep more attends to all
            of them, which is faster. 1 never does; None goes by what was measured for the kernel,
            where it was not named. Not under `torch.use_deterministic_algorithms`.
        first_dense_steps: the method's own parameter for first steps that stay dense, or "". A
            float up to 1 is a share of what the run has, other values are numbers.
        first_dense_layers: the same for the layers of the model.
    """

    first_dense_steps: ClassVar[str] = ""
    first_dense_layers: ClassVar[str] = ""

    dense_steps: IndexSelector | None = option(
        None, "denoising steps that stay dense, e.g. '0-3,38'"
    )
    dense_sigma: SigmaSelector | None = option(
        None, "denoising steps that stay dense, by the scheduler's sigma, e.g. '>0.9'"
    )
    dense_layers: IndexSelector | None = option(None, "layers that stay dense, e.g. '0-3,38'")
    dense_above: float | None = option(
        None, "share of pairs above which a call is dense; 1: never; none: as measured", ge=0, le=1
    )

    def dense_parts(self, axis: Axis) -> tuple[DensePart, ...]:
        """Return the steps or the layers that run on the dense backend, by parameter."""
        names: tuple[str, ...] = (self.first_dense_layers, "dense_layers")
        if axis == "steps":
            names = (self.first_dense_steps, "dense_steps", "dense_sigma")
        given = {name: getattr(self, name) for name in names if name}
        return tuple(
            DensePart(f"{name}={value}", _first(value)) for name, value in given.items() if value
        )


def _first(value: IndexSelector | SigmaSelector | float) -> Indices | SigmaSelector:
    """Return a selector as it is, and of a share or a number the first indices."""
    if isinstance(value, (IndexSelector, SigmaSelector)):
        return value
    if isinstance(value, float) and value <= 1:
        return FirstShare(value)
    return IndexSelector(((0, int(value) - 1),))


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
        UsageError: a parameter changes over the steps, and nobody knows how many there are.
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
    canonical = {name: name for name in parameters}
    canonical |= {alias: p.name for p in parameters.values() for alias in p.aliases}
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
    return {name: _plain(getattr(config, name)) for name in parameters_of(type(config))}


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


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, RatioSchedule):
        return value.as_dict()
    return str(value) if isinstance(value, (IndexSelector, SigmaSelector)) else value


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
