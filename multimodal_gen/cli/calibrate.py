"""`sglang attention calibrate`: what share of the attention each lambda of skip-softmax costs."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multimodal_gen.cli.options import Settings, takes
from multimodal_gen.cli.prompts import OBSERVED, PromptFile, Prompts, read_prompts
from multimodal_gen.cli.table import Row, echo, table
from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.files import require_apart, require_file, save_text
from multimodal_gen.runtime.model_path import locate
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import Setting

if TYPE_CHECKING:
    from multimodal_gen.runtime.generator.skip_calibration import Calibrated

_SUFFIXES = (".json", ".yaml", ".yml")

_Output = Annotated[
    Path,
    Setting(
        metavar="FILE",
        help="JSON or YAML file to write, for --attention-backend-config; an older one is "
        "replaced.",
    ),
]
_Targets = Annotated[
    str,
    Setting(
        metavar="X,...",
        help="Shares of steps to leave out, in (0, 1); the first one is what the file asks for.",
    ),
]
_Component = Annotated[
    str | None, Setting(metavar="NAME", help="Which denoiser, where the pipeline has several.")
]


@takes(*OBSERVED)
def calibrate(
    output: _Output,
    prompt: Prompts = None,
    prompts: PromptFile = None,
    target_sparsity: _Targets = "0.5",
    component: _Component = None,
    *,
    settings: Settings,
) -> None:
    """Fit the curve of skip-softmax to a model, and write it to a file.

    Generates the prompts with dense attention, and looks at some heads and queries of every
    self-attention layer in every step. The file is for --attention-backend skip_softmax.
    """
    targets = _shares(target_sparsity)
    if output.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--output must end in {', '.join(_SUFFIXES)}, got {short(str(output))}")
    args = ServerArgs(**settings, prompt="", backend="sglang")
    _require_free(output, args.model_path)
    given = read_prompts(prompt, prompts, "a calibration")
    locate(args.model_path)
    made = "" if output.expanduser().parent.is_dir() else ", in a new folder"
    typer.echo(f"output: {output}{made}")
    # What these import takes seconds.
    from multimodal_gen.integrations.diffusers import apply
    from multimodal_gen.runtime.generator import skip_calibration

    found = skip_calibration.calibrate(
        args,
        given,
        apply,
        component=component,
        told=lambda number, seconds: typer.echo(f"[{number}/{len(given)}] {seconds:.1f} s"),
    )
    reached = found.reached(targets) or [found.most()]
    save_text(output, json.dumps(found.as_config(reached), indent=2) + "\n", what="--output")
    curve = found.curve
    typer.echo(
        f"{found.component}: threshold_scale_factor = {curve.a:.6g} * exp({curve.b:.6g} * "
        f"target_sparsity), {found.keys} keys"
    )
    rows = []
    for target in reached:
        factor = curve.factor(target)
        cells = (f"{target:g}", f"{factor:.6g}", f"{factor / found.keys:.3g}")
        rows.append(Row((*cells, f"{found.share(target):.1%}")))
    echo(table(("target", "threshold_scale_factor", "lambda", "left out"), rows))
    beyond = [target for target in targets if target not in reached]
    if beyond:
        raise UsageError(
            f"--target-sparsity must be reached by a lambda below 1, got {beyond[0]:g}; "
            f"{short(str(output))} has the curve, and asks for {reached[0]:g}"
        )
    typer.echo(f"next: sglang generate ... {_options(found, output)}")


def _require_free(output: Path, model: str) -> None:
    """Refuse a file that cannot be written, or is a part of the model, before anything runs."""
    require_file(output, "--output")
    if output.is_dir():
        raise ConfigError(
            f"--output must be a file, got {short(str(output))}, which is a folder; name one in it"
        )
    folder = Path(model).resolve()

    def is_of_model(file: Path) -> bool:
        return file.exists() and folder in file.parents

    require_apart(output, "--output", "a file of the model", is_of_model, "skip.json")


def _options(found: "Calibrated", output: Path) -> str:
    """Return the options of a generation that goes by the file."""
    if found.is_only:
        named = shlex.quote(str(output))
        return f"--attention-backend skip_softmax --attention-backend-config {named}"
    rule = {"component": found.component, "role": "self", "backend": "skip_softmax"}
    rules = {"rules": [{**rule, "config": str(output)}]}
    return f"--attention-config {shlex.quote(json.dumps(rules))}"


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < 1 for share in shares):
        raise ConfigError(
            f"--target-sparsity must be shares between 0 and 1 such as 0.5,0.7, got {short(text)}"
        )
    return shares
