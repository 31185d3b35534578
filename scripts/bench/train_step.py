"""One training step of Wan2.1-T2V with random bf16 weights: stock diffusers against `apply`.

Forward, backward with gradient checkpointing, and AdamW on all weights, at batch 1; time and peak
memory of a step. Contenders take turns on one model. Gradients of dense ones are checked against
the first one's; of the others, that they are finite, and that every self-attention ran sparse.
Their distance from the dense gradients is a column: with random weights it says how much attention
there is.

    python3 scripts/bench/run.py train_step --commit HASH [--only 1.3B] [--rounds 3]
        [--contenders "stock native,apply video_sparse_attn"]
    python3 scripts/bench/run.py train_step --commit HASH --smoke    # a tiny model, on any machine
"""

import argparse
import math
from functools import partial

import torch
from _harness import DEVICE, Bench, relative_error, time_calls, version_of
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import attention_backend
from wan_forward import CASES as CASES
from wan_forward import SMOKE as SMOKE
from wan_forward import (
    Case,
    Contexts,
    applied,
    build,
    check_report,
    listed,
    pick,
    sparse_backend,
)

import multimodal_gen

METHODS = ("sliding_tile_attn", "video_sparse_attn", "sla_attn")
# What is compared of the gradients.
WATCHED = ("blocks.0.attn1.to_q.weight", "blocks.1.attn1.to_k.weight", "blocks.1.ffn.net.2.weight")
FLOP = "18*L*H*S*S*D: self-attention forward twice and backward, as if dense"


def contenders(model: WanTransformer3DModel) -> Contexts:
    """Return what to compare, each as a context in which the model runs."""
    dense = {"apply auto": partial(applied, model)}
    if DEVICE == "cuda":
        dense["apply triton_attn"] = partial(applied, model, "triton_attn")
    return {
        "stock native": partial(attention_backend, "native"),
        **dense,
        **{f"apply {backend}": partial(applied, model, backend) for backend in METHODS},
    }


class Training:
    """A model, its optimizer and what it is trained on.

    Args:
        case: the model.
    """

    def __init__(self, case: Case) -> None:
        self.model, self.inputs = build(case)
        self.model.enable_gradient_checkpointing()
        self.target = torch.randn_like(self.inputs["hidden_states"])
        fused = DEVICE == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-7, fused=fused)

    def backward(self) -> None:
        """Compute gradients of the flow-matching loss."""
        out = self.model(**self.inputs, return_dict=False)[0]
        (out.float() - self.target.float()).square().mean().backward()

    def step(self) -> None:
        """Take a step."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> torch.Tensor:
        """Return gradients of some weights, and forget all."""
        self.backward()
        found = [self.model.get_parameter(name).grad.flatten().clone() for name in WATCHED]
        self.optimizer.zero_grad()
        return torch.cat(found)


def check(case: Case, training: Training, contexts: Contexts) -> dict[str, float]:
    """Return how far the gradients of every contender are from the first one's."""
    errors: dict[str, float] = {}
    first: torch.Tensor | None = None
    for name, context in contexts.items():
        with context() as handle:
            found = training.gradients()
            if isinstance(handle, multimodal_gen.AttentionHandle):
                # Checkpoints run layers again, in what they compute anew.
                check_report(case, name, handle.report(), calls=None)
        first = found if first is None else first
        errors[name] = relative_error(found, first)
        # Roundings to 16 bits add up over 30 layers and back.
        bound = math.inf if sparse_backend(name) else 0.15
        if not found.isfinite().all() or not errors[name] < bound:
            raise SystemExit(f"{name} is wrong, relative error {errors[name]:.2e}")
    return errors


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--contenders", default="", help="names by commas; all by default")


def measure(case: Case, bench: Bench) -> None:
    """Check, time and write a case."""
    training = Training(case)
    contexts = pick(contenders(training.model), listed(bench.options.contenders))
    errors = check(case, training, contexts)
    training.step()  # which makes the optimizer's state
    times, peaks = time_calls(
        dict.fromkeys(contexts, training.step),
        bench.options.rounds,
        around=lambda name: contexts[name](),
    )
    bench.write(
        times,
        case,
        flop=4.5 * case.flop,
        flop_formula=FLOP,
        errors=errors,
        versions=version_of("diffusers"),
        more=lambda row: {"peak_gib": round(peaks[row["contender"]], 2)},
    )
