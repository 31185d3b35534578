"""What a fresh container waits for: first calls of layers, and generations up to their first step.

Every run is a process of its own, whose Triton cache is a folder of its own. Contenders are:

- "empty cache", as in a fresh container, and "full cache", the same again, as ever after;
- of generations "compiled ahead", an empty cache and `--compile-ahead`, and "warm folder", an empty
  cache and `--compiled-kernels` with what "attention warm" wrote, which is a row of its own.

A layer's time is that of its first call, for shapes of Wan 1.3B at 480p. A generation's is that
from its start, with the weights loaded, to the end of its first step; the denoiser has Wan 1.3B's
true dimensions and random weights, text encoder and decoder are tiny. Methods are sparse from the
first step on.

    python3 scripts/bench/run.py cold_start --commit HASH [--case "layer|generation"] [--only vsa]
    python3 scripts/bench/run.py cold_start --commit HASH --smoke    # tiny, on any machine

Needs diffusers for generations.

Columns: `load_s`, loading before a generation; `waited_ms`, beyond "full cache".
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from _attention import Case, layer_on
from _harness import DEVICE, RUN, Bench, Row, pattern, ran, synchronize

from multimodal_gen.runtime.managers.forward_context import set_forward_context

# Backend -> parameters.
METHODS: dict[str, dict[str, object]] = {
    "triton_attn": {},
    "sage_attn": {"kernel": "triton"},
    "sliding_tile_attn": {"window": [3, 3, 3], "skip_time_steps": 0},
    "video_sparse_attn": {"sparsity": 0.9},
    "sla_attn": {},
    "sage_sla_attn": {},
    "vmoba_attn": {
        "temporal_chunk_size": 3,
        "spatial_chunk_size": [5, 13],
        "st_chunk_size": [7, 5, 13],
        "temporal_topk": 2,
        "spatial_topk": 6,
        "st_topk": 18,
        "first_full_step": 0,
    },
    "sparse_video_gen_2_attn": {"svg2_first_layers_fp": 0, "svg2_first_times_fp": 0},
    "sol_attn": {"dense_steps": None, "dense_layers": None},
}
EMPTY, FULL, AHEAD, WARM = "empty cache", "full cache", "compiled ahead", "warm folder"
MADE = "attention warm"
# Runs a command with the folder given first as Triton's cache.
WITH_CACHE = 'TRITON_CACHE_DIR="$0" exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is started: a layer, or a generation; of tiny size on any machine."""

    name: str
    tiny: bool = False

    @property
    def layer(self) -> Case:
        """The layer."""
        grid = (5, 8, 8) if self.tiny else (21, 30, 52)
        return Case(name=self.name, grid=grid, heads=2 if self.tiny else 12, head_size=128)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods; of tiny size one that any machine can run."""
        return ("video_sparse_attn",) if self.tiny else tuple(METHODS)

    @property
    def settings(self) -> dict[str, object]:
        """What is generated."""
        height, width, frames = (64, 96, 9) if self.tiny else (480, 832, 81)
        return {"height": height, "width": width, "num_frames": frames}


CASES = (Start(name="layer"), Start(name="generation"))
SMOKE = tuple(replace(case, tiny=True) for case in CASES)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--case", type=pattern, default="", help="layer, generation")
    parser.add_argument("--trial", help=argparse.SUPPRESS)  # a backend whose layer is called


def measure(case: Start, bench: Bench) -> None:
    """Measure a case with all methods, or be the process that calls a layer."""
    if bench.options.trial:
        if case.name == "layer":
            print(json.dumps(first_calls(case, bench.options.trial)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        if case.name == "generation":
            write_model(model, case)
        for method in METHODS:
            if bench.wants(method) and method in case.methods:
                runs = (
                    layers(case, method)
                    if case.name == "layer"
                    else generations(case, method, model, Path(folder, method))
                )
                write(case, method, runs, bench)


def write(case: Start, method: str, runs: Iterator[tuple[str, Row | None]], bench: Bench) -> None:
    """Write what a method's runs took; one that failed makes the benchmark fail."""
    done: dict[str, Row] = {}
    for name, run in runs:
        if run is None:
            bench.wrong.append(f"{method}: {name}")
        else:
            done[name] = run
    full = done.get(FULL, {"ms": math.nan})["ms"]

    def more(row: Row) -> Row:
        run = done[row["contender"]]
        waited = math.nan if row["contender"] == MADE else run["ms"] - full
        return {"load_s": run["load_s"], "waited_ms": round(waited, 1)}

    bench.write(
        {name: [run["ms"]] for name, run in done.items()},
        case=f"{case.name}, {method}",
        shape=case.layer.shape,
        flop=math.nan,
        flop_formula="time only",
        more=more,
    )


