"""A process that compiles what a generation will launch, while this one loads, encodes or runs.

`generation_of` says which call of a loaded pipeline it rehearses, `Ahead` starts and ends it, and
`warm.serve` is what it does.
"""

import inspect
import json
import logging
import operator
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from multimodal_gen.errors import UsageError, first_line, nearest, short
from multimodal_gen.integrations.components import is_of_transformers, unwrap
from multimodal_gen.kernels.launch.ahead import place_of_gpu
from multimodal_gen.runtime.attention_report import CompiledAhead
from multimodal_gen.runtime.described_tokens import DescribedTokens
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.generator.sampling import check_sizes
from multimodal_gen.runtime.layers.attention.scope import SelectionScope
from multimodal_gen.runtime.server_args import EXAMPLE_PROMPT, ServerArgs, naming_arguments

logger = logging.getLogger(__name__)

_NAME = "compile_ahead (--compile-ahead)"
_SIZES = ("height", "width", "num_frames", "num_inference_steps")
# Reads where modules lie first, for those beside a script of the user's own.
_SERVE = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from multimodal_gen.integrations.warm import serve; serve({})"
)
# What offloading and step caches put into modules, and pipelines: they move and skip, and compute
# nothing.
_HOOKS = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_all_hooks")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """A call of a pipeline that is rehearsed.

    Attributes:
        pipe: the pipeline, whose weights need no data.
        arguments: keyword arguments of the call.
        scope: which attention it runs with.
        described: what was said of tokens of models without an adapter, or None.
        device: the GPU that it will run on.
        changed: attributes that the pipeline has meanwhile, by name.
        sigmas: the noise levels of its steps, or None for those of its scheduler.
    """

    pipe: Any
    arguments: Mapping[str, Any]
    scope: SelectionScope
    described: DescribedTokens | None
    device: torch.device
    changed: Mapping[str, object] = field(default_factory=dict)
    sigmas: object = None


def generation_of(
    pipe: Any,
    asked: Mapping[str, object],
    scope: SelectionScope,
    described: DescribedTokens | None,
) -> Generation:
    """Return the call of a loaded pipeline that is rehearsed.

    Args:
        pipe: the pipeline, on the GPU or offloaded from it.
        asked: arguments of its call; the others have its defaults, and there is a prompt.
        scope: which attention it runs with.
        described: what was said of tokens of models without an adapter, or None.

    Raises:
        UsageError: the call has no such argument, or needs one that is not there; or a size is not
            one that the pipeline makes.
        ConfigError: a size is no positive integer.
    """
    name = type(pipe).__name__
    parameters = inspect.signature(type(pipe).__call__).parameters
    takes = {x.name: x for x in list(parameters.values())[1:] if x.kind is not x.VAR_KEYWORD}
    if len(takes) == len(parameters) - 1:  # it takes no others
        for key in asked:
            if key not in takes:
                raise UsageError(
                    f"{_NAME} must have arguments that {name} is called with, got {short(key)}"
                    f"{nearest(str(key), tuple(takes))}"
                )
    arguments: dict[str, Any] = {key: value for key, value in asked.items() if key != "generator"}
    if "prompt" in takes and not any(key.startswith("prompt") for key in arguments):
        arguments["prompt"] = EXAMPLE_PROMPT
    needed = [x.name for x in takes.values() if x.default is x.empty and x.name not in arguments]
    if needed:
        raise UsageError(
            f"{_NAME} must have what {name} cannot be called without, {', '.join(needed)} "
            f"{'is' if len(needed) == 1 else 'are'} not there; add it, as "
            f"compile_ahead={{{needed[0]!r}: ...}}"
        )
    with naming_arguments():
        sizes: dict[str, Any] = {key: value for key, value in asked.items() if key in _SIZES}
        check_sizes(pipe, ServerArgs(model_path=name, **sizes))
    return Generation(
        pipe=pipe,
        arguments=arguments,
        scope=scope,
        described=described,
        device=torch.device(pipe._execution_device),
    )


def require_one_gpu(device: torch.device) -> None:
    """Refuse to compile ahead where that cannot be done.

    Raises:
        UsageError: there are several ranks, the GPU is none of NVIDIA, or there is no Triton.
    """
    if parallel_groups() is not None:
        raise UsageError(
            f"{_NAME} must be given to a single process, got several ranks, each of which launches "
            f"another share; leave it out here"
        )
    try:
        place_of_gpu(device)
    except UsageError as error:
        raise UsageError(f"{_NAME}: {error}; leave it out here") from error


class Ahead:
    """Processes that compile what a generation will launch, and what they have come to.

    Nothing waits for them: what is needed before they made it is compiled where it is needed.

    Args:
        given: the generation; as arguments, its pipeline is loaded there, without weights.
        device: the GPU that it will run on.

    Raises:
        UsageError: as `require_one_gpu`, or the pipeline cannot be copied to another process.
    """

    def __init__(self, given: Generation | ServerArgs, device: torch.device) -> None:
        require_one_gpu(device)
        self._final: CompiledAhead | None = None
        with ExitStack() as files:
            self._said = files.enter_context(tempfile.TemporaryFile())
            # There at once, where a pipe would have this process wait for imports.
            with tempfile.TemporaryFile() as stream:
                write(given, stream)
                stream.seek(0)
                # A session of its own, so that all its processes can be ended.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _SERVE.format(self._said.fileno())],
                    stdin=stream,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(self._said.fileno(),),
                    start_new_session=True,
                )
            self._files = files.pop_all()

    def wait(self) -> int:
        """Return its exit status once it is done."""
        return self._process.wait()

    def stop(self) -> None:
        """End it where it runs; a second call does nothing."""
        if self._final is not None:
            return
        found = self.report()
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            found = replace(found, failed="it was ended before it was done")
        elif found.failed is not None:
            logger.warning("%s", *found.lines())
        self._final = found
        self._files.close()

    def report(self) -> CompiledAhead:
        """Return what it has come to so far."""
        if self._final is not None:
            return self._final
        status = self._process.poll()
        # Without moving the place that the process writes at, which is the same.
        text = os.pread(self._said.fileno(), os.fstat(self._said.fileno()).st_size, 0)
        said: dict[str, Any] = {}
        for line in text.splitlines(keepends=True):
            said |= json.loads(line) if line.endswith(b"\n") else {}
        failed = said.get("failed")
        if status and failed is None:
            failed = f"its process ended with status {status}"
        return CompiledAhead(
            kernels=None if "kernels" not in said else tuple(said["kernels"]),
            seconds=said.get("seconds"),
            failed=failed,
        )


def write(given: Generation | ServerArgs, stream: Any) -> None:
    """Write what the process reads: where modules lie, and the generation, without weights.

    Raises:
        UsageError: the generation cannot be pickled.
    """
    pickle.dump(sys.path, stream)
    try:
        _WithoutWeights(stream, pickle.HIGHEST_PROTOCOL).dump(given)
    except Exception as error:  # models hold anything
        raise UsageError(
            f"{_NAME} must be given for a pipeline that can be pickled without its weights, it "
            f"cannot: {first_line(error)}; leave it out"
        ) from error


class _WithoutWeights(pickle.Pickler):
    """Pickles a pipeline: its parameters as sizes, its other tensors on the CPU."""

    def reducer_override(self, x: Any) -> Any:
        """Return how an object is pickled."""
        if isinstance(x, nn.Parameter):
            return _parameter, (x.shape, x.stride(), x.dtype, x.requires_grad)
        if isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta"):
            return operator.getitem, ((x.cpu(),), 0)
        if isinstance(x, nn.Module) and unwrap(x) is not x:
            return operator.getitem, ((unwrap(x),), 0)
        if is_of_transformers(x):
            return _encoder, (type(x), x.config, x.dtype)
        known = getattr(x, "__dict__", None)
        if isinstance(known, dict) and not isinstance(x, type) and known.keys() & set(_HOOKS):
            function, arguments, state, *rest = x.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if isinstance(state, dict):
                state = {key: value for key, value in state.items() if key not in _HOOKS}
            return (function, arguments, state, *rest)
        return NotImplemented


def _encoder(cls: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Make a model of transformers, which notes more of it than the model holds."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        model: nn.Module = cls(config)
    return nn.Module.to(model, dtype=dtype).eval()


def _parameter(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> nn.Parameter:
    data = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return nn.Parameter(data, requires_grad=requires_grad)
