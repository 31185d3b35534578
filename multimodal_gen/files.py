"""Files: bounded reads, atomic writes, and whether a file can be written at all.

What has its name is complete: files are written under temporary names in their folder, and renamed
at the end. Importing this module needs the standard library only.
"""

import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from multimodal_gen.errors import ConfigError, UsageError, short

_MOST_BYTES = 64 << 20  # more than any search of windows has

_PARTIAL = "partial"


class MalformedError(Exception):
    """The text cannot be read; the message says which part and why."""


def read_small_file(path: Path, *, encoding: str = "utf-8") -> str:
    """Return the text of a regular file; others may never end, or wait for a writer.

    Raises:
        MalformedError: it is none, too large or not UTF-8, or cannot be read.
    """
    try:
        # Not waiting for a writer, should it have become a pipe meanwhile.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MalformedError("this is no regular file")
            data = file.read(_MOST_BYTES + 1)
    except IsADirectoryError:
        raise MalformedError("this is a folder") from None
    except (OSError, ValueError) as error:  # or a character that no path has
        reason = getattr(error, "strerror", None) or str(error)
        raise MalformedError(f"the file cannot be read: {reason}") from None
    if len(data) > _MOST_BYTES:
        raise MalformedError(f"the file must have at most {_MOST_BYTES >> 20} MiB")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise MalformedError(f"the file is not UTF-8 text: {error.reason}") from None


def read_text(path: Path, *, what: str, encoding: str = "utf-8") -> str:
    """Return the text of a regular file.

    Args:
        path: the file.
        what: what it holds, for messages.
        encoding: how it is encoded.

    Raises:
        ConfigError: as `read_small_file`.
    """
    try:
        return read_small_file(path, encoding=encoding)
    except MalformedError as error:
        raise ConfigError(f"{what} must be a readable file, got {str(path)!r}: {error}") from None


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give another name to write a file or a folder to, and rename it when the block succeeds.

    There is no moment at which the file has neither its old content nor the new one, so that
    several processes may read and write it. After an exception nothing is left.

    Args:
        path: the final name; missing folders are made, a file or an empty folder is replaced.
    """
    _refuse_device(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _temporary(path, _PARTIAL)
    try:
        yield partial
        partial.replace(path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def _refuse_device(path: Path) -> None:
    """Refuse to put a file in the place of a device, a pipe or a socket."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "no regular file has that name", str(path))


def write_text(path: Path, text: str) -> None:
    """Write a text file as `atomic_write` does."""
    with atomic_write(path) as partial:
        partial.write_text(text, "utf-8")


def save_text(path: Path, text: str, *, what: str) -> None:
    """Write a text file as `atomic_write` does.

    Args:
        path: the file.
        text: what to write.
        what: what it holds, for messages.

    Raises:
        ConfigError: the file cannot be written.
    """
    with naming_file(path, what):
        write_text(path, text)


