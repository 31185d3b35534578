"""Compiles the kernels of a generation before it runs, without its weights and without the GPU.

The pipeline is called on tensors that have no data (`kernels.launch.rehearsal`), so that every
attention layer meets the shapes, masks and steps that it will meet; what it would launch is then
compiled (`kernels.launch.ahead`).
"""

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multimodal_gen.errors import MultimodalGenError, UsageError, first_line
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.kernels.launch.ahead import Made, Place, make, place_of_gpu, saved
from multimodal_gen.kernels.launch.rehearsal import Noted, Rehearsal
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.generator import PipelineIndex, pick_device
from multimodal_gen.runtime.generator.chat_templates import limited_templates
from multimodal_gen.runtime.generator.load import denoisers
from multimodal_gen.runtime.generator.overridden import overridden
from multimodal_gen.runtime.generator.sampling import check_arguments, prepare_call
from multimodal_gen.runtime.generator.scheduler import given_sigmas
from multimodal_gen.runtime.generator.skeleton import load_rehearsed
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.scope import scope_from_args
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.server_args import ServerArgs

logger = logging.getLogger(__name__)

# What a method carries from step to step it has from the second one on.
_CALLS = 2


def warm(args: ServerArgs, output: Path | None = None) -> tuple[Place, tuple[Made, ...]]:
    """Compile what a generation will launch, on this machine's GPU.

    It is for a process of its own; see `Rehearsal`.

    Args:
        args: the generation.
        output: folder to put the kernels into, which must not exist yet; Triton's cache when None.

    Returns:
        What they are for, and what was made.

    Raises:
        UsageError: there is no NVIDIA GPU, the pipeline cannot be called without data, or the
            folder is there already.
    """
    device = pick_device(args.device)
    place, index = place_of_gpu(device), device.index or 0
    noted = rehearse(args, device)
    if output is None:
        return place, make(noted, index=index)
    with saved(output, place):
        return place, make(noted, index=index)


def rehearse(args: ServerArgs, device: torch.device) -> tuple[Noted, ...]:
    """Return what a generation will launch, each compilation once.

    Args:
        args: the generation.
        device: the GPU that it will run on.

    Raises:
        UsageError: the pipeline cannot be called without data.
    """
    index = PipelineIndex.read(args.model_path, args.pipeline_class_name)
    check_arguments(index, args)
    args = replace(args, seed=args.seed or 0)
    pipe = load_rehearsed(index, args, device)
    call = prepare_call(pipe, index, args)
    arguments = dict(call.arguments)
    if "output_type" in arguments:
        arguments["output_type"] = "latent"
    rehearsal = Rehearsal(device.index or 0)
    tokens = {"latent_grid": args.latent_grid, "text_rows": args.text_rows}
    with apply(pipe, scope=scope_from_args(args), **tokens) as handle, ExitStack() as stack:  # type: ignore[arg-type]
        for name, model in denoisers(pipe).items():
            layers = [each.layer for each in handle.layers() if each.site.component == name]
            stack.enter_context(overridden(model, forward=_each_kind_twice(model, layers)))
        stack.enter_context(overridden(pipe, _progress_bar_config={"disable": True}))
        stack.enter_context(overridden(pipe, **call.changed))
        stack.enter_context(given_sigmas(pipe, args.sigmas))
        stack.enter_context(limited_templates(pipe))
        stack.enter_context(torch.inference_mode())
        try:
            with rehearsal:
                pipe(**arguments)
        except MultimodalGenError:
            raise
        except Exception as error:  # models do anything with data
            raise UsageError(
                f"{index.name} must be callable on tensors without data to be warmed, it failed: "
                f"{first_line(error)}; its kernels compile in its first steps"
            ) from error
    return tuple(rehearsal.noted.values())


def _each_kind_twice(model: nn.Module, layers: Sequence[AttentionLayer]) -> Callable[..., Any]:
    """Return a forward that runs two calls of every kind, and repeats their output for others.

    Of a kind are calls of the same shapes in steps that are served alike.
    """
    run = model.forward
    outputs: dict[Hashable, list[Any]] = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        context = current_forward_context()
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        kind: Hashable = tuple(x.shape for x in tensors)
        if context is not None:
            served = tuple(layer.step_kind(context) for layer in layers)
            kind = (kind, context.latent_grid, context.cfg_branch, context.branch_key, served)
        found = outputs.setdefault(kind, [])
        if len(found) < _CALLS:
            found.append(run(*args, **kwargs))
        return found[-1]

    return forward


class Ahead:
    """Processes that compile what a generation will launch, while this one loads it.

    Args:
        args: the generation.
    """

    def __init__(self, args: ServerArgs) -> None:
        command = [sys.executable, "-c", f"from {__name__} import _serve; _serve()"]
        # A session of its own, so that all its processes can be ended.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError), self._process.stdin as stream:
            pickle.dump(args, stream)

    def wait(self) -> int:
        """Return its exit status once it is done."""
        return self._process.wait()

    def stop(self) -> None:
        """End it where it runs; a second call does nothing."""
        status = self._process.poll()
        if status is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        elif status:
            logger.info("nothing was compiled ahead: `sglang attention warm` says why")


def start_ahead(args: ServerArgs) -> Ahead | None:
    """Begin to compile what a generation will launch; None on several ranks.

    Raises:
        UsageError: there is no NVIDIA GPU, or no Triton.
    """
    if parallel_groups() is not None:
        return None
    try:
        place_of_gpu(pick_device(args.device))
    except UsageError as error:
        raise UsageError(f"compile_ahead (--compile-ahead): {error}") from error
    return Ahead(args)


def _serve() -> None:
    """Be the process that `Ahead` starts."""
    warm(pickle.load(sys.stdin.buffer))
