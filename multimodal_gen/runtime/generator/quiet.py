"""What libraries log that is said otherwise, or that leaves nothing to do."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def without(logger: str, about: Callable[[str], bool]) -> Iterator[None]:
    """Drop the messages of a library's logger that `about` is true of."""

    def is_said(record: logging.LogRecord) -> bool:
        return not about(record.getMessage())

    library = logging.getLogger(logger)
    library.addFilter(is_said)
    try:
        yield
    finally:
        library.removeFilter(is_said)
