"""From the user's options to the arguments of one pipeline's `__call__`.

Only what the user gave is passed; everything else stays at the pipeline's own defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.limits import check_asked, check_components
from multimodal_gen.runtime.generator.loading import PipelineIndex, denoisers
from multimodal_gen.runtime.server_args import ServerArgs

__all__ = ["Call", "check_arguments", "prepare_call"]

# Option, and the names pipelines give to it; the first one a pipeline has is used.
_ARGUMENTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("prompt", ("prompt",)),
    ("negative_prompt", ("negative_prompt",)),
    ("height", ("height",)),
    ("width", ("width",)),
    ("num_frames", ("num_frames",)),
    ("num_inference_steps", ("num_inference_steps",)),
    ("true_cfg_scale", ("true_cfg_scale",)),
)
_NUM_OUTPUTS = ("num_videos_per_prompt", "num_images_per_prompt")
_FRAME_RATE = "frame_rate"

# Frames per second of the training videos, by the start of the pipeline's name.
_TRAINED_FPS: tuple[tuple[str, int], ...] = (
    ("Wan", 16),
    ("CogVideoX", 8),
    ("HunyuanVideo", 24),
    ("LTX", 25),
)
_DEFAULT_FPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a pipeline, ready to make.

    Attributes:
        arguments: keyword arguments for `__call__`.
        fps: frames per second of the result; meaningless for images.
        notes: what the user should know about the arguments.
    """

    arguments: Mapping[str, Any]
    fps: int
    notes: tuple[str, ...] = ()


def check_arguments(index: PipelineIndex, args: ServerArgs) -> None:
    """Check the options against the pipeline's signature, before its weights are loaded.

    Raises:
        UsageError: an option was given that the pipeline does not take or cannot serve, or the
            pipeline needs an argument there is no option for.
    """
    parameters = index.parameters
    for option, names in (*_ARGUMENTS, ("num_outputs", _NUM_OUTPUTS)):
        default = 1 if option == "num_outputs" else None
        if getattr(args, option) != default and not any(name in parameters for name in names):
            raise _not_taken(index.name, option, getattr(args, option), parameters)
    check_asked(index, args)
    check_components(index, args)
    if args.guidance_scale is not None and not _takes_guidance(index):
        raise _not_taken(index.name, "guidance_scale", args.guidance_scale, parameters)
    if args.fps is not None and index.kind == "image":
        raise _not_taken(index.name, "fps", args.fps, parameters)
    known = {name for _, names in _ARGUMENTS for name in names}
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is Parameter.empty
        and parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        and name not in known
    ]
    if needed:
        raise UsageError(
            f"{index.name} needs {', '.join(needed)}, which `sglang generate` has no option for; "
            f"run it from Python with multimodal_gen.apply"
        )


def prepare_call(pipe: Any, index: PipelineIndex, args: ServerArgs) -> Call:
    """Return the arguments of the call; sets the scale of a pipeline that keeps it in a guider."""
    parameters = index.parameters
    assert args.seed is not None, "the caller settles the seed, which names the output too"
    # A generator on the CPU draws the same noise whatever the device.
    arguments: dict[str, Any] = {"generator": torch.Generator("cpu").manual_seed(args.seed)}
    for option, names in _ARGUMENTS:
        value = getattr(args, option)
        if value is not None:
            arguments[next(name for name in names if name in parameters)] = value
    if args.num_outputs != 1:
        arguments[next(n for n in _NUM_OUTPUTS if n in parameters)] = args.num_outputs
    _guide(pipe, parameters, args, arguments)
    if args.fps is not None and _FRAME_RATE in parameters:
        arguments[_FRAME_RATE] = args.fps
    if "output_type" in parameters:
        arguments["output_type"] = "np"
    return Call(
        arguments=arguments,
        fps=args.fps or _default_fps(index.name, parameters),
        notes=_notes(parameters, arguments),
    )


def _takes_guidance(index: PipelineIndex) -> bool:
    taken = ("guidance_scale", "true_cfg_scale")
    return any(name in index.parameters for name in taken) or "guider" in index.components


def _guide(
    pipe: Any,
    parameters: Mapping[str, Parameter],
    args: ServerArgs,
    arguments: dict[str, Any],
) -> None:
    """Pass `--guidance-scale` to the guidance the model was made for."""
    scale = args.guidance_scale
    if scale is None:
        return
    embeds = [getattr(m.config, "guidance_embeds", None) for m in denoisers(pipe).values()]
    classifier_free = "true_cfg_scale" in parameters and False in embeds
    if classifier_free and args.true_cfg_scale is None:
        arguments["true_cfg_scale"] = scale
    elif "guidance_scale" in parameters:
        arguments["guidance_scale"] = scale
    elif "true_cfg_scale" in parameters:
        arguments["true_cfg_scale"] = scale
    else:
        pipe.guider = pipe.guider.new(guidance_scale=scale)


def _notes(parameters: Mapping[str, Parameter], arguments: Mapping[str, Any]) -> tuple[str, ...]:
    if "true_cfg_scale" not in parameters or "negative_prompt" not in arguments:
        return ()
    scale = arguments.get("true_cfg_scale", parameters["true_cfg_scale"].default)
    if scale > 1:
        return ()
    return (
        f"the negative prompt has no effect at a true_cfg_scale of {scale}; raise it with "
        f"--true-cfg-scale",
    )


def _default_fps(name: str, parameters: Mapping[str, Parameter]) -> int:
    if _FRAME_RATE in parameters:
        return int(parameters[_FRAME_RATE].default)
    return next((fps for start, fps in _TRAINED_FPS if name.startswith(start)), _DEFAULT_FPS)


def _not_taken(
    pipeline: str, option: str, value: object, parameters: Mapping[str, Parameter]
) -> UsageError:
    taken = [_flag(name) for name, names in _ARGUMENTS if any(n in parameters for n in names)]
    return UsageError(
        f"{_flag(option)} must be left out for {pipeline}, which has no such argument, got "
        f"{value!r}; it takes {', '.join(taken)}"
    )


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
