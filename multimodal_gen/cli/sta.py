"""`sglang attention sta`: search the windows of Sliding Tile Attention, tune and look at them."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multimodal_gen.cli.options import DtypeChoice, OffloadChoice, takes
from multimodal_gen.cli.table import Row, table
from multimodal_gen.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.sparse.sta.windows import Window
    from multimodal_gen.runtime.server_args import ServerArgs

__all__ = ["SearchOptions", "ShowOptions", "TuneOptions", "app", "search", "show", "tune"]


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


_BACKEND = "sliding_tile_attn"
_DEFAULT_SKIP = 15
_CELL = 7  # columns of a table's cell with the gap before it

app = typer.Typer(
    help="Find the windows of Sliding Tile Attention: search, tune, show.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
@takes(SearchOptions)
def search(options: SearchOptions) -> None:
    """Try windows on prompts, and write how far each takes every head from full attention.

    Generation goes on with full attention. Each prompt leaves a file per branch of guidance, when
    its last step is done. When an interrupted search is repeated, it goes on with the first prompt
    that has no file: a prompt that was interrupted starts anew.
    """
    from multimodal_gen.integrations.diffusers import apply
    from multimodal_gen.runtime.generator.window_search import WindowSearch
    from multimodal_gen.runtime.layers.attention.rules import (
        scope_from_args,
    )

    args = _search_args(options)
    scope = scope_from_args(args)
    windows = [_sizes("--window", text) for text in options.window or ()]
    work = WindowSearch(args, _prompts(options), options.output, windows)
    total = len(work.prompts)
    if work.done:
        typer.echo(f"{len(work.done)} of {total} prompts are done already")
    num_steps = work.num_steps
    found = work.run(lambda pipe: apply(pipe, scope=scope)) if work.pending else iter(())
    for number, item in enumerate(found, len(work.done) + 1):
        if number == len(work.done) + 1:
            tried = ", ".join(_by_axis(window) for window in item.windows)
            typer.echo(f"windows on {_by_axis(item.tiles)} tiles: {tried}")
        num_steps = item.num_steps
        typer.echo(f"[{number}/{total}] {item.seconds:.1f} s: {item.files[-1]}")
    typer.echo(
        f"searched {total} prompts; next: sglang attention sta tune --searches "
        f"{shlex.quote(str(options.output))} "
        f"--output mask_strategy.json{_skip(num_steps)}"
    )


@app.command()
@takes(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Choose a window for every head at every step from what searches found.

    Writes a strategy file for `--attention-backend sliding_tile_attn`.
    """
    from multimodal_gen.runtime.layers.attention.sparse.sta.search import NEGATIVE, find_searches
    from multimodal_gen.runtime.layers.attention.sparse.sta.tuning import tune_files
    from multimodal_gen.runtime.layers.attention.sparse.sta.windows import DEFAULT_TILE

    files = find_searches(options.searches)
    if options.negative is not None:
        files = (*files, *find_searches(options.negative, NEGATIVE))
    tuned = tune_files(
        files, skip_time_steps=options.skip_time_steps, target_density=options.target_density
    )
    tuned.strategy.write(options.output)
    strategy = tuned.strategy
    typer.echo(
        f"{options.output}: {strategy.num_steps} steps x {strategy.num_layers} layers x "
        f"{strategy.num_heads} heads, {_by_axis(tuned.tiles)} tiles, from {len(files)} searches"
    )
    typer.echo(f"density: {tuned.density:.1%}, the first {options.skip_time_steps} steps dense")
    within = "" if tuned.bound is None else ", the least at this density"
    if tuned.bound and tuned.loss > tuned.bound:
        within = f", at most {tuned.loss / tuned.bound - 1:.2g} of it above the least possible"
    typer.echo(f"loss: {tuned.loss:.6g} over all heads{within}")
    config = f"mask_strategy_file_path={options.output},skip_time_steps={options.skip_time_steps}"
    size = strategy.made_for.tile_size
    config += "" if size in (None, DEFAULT_TILE) else f",tile_size={list(size)}".replace(" ", "")
    typer.echo(
        f"next: sglang generate ... --attention-backend {_BACKEND} --attention-backend-config "
        f"{shlex.quote(config)}"
    )