@contextmanager
def naming_file(path: Path, what: str) -> Iterator[None]:
    """Say of which file it is that writing it failed inside the block.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # a name that is none, or that cannot be encoded
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{what} must be written to a file, got {str(path)!r}: {reason}"
        ) from None


def _temporary(final: Path, kind: str, mark: str = "") -> Path:
    """Return another name in the folder of a file; it has the same suffix."""
    # Without the final name, which may be as long as names can be.
    return final.with_name(f".{mark}{uuid.uuid4().hex}.{kind}{final.suffix}")


class Staging:
    """Files written under temporary names, renamed together when the `with` block succeeds.

    After any exception, Ctrl-C and a rename that fails included, the temporary files are gone and
    the final names are as they were.

    Args:
        overwrite: replace files that exist by then. Otherwise the block ends with
            `FileExistsError`, whatever moment they appeared at. A folder is never replaced: where
            one has a final name, the block ends with `IsADirectoryError`.
        mark: what the temporary names start with, for `sweep`.
    """

    def __init__(self, *, overwrite: bool = False, mark: str = "") -> None:
        self._overwrite = overwrite
        self._mark = mark
        self._moves: list[tuple[Path, Path, bool]] = []
        self._temporaries: list[Path] = []

    def path(self, final: Path, *, overwrite: bool = False) -> Path:
        """Return the temporary path to write for `final`; it has the same suffix.

        Args:
            final: the final name.
            overwrite: replace this file even where others are not replaced.
        """
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._temporary(final, _PARTIAL)
        self._moves.append((temporary, final, overwrite or self._overwrite))
        return temporary

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                with ExitStack() as undo:
                    for move in self._moves:
                        self._place(*move, undo)
                    undo.pop_all()
        finally:
            for temporary in self._temporaries:
                temporary.unlink(missing_ok=True)

    def _temporary(self, final: Path, kind: str) -> Path:
        temporary = _temporary(final, kind, self._mark)
        self._temporaries.append(temporary)
        return temporary

    def _place(self, temporary: Path, final: Path, overwrite: bool, undo: ExitStack) -> None:
        if not overwrite:
            _rename_to_free(temporary, final)
            undo.callback(final.unlink, missing_ok=True)
            return
        _refuse_device(final)
        if final.is_dir() and not final.is_symlink():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(final))
        if os.path.lexists(final):
            old = self._temporary(final, "replaced")
            final.replace(old)
            undo.callback(old.replace, final)
        else:
            undo.callback(final.unlink, missing_ok=True)
        temporary.replace(final)


def sweep(folder: Path, mark: str) -> None:
    """Remove the half-written files of a process that was killed.

    What it was replacing stays under its temporary name: it may be the only copy.

    Args:
        folder: where it wrote.
        mark: that of its `Staging`.
    """
    assert mark, "without a mark these could be another program's"
    for temporary in folder.glob(f".{mark}*.{_PARTIAL}*"):
        temporary.unlink(missing_ok=True)


def _rename_to_free(temporary: Path, final: Path) -> None:
    """Give a file its final name; `FileExistsError` if that is taken. `temporary` may remain."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        raise
    except OSError:
        # Not every file system has links; there the name is taken first, with an empty file.
        os.close(os.open(final, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            temporary.replace(final)
        except BaseException:
            final.unlink(missing_ok=True)
            raise


def is_taken(path: Path) -> bool:
    """Whether something has a name: a file, a folder or a link, one to nowhere too.

    Raises:
        OSError: nothing can have it, e.g. because it is too long.
        ValueError: the same.
    """
    try:
        path.lstat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return True


def require_file(path: Path, flag: str) -> bool:
    """Check that a file can be made, before minutes are spent on what it is to hold.

    Args:
        path: the file; `~` is expanded.
        flag: what names it, for messages.

    Returns:
        Whether its name is taken, by a folder or a link to nowhere too.

    Raises:
        UsageError: nothing can be written there.
    """
    try:
        path = path.expanduser()
        _refuse_device(path)
        taken = is_taken(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"{flag} must be a file that can be made, got {short(str(path))} "
            f"({getattr(error, 'strerror', None) or error})"
        ) from error
    require_writable(path.parent, flag)
    return taken


def require_new(folder: Path, flag: str) -> None:
    """Check that a folder can be made, before minutes are spent on what it is to hold.

    Args:
        folder: the folder; `~` is expanded.
        flag: what names it, for messages.

    Raises:
        UsageError: it is there already, or cannot be made.
    """
    if require_file(folder, flag):
        raise UsageError(f"{flag} must be a new folder, {str(folder)!r} exists; remove it")


def require_apart(
    path: Path, flag: str, what: str, is_one: Callable[[Path], bool], instead: str
) -> None:
    """Refuse to write a file over one that holds something else that is wanted.

    Args:
        path: the file.
        flag: what names it, for messages.
        what: what it must not be.
        is_one: tells whether a file is one; asked of the file, and of what it is a link to.
        instead: a name that would do.

    Raises:
        UsageError: it is one.
    """
    try:
        taken = is_one(path.absolute()) or is_one(path.resolve())
    except (OSError, RuntimeError, ValueError):  # writing it will say what is wrong with the name
        return
    if taken:
        raise UsageError(
            f"{flag} must not be {what}, got {str(path)!r}; give another name, such as {instead}"
        )


def require_writable(folder: Path, flag: str = "--output-path") -> None:
    """Check that files can be written to a folder, which may be yet to be made.

    Args:
        folder: the folder.
        flag: what names it, for messages.

    Raises:
        UsageError: they cannot.
    """
    try:
        is_taken(folder)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag} must be a folder that can be made, got {short(str(folder))} "
            f"({getattr(error, 'strerror', None) or error})"
        ) from error
    existing = nearest_existing(folder)
    if not existing.is_dir():
        raise UsageError(
            f"{flag} must lie in a folder, got {str(folder)!r}, where {str(existing)!r} is none"
        )
    # Permissions alone say little: some file systems take no files at all.
    try:
        if existing == folder:
            tempfile.TemporaryFile(dir=existing).close()
        else:
            tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        raise UsageError(
            f"{flag} must be writable, got {str(folder)!r}, which is not ({error.strerror})"
        ) from error


def nearest_existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    # A link to nowhere exists too: no folder can be made in its place.
    parents = (folder, *folder.absolute().parents)
    return next(parent for parent in parents if os.path.lexists(parent))
