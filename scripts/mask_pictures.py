"""Draw what each sparse method keeps, as the method itself decides it, for its documentation page.

    python scripts/mask_pictures.py [--check] [METHOD...]

A page says in a comment what is drawn, `<!-- mask NAME`, and the fields of `Picture` as YAML.
Each method runs as a layer on the CPU, over a small latent grid and inputs that vary over it as a
video's do. Every picture shows the attention matrix, rows of queries and columns of keys in raster
order, and what the queries at one place keep of every frame.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# A checkout works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import recorded_pairs
from multimodal_gen.runtime.managers.forward_context import set_forward_context

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = REPOSITORY / "docs" / "pages" / "methods"
PICTURES = PAGES / "masks"
KEPT, POOLED, QUERY, LINE, PAPER = "#3949ab", "#c5cae9", "#fb8c00", "#90a4ae", "#ffffff"
DESCRIBED = re.compile(r"<!-- mask (\w+)\n(.*?)-->", re.DOTALL)
WAVES = 12
MATRIX, FRAME, GAP = 320, 72, 14


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture.

    Attributes:
        method: the backend.
        grid: (T, H, W) of the video.
        config: parameters, so small that a small grid has several blocks.
        layer: index of the layer.
        query: (t, h, w) of the query whose keys are shown frame by frame.
        about: what is special, for the caption inside the picture.
        pooled: whether what is not kept counts by its means.
    """

    method: str
    grid: tuple[int, int, int]
    config: Mapping[str, object] = field(default_factory=dict)
    layer: int = 0
    query: tuple[int, int, int] = (3, 3, 3)
    about: str = ""
    pooled: bool = False


def pictures() -> Iterator[tuple[str, Picture]]:
    """Yield the pictures that the pages of methods describe, by their names."""
    for page in sorted(PAGES.glob("*.md")):
        for name, text in DESCRIBED.findall(page.read_text("utf-8")):
            yield name, Picture(method=page.stem, **yaml.safe_load(text))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (1: `--check` found differences)."""
    parser = argparse.ArgumentParser(description="Draw the masks of the sparse methods.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("names", nargs="*", metavar="METHOD", help="those alone")
    args = parser.parse_args(argv)
    PICTURES.mkdir(exist_ok=True)
    stale = []
    for name, picture in pictures():
        path = PICTURES / f"{name}.svg"
        if args.names and name not in args.names:
            continue
        text = drawn(picture, mask_of(picture))
        if args.check and (not path.exists() or path.read_text() != text):
            stale.append(path.name)
        elif not args.check:
            path.write_text(text)
    if stale:
        print(f"{', '.join(stale)}: run scripts/mask_pictures.py and commit them", file=sys.stderr)
    return bool(stale)


def mask_of(picture: Picture) -> torch.Tensor:
    """Return what a layer of the method attends to exactly: bool [S, S]."""
    scope = scope_from(
        attention_backend=picture.method,
        attention_backend_config={**picture.config, "dense_above": 1.0},
        strict=True,
    )
    site = LayerSite(name=f"blocks.{picture.layer}.attn1", layer=picture.layer, num_layers=3)
    layer = LocalAttention(1, 64, compute_dtype=torch.float32, site=site, scope=scope)
    call = {"latent_grid": picture.grid, "num_steps": 10, "request_id": picture.method}
    with recorded_pairs() as found, set_forward_context(0, **call), torch.no_grad():
        layer(*video(picture.grid, 64))
    (kept,) = found
    return kept.of_rows(torch.arange(math.prod(picture.grid)), slice(0, 1))[0, 0]


def video(grid: tuple[int, int, int], head_size: int) -> tuple[torch.Tensor, ...]:
    """Return q, k and v [1, S, 1, D] that are smooth over a grid: a few waves and some noise."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    places = torch.cartesian_prod(*(torch.linspace(0, 1, n, dtype=torch.float64) for n in grid))
    waves = (2 * math.pi * (places @ normal(3, WAVES) + normal(WAVES))).cos() / WAVES**0.5
    weights = normal(WAVES, head_size)
    parts = (waves @ weights + 0.4 * normal(len(places), head_size) for _ in range(3))
    return tuple(2 * part.float()[None, :, None] for part in parts)


