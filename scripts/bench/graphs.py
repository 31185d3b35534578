"""Steps of a denoiser under `apply`, as they come and with `cuda_graph=True`: time and host time.

Flux at 512 x 512 and 1024 x 1024, Wan2.1 1.3B at 480p, and a chunk of Helios, a 14B model that
streams, behind its history; with random weights. All contenders have the same weights and take
turns. Before, each makes the same calls while torch is deterministic: those that are replayed, from
the third on, must give what calls without a graph give, bit for bit. `host_ms` is the time until a
call returns; with a graph that is less than a millisecond, or the run fails.

    python3 scripts/bench/run.py graphs --commit HASH [--only flux] [--rounds 9]
    python3 scripts/bench/run.py graphs --commit HASH --smoke    # tiny models, on any machine

Needs diffusers and accelerate.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import wan_forward
from _harness import (
    DEVICE,
    Bench,
    Run,
    Times,
    event_ms,
    relative_error,
    shuffled_rounds,
    synchronize,
    version_of,
)
from generation import CASES as GENERATIONS
from generation import fill, make_empty

from multimodal_gen.integrations import cuda_graphs
from tests.helpers.recorded_graphs import CpuRecorder

# This method refuses to be captured: it starts from the step before.
STATEFUL = "sparse_video_gen_2_attn"
DENSE = ("torch_sdpa", "auto", "sage_attn")
WITH_SPARSE = (*DENSE, *(name for name in wan_forward.SPARSE if name != STATEFUL))
GRAPH = "cuda_graph"
CALLS = 4  # of which the first two of a kind are no replays
EQUAL = math.ulp(0.0)  # what an error is below where there is none
HOST_MS = 1.0
BFLOAT16: Any = {"device": DEVICE, "dtype": torch.bfloat16}
Inputs = dict[str, Any]


def filled(part: dict[str, Any]) -> torch.nn.Module:
    """Return a model with random weights, in the dtypes that a pipeline loads it in."""
    return fill(make_empty(part), torch.bfloat16, torch.device(DEVICE))


def build_flux(size: int, *, smoke: bool) -> tuple[torch.nn.Module, Inputs]:
    """Return Flux with random weights, and the arguments of one call at `size` x `size`."""
    case = next(each for each in GENERATIONS if each.name.startswith("flux"))
    part = (case.tiny if smoke else case).components["transformer"]
    side = size // 16
    positions = torch.zeros(side, side, 3, device=DEVICE)
    positions[..., 1] = torch.arange(side, device=DEVICE)[:, None]
    positions[..., 2] = torch.arange(side, device=DEVICE)
    return filled(part), {
        "hidden_states": torch.randn(1, side * side, 64, **BFLOAT16),
        "encoder_hidden_states": torch.randn(
            1, 512, part.get("joint_attention_dim", 4096), **BFLOAT16
        ),
        "pooled_projections": torch.randn(1, part.get("pooled_projection_dim", 768), **BFLOAT16),
        "timestep": torch.tensor([0.5], **BFLOAT16),
        "img_ids": positions.view(-1, 3),
        "txt_ids": torch.zeros(512, 3, device=DEVICE),
        "guidance": torch.full((1,), 3.5, device=DEVICE),
    }


def build_helios(*, smoke: bool) -> tuple[torch.nn.Module, Inputs]:
    """Return Helios with random weights, and the arguments of one call: 33 frames of 640 x 384.

    In front of the nine latent frames are the first one of the video, and 16, 2 and 1 before them.
    """
    sizes = {"num_attention_heads": 2, "num_layers": 2, "ffn_dim": 64} if smoke else {}
    height, width = (8, 8) if smoke else (48, 80)
    first, long, mid, short, chunk = torch.arange(29, device=DEVICE)[None].split(
        [1, 16, 2, 1, 9], 1
    )
    before = {"short": torch.cat((first, short), 1), "mid": mid, "long": long}

    def frames(count: int) -> torch.Tensor:
        return torch.randn(1, 16, count, height, width, **BFLOAT16)

    return filled({"class": "HeliosTransformer3DModel", **sizes}), {
        "hidden_states": frames(9),
        "timestep": torch.tensor([500], device=DEVICE),
        "encoder_hidden_states": torch.randn(1, 512, 4096, **BFLOAT16),
        "indices_hidden_states": chunk,
        **{f"indices_latents_history_{name}": x for name, x in before.items()},
        **{f"latents_history_{name}": frames(x.shape[1]) for name, x in before.items()},
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the arguments of one call, which `build` makes, and on what it runs."""

    name: str
    build: Callable[[], tuple[torch.nn.Module, Inputs]]
    backends: tuple[str, ...] = DENSE


