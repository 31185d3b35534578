"""From the user's options to the arguments of one pipeline's `__call__`, and what it cannot make.

Only what the user gave is passed; everything else stays at the pipeline's own defaults. Sizes below
one token, several outputs at once or a single step are refused where a pipeline cannot make them:
diffusers finds these out inside a model, where the message is about tensors, or not at all.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch

from multimodal_gen.errors import (
    ComponentAttentionBackendNotAppliedError,
    UsageError,
    nearest,
    short,
)
from multimodal_gen.runtime.generator.cache import read_cache
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.inputs import (
    check_inputs,
    given_arguments,
    how_to_give,
    read_inputs,
)
from multimodal_gen.runtime.generator.load import denoisers
from multimodal_gen.runtime.layers.attention.scope import component_names
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import as_flag

# Options that pipelines know by the same name.
_OPTIONS = (
    *("prompt", "negative_prompt", "height", "width", "num_frames", "num_inference_steps"),
    "true_cfg_scale",
)
_NUM_OUTPUTS = ("num_videos_per_prompt", "num_images_per_prompt")
_FRAME_RATE = "frame_rate"

# Frames per second of the training videos, by the start of the pipeline's name.
_TRAINED_FPS: tuple[tuple[str, int], ...] = (
    ("Wan", 16),
    ("CogVideoX", 8),
    ("Helios", 24),
    ("HunyuanVideo", 24),
    ("LTX", 25),
)
_DEFAULT_FPS = 16

# Pipelines that take the argument and cannot serve it, by the start of their names.
_SINGLE_OUTPUT: tuple[tuple[str, str], ...] = (
    ("Allegro", "which makes one whatever it is told"),
    ("CogVideoX", "which makes one whatever it is told"),
    ("ConsisID", "which makes one whatever it is told"),
    ("HunyuanVideo15", "which embeds its missing image for one video only and then fails"),
)

# Pipelines that neither round a size to whole tokens nor refuse it; their transformers drop rows.
_WHOLE_TOKENS = ("Allegro", "CogVideoX", "Mochi")

# Pipelines that start from an image or a video, by words of their names, and what they call it.
_STARTS_FROM = (
    "ImageToVideo",
    "VideoToVideo",
    "Img2Img",
    "Inpaint",
    "Fill",
    "Edit",
    "Control",
    "Upsampl",
    "Upscale",
)
_MEDIA = ("image", "video", "control_image", "control_video")
_CONTROLLED = ("Control",)
_CONTROLS = ("control_image", "control_video")
_MASKED = ("Inpaint", "Fill")
_MASKS = ("mask_image", "mask", "mask_video")

# What pipelines call the pixels per latent; the first one a pipeline has is used.
_SCALES = (
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
    "vae_scale_factor",
)


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
    flags = {name: as_flag(name) for name in (*_OPTIONS, "guidance_scale", "sigmas")}
    check_inputs(index, args, flags)
    needed = _missing(index, args)
    if needed:
        ways = "; ".join(dict.fromkeys(how_to_give(index, name) for name in needed))
        raise UsageError(f"{index.name} needs {', '.join(needed)}, got none; give {ways}")
    parameters = index.parameters
    for option in _OPTIONS:
        if getattr(args, option) is not None and option not in parameters:
            raise _not_taken(index.name, option, getattr(args, option), parameters)
    if args.num_outputs != 1 and not any(name in parameters for name in _NUM_OUTPUTS):
        raise _not_taken(index.name, "num_outputs", args.num_outputs, parameters)
    check_outputs(index, args)
    check_components(index, args)
    if args.guidance_scale is not None and not _takes_guidance(index):
        raise _not_taken(index.name, "guidance_scale", args.guidance_scale, parameters)
    if args.fps is not None and index.kind == "image":
        raise _not_taken(index.name, "fps", args.fps, parameters)
    if args.cache is not None:
        read_cache(args.cache)


def steps_of(index: PipelineIndex, args: ServerArgs) -> int | None:
    """Return the denoising steps of a generation, or None where only the pipeline knows."""
    if isinstance(args.sigmas, Sequence):
        return len(args.sigmas)
    default = getattr(index.parameters.get("num_inference_steps"), "default", None)
    steps = args.num_inference_steps or default
    return steps if isinstance(steps, int) else None


def _missing(index: PipelineIndex, args: ServerArgs) -> list[str]:
    """Return the arguments that the pipeline needs and nothing gives."""
    given = given_arguments(index, args) | set(_OPTIONS)
    needed = [
        name
        for name, parameter in index.parameters.items()
        if parameter.default is Parameter.empty
        and parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        and name not in given
    ]
    # What is None by default all the same, and missed only in the run.
    started = ((_STARTS_FROM, _MEDIA), (_CONTROLLED, _CONTROLS), (_MASKED, _MASKS))
    for words, names in started:
        taken = [name for name in names if name in index.parameters]
        if any(word in index.name for word in words) and not given.union(needed) & set(taken):
            needed += taken[:1]
    return needed


def prepare_call(pipe: Any, index: PipelineIndex, args: ServerArgs) -> Call:
    """Return the arguments of the call; sets the scale of a pipeline that keeps it in a guider."""
    import numpy as np

    parameters = index.parameters
    assert args.seed is not None, "the caller settles the seed, which names the output too"
    # A generator on the CPU draws the same noise whatever the device.
    arguments: dict[str, Any] = {"generator": torch.Generator("cpu").manual_seed(args.seed)}
    given = {option: getattr(args, option) for option in _OPTIONS}
    arguments |= {option: value for option, value in given.items() if value is not None}
    arguments.update(read_inputs(index, args))
    if args.sigmas is not None:
        arguments["num_inference_steps"] = len(args.sigmas)
        if "sigmas" in parameters:
            arguments["sigmas"] = np.array(args.sigmas)
    if args.num_outputs != 1:
        arguments[next(n for n in _NUM_OUTPUTS if n in parameters)] = args.num_outputs
    _guide(pipe, parameters, args, arguments)
    if args.fps is not None and _FRAME_RATE in parameters:
        arguments[_FRAME_RATE] = args.fps
    if "output_type" in parameters:
        arguments["output_type"] = "np"
    return Call(
        arguments=arguments,
        fps=args.fps or default_fps(index),
        notes=_notes(parameters, arguments),
    )


def output_size(pipe: Any, index: PipelineIndex, args: ServerArgs) -> tuple[int | str, int | str]:
    """Return width and height of the output in pixels, or "default" where that is unknown."""
    sizes: list[int | str] = []
    for name in ("width", "height"):
        default = getattr(index.parameters.get(name), "default", None)
        if not isinstance(default, int):
            edge: Any = getattr(pipe, "default_sample_size", None)
            scale: Any = getattr(pipe, "vae_scale_factor", None)
            known = isinstance(edge, int) and isinstance(scale, int)
            default = edge * scale if known else "default"
        sizes.append(getattr(args, name) or default)
    return sizes[0], sizes[1]


def check_outputs(index: PipelineIndex, args: ServerArgs) -> None:
    """Check how many outputs are asked for, before weights are loaded.

    Raises:
        UsageError: the pipeline makes one output per run and several are asked for.
    """
    for start, reason in _SINGLE_OUTPUT:
        if args.num_outputs != 1 and index.name.startswith(start):
            raise UsageError(
                f"--num-outputs must be 1 for {index.name}, {reason}, got {args.num_outputs}; "
                f"run the command again with another --seed"
            )


def check_components(index: PipelineIndex, args: ServerArgs) -> None:
    """Check the components that backends are named for, before weights are loaded.

    Raises:
        UsageError: the pipeline has no component of that name.
    """
    overrides = args.component_attention_backends
    if not isinstance(overrides, Mapping):
        return
    known = {name for component in index.components for name in component_names(component)}
    for key in overrides:
        component = key.partition(".")[0]
        if component not in known:
            raise ComponentAttentionBackendNotAppliedError(
                f"--component-attention-backends must name components of {index.name} "
                f"({', '.join(sorted(index.components))}), got {short(key)}"
                f"{nearest(component, sorted(known))}"
            )


def check_loaded(pipe: Any, args: ServerArgs) -> None:
    """Check the options against the loaded pipeline, before anything is computed.

    Raises:
        UsageError: height or width is less than one token, or not whole ones where it must be; the
            scheduler cannot make so few steps.
    """
    check_sizes(pipe, args)
    _check_steps(pipe, args)


def token_size(pipe: Any) -> tuple[int, int]:
    """Return the height and width in pixels that one token of the transformer stands for.

    It is the autoencoder's scale times the transformer's patch size; pipelines that pack latents
    into tokens themselves tell their image processor so.
    """
    scales = (_positive(getattr(pipe, name, None)) for name in _SCALES)
    scale = next((found for found in scales if found), 1)
    patches = [_patch_size(model) for model in denoisers(pipe).values()] or [(1, 1)]
    packed = [_processor_scale(pipe, name) for name in ("image_processor", "video_processor")]
    height, width = (math.lcm(scale * patch, *packed) for patch in patches[0])
    return height, width


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


def default_fps(index: PipelineIndex) -> int:
    """Return the frames per second of the videos that a pipeline was trained on."""
    if _FRAME_RATE in index.parameters:
        return int(index.parameters[_FRAME_RATE].default)
    return next((fps for start, fps in _TRAINED_FPS if index.name.startswith(start)), _DEFAULT_FPS)


def _not_taken(
    pipeline: str, option: str, value: object, parameters: Mapping[str, Parameter]
) -> UsageError:
    taken = [as_flag(name) for name in _OPTIONS if name in parameters]
    return UsageError(
        f"{as_flag(option)} must be left out for {pipeline}, which has no such argument, got "
        f"{short(value)}; it takes {', '.join(taken)}"
    )


def check_sizes(pipe: Any, args: ServerArgs) -> None:
    """Check height and width against a pipeline, which may be one without weights.

    Raises:
        UsageError: one is less than one token, more than the transformer has places for, or not
            whole ones where it must be; names the nearest that are.
    """
    name = type(pipe).__name__
    tables = [getattr(m.config, "rope_max_seq_len", None) for m in denoisers(pipe).values()]
    rows = min((found for found in map(_positive, tables) if found), default=1 << 31)
    for option, value, token in zip(
        ("--height", "--width"), (args.height, args.width), token_size(pipe), strict=True
    ):
        if value is not None and value // token > rows:
            raise UsageError(
                f"{option} must be at most {rows * token} for this {name}, got {value}: its "
                f"transformer has places for {rows} tokens (rope_max_seq_len) of {token} pixels"
            )
        if value is None or (value >= token and value % token == 0):
            continue
        reason = f"one token of the transformer stands for {token} pixels"
        if value < token:
            raise UsageError(
                f"{option} must be at least {token} for {name}, got {value}: {reason}; "
                f"give a multiple of {token}"
            )
        if name.startswith(_WHOLE_TOKENS):
            lower = value // token * token
            raise UsageError(
                f"{option} must be a multiple of {token} for {name}, got {value}: {reason}; "
                f"try {lower} or {lower + token}"
            )
    _check_divisible(pipe, args)


def _check_divisible(pipe: Any, args: ServerArgs) -> None:
    """Refuse sizes that the pipeline's own check refuses, with the nearest that it takes."""
    divisor = _refused_divisor(pipe, args)
    if divisor is None:
        return
    for option, value in (("--height", args.height), ("--width", args.width)):
        if value is not None and value % divisor:
            lower = value // divisor * divisor
            nearest_ones = f"{lower} or {lower + divisor}" if lower else str(divisor)
            raise UsageError(
                f"{option} must be a multiple of {divisor} for {type(pipe).__name__}, got {value}; "
                f"try {nearest_ones}"
            )


