#!/usr/bin/env python3
"""Write which kernels the first calls of each backend compile into docs/pages/guides/first-call.md.

    PYTHONPATH=. python scripts/kernel_list.py [--check] [--compile]

Needs triton, and no GPU: layers of Wan 1.3B at 480p (32,760 tokens, 12 heads of 128 channels,
bfloat16) are rehearsed for an H100 in three steps, in three layers one after another. A compilation
counts once, however often it is launched. `--compile` compiles them too, one after another, and
prints the seconds of each; it writes nothing. The table is of the newest triton that
scripts/triton.txt pins; tests/kernels/launch/test_compile.py checks it.
"""

import argparse
import importlib.metadata
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from multimodal_gen.kernels.launch.ahead import make
from multimodal_gen.kernels.launch.rehearsal import Noted, Rehearsal
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.layers.attention.scope import scope_from
from multimodal_gen.runtime.managers.forward_context import ForwardContext, use_forward_context
from tests.helpers.fakes import simulated_h100
from tests.kernels.compiling import StandInDriver, installed_release, pinned_release

PAGE = Path(__file__).resolve().parents[1] / "docs" / "pages" / "guides" / "first-call.md"
BLOCK = re.compile(r"<!-- kernels -->\n.*?<!-- kernels: end -->", re.DOTALL)
GRID, HEADS, CHANNELS = (21, 30, 52), 12, 128
STEPS = (20, 21, 22)
BACKENDS = {
    "triton_attn": "",
    "sage_attn": "",
    "sliding_tile_attn": "window=[3,3,3]",
    "video_sparse_attn": "sparsity=0.9",
    "sla_attn": "",
    "sage_sla_attn": "",
    "vmoba_attn": "configs/attention/vmoba_attn.yaml",
    "sparse_video_gen_2_attn": "",
    "sol_attn": "",
    "subblock_sparse_attn": "",
    "pisa_attn": "",
    "static_sparse_attn": "pattern=radial",
    "sparge_attn": "",
    "cube_sparse_attn": "",
    "nabla_attn": "",
    "draft_attn": "",
    "bsa_attn": "",
    "video_sparse_attn_h3": "",
    "skip_softmax": "threshold=0.001",
}
"""Backend -> its parameters."""


def kernels_of(backend: str, config: str) -> list[Noted]:
    """Return the launches of a backend's layers, one for each compilation."""
    scope = scope_from(attention_backend=backend, attention_backend_config=config or None)
    shape = (1, math.prod(GRID), HEADS, CHANNELS)
    with torch.inference_mode(), Rehearsal() as rehearsal:
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        for number in (5, 6, 7):
            site = LayerSite(name=f"blocks.{number}", component="t", layer=number, num_layers=30)
            layer = LocalAttention(
                HEADS, CHANNELS, compute_dtype=torch.bfloat16, scope=scope, site=site
            )
            for step in STEPS:
                context = ForwardContext(
                    current_timestep=step,
                    num_steps=50,
                    latent_grid=GRID,
                    request_id="r",
                    branch_key="cond",
                )
                with use_forward_context(context):
                    layer(q, k, v)
    return list(rehearsal.noted.values())


def row(backend: str) -> str:
    """Return a backend's line of the table."""
    counts = Counter(each.name for each in kernels_of(backend, BACKENDS[backend]))
    names = (f"`{name}`" + (f" x{n}" if n > 1 else "") for name, n in counts.items())
    return f"| `{backend}` | {counts.total()} | {', '.join(names)} |"


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    release = importlib.metadata.version("triton").rpartition(".")[0]
    yield f"<!-- kernels -->\n| backend (triton {release}, H100) | compilations | kernels |"
    yield "|---|---:|---|"
    yield from map(row, BACKENDS)
    yield "<!-- kernels: end -->"


def compile_all() -> None:
    """Compile each backend's kernels alone, from an empty cache, and print the seconds."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    assert StandInDriver().get_current_target() == GPUTarget("cuda", 90, 32)
    driver.set_active(StandInDriver())
    for backend, config in BACKENDS.items():
        with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            made = make(kernels_of(backend, config), workers=1)
        each = ", ".join(f"{one.name} {one.seconds:.2f}" for one in made)
        print(f"{backend}: {sum(one.seconds for one in made):.1f} s: {each}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (1: `--check` found differences)."""
    parser = argparse.ArgumentParser(description="List the kernels of first calls.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--compile", action="store_true", help="compile them, and print times")
    args = parser.parse_args(argv)
    newest, found = pinned_release("newest"), installed_release()
    if found is None or (found != newest and not args.compile):
        parser.error(f"the table is of triton {newest}, got {found or 'none'}; install that")
    with simulated_h100():
        if args.compile:
            compile_all()
            return 0
        text = PAGE.read_text()
        wanted = BLOCK.sub("\n".join(table()).replace("\\", r"\\"), text)
    if args.check and wanted != text:
        print(f"{PAGE.name} is out of date: run scripts/kernel_list.py", file=sys.stderr)
        return 1
    if not args.check:
        PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
