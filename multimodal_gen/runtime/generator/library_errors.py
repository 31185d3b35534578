"""What libraries raise, said in one line: which component, which file or option, and their message.

A model folder is trusted as far as diffusers trusts it: what is wrong with it is found by whatever
reads it, and told here. Only errors of this package, which say all already, and defects, which
keep their traceback, pass as they are.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from multimodal_gen.errors import (
    MissingDependencyError,
    MultimodalGenError,
    UsageError,
    first_line,
    is_out_of_memory,
)

_CALLERS = "_of_the_callers_function"
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
        if not is_out_of_memory(error) or _is_callers(error):
            raise
        raise UsageError(
            f"the device ran out of memory ({first_line(error)}); try a smaller --height, --width "
            f"or --num-frames, --dtype bfloat16, --vae-tiling, or --offload model (then sequential)"
        ) from error


@contextmanager
def told(say: Callable[[Exception], str]) -> Iterator[None]:
    """Tell in one line what a library raises.

    Args:
        say: returns the line; "" for an error that is to pass as it is.

    Raises:
        MissingDependencyError: a package cannot be imported.
        UsageError: anything else that `say` has a line for, full memory apart.
    """
    try:
        yield
    except Exception as error:
        known = isinstance(error, MultimodalGenError) or is_out_of_memory(error)
        line = "" if known or _is_callers(error) else say(error)
        if not line:
            raise
        kind = MissingDependencyError if isinstance(error, ImportError) else UsageError
        raise kind(line) from error


@contextmanager
def not_told() -> Iterator[None]:
    """Let pass as it is what a function of the caller's raises in the `with` block."""
    try:
        yield
    except Exception as error:
        BaseException.__setattr__(error, _CALLERS, True)  # its class may refuse any
        raise


def _is_callers(error: Exception) -> bool:
    return hasattr(error, _CALLERS)


def told_of_run(
    pipe: Any = None, *, given: Sequence[str] = (), backend: object = None
) -> AbstractContextManager[None]:
    """Tell what a call of a pipeline raises.

    These are, in this order: what the pipeline, its scheduler, its chat template or the compiler
    refuses; what diffusers' attention dispatch raises; errors with arguments that nothing but the
    pipeline can check; and what else a library raises, with the component.

    Args:
        pipe: the pipeline; without it the last of these passes.
        given: flags with their values: of files, and of arguments by the pipeline's own names.
        backend: the backend of diffusers that was asked for; diffusers accepts names whose function
            then refuses its first call, or that have none.
    """
    return told(
        lambda error: (
            _refused(error)
            or _of_dispatch(error, backend)
            or _of_arguments(error, given)
            or _of_component(error, pipe)
        )
    )


def _of_dispatch(error: Exception, backend: object) -> str:
    if backend is None or _DISPATCH not in _modules(error):
        return ""
    remedy = "use --backend sglang" if backend == "native" else "try native, or --backend sglang"
    return (
        f"--attention-backend must be one that diffusers can run here, got {backend}, which "
        f"failed: {first_line(error)}; {remedy}"
    )


def _of_arguments(error: Exception, given: Sequence[str]) -> str:
    if not given or _modules(error)[-1].partition(".")[0] == __name__.partition(".")[0]:
        return ""
    return (
        f"the pipeline fails with {', '.join(given)}: {described(error)}; give other values, or "
        f"leave them out"
    )


def _of_component(error: Exception, pipe: Any) -> str:
    if pipe is None or blamed_for(error) not in _LIBRARIES:
        return ""
    name, pipeline = _component_at_fault(error, pipe), type(pipe).__name__
    return (
        f"{f'component {name} of {pipeline}' if name else pipeline} fails in the run, check its "
        f"files and the options: {described(error)}; --traceback shows where"
    )


def described(error: BaseException) -> str:
    """Return the first line of an error, with its type where the line alone says little."""
    line = first_line(error)
    return line if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {line}"


def blamed_for(error: BaseException, *callees: str) -> str:
    """Return the package in whose code an error was raised, or an empty string.

    torch and the standard library only say what is wrong with those that call them; so do
    `callees`.
    """
    packages = [module.partition(".")[0] for module in _modules(error)]
    passed = {"torch", *callees, *sys.stdlib_module_names}
    return next((name for name in reversed(packages) if name not in passed), "")


def _refused(error: Exception) -> str:
    """Return what refused, by where the error comes from; "" for what may be a defect."""
    kind, line = type(error).__module__, first_line(error)
    if kind.startswith("jinja2."):
        return f"the chat template of the model's tokenizer fails, check its folder: {line}"
    if kind.startswith(("torch._dynamo.", "torch._inductor.")):
        return (
            f"the blocks of the model cannot be compiled, leave --enable-torch-compile out: {line}"
        )
    if isinstance(error, ValueError) and _modules(error)[-1].startswith(_REFUSING):
        return f"the pipeline refuses its arguments, change what it names: {line}"
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
