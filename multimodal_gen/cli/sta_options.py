"""The options of `sglang attention sta`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from multimodal_gen.cli.options import DtypeChoice, OffloadChoice

__all__ = ["SearchOptions", "ShowOptions", "TuneOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What `sglang attention sta search` takes; names are those of `ServerArgs` where shared."""

    model_path: Annotated[
        str,
        typer.Option(
            "--model-path",
            metavar="FOLDER_OR_ID",
            help="Diffusers pipeline: a folder with model_index.json, or a Hugging Face Hub id.",
        ),
    ]
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            metavar="FOLDER",
            help="Folder for the search files; prompts that have theirs already are not repeated.",
        ),
    ]
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="What to generate; may be given repeatedly."),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Text file with one prompt per line."),
    ] = None
    negative_prompt: Annotated[
        str | None,
        typer.Option("--negative-prompt", metavar="TEXT", help="What to keep out. Default: none."),
    ] = None
    window: Annotated[
        list[str] | None,
        typer.Option(
            "--window",
            metavar="T,H,W",
            help="A window to try, in tiles along time, height and width; may be given "
            "repeatedly. Default: about five that suit the grid.",
        ),
    ] = None
    tile_size: Annotated[
        str,
        typer.Option("--tile-size", metavar="T,H,W", help="Tokens per tile along each axis."),
    ] = "6,8,8"
    height: Annotated[
        int | None,
        typer.Option(
            "--height", metavar="N", min=1, help="Height in pixels. Default: the pipeline's."
        ),
    ] = None
    width: Annotated[
        int | None,
        typer.Option(
            "--width", metavar="N", min=1, help="Width in pixels. Default: the pipeline's."
        ),
    ] = None
    num_frames: Annotated[
        int | None,
        typer.Option(
            "--num-frames", metavar="N", min=1, help="Frames of a video. Default: the pipeline's."
        ),
    ] = None
    num_inference_steps: Annotated[
        int | None,
        typer.Option(
            "--num-inference-steps",
            metavar="N",
            min=1,
            help="Denoising steps. Default: the pipeline's.",
        ),
    ] = None
    guidance_scale: Annotated[
        float | None,
        typer.Option(
            "--guidance-scale",
            metavar="X",
            min=0.0,
            help="Guidance, as in `sglang generate`. Default: the pipeline's.",
        ),
    ] = None
    true_cfg_scale: Annotated[
        float | None,
        typer.Option(
            "--true-cfg-scale",
            metavar="X",
            min=0.0,
            help="Classifier-free guidance of pipelines that have distilled guidance too.",
        ),
    ] = None
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="Seed of the noise.")
    ] = 0
    dtype: Annotated[
        DtypeChoice,
        typer.Option("--dtype", help="Dtype of the weights. auto: as in `sglang generate`."),
    ] = DtypeChoice.AUTO
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Torch device, e.g. cuda:1 or cpu. Default: this machine's accelerator.",
        ),
    ] = None
    offload: Annotated[
        OffloadChoice,
        typer.Option("--offload", help="Keep weights in CPU memory while they do not run."),
    ] = OffloadChoice.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What `sglang attention sta tune` takes."""

    searches: Annotated[
        Path,
        typer.Option(
            "--searches",
            metavar="FOLDER",
            help="Folder of the searches, or of those of the positive prompts.",
        ),
    ]
    output: Annotated[
        Path,
        typer.Option(
            "--output", metavar="FILE", help="Strategy file to write; an older one is replaced."
        ),
    ]
    negative: Annotated[
        Path | None,
        typer.Option(
            "--negative",
            metavar="FOLDER",
            help="Folder of the searches of the negative prompts, to tune on both. Default: the "
            "positive ones only.",
        ),
    ] = None
    target_density: Annotated[
        float | None,
        typer.Option(
            "--target-density",
            metavar="X",
            min=0.0,
            max=1.0,
            help="Largest share of tiles kept, over all steps, the dense ones too: windows with "
            "the least total loss. Default: the best window of each head.",
        ),
    ] = None
    skip_time_steps: Annotated[
        int,
        typer.Option(
            "--skip-time-steps", metavar="N", min=0, help="First denoising steps that stay dense."
        ),
    ] = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """What `sglang attention sta show` takes."""

    file: Annotated[Path, typer.Argument(metavar="FILE", help="Strategy file.")]
    tiles: Annotated[
        str | None,
        typer.Option(
            "--tiles",
            metavar="T,H,W",
            help="Grid of tiles the windows are for. Default: what the file tells.",
        ),
    ] = None
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", help="Also draw the windows into a PNG file."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