def drawn(picture: Picture, kept: torch.Tensor) -> str:
    """Return the picture as SVG."""
    frames, height, width = picture.grid
    columns = min(frames, 4)
    cell = FRAME // max(height, width)
    right = columns * (width * cell + GAP)
    down = -(-frames // columns) * (height * cell + GAP + 12)
    size = (MATRIX + 60 + right, max(MATRIX + 60, down + 60))
    other = POOLED if picture.pooled else PAPER
    share = f"{kept.float().mean():.0%} of the pairs"
    t, h, w = picture.query
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'font-family="sans-serif" font-size="12" shape-rendering="crispEdges" role="img">',
        f"<title>{picture.method}: {picture.about}</title>",
        f'<rect width="{size[0]}" height="{size[1]}" rx="6" fill="#eceff1"/>',
        '<g transform="translate(24 34)">',
        f'<text y="-10">queries by keys: {share}</text>',
        f'<rect width="{MATRIX}" height="{MATRIX}" fill="{other}" stroke="{LINE}"/>',
        *matrix(kept),
        f'</g><g transform="translate({MATRIX + 48} 34)">',
        f'<text y="-10">kept by the query at frame {t}, row {h}, column {w}</text>',
        *frames_of(picture, kept, columns, cell, other),
        "</g>",
        f'<text x="24" y="{size[1] - 8}" fill="#37474f">{picture.about}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def matrix(kept: torch.Tensor) -> Iterator[str]:
    """Yield the kept pairs, each different row once and then wherever it stands."""
    scale = MATRIX / len(kept)
    rows, which = torch.unique_consecutive(kept, dim=0, return_inverse=True)
    patterns, number = torch.unique(rows, dim=0, return_inverse=True)
    heights = torch.bincount(which).tolist()
    yield f'<g transform="scale({scale:g})" stroke="{KEPT}"><defs>'
    for i, row in enumerate(patterns):
        yield f'<path id="r{i}" d="{runs(row)}"/>'
    yield "</defs>"
    top = 0
    for pattern, tall in zip(number.tolist(), heights, strict=True):
        at = f"translate(0 {top})" + (f"scale(1 {tall})" if tall > 1 else "")
        yield f'<use href="#r{pattern}" transform="{at}"/>'
        top += tall
    yield "</g>"


def runs(row: torch.Tensor) -> str:
    """Return a path of horizontal strokes, one for every run of kept keys."""
    edge = torch.diff(torch.nn.functional.pad(row.int(), (1, 1))).nonzero().flatten().tolist()
    path, at = "M0 .5", 0
    for start, stop in zip(edge[::2], edge[1::2], strict=True):
        path += f"m{start - at} 0h{stop - start}"
        at = stop
    return path


def frames_of(
    picture: Picture, kept: torch.Tensor, columns: int, cell: int, other: str
) -> Iterator[str]:
    """Yield every frame, with the keys that the query keeps in it."""
    frames, height, width = picture.grid
    t, h, w = picture.query
    seen = kept[(t * height + h) * width + w].view(frames, height, width)
    for frame in range(frames):
        x = (frame % columns) * (width * cell + GAP)
        y = (frame // columns) * (height * cell + GAP + 12) + 12
        yield f'<g transform="translate({x} {y})">'
        yield f'<text y="-3" font-size="9" fill="#37474f">frame {frame}</text>'
        yield f'<rect width="{width * cell}" height="{height * cell}" fill="{other}"/>'
        yield f'<g transform="scale({cell})" stroke="{KEPT}">'
        for row, keys in enumerate(seen[frame]):
            if keys.any():
                yield f'<path transform="translate(0 {row})" d="{runs(keys)}"/>'
        yield "</g>"
        if frame == t:
            where = f'x="{w * cell}" y="{h * cell}" width="{cell}" height="{cell}"'
            yield f'<rect {where} fill="{QUERY}"/>'
        yield (
            f'<rect width="{width * cell}" height="{height * cell}" fill="none" '
            f'stroke="{LINE}"/></g>'
        )


if __name__ == "__main__":
    sys.exit(main())
