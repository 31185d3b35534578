"""Attention and whole forwards over several GPUs, against one and against stock diffusers.

    python3 -m torch.distributed.run --nproc-per-node 4 scripts/bench/run.py parallel --commit HASH
        [--only forward] [--layers 8] [--modes eager,compiled] [--methods video_sparse_attn]

Cases, in this order: `exchange` and `layer ...` (one layer of Wan2.1-14B at 720p: bytes and time of
its exchanges, chunks of heads), `growth` (32K to 256K tokens), `forward dense` (stock and ours in
every layout) and `forward methods` (sparse methods under Ulysses). Every output is compared with
one GPU's before it is timed, and rows are written as each case ends. The forwards need diffusers.
"""

import argparse
import time
from pathlib import Path

import torch.distributed as dist
import yaml
from _harness import Bench, positive
from _parallel_layers import exchange_case, growth_case, layer_case
from _ranks import Ranks

_START = "python3 -m torch.distributed.run --nproc-per-node 2 scripts/bench/run.py"
_MODELS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text("utf-8"))
SPARSE_LAYERS = {
    name: _MODELS[name]["config"] for name in ("sliding_tile_attn", "video_sparse_attn")
}
# Tiles that a tiny video has several of.
SMOKE = {
    **SPARSE_LAYERS,
    "sliding_tile_attn": {"window": [1, 3, 1], "tile_size": [2, 2, 2], "skip_time_steps": 0},
}
# What overlaps depends on how a kernel shares the GPU: these run with `dense`, the choice.
DENSE_LAYERS = ("fa", "triton_attn")
CASES = (
    "exchange",
    *(f"layer {name}" for name in ("dense", *DENSE_LAYERS, *SPARSE_LAYERS)),
    "growth",
)
FORWARDS = ("forward dense", "forward methods")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.set_defaults(rounds=3)
    parser.add_argument(
        "--layer-rounds", type=positive, default=5, help="rounds of single layers (5)"
    )
    parser.add_argument("--frames", type=int, default=0, help="latent frames of single layers (21)")
    parser.add_argument("--layers", type=int, default=0, help="layers of the model (all)")
    parser.add_argument("--modes", default="eager", help="eager, compiled, or both by commas")
    parser.add_argument(
        "--methods", default=",".join(SPARSE_LAYERS), help="of `forward methods`, by commas"
    )
    parser.add_argument("--chunks", default="", help="further chunks of heads in forwards")
    parser.add_argument("--skip", default="", help='contenders to leave out, by ";"')


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def main(bench: Bench) -> int:
    """Run the cases asked for; append to `parallel.csv`."""
    options = bench.options
    options.modes = _listed(options.modes)
    options.methods = _listed(options.methods)
    options.skip = {name.strip() for name in options.skip.split(";")}
    options.chunks = tuple(int(n) for n in _listed(options.chunks))
    options.wants = lambda case: any(name in case for name in options.only.split(","))
    if not any(options.wants(case) for case in (*CASES, *FORWARDS)):
        known = ", ".join((*CASES, *FORWARDS))
        raise argparse.ArgumentError(None, f"--only must be part of one of {known}")
    if not (dist.is_torchelastic_launched() or dist.is_initialized()):
        raise argparse.ArgumentError(None, f"start it on several ranks: {_START} parallel ...")
    ranks = Ranks.join()
    begin = time.monotonic()
    sparse = SMOKE if options.smoke else SPARSE_LAYERS
    methods = {"dense": None, **dict.fromkeys(DENSE_LAYERS if not options.smoke else ()), **sparse}
    runs = {
        "exchange": lambda: exchange_case(ranks, bench),
        **{
            f"layer {name}": lambda name=name, config=config: layer_case(ranks, bench, name, config)
            for name, config in methods.items()
        },
        "growth": lambda: growth_case(ranks, bench),
    }
    for name, run in runs.items():
        if options.wants(name):
            run()
            ranks.say(f"-- {name} ended after {time.monotonic() - begin:.0f} s")
    if any(options.wants(name) for name in FORWARDS):
        # Only here: single layers need no diffusers.
        from _parallel_forward import forward_case

        forward_case(ranks, bench)
        ranks.say(f"-- forwards ended after {time.monotonic() - begin:.0f} s")
    dist.destroy_process_group()
    return 1 if ranks.failures else 0
