"""What a user says of the tokens of a model that this package has no adapter for.

Importing this module imports neither torch nor diffusers.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from multimodal_gen.errors import ConfigError, short

_LARGEST = 2**31 - 1  # tokens are indexed by 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedTokens:
    """The rows of the sequences that self-attention gets.

    Attributes:
        grid: (T, H, W) of the latent after patching; its T H W rows lie in raster order.
        text: (first row of the text, row after its last), or None where there is none.

    Raises:
        ConfigError: the text is neither in front of the grid nor behind it.
    """

    grid: tuple[int, int, int]
    text: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.text is not None and self.text[0] not in (0, self.video_rows):
            raise ConfigError(
                f"text_rows must start at 0, in front of the latent grid, or at {self.video_rows}, "
                f"behind the {self._grid}, got {self.text[0]}-{self.text[1]}"
            )

    @property
    def video_rows(self) -> int:
        """T H W."""
        return math.prod(self.grid)

    @property
    def rows(self) -> int:
        """Rows of the whole sequence."""
        start, stop = self.text or (0, 0)
        return self.video_rows + stop - start

    @property
    def _grid(self) -> str:
        return "x".join(str(size) for size in self.grid)

    def __str__(self) -> str:
        if self.text is None:
            return f"latent_grid={self._grid}"
        return f"latent_grid={self._grid}, text_rows={self.text[0]}-{self.text[1]}"


def describe_tokens(
    latent_grid: object, text_rows: object, *, spell: Callable[[str], str] = str
) -> DescribedTokens | None:
    """Return what `latent_grid` and `text_rows` say, in any of their forms; None for nothing.

    Args:
        latent_grid: see `parse_latent_grid`.
        text_rows: see `parse_text_rows`.
        spell: what messages call a setting; by default its name.

    Raises:
        ConfigError: one of them is something else, or rows come without a grid.
    """
    grid = parse_latent_grid(latent_grid, name=spell("latent_grid"))
    text = parse_text_rows(text_rows, name=spell("text_rows"))
    if grid is not None:
        return DescribedTokens(grid=grid, text=text)
    if text is not None:
        rows, needed = spell("text_rows"), spell("latent_grid")
        raise ConfigError(f"{rows} needs {needed}, got {rows} alone; add it")
    return None


def parse_latent_grid(value: object, *, name: str = "latent_grid") -> tuple[int, int, int] | None:
    """Return (T, H, W) of "21x45x80" or of three integers; None for None.

    Args:
        value: what was given.
        name: what messages call it.

    Raises:
        ConfigError: it is something else, or larger than any sequence.
    """
    if value is None:
        return None
    sizes = _integers(value, r"(\d{1,9})x(\d{1,9})x(\d{1,9})", 3)
    if sizes is None or min(sizes) < 1 or math.prod(sizes) > _LARGEST:
        raise ConfigError(
            f"{name} must be frames x rows x columns of the latent after patching, three integers "
            f">= 1 such as 21x45x80, got {short(value)}"
        )
    return (sizes[0], sizes[1], sizes[2])


def parse_text_rows(value: object, *, name: str = "text_rows") -> tuple[int, int] | None:
    """Return (start, stop) of "0-226" or of two integers; None for None.

    Args:
        value: what was given.
        name: what messages call it.

    Raises:
        ConfigError: it is something else, or has no row.
    """
    if value is None:
        return None
    rows = _integers(value, r"(\d{1,9})-(\d{1,9})", 2)
    if rows is None or not 0 <= rows[0] < rows[1] <= _LARGEST:
        raise ConfigError(
            f"{name} must be the first row of the text and the row after its last, such as 0-226, "
            f"got {short(value)}"
        )
    return (rows[0], rows[1])


def _integers(value: object, pattern: str, count: int) -> list[int] | None:
    if isinstance(value, str):
        found = re.fullmatch(pattern, value.strip().lower(), re.ASCII)
        return None if found is None else [int(size) for size in found.groups()]
    if not isinstance(value, Sequence) or len(value) != count:
        return None
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in value)
    return list(value) if whole else None
