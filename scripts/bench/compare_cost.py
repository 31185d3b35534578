"""What a comparison costs beside the runs it is made of, and what `--check-attention` costs.

    python3 scripts/bench/run.py compare_cost --commit HASH [--only wan] [--part checks]
        [--steps 20] [--seeds 2] [--keep FOLDER]

Models of full size with random weights, on tiny text encoders: Wan2.1 1.3B at 480p with 81 frames,
Flux at 1024 x 1024. Random weights prove the tool and not a method: whatever a method does to their
output says nothing about trained ones. Each row is a value with the limit that it is held against:

    memory     bytes at most over the whole comparison / a plain run's          at most 1.15
    time       seconds of the whole comparison / the sum of its runs            at most 1.10
    page       bytes of report.html                                             at most 20 MB
    check N    median step with N checked calls / without, in interleaved runs  at most 1.02

Needs diffusers, and the packages of the extra `compare`.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _harness import DEVICE, Bench, machine, version_of, write_table

import multimodal_gen
from multimodal_gen.runtime.comparison.record import Report
from multimodal_gen.runtime.generator.attention_check import AttentionCheck
from multimodal_gen.runtime.generator.denoise import Timings, denoise
from multimodal_gen.runtime.generator.sampling import Call
from multimodal_gen.runtime.layers.attention.call import watching
from multimodal_gen.testing.tiny_models import FAMILIES
from multimodal_gen.testing.tiny_models.family import initialise

CHECKED = (1, 4)
PARTS = ("both", "checks", "comparison")
ROUNDS = 3
# Random weights give flat scores: of SVG2 the least share decides, not the mass.
BACKENDS = (
    "sliding_tile_attn:window=[3,3,3],skip_time_steps=0",
    "video_sparse_attn:sparsity=0.9",
    "sla_attn:topk_ratio=0.1",
    "sage_sla_attn:topk_ratio=0.1",
    "sparse_video_gen_2_attn:svg2_top_p_kmeans=0,svg2_first_layers_fp=0,svg2_first_times_fp=0",
    "vmoba_attn:temporal_chunk_size=3,temporal_topk=2,spatial_chunk_size=[9,10],spatial_topk=10,"
    "st_chunk_size=[7,15,20],st_topk=9,moba_select_mode=topk,first_full_step=0",
    "sage_attn",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and the sizes it is compared at."""

    name: str
    family: str
    sizes: dict[str, int]
    smoke: bool = False


CASES = (
    Case(
        name="wan 1.3B 480p 81f",
        family="wan",
        sizes={"height": 480, "width": 832, "num_frames": 81},
    ),
    Case(name="flux 1024px", family="flux", sizes={"height": 1024, "width": 1024}),
)
SMOKE = (Case(name="smoke", family="flux", sizes={"height": 64, "width": 128}, smoke=True),)


def build(case: Case) -> Any:
    """Return the pipeline with a denoiser and an autoencoder of full size and random weights."""
    import diffusers

    tiny = FAMILIES[case.family].build(0)
    if case.smoke:
        return tiny.to(DEVICE)
    text = tiny.transformer.config
    torch.manual_seed(0)
    with torch.device(DEVICE):
        if case.family == "wan":
            model = diffusers.WanTransformer3DModel(
                num_attention_heads=12, num_layers=30, ffn_dim=8960, text_dim=text.text_dim
            )
            vae = diffusers.AutoencoderKLWan()
        else:
            model = diffusers.FluxTransformer2DModel(
                joint_attention_dim=text.joint_attention_dim,
                pooled_projection_dim=text.pooled_projection_dim,
                guidance_embeds=True,
            )
            vae = diffusers.AutoencoderKL(
                **{**tiny.vae.config, "block_out_channels": (128, 256, 512, 512),
                   "layers_per_block": 2, "norm_num_groups": 32}
            )  # fmt: skip
    parts = {"transformer": initialise(model), "vae": initialise(vae)}
    pipe = type(tiny)(**{**tiny.components, **parts})
    return pipe.to(DEVICE, torch.bfloat16)


def arguments(case: Case, steps: int) -> dict[str, Any]:
    """Return the arguments of one generation."""
    given = {**FAMILIES[case.family].generate_kwargs, **case.sizes}
    return {**given, "num_inference_steps": steps}