@app.command()
@takes(ShowOptions)
def show(options: ShowOptions) -> None:
    """Show the density of a strategy file by step and layer, and draw its windows."""
    from multimodal_gen.runtime.layers.attention.sparse.sta.strategy import load_strategy
    from multimodal_gen.runtime.layers.attention.sparse.sta.windows import tile_density

    strategy = load_strategy(options.file)
    tiles = strategy.made_for.tiles or strategy.largest
    if options.tiles is not None:
        tiles = _sizes("--tiles", options.tiles)
    density = strategy.density(tiles)
    counts = strategy.counts().most_common()
    total = sum(count for _, count in counts)
    if options.png is not None:
        from multimodal_gen.cli.sta_picture import draw

        draw(strategy, tiles, options.png)
    if options.as_json:
        document = {
            "tiles": tiles,
            "steps": strategy.num_steps,
            "layers": strategy.num_layers,
            "heads": strategy.num_heads,
            "density": _mean([_mean(step) for step in density]),
            "density_by_step_and_layer": density,
            "windows": [
                {"window": w, "share": n / total, "density": tile_density(w, tiles)}
                for w, n in counts
            ],
        }
        typer.echo(json.dumps(document))
        return
    typer.echo(
        f"{strategy.num_steps} steps x {strategy.num_layers} layers x {strategy.num_heads} heads "
        f"on {_by_axis(tiles)} tiles, density {_mean([_mean(step) for step in density]):.1%}"
    )
    typer.echo("")
    rows = [
        Row((_by_axis(w), f"{n / total:.1%}", f"{tile_density(w, tiles):.1%}")) for w, n in counts
    ]
    _echo(table(("window", "heads", "density"), rows))
    typer.echo("")
    _echo(_density_table(density))
    if options.png is not None:
        typer.echo(f"\ndrawn: {options.png}")


def _search_args(options: SearchOptions) -> "ServerArgs":
    from multimodal_gen.runtime.server_args import ServerArgs

    return ServerArgs(
        model_path=options.model_path,
        prompt="",
        negative_prompt=options.negative_prompt,
        backend="sglang",
        attention_backend=_BACKEND,
        attention_backend_config={
            "sta_mode": "STA_searching",
            "search_path": str(options.output),
            "tile_size": list(_sizes("--tile-size", options.tile_size)),
        },
        height=options.height,
        width=options.width,
        num_frames=options.num_frames,
        num_inference_steps=options.num_inference_steps,
        guidance_scale=options.guidance_scale,
        true_cfg_scale=options.true_cfg_scale,
        seed=options.seed,
        dtype=options.dtype.value,
        device=options.device,
        offload=options.offload.value,
    )


def _skip(num_steps: int | None) -> str:
    """Return the option that keeps a fitting number of steps dense where the default does not."""
    if num_steps is None or num_steps > _DEFAULT_SKIP:
        return ""
    # As many as the default is of 50 steps, for which it was found.
    return f" --skip-time-steps {min(round(num_steps * _DEFAULT_SKIP / 50), num_steps - 1)}"


def _prompts(options: SearchOptions) -> list[str]:
    prompts = [*(options.prompt or ())]
    if options.prompts is not None:
        try:
            lines = options.prompts.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(
                f"--prompts must be a readable text file, got {str(options.prompts)!r}: {reason}"
            ) from None
        prompts += [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UsageError(
            "a search must have at least one prompt, got none; give --prompt or --prompts"
        )
    return prompts


def _sizes(flag: str, text: str) -> "Window":
    match = re.fullmatch(r"\s*\[?\s*(\d{1,6})\s*[,x]\s*(\d{1,6})\s*[,x]\s*(\d{1,6})\s*\]?\s*", text)
    sizes = [int(size) for size in match.groups()] if match else []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{flag} must be three integers >= 1 such as 3,3,3, got {text!r}")
    return (sizes[0], sizes[1], sizes[2])


def _density_table(density: Sequence[Sequence[float]]) -> Iterator[str]:
    """Yield a table of densities; equal steps share a row, layers a column where space is short."""
    width = max(80, shutil.get_terminal_size((100, 24)).columns)
    groups = list(_groups(len(density[0]), (width - 16) // _CELL))
    headings = ("steps", *(_range(*group) for group in groups), "mean")
    rows: list[tuple[int, int, list[str]]] = []
    for step, layers in enumerate(density):
        means = [_mean(layers[first : last + 1]) for first, last in groups]
        cells = [f"{value:.0%}" for value in (*means, _mean(layers))]
        if rows and rows[-1][2] == cells:
            rows[-1] = (rows[-1][0], step, cells)
        else:
            rows.append((step, step, cells))
    yield "density by step (rows) and layer (columns)"
    yield from table(headings, [Row((_range(a, b), *cells)) for a, b, cells in rows])


def _groups(count: int, columns: int) -> Iterator[tuple[int, int]]:
    size = -(-count // max(columns, 1))
    for first in range(0, count, size):
        yield first, min(first + size, count) - 1


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _by_axis(sizes: Any) -> str:
    return "x".join(map(str, sizes))


def _echo(lines: Iterator[str]) -> None:
    for line in lines:
        typer.echo(line)
