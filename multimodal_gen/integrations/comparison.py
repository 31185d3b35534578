"""`compare`: what attention backends do to a pipeline's output, and what they save."""

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from multimodal_gen._version import __version__
from multimodal_gen.errors import UsageError, short
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.comparison.configurations import Plan, plan_of
from multimodal_gen.runtime.comparison.page import require_page, write_page
from multimodal_gen.runtime.comparison.record import Report
from multimodal_gen.runtime.comparison.run import Comparison
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import expect


def compare(
    pipe: Any,
    *,
    prompts: str | Sequence[str],
    backends: str | Sequence[str],
    output: str | os.PathLike[str],
    seeds: Sequence[int] = (0,),
    reference: str = "torch_sdpa",
    floor: str | Sequence[str] | None = None,
    resume: bool = False,
    replayed_steps: int | None = None,
    layers_for: int | None = None,
    score: str | Callable[[Any, str], float] | None = None,
    perceptual: bool = True,
    page: bool = True,
    negative_prompt: str | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    true_cfg_scale: float | None = None,
    fps: int | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Report:
    """Compare attention backends on a loaded pipeline, as `sglang attention compare` does.

    The pipeline is used as it is, on the device it is on, and left as it was found. It is one
    process on one device: after `init_parallel` it is refused.

    Args:
        pipe: a diffusers pipeline, to which nothing is applied.
        prompts: what is generated.
        backends: configurations such as "sliding_tile_attn:window=[3,3,3]"; in one text between
            semicolons.
        output: folder for report.json, report.html, the clips and what `resume` finds again.
        seeds: seeds of the noise, for every prompt. Default: 0.
        reference: the dense backend that the others are compared with. Default: torch_sdpa.
        floor: exact backends for the noise; an empty list for none. Default: up to two that this
            machine has.
        resume: go on with what the folder holds; otherwise it must be new or empty.
        replayed_steps: denoising steps of a generation whose attention calls are given to all
            backends, for errors by layer and head; 0 for none. Default: one in ten, up to three.
        layers_for: prompts and seeds of which that is done, one of each prompt first. Default: all.
        score: function of a clip, uint8 [T, H, W, 3], and its prompt that returns a number in
            [0, 1], or its place as "FILE.py:function"; every clip is scored by it, the reference's
            too. Default: none.
        perceptual: whether LPIPS, ST-LPIPS and ColorVideoVDP are measured where their packages are
            installed; the last two take minutes of a CPU for a clip. Default: yes.
        page: whether to write report.html too, which needs the extra `compare`. Default: yes.
        negative_prompt: what to keep out. Default: none.
        height: in pixels. Default: the pipeline's, as for all of the following.
        width: in pixels.
        num_frames: frames of a video.
        num_inference_steps: denoising steps.
        guidance_scale: see `sglang generate --help`.
        true_cfg_scale: the same.
        fps: frames per second of a video.
        say: takes a line about progress. Default: it is not shown.

    Returns:
        The report, which is also written to the folder.

    Raises:
        UsageError: an argument is of another type or does not fit the pipeline, the folder is in
            use, the reference cannot run, or this is one of several ranks.
        ConfigError: a backend or its parameters are wrong, or `score` is no such function.
        MissingDependencyError: an encoder for videos or what the page needs is not installed.
    """
    if not hasattr(pipe, "components"):
        raise UsageError(
            f"pipe must be a diffusers pipeline, got a {type(pipe).__name__}; a bare model "
            f"generates nothing"
        )
    for name, flag in (("resume", resume), ("perceptual", perceptual), ("page", page)):
        expect(name, flag, bool, "True or False")
    expect("say", say, Callable, "a function of a line")
    expect("reference", reference, str, "text such as 'torch_sdpa'")
    prompts = _texts(prompts, "prompts")
    for name, given in (("backends", backends), ("floor", () if floor is None else floor)):
        _texts(given, name)
    plan = plan_of(
        prompts=prompts,
        seeds=[*_seeds(seeds)],
        backends=backends,
        reference=reference,
        floor=floor,
        folder=_folder(output),
        resume=resume,
        replayed_steps=_count(replayed_steps, "replayed_steps", 0),
        layers_for=_count(layers_for, "layers_for", 1),
        score=score,
        perceptual=perceptual,
    )
    args = ServerArgs(
        model_path=str(getattr(pipe, "name_or_path", "") or type(pipe).__name__),
        negative_prompt=negative_prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        true_cfg_scale=true_cfg_scale,
        fps=fps,
    )
    return run_plan(pipe, _index_of(pipe, args.model_path), args, plan, page=page, say=say)


def run_plan(
    pipe: Any,
    index: PipelineIndex,
    args: ServerArgs,
    plan: Plan,
    *,
    page: bool = True,
    say: Callable[[str], object] = lambda line: None,
) -> Report:
    """Run a comparison on a loaded pipeline, and write its page; see `Comparison`."""
    if page:
        require_page()
    report = Comparison(
        pipe, index, args, plan, lambda it, scope: apply(it, scope=scope), __version__, say
    ).run()
    if page:
        write_page(report, plan.folder, plan.folder / "report.html")
    return report


def _texts(given: object, name: str) -> tuple[str, ...]:
    """Return a text, or several, as a tuple."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise UsageError(f"{name} must be a text or a list of texts, got {short(given)}")
    return tuple(given)


def _seeds(given: Any) -> Iterator[int]:
    """Yield seeds, numbers of NumPy as those of Python."""
    try:
        found = [None if isinstance(each, bool) else operator.index(each) for each in given]
    except TypeError:
        found = [None]
    for seed in found:
        if seed is None or seed < 0:
            raise UsageError(
                f"seeds must be a list of whole numbers from 0, such as [0, 1] or range(4), got "
                f"{short(given)}"
            )
        yield seed


def _count(given: object, name: str, least: int) -> int | None:
    if given is None or (type(given) is int and given >= least):
        return given
    raise UsageError(f"{name} must be a whole number from {least}, or None, got {short(given)}")


def _folder(given: object) -> Path:
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise UsageError(f"output must be the path of a folder, got {short(given)}")
    return Path(given)


def _index_of(pipe: Any, name: str) -> PipelineIndex:
    """Return what a loaded pipeline is, as its folder would tell."""
    components = {
        key: (type(component).__module__.partition(".")[0], type(component).__name__)
        for key, component in pipe.components.items()
        if component is not None
    }
    return PipelineIndex(model_path=name, pipeline_class=type(pipe), components=components)
