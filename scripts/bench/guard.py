"""What an attention guard costs: steps of Wan2.1 14B at 720p with one and without, in turns.

Of its 40 layers there are 17, one of which a guard compares in a call. Random bf16 weights,
compiled blocks. A timing is of two denoiser calls at timesteps of their own, so that what is found
in the first is read before the second. A row tells one call, how many layers were compared in both,
and how many missed: those run otherwise in the second, which costs what the backend saves. No layer
misses the bound of sparse methods, which is given in one row and left out in another.

    python3 scripts/bench/run.py guard --commit HASH [--only sage] [--rounds 9] [--smoke]
"""

import argparse
from dataclasses import replace
from typing import Any

import torch
import wan_forward
from _harness import Bench, pattern, relative_error, time_calls, version_of

from multimodal_gen.runtime.attention_report import GuardReport
from multimodal_gen.runtime.generator.attention_guard import EVERY

BOUNDS = {"": None, "guard": {"quantized": 0.05}, "guard of both": {"sparse": 1e6}}
NAMES = {
    "sage_attn": ("sage_attn", "sage_attn, guard"),
    "video_sparse_attn": (
        "video_sparse_attn",
        "video_sparse_attn, guard",
        "video_sparse_attn, guard of both",
    ),
}
TIMESTEPS = (900, 700)
CASES = tuple(
    replace(case, name=f"{case.name}, {EVERY} of {case.layers} layers", layers=EVERY)
    for case in wan_forward.CASES[1:]
)
SMOKE = wan_forward.SMOKE


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--case", type=pattern, default="", help="run the cases that match")


def measure(case: wan_forward.Case, bench: Bench) -> None:
    """Check that a guard checks and changes little; time and write a model."""
    options = bench.options
    model, inputs = wan_forward.build(case)
    inductor = "eager" if options.smoke else "inductor"
    model.compile_repeated_blocks(fullgraph=True, backend=inductor)
    calls = [inputs | {"timestep": torch.full_like(inputs["timestep"], t)} for t in TIMESTEPS]
    guards: dict[str, GuardReport | None] = {}

    def run() -> torch.Tensor:
        return [model(**each, return_dict=False)[0] for each in calls][-1]

    def applied(name: str) -> Any:
        backend, _, guard = name.partition(", ")
        return wan_forward.applied(model, backend, attention_guard=BOUNDS[guard], strict=True)

    plain: dict[str, torch.Tensor] = {}

    def error_of(name: str, backend: str) -> float:
        with applied(name) as handle:
            out = run()
            guards[name] = handle.report().guard
        found = guards[name]
        if found is not None and not found.tested:
            raise RuntimeError("the guard must test calls, got none")
        return relative_error(out, plain.setdefault(backend, out))

    def columns(row: dict[str, Any]) -> dict[str, int]:
        found = guards[row["contender"]]
        return {
            "checked": 0 if found is None else found.calls,
            "missed": 0 if found is None else len(found.missed),
        }

    names = [(name, backend) for backend, guarded in NAMES.items() for name in guarded]
    both = [each for each in names if bench.wants(each[1])]
    with torch.inference_mode():
        right, errors = bench.check(both, error_of, 5e-2)
        times, _ = time_calls(dict.fromkeys(right, run), options.rounds, around=applied)
    bench.write(
        {name: [each / len(calls) for each in found] for name, found in times.items()},
        case,
        flop_formula="4*L*H*S*S*D, self-attention only, as if dense",
        errors=errors,
        versions=version_of("diffusers"),
        group=lambda name: right[name],
        more=columns,
    )
