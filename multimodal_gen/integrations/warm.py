"""Compiles the kernels of a generation before it runs, without its weights and without the GPU.

The pipeline is called on tensors that have no data (`kernels.launch.rehearsal`), so that every
attention layer meets the shapes, masks and steps that it will meet; what it would launch is then
compiled (`kernels.launch.ahead`).
"""

import inspect
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multimodal_gen.errors import MultimodalGenError, UsageError, first_line
from multimodal_gen.integrations.ahead import Generation
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.kernels.launch.ahead import (
    Made,
    Place,
    make,
    place_of_gpu,
    saved,
)
from multimodal_gen.kernels.launch.rehearsal import Noted, Rehearsal
from multimodal_gen.runtime.described_tokens import describe_tokens
from multimodal_gen.runtime.generator import PipelineIndex, pick_device
from multimodal_gen.runtime.generator.chat_templates import limited_templates
from multimodal_gen.runtime.generator.load import denoisers
from multimodal_gen.runtime.generator.overridden import overridden
from multimodal_gen.runtime.generator.sampling import check_arguments, check_sizes, prepare_call
from multimodal_gen.runtime.generator.scheduler import given_sigmas
from multimodal_gen.runtime.generator.skeleton import load_rehearsed
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.scope import scope_from_args
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.server_args import ServerArgs

# What a method carries from step to step it has from the second one on.
_CALLS = 2
_NICE = 10  # what loads, encodes and runs meanwhile goes first


def warm(args: ServerArgs, output: Path | None = None) -> tuple[Place, tuple[Made, ...]]:
    """Compile what a generation will launch, on this machine's GPU.

    It is for a process of its own; see `Rehearsal`.

    Args:
        args: the generation.
        output: folder to put the kernels into, which must not exist yet; Triton's cache when None.

    Returns:
        What they are for, and what was made.

    Raises:
        UsageError: there is no NVIDIA GPU, the folder is there already, cannot be made or would be
            empty, or the pipeline cannot be called without data.
    """
    device = pick_device(args.device)
    try:
        place, index = place_of_gpu(device), device.index or 0
    except UsageError as error:
        raise UsageError(f"{error}; run it on the machine that will generate") from error
    noted = rehearse(generation_of_args(args, device))
    if output is None:
        return place, make(noted, index=index)
    if not noted:
        raise UsageError(
            f"--output must be given for a generation that launches kernels of this package, got "
            f"{str(output)!r} for one that launches none; there is nothing to compile"
        )
    with saved(output, place):
        return place, make(noted, index=index)


def generation_of_args(args: ServerArgs, device: torch.device) -> Generation:
    """Return the call that arguments ask for, of a pipeline without weights.

    Args:
        args: the generation.
        device: the GPU that it will run on.

    Raises:
        UsageError: an option does not fit the pipeline.
    """
    index = PipelineIndex.read(args.model_path, args.pipeline_class_name)
    check_arguments(index, args)
    args = replace(args, seed=args.seed or 0)
    pipe = load_rehearsed(index, args, device)
    check_sizes(pipe, args)
    call = prepare_call(pipe, index, args)
    return Generation(
        pipe=pipe,
        arguments=call.arguments,
        scope=scope_from_args(args),
        described=describe_tokens(args.latent_grid, args.text_rows),
        device=device,
        changed=call.changed,
        sigmas=args.sigmas,
    )


def rehearse(generation: Generation) -> tuple[Noted, ...]:
    """Return what a generation will launch, each compilation once.

    Raises:
        UsageError: the pipeline cannot be called without data.
    """
    pipe, described = generation.pipe, generation.described
    # A generator on the CPU draws there, whatever the device.
    arguments = {**generation.arguments, "generator": torch.Generator("cpu").manual_seed(0)}
    if "output_type" in inspect.signature(type(pipe).__call__).parameters:
        arguments["output_type"] = "latent"
    rehearsal = Rehearsal(generation.device.index or 0)
    grid, text = (None, None) if described is None else (described.grid, described.text)
    with (
        apply(pipe, scope=generation.scope, latent_grid=grid, text_rows=text) as handle,
        ExitStack() as stack,
    ):
        for name, model in denoisers(pipe).items():
            layers = [each.layer for each in handle.layers() if each.site.component == name]
            stack.enter_context(overridden(model, forward=_each_kind_twice(model, layers)))
        stack.enter_context(overridden(pipe, _progress_bar_config={"disable": True}))
        stack.enter_context(overridden(pipe, **generation.changed))
        stack.enter_context(given_sigmas(pipe, generation.sigmas))
        stack.enter_context(limited_templates(pipe))
        stack.enter_context(torch.inference_mode())
        try:
            with rehearsal:
                pipe(**arguments)
        except MultimodalGenError:
            raise
        except Exception as error:  # models do anything with data
            raise UsageError(
                f"{type(pipe).__name__} must be callable on tensors without data to be warmed, it "
                f"failed: {first_line(error)}; its kernels compile in its first steps"
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


def serve(said: int) -> None:
    """Be the process that `Ahead` starts.

    Args:
        said: file to write to what it has come to, a line of JSON each time.
    """
    start = time.perf_counter()
    os.nice(_NICE)
    with os.fdopen(said, "w", buffering=1) as lines:

        def say(**known: object) -> None:
            lines.write(json.dumps(known) + "\n")

        try:
            given = pickle.load(sys.stdin.buffer)
            device = pick_device(given.device) if isinstance(given, ServerArgs) else given.device
            place_of_gpu(device)
            if isinstance(given, ServerArgs):
                given = generation_of_args(given, device)
            noted = rehearse(given)
            say(kernels=[each.name for each in noted])
            made = make(noted, index=device.index or 0)
        except Exception as error:
            say(failed=first_line(error))
            raise SystemExit(1) from error
        seconds = round(time.perf_counter() - start, 1)
        say(kernels=[each.name for each in made], seconds=seconds)
