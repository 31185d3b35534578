"""Which branch of classifier-free guidance a call of a denoiser is, as its pipeline calls it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from multimodal_gen.integrations.hooks import own_method, replace_method
from multimodal_gen.runtime.managers.forward_context import set_for_block

# The name of the running call; per thread, like the context of attention layers.
_BRANCH: ContextVar[str | None] = ContextVar("multimodal_gen_branch", default=None)


def branch_name() -> str | None:
    """Return what the pipeline calls the running call, e.g. "cond"; None where it does not tell."""
    name = _BRANCH.get()
    return None if name is None else name.removeprefix("pred_")


def note_branch_names(model: nn.Module, undo: ExitStack) -> None:
    """Note the names that pipelines give to calls of a denoiser, by its `cache_context`.

    Args:
        model: the denoiser.
        undo: takes the step that takes it back.
    """

    @contextmanager
    def cache_context(name: str, **kwargs: Any) -> Iterator[None]:
        with set_for_block(_BRANCH, name), own_method(model, "cache_context")(name, **kwargs):
            yield

    replace_method(model, "cache_context", cache_context, undo)
