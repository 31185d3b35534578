"""`sglang attention compare`: what backends do to the output of a model, and what they save."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multimodal_gen.cli.options import Settings, takes
from multimodal_gen.cli.prompts import PromptFile, Prompts, read_prompts
from multimodal_gen.cli.table import Row, echo, table, wrapped
from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.runtime.server_args import SETTINGS, ServerArgs
from multimodal_gen.settings import Setting, as_flag

if TYPE_CHECKING:
    from multimodal_gen.runtime.comparison.configurations import Plan
    from multimodal_gen.runtime.comparison.record import Report, Run

COMPARED = (
    "model_path",
    "negative_prompt",
    "height",
    "width",
    "num_frames",
    "guidance_scale",
    "true_cfg_scale",
    "fps",
    "dtype",
    "device",
    "offload",
    "vae_tiling",
)
STEPS = replace(SETTINGS["num_inference_steps"], short="--steps")


OneGpu = Annotated[
    int,
    Setting(
        metavar="N",
        help="Must be 1; `sglang generate --num-gpus` takes several, for a backend at a time.",
    ),
]
"""Given up in 0.2: refused, with what to do instead."""

_Backends = Annotated[
    str,
    Setting(
        metavar="CONFIGS",
        help="What is compared: backends between semicolons, each with its parameters behind a "
        "colon, as in 'sliding_tile_attn:window=[3,3,3];sage_attn'.",
    ),
]
_Output = Annotated[
    Path,
    Setting(
        metavar="FOLDER",
        help="Folder for report.json, report.html and the clips; new or empty without --resume.",
    ),
]
_Reference = Annotated[
    str, Setting(metavar="CONFIG", help="Dense backend the others are compared with.")
]
_Floor = Annotated[
    str | None,
    Setting(
        metavar="CONFIGS",
        help="Exact backends whose difference is noise. Default: up to two that run here.",
    ),
]
_Seeds = Annotated[str, Setting(metavar="N-N,N", help="Seeds of the noise, for every prompt.")]
_Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with what --output holds. What is done is not repeated, but for generations of "
        "the reference whose layers are still to be replayed on a backend that is new.",
    ),
]
_Replayed = Annotated[
    int | None,
    Setting(
        metavar="N",
        ge=0,
        help="Denoising steps of a generation whose attention calls all backends are given, for "
        "errors by layer and head. Default: one in ten, up to three.",
    ),
]
_LayersFor = Annotated[
    int | None,
    Setting(
        metavar="N",
        ge=1,
        help="Prompts and seeds of which that is done, one of each prompt first. Default: all.",
    ),
]
_Score = Annotated[
    str | None,
    Setting(
        metavar="FILE.py:FUNCTION",
        help="Function that scores every clip, also the reference's: of the video [T, H, W, 3] in "
        "bytes and its prompt, a number from 0 to 1.",
    ),
]
_Page = Annotated[
    bool, typer.Option(help="Write report.html; needs the packages of the extra `compare`.")
]


@takes(*(SETTINGS[name] for name in COMPARED), STEPS)
def compare(
    backends: _Backends,
    output: _Output,
    prompt: Prompts = None,
    prompts: PromptFile = None,
    reference: _Reference = "torch_sdpa",
    floor: _Floor = None,
    seeds: _Seeds = "0",
    resume: _Resume = False,
    replayed_steps: _Replayed = None,
    layers_for: _LayersFor = None,
    score: _Score = None,
    page: _Page = True,
    num_gpus: OneGpu = 1,
    *,
    settings: Settings,
) -> None:
    """Compare attention backends on a model: quality, layer by layer and frame by frame, and cost.

    Generates every prompt with every seed on a dense reference, on other exact kernels, whose
    difference is the noise, and on each backend, clip by clip. Writes report.json and report.html.
    A backend that fails or runs out of memory is a row of the report.
    """
    from multimodal_gen.runtime.comparison.configurations import plan_of

    refuse_several(num_gpus)
    plan = plan_of(
        prompts=read_prompts(prompt, prompts, "a comparison"),
        seeds=read_seeds(seeds),
        backends=backends,
        reference=reference,
        floor=floor,
        folder=output,
        resume=resume,
        replayed_steps=replayed_steps,
        layers_for=layers_for,
        score=score,
        spell=as_flag,
    )
    report = run_comparison(settings, plan, page=page)
    print_report(report)
    typer.echo(f"\nreport: {output / 'report.json'}")
    if page:
        typer.echo(f"page:   {output / 'report.html'}")


def refuse_several(num_gpus: int) -> None:
    """Refuse what was given up in 0.2."""
    from multimodal_gen.runtime.comparison.configurations import ONE_DEVICE

    if num_gpus != 1:
        raise UsageError(f"--num-gpus must be 1, got {num_gpus}: {ONE_DEVICE}")


def run_comparison(
    settings: Settings,
    plan: "Plan",
    *,
    page: bool = True,
    check: Callable[["Plan", ServerArgs], object] = lambda plan, args: None,
) -> "Report":
    """Load a pipeline, compare backends on it, and return the report; see `compare`.

    Before anything is loaded, `check` may refuse what is planned.
    """
    from multimodal_gen.integrations.comparison import run_plan
    from multimodal_gen.runtime.comparison.configurations import ONE_DEVICE
    from multimodal_gen.runtime.comparison.page import require_page
    from multimodal_gen.runtime.comparison.store import check_folder
    from multimodal_gen.runtime.distributed.launch import is_launched_rank
    from multimodal_gen.runtime.generator import PipelineIndex
    from multimodal_gen.runtime.generator.library_errors import out_of_memory_explained
    from multimodal_gen.runtime.generator.load import load_pipeline
    from multimodal_gen.runtime.generator.ranks import rank_device

    if is_launched_rank():
        raise UsageError(ONE_DEVICE)
    args = ServerArgs(**settings, prompt="", backend="sglang")
    check(plan, args)
    check_folder(plan.folder, resume=plan.resume)
    if page:
        require_page()
    index = PipelineIndex.read(args.model_path, args.pipeline_class_name)
    with out_of_memory_explained():
        pipe = load_pipeline(index, args, rank_device(args.device))
    return run_plan(pipe, index, args, plan, page=page, say=lambda it: typer.echo(it, err=True))


def print_report(report: "Report") -> None:
    """Print a report as tables: quality, then cost."""
    from multimodal_gen.runtime.comparison.paired import speed_text
    from multimodal_gen.runtime.comparison.record import kept_mass_sources

    typer.echo(f"{report.model.pipeline} on {report.environment.device}, {report.model.dtype}")
    typer.echo("")
    count = len(report.prompts) * len(report.seeds)
    clips = "one clip" if count == 1 else f"means over {count} clips"
    typer.echo(f"quality, against {report.reference.name}; {clips}")
    headings = ("backend", "verdict", "PSNR", "SSIM", "VMAF", "latents", "layers L2", "kept")
    rows = [Row(tuple(_quality(run)), _remarks(run)) for run in report.runs[1:]]
    echo(table(headings, rows))
    if any("estimate" in kept_mass_sources(run) for run in report.runs):
        typer.echo("~ an estimate: what computes it does not tell which pairs it keeps")
    if report.score is not None:
        typer.echo(
            f"\nscores by {report.score}; differences are paired by clip, with 95 % intervals"
        )
        echo(table(("backend", "score", "difference"), [Row(_score(run)) for run in report.runs]))
    typer.echo("")
    typer.echo("cost")
    headings = ("backend", "generation", "speed-up", "step", "warm-up", "memory", "density", "attn")
    echo(table(headings, [Row(tuple(_cost(run))) for run in report.runs]))
    noise = report.reference.speed
    if noise is not None:
        typer.echo(f"noise of speeds, {report.reference.name} against itself: {speed_text(noise)}")
    for note in report.notes:
        echo(wrapped(f"note: {note}"))


def _quality(run: "Run") -> Iterator[str]:
    from multimodal_gen.runtime.comparison.record import kept_mass_sources

    yield run.name
    yield run.status if run.status != "done" else _word(run)
    for name, digits in (("psnr", 1), ("ssim", 4), ("vmaf", 1)):
        value = getattr(run.frames_mean, name, None)
        yield "-" if value is None else f"{value:.{digits}f}"
    last = [each.latents[-1] for each in run.generations if each.latents]
    yield f"{sum(last) / len(last):.2g}" if last else "-"
    errors = [error for layer in run.layers for error in layer.relative_l2]
    yield f"{sum(errors) / len(errors):.2g}" if errors else "-"
    masses = [mass for layer in run.layers for mass in layer.kept_mass or ()]
    about = "~" if "estimate" in kept_mass_sources(run) else ""
    yield f"{about}{sum(masses) / len(masses):.1%}" if masses else "-"


def _score(run: "Run") -> tuple[str, str, str]:
    from multimodal_gen.runtime.comparison.verdict import SCORE

    scores, apart = [*SCORE.figures(run).values()], run.differences.get("score")
    mean = SCORE.number(sum(scores) / len(scores)) if scores else "-"
    return run.name, mean, "-" if apart is None else " ".join(SCORE.apart(apart)).strip()


def _word(run: "Run") -> str:
    """Return the verdict, short enough for a column."""
    if run.verdict is None:
        return "-"
    return "within noise" if run.verdict.word.startswith("within") else run.verdict.word


def _remarks(run: "Run") -> list[str]:
    if run.message:
        return [run.message]
    return list(run.verdict.reasons) if run.verdict else []


def _cost(run: "Run") -> Iterator[str]:
    from multimodal_gen.runtime.comparison.paired import speed_text

    yield run.name
    cost = run.cost
    if cost is None:
        yield from ("-",) * 7
        return
    yield f"{cost.generation_seconds:.2f} s"
    yield "-" if run.speed is None else speed_text(run.speed)
    yield f"{cost.step_seconds:.3f} s"
    yield f"{cost.warm_up_seconds:.1f} s"
    yield "-" if cost.peak_memory is None else f"{cost.peak_memory / 2**30:.1f} GiB"
    yield f"{cost.density:.1%}"
    yield f"{cost.attention_share:.0%}"


def read_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of text such as "0-3,7"."""
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        first, last = (int(x or match[1]) for x in match.groups()) if match else (1, 0)
        if match is None or not first <= last < first + 10_000:
            raise ConfigError(f"--seeds must be seeds and ranges such as 0-3,7, got {short(text)}")
        found.update(dict.fromkeys(range(first, last + 1)))
    return tuple(found)
