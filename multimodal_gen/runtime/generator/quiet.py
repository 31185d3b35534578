"""What libraries log that is said otherwise, or that leaves nothing to do."""

import ast
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


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


def quiet_about_curves() -> AbstractContextManager[None]:
    """Drop what diffusers warns of a calibrated curve, which is read when an attention attaches."""
    return without("diffusers.configuration_utils", _is_of_curve)


def _is_of_curve(message: str) -> bool:
    """Tell whether a message is about that attribute of a configuration, and no other one."""
    given = message.partition("The config attributes ")[2].rpartition(" were passed to ")[0]
    try:
        return set(ast.literal_eval(given)) == {"sparse_attention_config"}
    except (ValueError, SyntaxError, TypeError):  # another message
        return False
