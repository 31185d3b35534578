"""`sglang attention warm`: compiles the kernels of a generation before it runs."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from multimodal_gen.cli.options import AsJson, Settings, takes
from multimodal_gen.cli.table import echo, wrapped
from multimodal_gen.files import require_new
from multimodal_gen.runtime.model_path import locate
from multimodal_gen.runtime.server_args import CALL_SETTINGS, EXAMPLE_PROMPT, SETTINGS, ServerArgs
from multimodal_gen.settings import Setting

_SEEN = (
    "model_path",
    "pipeline_class_name",
    *CALL_SETTINGS,
    "image_path",
    "pipeline_arg",
    "num_outputs",
    "scheduler",
    "dtype",
    "device",
    "attention_backend",
    "attention_backend_config",
    "component_attention_backends",
    "attention_config",
    "attention_auto_table",
    "latent_grid",
    "text_rows",
    "strict_attention",
)
_PROMPT = replace(
    SETTINGS["prompt"],
    default=EXAMPLE_PROMPT,
    help="Prompt; its length counts where a model does not pad its text.",
)
_Output = Annotated[
    Path | None,
    Setting(
        metavar="FOLDER",
        help="New folder for the kernels, for --compiled-kernels; it can be moved and shipped. "
        "Default: Triton's own cache.",
    ),
]


@takes(*(SETTINGS[name] for name in _SEEN), _PROMPT)
def warm(output: _Output = None, *, settings: Settings, as_json: AsJson = False) -> None:
    """Compile the kernels that a generation will need, before it runs.

    Calls the pipeline on tensors without data: no weights are read, and nothing runs on the GPU,
    which must be there all the same. Kernels compile in as many processes as there are cores.
    """
    start = time.perf_counter()
    args = ServerArgs(**settings, backend="sglang")
    locate(args.model_path)
    if output is not None:
        require_new(output, "--output")
    # What these import takes seconds.
    from multimodal_gen.integrations import warm as warming
    from multimodal_gen.runtime.attention_report import counted

    place, made = warming.warm(args, output)
    seconds = round(time.perf_counter() - start, 1)
    if as_json:
        document = {
            "place": asdict(place),
            "seconds": seconds,
            "output": None if output is None else str(output),
            "kernels": [asdict(each) for each in made],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    named = counted(each.name for each in made)
    echo(wrapped(f"kernels: {len(made)}" + (f" ({named})" if made else "")))
    echo(wrapped(f"made for: {place}"))
    typer.echo(f"time: {seconds} s, {sum(each.seconds for each in made):.1f} s of compiling")
    if output is not None:
        typer.echo(f"folder: {output}")
        typer.echo(f"next: sglang generate ... --compiled-kernels {output}")
