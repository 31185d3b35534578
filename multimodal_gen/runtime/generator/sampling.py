"""From the user's options to the arguments of one pipeline's `__call__`, and what it cannot make.

Only what the user gave is passed; everything else stays at the pipeline's own defaults. Sizes below
one token, several outputs at once or a single step are refused where a pipeline cannot make them:
diffusers finds these out inside a model, where the message is about tensors, or not at all.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from multimodal_gen.runtime.generator.quiet import without
from multimodal_gen.runtime.layers.attention.scope import component_names
from multimodal_gen.runtime.managers.generation import Generation
from multimodal_gen.runtime.server_args import SETTINGS, ServerArgs
from multimodal_gen.settings import as_flag

# Options that pipelines know by the same name.
_OPTIONS = (
    *("prompt", "negative_prompt", "height", "width", "num_frames", "num_inference_steps"),
    "true_cfg_scale",
)
_GUIDANCE = ("guidance_scale", "true_cfg_scale")
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

# Words in the names of pipelines that start from media, and the arguments of which they need one.
_STARTS_FROM: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "ImageToVideo|VideoToVideo|Img2Img|Inpaint|Fill|Edit|Control|Upsampl|Upscale",
        ("image", "video", "control_image", "control_video"),
    ),
    ("Control", ("control_image", "control_video")),
    ("Inpaint|Fill", ("mask_image", "mask", "mask_video")),
)

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
        changed: attributes that the pipeline has meanwhile, by name.
        fps: frames per second of the result; meaningless for images.
        generation: what it makes, for methods that write files about it.
        notes: what the user should know about the arguments.
    """

    arguments: Mapping[str, Any]
    fps: int
    generation: Generation
    changed: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def without_pixels(self) -> "Call":
        """Return the call with nothing decoded at its end, where the pipeline can leave that."""
        latent = {"output_type": "latent"} if "output_type" in self.arguments else {}
        return replace(self, arguments={**self.arguments, **latent})


def check_arguments(index: PipelineIndex, args: ServerArgs) -> None:
    """Check the options against the pipeline's signature, before its weights are loaded.

    Raises:
        UsageError: an option was given that the pipeline does not take or cannot serve, or the
            pipeline needs an argument there is no option for.
    """
    check_inputs(index, args, (*_OPTIONS, "guidance_scale", "sigmas"))
    needed = _missing(index, args)
    if needed:
        ways = "; ".join(dict.fromkeys(how_to_give(index, name) for name in needed))
        raise UsageError(f"{index.name} needs {', '.join(needed)}, got none; give {ways}")
    _check_taken(index, args)
    check_outputs(index, args)
    check_components(index, args)
    if args.cache is not None:
        read_cache(args.cache)


def _check_taken(index: PipelineIndex, args: ServerArgs) -> None:
    """Refuse options that the pipeline has no argument for."""
    parameters = index.parameters
    taken = {
        **{name: name in parameters for name in _OPTIONS},
        "num_outputs": any(name in parameters for name in _NUM_OUTPUTS),
        "guidance_scale": "guider" in index.components or any(n in parameters for n in _GUIDANCE),
        "fps": index.kind == "video",
    }
    for option, is_taken in taken.items():
        value = getattr(args, option)
        if not is_taken and value != SETTINGS[option].default:
            flags = [as_flag(name) for name in _OPTIONS if taken[name]]
            raise UsageError(
                f"{as_flag(option)} must be left out for {index.name}, which has no such argument, "
                f"got {short(value)}; it takes {', '.join(flags)}"
            )


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
    for words, names in _STARTS_FROM:
        taken = [name for name in names if name in index.parameters]
        if re.search(words, index.name) and not given.union(needed) & set(taken):
            needed += taken[:1]
    return needed


def prepare_call(pipe: Any, index: PipelineIndex, args: ServerArgs) -> Call:
    """Return the call that makes what is asked for; it changes nothing."""
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
    guidance = _guidance(pipe, parameters, args)
    guider = guidance.pop("guider", None)
    arguments |= guidance
    if args.fps is not None and _FRAME_RATE in parameters:
        arguments[_FRAME_RATE] = args.fps
    if "output_type" in parameters:
        arguments["output_type"] = "np"
    width, height = output_size(pipe, index, args)
    return Call(
        arguments=arguments,
        fps=args.fps or default_fps(index),
        generation=Generation(prompt=args.prompt or "", width=width, height=height),
        changed={} if guider is None else {"guider": guider},
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


def _guidance(
    pipe: Any, parameters: Mapping[str, Parameter], args: ServerArgs
) -> dict[str, object]:
    """Return what passes `--guidance-scale` to the guidance that the model was made for.

    That is an argument of the call, or the pipeline's "guider".
    """
    scale = args.guidance_scale
    if scale is None:
        return {}
    embeds = [getattr(m.config, "guidance_embeds", None) for m in denoisers(pipe).values()]
    classifier_free = False in embeds and args.true_cfg_scale is None
    if "true_cfg_scale" in parameters and (classifier_free or "guidance_scale" not in parameters):
        return {"true_cfg_scale": scale}
    if "guidance_scale" in parameters:
        return {"guidance_scale": scale}
    return {"guider": pipe.guider.new(guidance_scale=scale)}


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


def check_sizes(pipe: Any, args: ServerArgs) -> None:
    """Check sizes and steps against a pipeline, which may be one without weights.

    Raises:
        UsageError: height or width is less than one token, or not whole ones where it must be; the
            scheduler cannot make so few steps.
    """
    _check_steps(pipe, args)
    name = type(pipe).__name__
    asked = _asked_multiple(pipe, args)
    for option, value, token in zip(
        ("--height", "--width"), (args.height, args.width), token_size(pipe), strict=True
    ):
        whole = math.lcm(token, asked or 1)
        if value is None or value % whole == 0:
            continue
        lower = value // whole * whole
        if asked or name.startswith(_WHOLE_TOKENS) or not lower:
            rule = f"a multiple of {whole}" if lower else f"at least {whole}"
            why = f"one token of the transformer stands for {token} pixels"
            if whole != token:
                why = f"the pipeline asks for multiples of {asked}"
            raise UsageError(
                f"{option} must be {rule} for {name}, got {value}: {why}; "
                f"try {f'{lower} or ' if lower else ''}{lower + whole}"
            )


def _asked_multiple(pipe: Any, args: ServerArgs) -> int | None:
    """Return what the pipeline's own check wants sizes to be a multiple of, if it refuses these."""
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
    try:
        with without(type(pipe).__module__, lambda _: True):  # what it warns of, it does again
            check(**wanted)
    except Exception as error:  # maybe of another argument, which is not given here
        found = re.search(r"divisible by (\d*)", str(error))
        return int(found[1] or 1) if found and isinstance(error, ValueError) else None
    return None


def _check_steps(pipe: Any, args: ServerArgs) -> None:
    scheduler = getattr(pipe, "scheduler", None)
    end = getattr(getattr(scheduler, "config", None), "shift_terminal", None)
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
