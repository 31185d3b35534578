"""Text files that are read whole and written whole."""

import os
import uuid
from contextlib import suppress
from pathlib import Path

from multimodal_gen.errors import ConfigError

__all__ = ["read_text", "write_text"]


def read_text(path: Path, *, what: str) -> str:
    """Return a file's text.

    Args:
        path: the file.
        what: what it holds, for messages.

    Raises:
        ConfigError: the file is missing, unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{what} must be a readable file, got {str(path)!r}: {reason}") from None


def write_text(path: Path, text: str, *, what: str) -> None:
    """Write a file under another name and rename it: what has its name is always complete.

    Args:
        path: the file; missing folders are made, an existing file is replaced.
        text: what to write.
        what: what it holds, for messages.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(
            f"{what} must be written to a file, got {str(path)!r}: {error.strerror}"
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()