CASES = (
    *(
        Case(name=f"flux {size}px", build=lambda size=size: build_flux(size, smoke=False))
        for size in (512, 1024)
    ),
    Case(
        name=wan_forward.CASES[0].name,
        build=lambda: wan_forward.build(wan_forward.CASES[0]),
        backends=WITH_SPARSE,
    ),
    Case(name="helios 384p 33f chunk", build=lambda: build_helios(smoke=False)),
)
SMOKE = (
    Case(name="smoke flux", build=lambda: build_flux(64, smoke=True), backends=("auto",)),
    Case(
        name="smoke wan",
        build=lambda: wan_forward.build(wan_forward.SMOKE[0]),
        backends=("auto", "video_sparse_attn"),
    ),
    Case(name="smoke helios chunk", build=lambda: build_helios(smoke=True), backends=("auto",)),
)


@contextmanager
def deterministic() -> Iterator[None]:
    """Let kernels sum in the same order in every run; some do not otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def host_ms(run: Run) -> float:
    """Return the milliseconds until a call returns, with nothing before it in the queue."""
    synchronize()
    start = time.perf_counter()
    run()
    elapsed = (time.perf_counter() - start) * 1e3
    synchronize()
    return elapsed


def slow_hosts(hosts: Times) -> list[str]:
    """Return who has graphs and takes the host longer all the same."""
    medians = {name: statistics.median(found) for name, found in hosts.items() if GRAPH in name}
    return [f"{name}: host {ms:.2f} ms" for name, ms in medians.items() if not ms < HOST_MS]


def measure(case: Case, bench: Bench) -> None:
    """Check, time and write a model."""
    model, inputs = case.build()
    latents = [torch.randn_like(inputs["hidden_states"]) for _ in range(CALLS)]
    expected: dict[str, list[torch.Tensor]] = {}

    def call(own: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return own(**{**inputs, "hidden_states": x}, return_dict=False)[0]

    def error_of(name: str, own: torch.nn.Module) -> float:
        backend, _, graph = name.partition(", ")
        chosen = None if backend == "auto" else backend
        handle = stack.enter_context(wan_forward.applied(own, chosen, cuda_graph=bool(graph)))
        with deterministic():
            made = [call(own, x) for x in latents]
        if not graph:
            expected[backend] = made
            return 0.0
        (found,) = handle.report().graphs.denoisers
        if found.replays != CALLS - 2:
            raise RuntimeError(f"{CALLS - 2} calls must be replayed, got {found}")
        return max(map(relative_error, made, expected[backend]))

    with torch.inference_mode(), ExitStack() as stack:
        if DEVICE == "cpu":
            stack.enter_context(mock.patch.object(cuda_graphs, "Recorder", CpuRecorder))
        names = [name for x in case.backends for name in (x, f"{x}, {GRAPH}")]
        twins = [(name, wan_forward.twin_of(model)) for name in names]
        right, errors = bench.check(twins, error_of, EQUAL)
        runs = {name: (lambda own=own: call(own, latents[0])) for name, own in right.items()}
        times: Times = {name: [] for name in runs}
        hosts: Times = {name: [] for name in runs}
        for run in runs.values():  # as they are timed, they are of another kind
            for _ in range(CALLS):
                run()
        for name in shuffled_rounds(runs, bench.options.rounds):
            times[name].append(event_ms(runs[name]))
            hosts[name].append(host_ms(runs[name]))
    bench.write(
        times,
        case,
        shape=f"{tuple(inputs['hidden_states'].shape)} bf16",
        flop=0.0,
        flop_formula="time only",
        errors=errors,
        versions=version_of("diffusers"),
        more=lambda row: {"host_ms": round(statistics.median(hosts[row["contender"]]), 4)},
    )
    if DEVICE != "cpu":
        bench.wrong += slow_hosts(hosts)
