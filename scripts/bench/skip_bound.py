"""Shares of skip-softmax's steps that a bound could leave out before their scores are computed.

A step is a tile of queries and a block of keys. The method leaves it out by its scores. A bound
that no score of it exceeds could do so ahead of the keys and their products with the queries:

- maxima: sum_c max(q_c max(k_c), q_c min(k_c)) of every query, by extremes of the keys' channels;
- maxima_of_both: the same by those of the queries, too, which is one number a step;
- centre: q . mean(k) + |q| max |k - mean(k)| of every query.

They are compared with the largest score that each row has seen, as the method's `known` is: that
"so far", or "of all" keys, which is more than a kernel can know. Attention is that of a pipeline of
`scripts/shapes`, for a clip that its training did not see, at two noise levels. Shares are of all
steps, over all heads and some of their tiles.

    python3 scripts/bench/run.py skip_bound --commit HASH [--model FOLDER --size large]

Shapes: S tokens, H heads, D head size, T tiles of R queries, N blocks of keys.
"""

import argparse
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _harness import Bench, machine, write_table

SHAPES = Path(__file__).resolve().parents[1] / "shapes"
TILES = ((128, 128), (128, 64), (64, 64))  # queries and keys
ROWS = 16  # tiles of queries of a head
NOISE = (0.9, 0.5)
SEED = 11  # of the clip; the study's
SETTINGS: tuple[dict[str, float], ...] = (
    {"threshold": 0.001},
    {"threshold": 0.01},
    {"threshold_scale_factor": 750.0},
    # target_sparsity 0.5 on the curve that the method's page has for an example
    {"threshold_scale_factor": 18239.0},
)


class Layer(NamedTuple):
    """Query and key, [S, H, D] each, of a layer at a noise level, and the factor of its scores."""

    noise: float
    number: int
    query: torch.Tensor
    key: torch.Tensor
    scale: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--model", type=Path, default=SHAPES / "small", help="its folder (small)")
    parser.add_argument("--size", default="small", help="of the model, as its training calls it")


def main(bench: Bench) -> None:
    """Write rows of every layer at every noise level."""
    options, limits = bench.options, dict[str, float]()
    for layer in layers_of(options.model, options.size):
        limits = limits or limits_of(layer.key.shape[0])
        rows = [
            {
                **machine(),
                "commit": options.commit,
                "model": f"shapes {options.size}",
                "noise": layer.noise,
                "layer": layer.number,
                "keys": layer.key.shape[0],
                "tile": "x".join(map(str, tile)),
                "threshold": threshold,
                "known": known,
                **{name: round(share, 5) for name, share in found.items()},
            }
            for tile in TILES
            for (threshold, known), found in shares_of(layer, tile, limits).items()
        ]
        write_table(options.out / f"{bench.name}.csv", rows)
        for row in rows:
            print(*[*row.values()][6:], flush=True)


def limits_of(keys: int) -> dict[str, float]:
    """Return, by its setting, how far below the largest score a step is left out, in nats."""
    from multimodal_gen.errors import UsageError
    from multimodal_gen.runtime.layers.attention.sparse.methods.skip_softmax import (
        SkipSoftmaxConfig,
    )

    found = {}
    for setting in SETTINGS:
        name = " ".join(f"{key}={value:g}" for key, value in setting.items())
        try:
            decibels = SkipSoftmaxConfig(**setting).decibels(keys)
        except UsageError as error:
            print(f"left out: {name}, {error}", flush=True)
            continue
        assert decibels is not None, "a setting is given"
        found[name] = decibels * math.log(10) / 10
    return found


def shares_of(
    layer: Layer, tile: tuple[int, int], limits: dict[str, float]
) -> dict[tuple[str, str], dict[str, float]]:
    """Return the shares of steps that the method and each bound leave out.

    Args:
        layer: what attends.
        tile: queries and keys of a step.
        limits: by the name of a threshold, see `limits_of`.

    Returns:
        By threshold and what is known, the share of "left_out" and of every bound.
    """
    left: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    (rows, size), (total, heads, _) = tile, layer.query.shape
    tiles = -(-total // rows)
    count = min(tiles, ROWS)
    starts = torch.tensor([min(rows * (i * tiles // count), total - rows) for i in range(count)])
    places = starts[:, None] + torch.arange(rows)
    for head in range(heads):
        query = layer.query[places, head].float() * layer.scale
        key = layer.key[:, head * layer.key.shape[1] // heads].float()
        # Its last token again where the last block is short: no extreme is another for it.
        key = torch.cat((key, key[-1:].expand(-len(key) % size, -1))).unflatten(0, (-1, size))
        best = (query @ key.flatten(0, 1).T).unflatten(2, (-1, size)).amax(3)
        before = best.cummax(2).values.roll(1, 2)
        before[..., 0] = -math.inf
        known = {"so far": before, "of all": best.amax(2, keepdim=True)}
        scores = {"left_out": best, **bounds_of(query, key)}
        for (threshold, limit), (when, seen) in itertools.product(limits.items(), known.items()):
            for name, most in scores.items():
                share = (most <= seen - limit).all(1).double().mean().item()
                left[threshold, when][name] += share / heads
    return left


def bounds_of(query: torch.Tensor, key: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what no score of a query exceeds in a block of keys, [T, R, N] or [T, 1, N].

    Args:
        query: [T, R, D].
        key: [N, keys of a block, D].
    """
    high, low, mean = key.amax(1), key.amin(1), key.mean(1)
    radius = (key - mean[:, None]).norm(dim=2).amax(1)
    ends = [(x[:, None], y) for x in (query.amax(1), query.amin(1)) for y in (high, low)]
    both = torch.stack([x * y for x, y in ends]).amax(0).sum(2)
    return {
        "maxima": query.clamp(min=0) @ high.T + query.clamp(max=0) @ low.T,
        "maxima_of_both": both[:, None],
        "centre": query @ mean.T + query.norm(dim=2, keepdim=True) * radius,
    }


@torch.no_grad()
def layers_of(folder: Path, name: str) -> Iterator[Layer]:
    """Yield every layer's self-attention at every noise level.

    Args:
        folder: of the pipeline.
        name: of its size.
    """
    # Behind the modules of this folder.
    sys.path.append(str(SHAPES))
    from diffusers import WanPipeline
    from models import SIZES, embedded
    from train import DEVICE, Pool

    import multimodal_gen
    from multimodal_gen.runtime.layers.attention.call import watching
    from multimodal_gen.runtime.layers.attention.request import AttentionRole

    pipe = WanPipeline.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    pool = Pool(pipe.vae, pipe.tokenizer, replace(SIZES[name].stages[-1], clips=1), SEED)
    prompt = embedded(pipe.text_encoder, pool.tokens[:1], pool.real[:1])
    clip = pool.latents.float()
    drawn = torch.randn(clip.shape, generator=torch.Generator().manual_seed(SEED)).to(DEVICE)
    found: list[Layer] = []

    def look(layer: Any, call: Any, serve: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        if layer.site.role is AttentionRole.SELF:
            pair, scale = (call.query[0], call.key[0]), layer.geometry.softmax_scale
            found.append(Layer(noise, layer.site.layer, *pair, scale))
        return serve(call)

    for noise in NOISE:
        with multimodal_gen.apply(pipe), watching(look):
            pipe.transformer(
                hidden_states=(1 - noise) * clip + noise * drawn,
                encoder_hidden_states=prompt,
                timestep=torch.tensor([1000 * noise], device=DEVICE),
            )
        yield from found
        found.clear()
