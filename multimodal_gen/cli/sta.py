"""`sglang attention sta`: search the windows of Sliding Tile Attention, tune and look at them."""

import json
import re
import shlex
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multimodal_gen.cli.options import App, AsJson, Settings, takes
from multimodal_gen.cli.prompts import OBSERVED, PromptFile, Prompts, read_prompts
from multimodal_gen.cli.table import Row, echo, table
from multimodal_gen.errors import ConfigError, short
from multimodal_gen.files import require_apart
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import Setting, by_axis

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.sparse.windows import Window

_BACKEND = "sliding_tile_attn"
_DEFAULT_SKIP = 15
_CELL = 7  # columns of a table's cell with the gap before it

app = App(help="Find the windows of Sliding Tile Attention: search, tune, show.")

_Folder = Annotated[
    Path,
    Setting(
        metavar="FOLDER",
        help="Folder for the search files; prompts that have theirs already are not repeated.",
    ),
]
_Windows = Annotated[
    list[str] | None,
    Setting(
        many=True,
        metavar="T,H,W",
        help="A window to try, in tiles along time, height and width; may be given repeatedly. "
        "Default: about five that suit the grid.",
    ),
]
_TileSize = Annotated[str, Setting(metavar="T,H,W", help="Tokens per tile along each axis.")]
_Searches = Annotated[
    Path,
    Setting(metavar="FOLDER", help="Folder of the searches, or of those of the positive prompts."),
]
_StrategyFile = Annotated[
    Path, Setting(metavar="FILE", help="Strategy file to write; an older one is replaced.")
]
_Negative = Annotated[
    Path | None,
    Setting(
        metavar="FOLDER",
        help="Folder of the searches of the negative prompts, to tune on both. Default: the "
        "positive ones only.",
    ),
]
_TargetDensity = Annotated[
    float | None,
    Setting(
        metavar="X",
        ge=0.0,
        le=1.0,
        help="Largest share of tiles kept, over all steps, the dense ones too: windows with the "
        "least total loss. Default: the best window of each head.",
    ),
]
_SkipTimeSteps = Annotated[
    int, Setting(metavar="N", ge=0, help="First denoising steps that stay dense.")
]
_Shown = Annotated[Path, typer.Argument(metavar="FILE", help="Strategy file.")]
_Tiles = Annotated[
    str | None,
    Setting(
        metavar="T,H,W", help="Grid of tiles the windows are for. Default: what the file tells."
    ),
]
_Png = Annotated[
    Path | None, Setting(metavar="FILE", help="Also draw the windows into a PNG file.")
]


@app.command()
@takes(*OBSERVED)
def search(
    output: _Folder,
    prompt: Prompts = None,
    prompts: PromptFile = None,
    window: _Windows = None,
    tile_size: _TileSize = "6,8,8",
    *,
    settings: Settings,
) -> None:
    """Try windows on prompts, and write how far each takes every head from full attention.

    Generation goes on with full attention. Each prompt leaves a file per branch of guidance, when
    its last step is done. When an interrupted search is repeated, it goes on with the first prompt
    that has no file: a prompt that was interrupted starts anew.
    """
    from multimodal_gen.integrations.diffusers import apply
    from multimodal_gen.runtime.generator.window_search import WindowSearch
    from multimodal_gen.runtime.layers.attention.scope import scope_from_args

    args = ServerArgs(
        **settings,
        prompt="",
        backend="sglang",
        attention_backend=_BACKEND,
        attention_backend_config={
            "sta_mode": "STA_searching",
            "search_path": str(output),
            "tile_size": list(_sizes("--tile-size", tile_size)),
        },
    )
    scope = scope_from_args(args)
    windows = [_sizes("--window", text) for text in window or ()]
    work = WindowSearch(args, read_prompts(prompt, prompts, "a search"), output, windows)
    total = len(work.prompts)
    if work.done:
        typer.echo(f"{len(work.done)} of {total} prompts are done already")
    num_steps = work.num_steps
    found = work.run(lambda pipe: apply(pipe, scope=scope)) if work.pending else iter(())
    for number, item in enumerate(found, len(work.done) + 1):
        if number == len(work.done) + 1:
            tried = ", ".join(map(by_axis, item.found.windows))
            typer.echo(f"windows on {by_axis(item.found.tiles)} tiles: {tried}")
        num_steps = item.found.l2.shape[1]
        typer.echo(f"[{number}/{total}] {item.seconds:.1f} s: {item.file}")
    typer.echo(
        f"searched {total} prompts; next: sglang attention sta tune --searches "
        f"{shlex.quote(str(output))} "
        f"--output mask_strategy.json{_skip(num_steps)}"
    )


