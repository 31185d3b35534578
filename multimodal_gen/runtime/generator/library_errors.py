"""What libraries raise, said in one line: which component, which file or option, and their message.

A model folder is trusted as far as diffusers trusts it: what is wrong with it is found by whoever
reads it, and told here. Only errors of this package, which say all already, and defects, which
keep their traceback, pass as they are.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from multimodal_gen.errors import MultimodalGenError, UsageError, first_line, is_out_of_memory
from multimodal_gen.runtime.generator.index import blamed_for, described

_DISPATCH = "diffusers.models.attention_dispatch"
_REFUSING = (
    *("diffusers.pipelines.", "diffusers.schedulers."),
    *("diffusers.image_processor", "diffusers.video_processor"),
)
_LIBRARIES = ("diffusers", "transformers", "tokenizers", "accelerate", "peft")


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
    """Tell what a pipeline, its scheduler, its chat template or the compiler says.

    Raises:
        UsageError: a pipeline or a scheduler of diffusers, and nothing that it calls, raised a
            `ValueError`; a chat template failed; blocks could not be compiled.
    """
    try:
        yield
    except Exception as error:
        refused = _refused(error)
        if isinstance(error, MultimodalGenError) or not refused:
            raise
        raise UsageError(f"{refused}: {first_line(error)}") from error


@contextmanager
def failure_explained(pipe: Any) -> Iterator[None]:
    """Say in one line what else a library raises in a run, and in which component.

    Raises:
        UsageError: a library that the pipeline is made of raised an error.
    """
    try:
        yield
    except Exception as error:
        known = isinstance(error, MultimodalGenError) or is_out_of_memory(error)
        if known or blamed_for(error) not in _LIBRARIES:
            raise
        name, pipeline = _component_at_fault(error, pipe), type(pipe).__name__
        raise UsageError(
            f"{f'component {name} of {pipeline}' if name else pipeline} fails in the run, check "
            f"its files and the options: {described(error)}; --traceback shows where"
        ) from error


@contextmanager
def arguments_explained(given: Sequence[str]) -> Iterator[None]:
    """Name the arguments that nothing but the pipeline can check where it fails with them.

    Args:
        given: flags with their values: of files, and of arguments by the pipeline's own names.

    Raises:
        UsageError: there are some, and diffusers, or what it calls, raised an error.
    """
    try:
        yield
    except Exception as error:
        ours = _modules(error)[-1].partition(".")[0] == __name__.partition(".")[0]
        if not given or ours or isinstance(error, MultimodalGenError) or is_out_of_memory(error):
            raise
        raise UsageError(
            f"the pipeline fails with {', '.join(given)}: {described(error)}; give other "
            f"values, or leave them out"
        ) from error


def _refused(error: Exception) -> str:
    """Return what refused, by where the error comes from; "" for what may be a defect."""
    kind = type(error).__module__
    if kind.startswith("jinja2."):
        return "the chat template of the model's tokenizer fails, check its folder"
    if kind.startswith(("torch._dynamo.", "torch._inductor.")):
        return "the blocks of the model cannot be compiled, leave --enable-torch-compile out"
    if isinstance(error, ValueError) and _modules(error)[-1].startswith(_REFUSING):
        return "the pipeline refuses its arguments"
    return ""


def _component_at_fault(error: BaseException, pipe: Any) -> str:
    """Return the component in whose methods an error was raised; "" for the pipeline itself."""
    owners = {
        id(part): name
        for name, component in pipe.components.items()
        if component is not None
        for part in (
            component.modules() if isinstance(component, torch.nn.Module) else (component,)
        )
    }
    frames = reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
    callers = (owners.get(id(frame.f_locals.get("self"))) for frame in frames)
    return next((name for name in callers if name), "")


def _modules(error: BaseException) -> list[str]:
    """Return the modules that an error came through, the one that raised it last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [str(frame.f_globals.get("__name__")) for frame, _ in frames]
