"""Backend configuration: one frozen dataclass per backend, built from untyped mappings.

A backend declares its parameters once:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class VideoSparseAttnConfig(SparseConfig):
        sparsity: float = option(0.0, "share of key blocks to skip", ge=0, le=1)

`build_config` turns a mapping into such an object; `config_source.py` reads the mapping from a
file, a JSON string or `k=v` pairs.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any


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
    """Parameters of one backend; this base has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(BackendConfig):
    """Parameters every sparse backend has.

    Attributes:
        dense_steps: denoising steps that run on the dense backend, e.g. "0-3,38".
        dense_layers: layers that run on the dense backend, e.g. "0-3,38".
    """

    dense_steps: str | None = option(None, "denoising steps that stay dense, e.g. '0-3,38'")
    dense_layers: str | None = option(None, "layers that stay dense, e.g. '0-3,38'")
