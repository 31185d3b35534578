"""What was measured to be the fastest at which shape: the tables that `auto` goes by.

A table holds the times of dense backends on one machine, shape by shape. `auto_table.json`, in
this folder, holds those that come with the package, made of rows under scripts/bench/results;
`sglang attention bench --save` writes one for the machine it runs on.

A measured shape speaks for the calls near it: of the same dtype, with or without a key mask, with
or without grouped heads, of its head size or up to 15 channels less, at most twice as many or half
as many queries, and keys, and a quarter to four times as many heads of all samples. Of several such
shapes the one with the smallest head size speaks, and of these the nearest. Where none does, the
first of the platform's list runs, as without a table.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import torch

from multimodal_gen.errors import ConfigError, short
from multimodal_gen.files import write_text
from multimodal_gen.records import from_plain, read_file, wrong
from multimodal_gen.runtime.layers.attention.request import Environment, Ranking, Timing
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.settings import as_plain, expect

SCHEMA: Final = 1
COMMITTED = Path(__file__).with_suffix(".json")

# How far a measured shape reaches, as powers of two.
_TOKENS_REACH = 1.0
_HEADS_REACH = 2.0
# Kernels round head sizes up, each in its own steps.
_HEAD_SIZE_REACH = 16

# Longer numbers are no sizes, and their ratio may be no float.
_SIZE = r"[0-9]{1,12}"
_SHAPE = re.compile(rf"{'x'.join([f'({_SIZE})'] * 4)}((?::[a-z_]+(?:={_SIZE})?)*)")
_SHAPE_FORM = (
    "BxSxHxD of numbers of at most 12 digits, with :keys=N, :kv_heads=N and :mask where they differ"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """What the time of a dense call depends on.

    Attributes:
        batch: B.
        queries: Sq.
        keys: Sk.
        heads: H.
        kv_heads: Hkv.
        head_size: D.
        masked: whether keys are masked.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int
    masked: bool = False

    @classmethod
    def parse(cls, text: str, *, name: str = "a shape") -> "CallShape":
        """Read a shape from text: "1x4096x24x128", "2x4096x24x128:keys=512:kv_heads=8:mask".

        Raises:
            ConfigError: it is not of this form, or a number is 0 or does not fit another.
        """
        match = _SHAPE.fullmatch(text.strip())
        options = [part.partition("=") for part in (match[5] if match else "").split(":")[1:]]
        names = [name for name, _, _ in options]
        spelled = all((name == "mask") != bool(value) for name, _, value in options)
        known = set(names) <= {"keys", "kv_heads", "mask"} and len(set(names)) == len(names)
        if match is None or not known or not spelled:
            raise ConfigError(f"{name} must be {_SHAPE_FORM}, got {text!r}")
        batch, queries, heads, head_size = (int(number) for number in match.groups()[:4])
        given = {name: int(value) for name, _, value in options if value}
        shape = cls(
            batch=batch,
            queries=queries,
            keys=given.get("keys", queries),
            heads=heads,
            kv_heads=given.get("kv_heads", heads),
            head_size=head_size,
            masked="mask" in names,
        )
        if min(batch, queries, shape.keys, heads, shape.kv_heads, head_size) < 1:
            raise ConfigError(f"{name} must have sizes of at least 1, got {text!r}")
        if heads % shape.kv_heads:
            raise ConfigError(
                f"{name} must have a multiple of its key heads as heads, got {text!r}"
            )
        return shape

    def __str__(self) -> str:
        text = f"{self.batch}x{self.queries}x{self.heads}x{self.head_size}"
        text += f":keys={self.keys}" if self.keys != self.queries else ""
        text += f":kv_heads={self.kv_heads}" if self.grouped else ""
        return text + (":mask" if self.masked else "")

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.kv_heads != self.heads

    @property
    def flop(self) -> float:
        """Operations of the two matrix products; masked keys count."""
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.head_size

    def speaks_for(self, other: "CallShape") -> bool:
        """Whether what was measured at this shape holds for `other`; see above."""
        return (
            (self.masked, self.grouped) == (other.masked, other.grouped)
            and 0 <= self.head_size - other.head_size < _HEAD_SIZE_REACH
            and _apart(self.queries, other.queries) <= _TOKENS_REACH
            and _apart(self.keys, other.keys) <= _TOKENS_REACH
            and _apart(self.batch * self.heads, other.batch * other.heads) <= _HEADS_REACH
        )

    def distance(self, other: "CallShape") -> tuple[float, ...]:
        """Return what is to be least between a measured shape and a call."""
        tokens = _apart(self.queries, other.queries) + _apart(self.keys, other.keys)
        heads = _apart(self.batch * self.heads, other.batch * other.heads)
        return self.head_size, tokens + heads / 2, abs(self.batch - other.batch)


