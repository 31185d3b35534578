"""A denoiser step under `apply`, as it comes and replayed as a CUDA graph: time and host time.

Wan2.1 1.3B at 480p and Flux at 512 x 512 with random bf16 weights. A capture follows a call at the
same timestep; replays read new latents from the same memory. Outputs of replays are checked against
plain calls on the same latents first. `host_ms` is the time until a call returns. Rows that end in
`cuda_graph` are calls under `apply(..., cuda_graph=True)`, from the third on, timed after the rest.

    python3 scripts/bench/run.py graphs --commit HASH [--only flux] [--rounds 9] [--smoke]
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import wan_forward
from _harness import (
    DEVICE,
    Bench,
    Times,
    capture,
    event_ms,
    relative_error,
    shuffled_rounds,
    synchronize,
    version_of,
)

# This method refuses to be captured: it starts from the step before.
STATEFUL = "sparse_video_gen_2_attn"
SPARSE = tuple(name for name in wan_forward.SPARSE if name != STATEFUL)
DENSE = ("torch_sdpa", "auto", "sage_attn")
# The GPU's sums differ between runs where programs begin at other keys.
BOUND = 2e-2
Inputs = dict[str, Any]


def build_flux(*, smoke: bool) -> tuple[torch.nn.Module, Inputs]:
    """Return Flux with random weights, and the arguments of one call at 512 x 512."""
    sizes = {"num_layers": 1, "num_single_layers": 1} if smoke else {}
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(guidance_embeds=True, **sizes)
    model = model.to(torch.bfloat16).to_empty(device=DEVICE).eval()
    wan_forward.draw_weights(model)
    side = 4 if smoke else 32
    positions = torch.zeros(side, side, 3, device=DEVICE)
    positions[..., 1] = torch.arange(side, device=DEVICE)[:, None]
    positions[..., 2] = torch.arange(side, device=DEVICE)
    drawn = {"device": DEVICE, "dtype": torch.bfloat16}
    return model, {
        "hidden_states": torch.randn(1, side * side, 64, **drawn),
        "encoder_hidden_states": torch.randn(1, 512, 4096, **drawn),
        "pooled_projections": torch.randn(1, 768, **drawn),
        "timestep": torch.tensor([0.5], **drawn),
        "img_ids": positions.view(-1, 3),
        "txt_ids": torch.zeros(512, 3, device=DEVICE),
        "guidance": torch.full((1,), 3.5, device=DEVICE),
    }


def host_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds until a call returns, with nothing before it in the queue."""
    synchronize()
    start = time.perf_counter()
    run()
    elapsed = (time.perf_counter() - start) * 1e3
    synchronize()
    return elapsed


def captured(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """Return what replays a call, and its output; the call ran before."""
    if DEVICE == "cpu":  # to try the script
        out = run()
        return lambda: out.copy_(run()), out
    return capture(run)


def times_of(
    model: torch.nn.Module, inputs: Inputs, rounds: int
) -> tuple[Times, Times, dict[str, float]]:
    """Return times, host times and errors of every backend, plain and replayed."""
    times: Times = {}
    hosts: Times = {}
    errors: dict[str, float] = {}
    latents = inputs["hidden_states"]
    for backend in (*DENSE, *(SPARSE if latents.dim() == 5 else ())):

        def run() -> torch.Tensor:
            return model(**inputs, return_dict=False)[0]

        chosen = None if backend == "auto" else backend
        with torch.inference_mode(), wan_forward.applied(model, chosen):
            run()
            try:
                replay, out = captured(run)
            except Exception as error:  # the others are still worth measuring
                print(f"FAILED {backend}: {error}", flush=True)
                synchronize()
                continue
            latents.copy_(torch.randn_like(latents))
            replay()
            error = relative_error(out.clone(), run())
            print(f"{backend}: a replay differs from a call by {error:.2e}", flush=True)
            if not error < BOUND:
                continue
            both = {f"{backend}": run, f"{backend}, graph": replay}
            for name in both:
                times[name], hosts[name], errors[name] = [], [], error
            for name in shuffled_rounds(both, rounds):
                times[name].append(event_ms(both[name]))
                hosts[name].append(host_ms(both[name]))
            expected = run()
        with (
            torch.inference_mode(),
            wan_forward.applied(model, chosen, cuda_graph=DEVICE != "cpu") as handle,
        ):
            name, found = f"{backend}, cuda_graph", [run() for _ in range(3)]
            graphs = handle.report().graphs
            error = relative_error(found[-1], expected)
            print(f"{name}: differs from a call by {error:.2e}; {graphs}", flush=True)
            if not error < BOUND or (graphs and not graphs.denoisers[0].replays):
                continue
            errors[name] = error
            times[name] = [event_ms(run) for _ in range(rounds)]
            hosts[name] = [host_ms(run) for _ in range(rounds)]
    return times, hosts, errors


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the arguments of one call, which `build` makes."""

    name: str
    build: Callable[[], tuple[torch.nn.Module, Inputs]]


def cases_of(wan: wan_forward.Case, *, smoke: bool) -> tuple[Case, Case]:
    """Return both models."""
    return (
        Case(name=wan.name, build=lambda: wan_forward.build(wan)),
        Case(name="flux 512px", build=lambda: build_flux(smoke=smoke)),
    )


CASES = cases_of(wan_forward.CASES[0], smoke=False)
SMOKE = cases_of(wan_forward.SMOKE[0], smoke=True)


def measure(case: Case, bench: Bench) -> None:
    """Check, time and write a model."""
    model, inputs = case.build()
    times, hosts, errors = times_of(model, inputs, bench.options.rounds)
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
