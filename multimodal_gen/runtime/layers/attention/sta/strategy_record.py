"""What a strategy file was made for, in a small file beside it.

A strategy file has room for windows only, and other programs read every key of it as three
indices. So `mask_strategy.json` has its record in `mask_strategy.json.meta.json`:

    {"tiles": [5, 6, 10], "tile_size": [6, 8, 8], "sha256": "..."}

Each key may be left out: a record for a file of another program needs its tiles only. The digest is
that of the strategy file, so that a record is not taken for that of a file that replaced it.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.config_fields import short
from multimodal_gen.runtime.layers.attention.sta.files import read_text, write_text
from multimodal_gen.runtime.layers.attention.sta.windows import AXES, Window

__all__ = ["StrategyRecord", "read_record", "record_path", "write_record"]

_WHAT = "record of a mask strategy"
_DIGEST = "sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRecord:
    """What a strategy was made for, as far as it is known.

    Attributes:
        tiles: tiles along (time, height, width), or None.
        tile_size: tokens per tile along each axis, or None.
    """

    tiles: Window | None = None
    tile_size: Window | None = None


_SIZES = ("tiles", "tile_size")


def record_path(path: Path) -> Path:
    """Return where the record of a strategy file lies."""
    return path.with_name(f"{path.name}.meta.json")


def read_record(path: Path, text: str) -> StrategyRecord:
    """Read the record of a strategy file; an empty one where there is none.

    Args:
        path: the strategy file.
        text: what it holds.

    Raises:
        ConfigError: the record cannot be read, is malformed, or is that of another strategy.
    """
    beside = record_path(path)
    if not beside.exists():
        return StrategyRecord()
    name = f"{_WHAT} {str(beside)!r}"
    try:
        content = json.loads(read_text(beside, what=_WHAT))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be JSON, got {error}; {_REMEDY}") from None
    if not isinstance(content, dict) or not content.keys() <= {*_SIZES, _DIGEST}:
        raise ConfigError(
            f"{name} must be a JSON object with tiles, tile_size and sha256 at most, got "
            f"{short(content)}; {_REMEDY}"
        )
    if content.get(_DIGEST) not in (None, _digest(text)):
        raise ConfigError(
            f"{name} must belong to {path.name!r}, got that of another strategy, which the file "
            f"held before; {_REMEDY}"
        )
    tiles, tile_size = (_sizes(content.get(key), key, name) for key in _SIZES)
    return StrategyRecord(tiles=tiles, tile_size=tile_size)


def write_record(path: Path, text: str, record: StrategyRecord) -> None:
    """Write the record of a strategy file; an empty record leaves none, not even an older one.

    Args:
        path: the strategy file.
        text: what it holds.
        record: what it was made for.

    Raises:
        ConfigError: the record cannot be written.
    """
    sizes = {key: getattr(record, key) for key in _SIZES}
    known = {key: list(size) for key, size in sizes.items() if size is not None}
    beside = record_path(path)
    if known:
        write_text(beside, json.dumps({**known, _DIGEST: _digest(text)}) + "\n", what=_WHAT)
        return
    with suppress(FileNotFoundError):
        beside.unlink()


_REMEDY = "delete it, or tune again"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _sizes(value: object, key: str, name: str) -> Window | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == len(AXES):
        time, height, width = value
        if all(type(size) is int and size >= 1 for size in value):
            return (time, height, width)
    raise ConfigError(
        f"{name} must have three integers >= 1 as {key}, got {short(value)}; {_REMEDY}"
    )