def _apart(a: int, b: int) -> float:
    return abs(math.log2(a / b))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured at one shape.

    Attributes:
        shape: the shape.
        dtype: dtype of q, k and v, such as "bfloat16".
        timings: one per backend.

    Raises:
        ConfigError: torch has no such floating dtype.
    """

    shape: CallShape
    dtype: str
    timings: tuple[Timing, ...]

    def __post_init__(self) -> None:
        dtype = getattr(torch, self.dtype, None)
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"dtype must be one of torch's floating ones, got {self.dtype!r}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AutoTable:
    """What was measured on one machine.

    Attributes:
        name: what reports call it.
        platform: kind of device, such as "cuda".
        device: its name.
        capability: compute capability, such as "9.0"; "" where the notion does not exist.
        versions: of torch, triton and the packages of the backends, by distribution.
        source: where the times come from.
        measured: by shape.
    """

    name: str
    platform: str
    device: str
    capability: str
    versions: Mapping[str, str]
    source: str
    measured: tuple[Measured, ...]

    def ranking(self, shape: CallShape, dtype: torch.dtype) -> Ranking | None:
        """Return what was measured for calls of a shape, or None; see the head of the module."""
        name = str(dtype).removeprefix("torch.")
        near = [m for m in self.measured if m.dtype == name and m.shape.speaks_for(shape)]
        if not near:
            return None
        best = min(near, key=lambda measured: measured.shape.distance(shape))
        return Ranking(
            timings=tuple(sorted(best.timings, key=lambda timing: timing.ms)),
            source=f"{best.shape} ({self.name})",
        )

    def mismatches(self, environment: Environment) -> tuple[str, ...]:
        """Return what differs between the machine it was measured on and this one."""
        here = (
            ("platform", str(environment.platform), self.platform),
            ("device", environment.device_name, self.device),
            ("compute capability", _capability(environment), self.capability),
        )
        found = [f"the {what} is {now!r}, not {then!r}" for what, now, then in here if now != then]
        present = versions_of(environment)
        versions = (
            (name, present.get(name, "not installed"), then) for name, then in self.versions.items()
        )
        found += [f"{name} is {now}, not {then}" for name, now, then in versions if now != then]
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _File:
    """What a file of tables holds."""

    schema: Literal[1]
    tables: tuple[AutoTable, ...]


def versions_of(environment: Environment) -> Mapping[str, str]:
    """Return the versions of torch and of the optional packages that are installed."""
    packages = {distribution: version for _, distribution, version in environment.packages}
    return {"torch": torch.__version__, **packages}


def _capability(environment: Environment) -> str:
    return environment.capability.as_version_str() if environment.capability else ""


@lru_cache(maxsize=32)
def committed_table(environment: Environment) -> AutoTable | None:
    """Return the package's own table for a device, or None where there is none.

    It is for a compute capability. Of several, the one that was measured with the same minor
    release of triton comes first, then of torch, then the newest.
    """
    place = (str(environment.platform), _capability(environment))
    fitting = [t for t in _committed() if (t.platform, t.capability) == place]
    here = _minors(versions_of(environment))

    def closeness(table: AutoTable) -> tuple[object, ...]:
        there = _minors(table.versions)
        return *(now == then for now, then in zip(here, there, strict=True)), *reversed(there)

    return max(fitting, key=closeness, default=None)


@lru_cache(maxsize=1)
def _committed() -> tuple[AutoTable, ...]:
    return read_tables(COMMITTED, name="the package's own table")


def _minors(versions: Mapping[str, str]) -> list[tuple[int, ...]]:
    """Return the minor releases of triton and torch."""
    texts = (versions.get(name, "") for name in ("triton", "torch"))
    return [tuple(int(number) for number in re.findall(r"\d+", text)[:2]) for text in texts]


def table_for(
    path: "str | os.PathLike[str]", environments: Sequence[Environment], *, name: str
) -> AutoTable:
    """Read the table of a file that was measured on this machine.

    Args:
        path: the file.
        environments: the devices of this machine, those that are asked about first in front.
        name: what asked for it, for messages.

    Raises:
        ConfigError: the file is no table, or was measured on another machine or with other
            versions; says what differs.
    """
    expect(name, path, (str, os.PathLike), "a file that `sglang attention bench --save` wrote")
    tables = read_tables(path, name=name)
    for environment in environments:
        for table in tables:
            if not table.mismatches(environment):
                return table
    reasons = "; ".join(
        dict.fromkeys(reason for table in tables for reason in table.mismatches(environments[0]))
    )
    raise ConfigError(
        f"{name} must be a table of this machine and its versions, got {short(str(path))}: "
        f"{reasons}; measure one here with `sglang attention bench --save FILE`, or leave it out"
    )


def read_tables(path: "str | os.PathLike[str]", *, name: str) -> tuple[AutoTable, ...]:
    """Read a file of tables.

    Args:
        path: the file.
        name: what asked for it, for messages.

    Raises:
        ConfigError: the file cannot be read, is of another schema, or is malformed.
    """
    where = f"{name} {short(str(path))}"
    try:
        tables = from_plain(_File, read_file(Path(path), where), where).tables
        if not tables:
            raise wrong(where, "some tables", [])
        for timing in (x for table in tables for each in table.measured for x in each.timings):
            AttentionBackendEnum.parse(timing.backend)
        machines = [(t.platform, t.device, t.capability, dict(t.versions)) for t in tables]
        if any(machine in machines[:i] for i, machine in enumerate(machines)):
            raise ConfigError(
                f"{where} must be of different machines and versions, got two of the same"
            )
    except ConfigError as error:
        raise ConfigError(f"{error}; write it anew with `sglang attention bench --save`") from None
    return tables


def tables_as_json(tables: Iterable[AutoTable]) -> dict[str, Any]:
    """Return tables as JSON data, as `read_tables` reads them."""
    data: dict[str, Any] = as_plain(_File(schema=SCHEMA, tables=tuple(tables)))
    return data


def write_tables(path: Path, tables: Iterable[AutoTable]) -> None:
    """Write tables to a file, which appears whole or not at all."""
    write_text(path, _text(tables_as_json(tables)))


def _text(document: Mapping[str, Any]) -> str:
    """Return JSON with a line per shape and per backend, as people read and compare tables."""
    text = json.dumps(document, indent=1)
    # What lies deepest fits a line each.
    return (
        re.sub(r"\{([^{}]*)\}", lambda inner: "{" + " ".join(inner[1].split()) + "}", text) + "\n"
    )