def _refused_divisor(pipe: Any, args: ServerArgs) -> int | None:
    """Return what the pipeline says that sizes must be divisible by, where it refuses them."""
    check = getattr(pipe, "check_inputs", None)
    if check is None or (args.height is None and args.width is None):
        return None
    parameters = signature(type(pipe).__call__).parameters
    known = {name: p.default for name, p in parameters.items() if p.default is not Parameter.empty}
    known |= {"prompt": "a prompt"}
    known |= {n: v for n in ("height", "width") if (v := getattr(args, n)) is not None}
    wanted = {
        name: known.get(name, None if p.default is Parameter.empty else p.default)
        for name, p in signature(check).parameters.items()
    }
    logger = logging.getLogger(type(pipe).__module__)
    before = logger.disabled
    logger.disabled = True  # what it warns of, it does again in the run
    try:
        check(**wanted)
    except ValueError as error:  # maybe of an argument that is not given here
        found = re.search(r"divisible by (\d+)", str(error))
        return int(found[1]) if found else None
    except Exception:  # checks of other arguments, which are missing here
        return None
    finally:
        logger.disabled = before
    return None


def _check_steps(pipe: Any, args: ServerArgs) -> None:
    end = getattr(getattr(pipe.scheduler, "config", None), "shift_terminal", None)
    if args.num_inference_steps == 1 and end:
        # The stretch divides by the distance of the last step from the first.
        raise UsageError(
            f"--num-inference-steps must be at least 2 for this {type(pipe).__name__}, got 1: its "
            f"scheduler stretches the steps to end at shift_terminal {end}, which one step cannot"
        )


def _patch_size(model: Any) -> tuple[int, int]:
    """Return rows and columns of a patch; configs hold one size, or [frames, rows, columns]."""
    patch = getattr(model.config, "patch_size", None)
    sizes = patch[-2:] if isinstance(patch, (list, tuple)) else (patch, patch)
    rows, columns = (_positive(size) or 1 for size in (sizes[0], sizes[-1]))
    return rows, columns


def _processor_scale(pipe: Any, name: str) -> int:
    config = getattr(getattr(pipe, name, None), "config", None)
    return _positive(getattr(config, "vae_scale_factor", None)) or 1


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
