"""What is being generated, for methods that write files about it.

The generator says so around the call of the pipeline; other callers of a pipeline may:

    with describe_generation(Generation(prompt="a fox", width=832, height=480)):
        pipe(prompt="a fox", width=832, height=480)
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

from multimodal_gen.runtime.managers.forward_context import set_for_block


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation.

    Attributes:
        prompt: what it shows.
        width: of the output in pixels, or "default" where only the pipeline knows.
        height: the same.
    """

    prompt: str
    width: int | str
    height: int | str


_GENERATION: ContextVar[Generation | None] = ContextVar("multimodal_gen_generation", default=None)


def describe_generation(generation: Generation) -> AbstractContextManager[None]:
    """Say what is generated inside the `with` block."""
    return set_for_block(_GENERATION, generation)


def current_generation() -> Generation | None:
    """Return what is being generated, or None where that was not said."""
    return _GENERATION.get()