def layers(case: Start, method: str) -> Iterator[tuple[str, Row | None]]:
    """Yield the first calls of a layer with an empty cache, and with what that left."""
    words = [str(RUN), "cold_start", "--commit", "-", "--case", "layer", "--trial", method]
    words += ["--smoke"] if case.tiny else []
    with tempfile.TemporaryDirectory() as cache:
        for name in (EMPTY, FULL):
            said = said_by_python(words, Path(cache))
            ms = math.nan if said is None else json.loads(said.splitlines()[-1])
            yield name, None if said is None else {"ms": ms, "load_s": math.nan}


@torch.inference_mode()
def first_calls(case: Start, method: str) -> float:
    """Return the milliseconds of a layer's first call, once the device is there."""
    layer, qkv = layer_on(case.layer, method, METHODS[method]), case.layer.draw(torch.bfloat16)
    torch.matmul(*(torch.zeros(8, 8, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)))
    synchronize()
    start = time.perf_counter()
    branch = {"request_id": "bench", "cfg_branch": "cond"}
    with set_forward_context(1, latent_grid=case.layer.grid, num_steps=3, **branch):
        layer(*qkv)
    synchronize()
    return (time.perf_counter() - start) * 1e3


def generations(
    case: Start, method: str, model: Path, folder: Path
) -> Iterator[tuple[str, Row | None]]:
    """Yield the first steps of generations, and what it takes to compile a folder of kernels."""
    words = words_of(case, method, model)
    kernels = folder / "kernels"
    ways: dict[str, list[object]] = {
        EMPTY: [],
        FULL: [],
        AHEAD: ["--compile-ahead"],
        WARM: ["--compiled-kernels", kernels],
    }
    for name, more in ways.items():
        if DEVICE == "cpu" and more:
            continue
        if name == WARM:
            start = time.perf_counter()
            command = ["-m", "multimodal_gen", "attention", "warm", *words, "--output", kernels]
            said = said_by_python(command, folder / "cache of warm")
            seconds = time.perf_counter() - start
            yield MADE, None if said is None else {"ms": seconds * 1e3, "load_s": math.nan}
        video = folder / f"{name}.mp4"
        command = ["-m", "multimodal_gen", "generate", *words, *more, "--output-path", video]
        if said_by_python(command, folder / (EMPTY if name == FULL else name)) is None:
            yield name, None
            continue
        took = json.loads(video.with_suffix(".json").read_text())["timings_s"]
        until = took["prepare"] + took["steps"][0]
        yield name, {"ms": until * 1e3, "load_s": round(took["load"], 2)}


def words_of(case: Start, method: str, model: Path) -> list[str]:
    """Return the options of a generation, which `sglang attention warm` takes too."""
    settings: dict[str, object] = {
        "model-path": model,
        **{name.replace("_", "-"): value for name, value in case.settings.items()},
        "num-inference-steps": 2,
        "guidance-scale": 1,
        "prompt": "A red fox",
        "attention-backend": method,
    }
    if METHODS[method]:
        settings["attention-backend-config"] = json.dumps(METHODS[method])
    return [x for name, value in settings.items() for x in (f"--{name}", str(value))]


def write_model(folder: Path, case: Start) -> None:
    """Write a Wan pipeline, whose denoiser has true dimensions unless the case is tiny."""
    from multimodal_gen.testing.tiny_models import make_tiny_model

    make_tiny_model("wan", folder)
    if case.tiny:
        return
    from diffusers import WanTransformer3DModel
    from wan_forward import draw_weights

    tiny = WanTransformer3DModel.load_config(folder / "transformer")
    own = {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30}
    with torch.device(DEVICE):
        model = WanTransformer3DModel.from_config(tiny, ffn_dim=8960, freq_dim=256, **own)
    draw_weights(model)
    model.to(torch.bfloat16).save_pretrained(folder / "transformer")


def said_by_python(words: Sequence[object], cache: Path) -> str | None:
    """Return what Python printed, with a folder for Triton's cache; None where it failed."""
    command = ["sh", "-c", WITH_CACHE, str(cache), sys.executable, *map(str, words)]
    said, failure = ran(command, seconds=300)
    if failure is not None:
        print(f"FAILED: {(said + failure)[-600:].strip()}", flush=True)
    return said if failure is None else None
