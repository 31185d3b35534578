"""A score of clips by a function of the user's: found, called, and held to what it may return.

It takes a clip, uint8 [T, H, W, 3], T being 1 for an image, and the prompt, and returns a number in
[0, 1], of which more is better. It needs no reference, so that what is merely different may be as
good.
"""

import inspect
import math
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal_gen.errors import ConfigError, UsageError, first_line, nearest, short


@dataclass(frozen=True, slots=True)
class Score:
    """What clips are scored by.

    Attributes:
        name: of the function, e.g. "score.py:score".
        function: it.
        spelled: what messages call it.
    """

    name: str
    function: Callable[[Any, str], Any]
    spelled: str = "score"

    def of(self, frames: Any, prompt: str) -> float:
        """Return the score of a clip.

        Args:
            frames: uint8 [T, H, W, C]; the function gets a copy with three channels.
            prompt: what it was made from.

        Raises:
            UsageError: the function fails, or returns something else than a number in [0, 1].
        """
        import numpy as np

        rgb = np.repeat(frames, 3, -1) if frames.shape[-1] == 1 else frames[..., :3]
        try:
            given = self.function(np.array(rgb), prompt)
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
        else:
            figure = _number(given)
            if 0 <= figure <= 1:
                return figure
            problem = short(given)
        raise UsageError(
            f"{self.spelled} must return a number in [0, 1] for every clip, got {problem} from "
            f"{self.name!r} for {list(rgb.shape)} and the prompt {short(prompt)}; what was "
            f"generated is kept: mend it, and go on with --resume"
        )


def _number(given: object) -> float:
    """Return a number of Python, NumPy or torch; NaN for anything else."""
    try:
        return float(given) if hasattr(given, "__float__") else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # none, or too large
        return math.nan


def read_score(given: object, *, name: str = "score") -> Score:
    """Return the score that a function, or a text FILE.py:function, stands for.

    The file is run, as an import of it would.

    Args:
        given: the function, or the text.
        name: what messages call it.

    Raises:
        ConfigError: there is no such file or function, the file fails, or the function does not
            take a clip and a prompt.
    """
    if isinstance(given, str):
        text, function = given, _function_of(given, name)
    else:
        of = getattr(given, "__qualname__", type(given).__qualname__)
        text, function = f"{getattr(given, '__module__', '?')}.{of}", given
    if not callable(function):
        raise ConfigError(f"{name} must be a function or FILE.py:function, got {short(given)}")
    try:
        inspect.signature(function).bind(None, "")
    except TypeError as error:
        raise ConfigError(
            f"{name} must be a function of a clip [T, H, W, 3] and its prompt, got {text!r}, which "
            f"cannot be called so: {first_line(error)}"
        ) from None
    except ValueError:  # one in C that does not tell
        pass
    return Score(text, function, name)


def _function_of(text: str, name: str) -> object:
    file, _, function = text.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(f"{name} must be FILE.py:function, got {short(text)}")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{name} must name a file that is there, got {short(text)}")
    try:
        found = runpy.run_path(str(path), run_name=f"_score_{path.stem}")
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{name} must name a file that can be imported, got {short(text)}, which raises "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    if not callable(found.get(function)):
        known = [key for key, value in found.items() if callable(value)]
        raise ConfigError(
            f"{name} must name a function of {str(path)!r}, got {function!r}"
            f"{nearest(function, known)}"
        )
    return found[function]
