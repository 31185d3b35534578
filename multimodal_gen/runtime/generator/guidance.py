"""Refuses `--cfg-parallel` for generations without guidance, before weights are loaded."""

import math
from typing import Any

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.identity import denoiser_configs
from multimodal_gen.runtime.generator.loading import PipelineIndex, import_diffusers
from multimodal_gen.runtime.managers.guidance import guides_at, has_branches, one_branch, unguided
from multimodal_gen.runtime.server_args import ServerArgs

__all__ = ["check_guided"]


def check_guided(index: PipelineIndex, args: ServerArgs) -> None:
    """Check that a generation has the two guidance branches `--cfg-parallel` gives to ranks.

    What cannot be told from the pipeline's class and the arguments passes; the denoiser's first
    calls tell.

    Raises:
        UsageError: it has one branch only.
    """
    if not args.cfg_parallel:
        return
    configs = [config for _, config in denoiser_configs(index)]
    classes = [getattr(import_diffusers(), config["_class_name"]) for config in configs]
    if not has_branches(index.pipeline_class, classes):
        raise one_branch(index.name)
    embeds = [config.get("guidance_embeds") for config in configs]
    refused = (
        _by_true_scale(index, args, distilled=False not in embeds)
        if "true_cfg_scale" in index.parameters
        else _by_scale(index, args)
    )
    if refused is not None:
        raise refused


def _by_true_scale(index: PipelineIndex, args: ServerArgs, *, distilled: bool) -> UsageError | None:
    """Return why a pipeline that guides by `true_cfg_scale` and a negative prompt does not."""
    scale: Any = args.true_cfg_scale
    if scale is None and not (distilled and "guidance_scale" in index.parameters):
        scale = args.guidance_scale  # which then stands for it
    if scale is None:
        scale = index.parameters["true_cfg_scale"].default
    missing = []
    if scale <= 1:
        missing.append(f"a true_cfg_scale of {scale:g}")
    if args.negative_prompt is None:
        missing.append("no negative prompt")
    if not missing:
        return None
    advice = "give --true-cfg-scale above 1 and --negative-prompt"
    return unguided(index.name, " and ".join(missing), advice)


def _by_scale(index: PipelineIndex, args: ServerArgs) -> UsageError | None:
    """Return why a pipeline that guides by its guidance scale does not."""
    scale = args.guidance_scale
    if guides_at(index.pipeline_class, math.inf, index.settings) is False:
        return one_branch(index.name)
    if "guider" in index.components:
        # Without the option its guider's own scale counts.
        guided = scale is None or not math.isclose(scale, 1.0)
    else:
        if scale is None and "guidance_scale" in index.parameters:
            scale = index.parameters["guidance_scale"].default
        guided = (
            scale is None or guides_at(index.pipeline_class, scale, index.settings) is not False
        )
    if guided:
        return None
    return unguided(index.name, f"a guidance scale of {scale:g}", "give --guidance-scale above 1")