def run_plainly(
    pipe: Any, case: Case, steps: int, check: AttentionCheck | None = None
) -> tuple[list[float], int]:
    """Generate once on torch_sdpa; return the seconds of its steps, and the bytes at most."""
    timings = Timings(torch.device(DEVICE))
    given = {**arguments(case, steps), "output_type": "np"}
    call = Call(arguments={**given, "generator": torch.Generator().manual_seed(0)}, fps=16)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with multimodal_gen.apply(pipe, attention_backend="torch_sdpa"), watching(check):
        denoise(pipe, call, timings)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return timings.steps, peak


def rows_of(
    case: Case, steps: int, folder: Path, *, seeds: int, part: str
) -> Iterator[tuple[str, float, float, str]]:
    """Yield measure, value, limit and details of one case."""
    pipe = build(case)
    run_plainly(pipe, case, 2)  # warm-up
    if part != "comparison":
        yield from rows_of_checks(pipe, case, steps)
    if part != "checks":
        yield from rows_of_a_comparison(pipe, case, steps, folder, seeds=seeds)


def rows_of_checks(pipe: Any, case: Case, steps: int) -> Iterator[tuple[str, float, float, str]]:
    """Yield the rows of `--check-attention`."""
    for calls in CHECKED:
        plain, checked = [], []
        for _ in range(ROUNDS):
            plain += run_plainly(pipe, case, steps)[0]
            checked += run_plainly(pipe, case, steps, AttentionCheck(calls))[0]
        ratio = statistics.median(checked) / statistics.median(plain)
        yield f"check {calls}", ratio, 1.02, f"step {statistics.median(plain):.4f} s"


def rows_of_a_comparison(
    pipe: Any, case: Case, steps: int, folder: Path, *, seeds: int
) -> Iterator[tuple[str, float, float, str]]:
    """Yield the rows of a comparison of every backend."""
    _, peak = run_plainly(pipe, case, steps)
    given = arguments(case, steps)
    names = (*case.sizes, "num_inference_steps", "guidance_scale", "negative_prompt")
    report = multimodal_gen.compare(
        pipe,
        prompts=given["prompt"],
        backends=BACKENDS,
        output=folder,
        seeds=range(seeds),
        say=lambda line: print(line, flush=True),
        **{name: given[name] for name in names if name in given},
    )
    for run in report.runs:
        print(f"{run.name}: {run.status} {run.message} {run.verdict} {run.cost}")
    highest = report.peak_memory or 0
    details = f"{highest / 2**30:.2f} GiB, plain {peak / 2**30:.2f} GiB"
    yield "memory", highest / max(peak, 1), 1.15, details
    total = sum_of_runs(report)
    yield "time", report.seconds / total, 1.10, f"{report.seconds:.1f} s of {total:.1f} s"
    page = (folder / "report.html").stat().st_size
    yield "page", page, 20e6, f"{page / 1e6:.1f} MB"


def sum_of_runs(report: Report) -> float:
    """Return the seconds of all generations, with the first calls of their kernels."""
    runs = [run for run in report.runs if run.cost is not None]
    generations = sum(each.seconds for run in runs for each in run.generations)
    return generations + sum(run.cost.warm_up_seconds for run in runs if run.cost is not None)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--steps", type=int, default=20, help="denoising steps (20)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds, layers replayed for all (1)")
    parser.add_argument("--part", choices=PARTS, default="both", help="which rows (both)")
    parser.add_argument("--keep", type=Path, help="folder that keeps the comparisons")


def measure(case: Case, bench: Bench) -> None:
    """Measure a case, and append its rows to a CSV file."""
    options = bench.options
    folder = Path(options.mask or tempfile.mkdtemp()) / case.name.replace(" ", "-")
    rows = [
        {
            **machine(),
            "triton": version_of("triton"),
            "commit": options.commit,
            "benchmark": bench.name,
            "case": f"{case.name}, {options.steps} steps, {options.seeds} seeds",
            "measure": name,
            "value": round(value, 4),
            "limit": limit,
            "holds": value <= limit,
            "details": details,
        }
        for name, value, limit, details in rows_of(
            case, options.steps, folder, seeds=options.seeds, part=options.part
        )
    ]
    write_table(options.out / "compare_cost.csv", rows)
    for row in rows:
        print(*[*row.values()][6:], flush=True)