@app.command()
@takes()
def tune(
    searches: _Searches,
    output: _StrategyFile,
    negative: _Negative = None,
    target_density: _TargetDensity = None,
    skip_time_steps: _SkipTimeSteps = _DEFAULT_SKIP,
) -> None:
    """Choose a window for every head at every step from what searches found.

    Writes a strategy file for `--attention-backend sliding_tile_attn`.
    """
    from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
        NEGATIVE,
        find_searches,
    )
    from multimodal_gen.runtime.layers.attention.sparse.methods.sta.tuning import tune_files
    from multimodal_gen.runtime.layers.attention.sparse.windows import DEFAULT_TILE

    files = find_searches(searches)
    if negative is not None:
        files = (*files, *find_searches(negative, NEGATIVE))
    _check_not_read(output, files)
    strategy, found = tune_files(
        files, skip_time_steps=skip_time_steps, target_density=target_density
    )
    strategy.write(output)
    typer.echo(
        f"{output}: {strategy.num_steps} steps x {strategy.num_layers} layers x "
        f"{strategy.num_heads} heads, {by_axis(strategy.grid)} tiles, from {len(files)} searches"
    )
    density = strategy.mean_density(strategy.grid)
    typer.echo(f"density: {density:.1%}, the first {skip_time_steps} steps dense")
    within = "" if target_density is None else ", the least at this density"
    if found.loss > found.bound > 0:
        within = f", at most {found.loss / found.bound - 1:.2g} of it above the least possible"
    typer.echo(f"loss: {found.loss:.6g} over all heads{within}")
    config = f"mask_strategy_file_path={output},skip_time_steps={skip_time_steps}"
    size = strategy.made_for.tile_size
    config += "" if size in (None, DEFAULT_TILE) else f",tile_size={list(size)}".replace(" ", "")
    typer.echo(
        f"next: sglang generate ... --attention-backend {_BACKEND} --attention-backend-config "
        f"{shlex.quote(config)}"
    )


@app.command()
@takes()
def show(file: _Shown, tiles: _Tiles = None, png: _Png = None, as_json: AsJson = False) -> None:
    """Show the density of a strategy file by step and layer, and draw its windows."""
    from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import load_strategy
    from multimodal_gen.runtime.layers.attention.sparse.windows import tile_density

    strategy = load_strategy(file)
    grid = strategy.grid if tiles is None else _sizes("--tiles", tiles)
    density, mean = strategy.density(grid), strategy.mean_density(grid)
    counts = strategy.counts().most_common()
    total = strategy.counts().total()
    if png is not None:
        from multimodal_gen.cli.sta_picture import draw

        draw(strategy, grid, png)
    if as_json:
        document = {
            "tiles": grid,
            "steps": strategy.num_steps,
            "layers": strategy.num_layers,
            "heads": strategy.num_heads,
            "density": mean,
            "density_by_step_and_layer": density,
            "windows": [
                {"window": w, "share": n / total, "density": tile_density(w, grid)}
                for w, n in counts
            ],
        }
        typer.echo(json.dumps(document))
        return
    typer.echo(
        f"{strategy.num_steps} steps x {strategy.num_layers} layers x {strategy.num_heads} heads "
        f"on {by_axis(grid)} tiles, density {mean:.1%}"
    )
    typer.echo("")
    rows = [
        Row((by_axis(w), f"{n / total:.1%}", f"{tile_density(w, grid):.1%}")) for w, n in counts
    ]
    echo(table(("window", "heads", "density"), rows))
    typer.echo("")
    echo(_density_table(density))
    if png is not None:
        typer.echo(f"\ndrawn: {png}")


def _check_not_read(output: Path, files: Sequence[Path]) -> None:
    """Refuse a strategy file that is a search, or the record of another strategy."""
    from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import SEARCH_STEM
    from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import record_path

    ending = record_path(Path()).name  # of a strategy without a name

    def is_one(path: Path) -> bool:
        if path.name.endswith(ending):
            return True
        return path.exists() and (
            path.name.startswith(SEARCH_STEM) or any(map(path.samefile, files))
        )

    what = "a search or the record of a strategy"
    require_apart(output, "--output", what, is_one, "mask_strategy.json")


def _skip(num_steps: int | None) -> str:
    """Return the option that keeps a fitting number of steps dense where the default does not."""
    if num_steps is None or num_steps > _DEFAULT_SKIP:
        return ""
    # As many as the default is of 50 steps, for which it was found.
    return f" --skip-time-steps {min(round(num_steps * _DEFAULT_SKIP / 50), num_steps - 1)}"


def _sizes(flag: str, text: str) -> "Window":
    match = re.fullmatch(r"\s*\[?\s*(\d{1,6})\s*[,x]\s*(\d{1,6})\s*[,x]\s*(\d{1,6})\s*\]?\s*", text)
    sizes = [int(size) for size in match.groups()] if match else []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{flag} must be three integers >= 1 such as 3,3,3, got {short(text)}")
    return (sizes[0], sizes[1], sizes[2])


def _density_table(density: Sequence[Sequence[float]]) -> Iterator[str]:
    """Yield a table of densities; equal steps share a row, layers a column where space is short."""
    width = max(80, shutil.get_terminal_size((100, 24)).columns)
    groups = list(_groups(len(density[0]), (width - 16) // _CELL))
    headings = ("steps", *(_range(*group) for group in groups), "mean")
    rows: list[tuple[int, int, list[str]]] = []
    for step, layers in enumerate(density):
        means = [statistics.fmean(layers[first : last + 1]) for first, last in groups]
        cells = [f"{value:.0%}" for value in (*means, statistics.fmean(layers))]
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
