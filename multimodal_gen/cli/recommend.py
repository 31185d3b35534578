"""`sglang attention recommend`: the fastest backend that is good enough, as a file to run with."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from multimodal_gen.cli.compare import (
    COMPARED,
    STEPS,
    OneGpu,
    print_report,
    read_seeds,
    refuse_several,
    run_comparison,
)
from multimodal_gen.cli.options import AsJson, Settings, takes
from multimodal_gen.cli.prompts import PromptFile, Prompts, read_prompts
from multimodal_gen.cli.table import echo, wrapped
from multimodal_gen.errors import UsageError, short
from multimodal_gen.runtime.server_args import SETTINGS
from multimodal_gen.settings import Setting, as_flag

_MODEL = replace(
    SETTINGS["model_path"],
    default=None,
    help="Compare on this pipeline first: a folder with model_index.json, or a Hugging Face Hub "
    "id. Default: read what --comparison holds.",
)

_Folder = Annotated[
    Path,
    Setting(
        metavar="FOLDER",
        help="Folder of a comparison. With --model-path the comparison is made there: new, or this "
        "search's own, which is gone on with.",
    ),
]
_MinPsnr = Annotated[float | None, Setting(metavar="DB", help="Least mean PSNR, in dB.")]
_MinVmaf = Annotated[float | None, Setting(metavar="X", ge=0, le=100, help="Least mean VMAF.")]
_MaxError = Annotated[
    float | None,
    Setting(
        metavar="X",
        ge=0,
        help="Largest mean relative L2 distance of the last latents. Without any limit: within "
        "the noise of dense kernels.",
    ),
]
_Output = Annotated[
    Path | None,
    Setting(
        metavar="FILE",
        help="YAML file to write, for --attention-config of `sglang generate`, or for --config "
        "where a step cache won; an older one is replaced.",
    ),
]
_Backends = Annotated[
    str | None,
    Setting(
        metavar="CONFIGS",
        help="With --model-path: what is searched, as in `sglang attention compare`. Default: "
        "each sparse method that needs no training, from mild to strong, and sage_attn.",
    ),
]
_Seeds = Annotated[
    str | None, Setting(metavar="N-N,N", help="With --model-path: seeds of every prompt.")
]


@takes(_MODEL, *(SETTINGS[name] for name in COMPARED if name != "model_path"), STEPS)
def recommend(
    comparison: _Folder,
    min_psnr: _MinPsnr = None,
    min_vmaf: _MinVmaf = None,
    max_error: _MaxError = None,
    output: _Output = None,
    prompt: Prompts = None,
    prompts: PromptFile = None,
    backends: _Backends = None,
    seeds: _Seeds = None,
    num_gpus: OneGpu = 1,
    *,
    settings: Settings,
    as_json: AsJson = False,
) -> None:
    """Recommend the fastest backend of a comparison that is good enough, and say why.

    The fastest takes the least time for a generation, from the prompt to the pixels.
    What is good enough is said by limits, or is what is within the noise of dense kernels. Where
    nothing is, says what comes nearest, writes no file, and ends with status 1.
    """
    from multimodal_gen.runtime.comparison import recommend as choice
    from multimodal_gen.runtime.comparison.configurations import plan_of
    from multimodal_gen.runtime.comparison.record import Report, read_record

    refuse_several(num_gpus)
    limits = choice.Limits(min_psnr=min_psnr, min_vmaf=min_vmaf, max_error=max_error)
    if output is not None:
        choice.check_apart(output, comparison)
        choice.check_file(output)
    if settings["model_path"] is None:
        _refuse_search(prompt, prompts, backends, seeds, settings)
        file = comparison / "report.json" if os.path.isdir(comparison) else comparison
        if not os.path.exists(file):
            raise UsageError(
                f"--comparison must be the folder of a comparison, with its report.json, got "
                f"{short(str(comparison))} without one; `sglang attention compare` makes one, and "
                f"so does --model-path"
            )
        report = read_record(Report, file)
    else:
        plan = plan_of(
            prompts=read_prompts(prompt, prompts, "a comparison"),
            seeds=read_seeds("0" if seeds is None else seeds),
            backends=backends or ";".join(choice.GRID),
            folder=comparison,
            resume=os.path.exists(comparison),
            replayed_steps=0,
            spell=as_flag,
        )
        report = run_comparison(settings, plan, check=choice.check_search)
        if not as_json:
            print_report(report)
            typer.echo("")
    found = choice.recommend(report, limits)
    if output is not None and found.run is not None:
        choice.write_config(found, output)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        for reason in found.reasons:
            echo(wrapped(reason))
        if output is not None and found.run is not None:
            kind = "attention config" if found.cache is None else "config, for --config"
            typer.echo(f"\n{kind}: {output}")
    if found.run is None:
        raise typer.Exit(1)


def _refuse_search(
    prompt: list[str] | None,
    prompts: Path | None,
    backends: str | None,
    seeds: str | None,
    settings: Settings,
) -> None:
    """Refuse what only a search takes, rather than leave it out."""
    flags = {"--prompt": prompt, "--prompts": prompts, "--backends": backends, "--seeds": seeds}
    given = [flag for flag, value in flags.items() if value]
    given += [
        setting.flag
        for name in (*COMPARED, STEPS.name)
        if name != "model_path"
        and settings[name] != (setting := SETTINGS[name]).default
        and settings[name] is not None
    ]
    if given:
        raise UsageError(
            f"--model-path must be given with {', '.join(given)}: without it, a comparison that "
            f"was made before is read"
        )
