"""Failures of a run that the user can do something about, told as such."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from multimodal_gen.errors import MultimodalGenError, UsageError
from multimodal_gen.runtime.generator.loading import first_line, is_out_of_memory

__all__ = ["diffusers_backend_explained", "out_of_memory_explained", "refusal_explained"]

_DISPATCH = "diffusers.models.attention_dispatch"
_REFUSING = ("diffusers.pipelines.", "diffusers.schedulers.")


@contextmanager
def out_of_memory_explained() -> Iterator[None]:
    """Say what to try when the device runs out of memory.

    Raises:
        UsageError: it did.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(
            f"the device ran out of memory ({first_line(error)}); try a smaller --height, --width "
            f"or --num-frames, --dtype bfloat16, --vae-tiling, or --offload model (then sequential)"
        ) from error


@contextmanager
def diffusers_backend_explained(name: str | None) -> Iterator[None]:
    """Tell an error of the named diffusers backend from one of the pipeline.

    diffusers accepts names whose function then refuses its first call, or that have none.

    Args:
        name: the backend that was asked for; None explains nothing.

    Raises:
        UsageError: an error came out of diffusers' attention dispatch.
    """
    try:
        yield
    except Exception as error:
        known = isinstance(error, MultimodalGenError) or is_out_of_memory(error)
        if name is None or known or _DISPATCH not in _modules(error):
            raise
        remedy = "use --backend sglang" if name == "native" else "try native, or --backend sglang"
        raise UsageError(
            f"--attention-backend must be one that diffusers can run here, got {name}, which "
            f"failed: {first_line(error)}; {remedy}"
        ) from error


@contextmanager
def refusal_explained() -> Iterator[None]:
    """Tell what a pipeline or a scheduler of diffusers says of its arguments.

    Raises:
        UsageError: one of them, and nothing that it calls, raised a `ValueError`.
    """
    try:
        yield
    except ValueError as error:
        where = _modules(error)[-1]
        if isinstance(error, MultimodalGenError) or not where.startswith(_REFUSING):
            raise
        raise UsageError(f"the pipeline refuses its arguments: {first_line(error)}") from error


def _modules(error: BaseException) -> list[str]:
    """Return the modules that an error came through, the one that raised it last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [str(frame.f_globals.get("__name__")) for frame, _ in frames]
