"""What a pipeline cannot make: sizes below one token, several outputs at once, a single step.

diffusers finds these out inside a model, where the message is about tensors, or not at all.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from multimodal_gen.errors import (
    ComponentAttentionBackendNotAppliedError,
    UsageError,
    nearest,
)
from multimodal_gen.runtime.generator.loading import PipelineIndex, denoisers
from multimodal_gen.runtime.layers.attention.scope import component_names
from multimodal_gen.runtime.server_args import ServerArgs

__all__ = ["check_asked", "check_components", "check_loaded", "token_size"]

# Beyond these, memory runs out while the noise is drawn or the files are named, or floats overflow.
_MOST = MappingProxyType(
    {
        "height": 65536,
        "width": 65536,
        "num_frames": 65536,
        "num_inference_steps": 10000,
        "num_outputs": 1000,
        "guidance_scale": 10**6,
        "true_cfg_scale": 10**6,
    }
)

# Pipelines that take the argument and cannot serve it, by the start of their names.
_SINGLE_OUTPUT: tuple[tuple[str, str], ...] = (
    ("Allegro", "which makes one whatever it is told"),
    ("CogVideoX", "which makes one whatever it is told"),
    ("ConsisID", "which makes one whatever it is told"),
    ("HunyuanVideo15", "which embeds its missing image for one video only and then fails"),
)

# Pipelines that neither round a size to whole tokens nor refuse it; their transformers drop rows.
_WHOLE_TOKENS = ("Allegro", "CogVideoX", "Mochi")

# What pipelines call the pixels per latent; the first one a pipeline has is used.
_SCALES = (
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
    "vae_scale_factor",
)


def check_asked(index: PipelineIndex, args: ServerArgs) -> None:
    """Check what is asked for against what any run can do, before weights are loaded.

    Raises:
        UsageError: a number is beyond all use, a text is not Unicode, or the pipeline makes one
            output per run and several are asked for.
    """
    for name, most in _MOST.items():
        value = getattr(args, name)
        if value is not None and value > most:
            raise UsageError(f"{_flag(name)} must be at most {most}, got {value}")
    for name in ("prompt", "negative_prompt"):
        text = getattr(args, name) or ""
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UsageError(
                f"{_flag(name)} must be Unicode text, got bytes that are not UTF-8: {text[:80]!r}; "
                f"check the encoding of the terminal or script"
            )
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
                f"({', '.join(sorted(index.components))}), got {key!r}"
                f"{nearest(component, sorted(known))}"
            )


def check_loaded(pipe: Any, args: ServerArgs) -> None:
    """Check the options against the loaded pipeline, before anything is computed.

    Raises:
        UsageError: height or width is less than one token, or not whole ones where it must be; the
            scheduler cannot make so few steps.
    """
    _check_sizes(pipe, args)
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


def _check_sizes(pipe: Any, args: ServerArgs) -> None:
    name = type(pipe).__name__
    for option, value, token in zip(
        ("--height", "--width"), (args.height, args.width), token_size(pipe), strict=True
    ):
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


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
