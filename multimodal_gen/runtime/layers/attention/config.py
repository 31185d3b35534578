"""Backend configuration: one frozen dataclass per backend, built from untyped mappings.

A backend declares its parameters once:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class VideoSparseConfig(SparseConfig):
        sparsity: float = option(0.0, "share of key blocks to skip", ge=0, le=1)

`build_config` turns a mapping into such an object; `config_source.py` reads the mapping from a
file, a JSON string or `k=v` pairs. Values are checked however the object is made.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from multimodal_gen.errors import ConfigError, nearest
from multimodal_gen.runtime.layers.attention.config_fields import parameters_of, short
from multimodal_gen.runtime.layers.attention.index_selector import IndexSelector

Config = TypeVar("Config", bound="BackendConfig")


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

    Raises:
        ConfigError: a value has the wrong type, is out of range or contradicts another.
    """

    groups: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, parameter in parameters_of(type(self)).items():
            value = parameter.convert(getattr(self, name), type(self).__name__)
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` when parameters contradict each other; they are converted by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(BackendConfig):
    """Parameters every sparse backend has.

    Attributes:
        dense_steps: denoising steps that run on the dense backend, e.g. "0-3,38".
        dense_layers: layers that run on the dense backend, e.g. "0-3,38".
        first_dense: the method's own parameters for first steps and first layers that stay dense,
            for messages; "" where it has none.
    """

    first_dense: ClassVar[tuple[str, str]] = ("", "")

    dense_steps: IndexSelector | None = option(  # noqa: RUF009 - it returns a field
        None, "denoising steps that stay dense, e.g. '0-3,38'"
    )
    dense_layers: IndexSelector | None = option(  # noqa: RUF009 - it returns a field
        None, "layers that stay dense, e.g. '0-3,38'"
    )

    def dense_schedule(self) -> tuple[IndexSelector | None, IndexSelector | None]:
        """Return the steps and the layers that run on the dense backend.

        Methods whose first steps or layers are dense by parameters of their own add those here.
        """
        return self.dense_steps, self.dense_layers

    def dense_first(self) -> tuple[float, float]:
        """Return how many first steps and first layers run on the dense backend besides.

        Values up to 1 are shares of what the run and the model have, others are numbers.
        """
        return 0.0, 0.0


def build_config(config_cls: type[Config], raw: Mapping[str, object], *, backend: str) -> Config:
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
    return str(value) if isinstance(value, IndexSelector) else value
