"""Every exception this package raises on purpose.

    MultimodalGenError
      UsageError (ValueError)                  the caller asked for something that cannot be done
        ConfigError                            a parameter or a configuration file is wrong
        UnsupportedBackendError                the requested backend cannot serve this request
        ComponentAttentionBackendNotAppliedError
                                               an override reached no attention layer
        NothingAppliedError                    `apply` found no attention it could take over
        MissingDependencyError (ImportError)   an optional package is not installed
      RankError (RuntimeError)                 another rank failed, hangs or does something else

Messages read "`<name>` must <rule>, got <value>", then the remedy.
The command line prints a `MultimodalGenError` as one line and exits with status 2, or 1 for a
`RankError`.
"""

import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class MultimodalGenError(Exception):
    """Base class of every exception raised on purpose."""


class UsageError(MultimodalGenError, ValueError):
    """The caller asked for something that cannot be done; the message says what to do instead."""


class ConfigError(UsageError):
    """A configuration value, string or file is wrong."""


class UnsupportedBackendError(UsageError):
    """The requested attention backend cannot serve this request; the message lists every reason."""


class ComponentAttentionBackendNotAppliedError(UsageError):
    """A component override reached no attention layer."""


class NothingAppliedError(UsageError):
    """No attention module was found that could be taken over."""


class MissingDependencyError(UsageError, ImportError):
    """An optional package is needed and not installed."""


class RankError(MultimodalGenError, RuntimeError):
    """Another rank of the run failed, does not answer or does something else.

    Attributes:
        among: the ranks of which one did not answer; empty where any may be at fault.
    """

    def __init__(self, message: str = "", among: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.among = among


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # a title alone
        return f"{lines[0]} {lines[1].strip()}".rstrip(".")
    return lines[0].rstrip(".") if lines else type(error).__name__


def short(value: object) -> str:
    """Return `repr(value)`, cut to what fits in a one-line message."""
    try:
        text = _REPR.repr(value)
    except (ValueError, RecursionError):  # an int too long to print, a list inside itself
        return f"something of type {type(value).__name__}"
    half = _MOST_LETTERS // 2
    return text if len(text) <= _MOST_LETTERS else f"{text[:half]}...{text[-half:]}"


_MOST_LETTERS = 200
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _MOST_LETTERS


def listed(names: Sequence[object], most: int = 3) -> str:
    """Return the first of several names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that a device's memory, or the machine's, is full."""
    # torch's own error is a RuntimeError whose class needs torch; the CPU's allocator and the
    # CUDA driver raise plain ones.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return "can't allocate memory" in text or "[CUDA]: out of memory" in text


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the valid name closest to `name`, or an empty string."""
    # Dashes that all options start with would make every short name look close.
    stems = {option.lstrip("-"): option for option in valid}
    match = get_close_matches(name.lstrip("-"), list(stems), n=1, cutoff=0.6)
    return f", did you mean {stems[match[0]]!r}?" if match else ""
