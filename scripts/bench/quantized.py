"""8-bit attention: dense layers beside FlashAttention 3 and SageAttention, and SageSLA beside SLA.

Sampled rows of every output are checked against float32 first; what is wrong is not timed, and
makes the script fail at the end. Quantisation is part of what is timed.

    python3 scripts/bench/run.py quantized --commit HASH [--only "wan 14B"] [--rounds 7]
    python3 scripts/bench/run.py quantized --commit HASH --smoke    # tiny cases, on any machine
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from _attention import DTYPE, Case, attention_rows, fa3_run, layer_on
from _harness import DEVICE, Bench, Run, relative_error, version_of
from torch import nn

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.managers.forward_context import set_forward_context

SAMPLES = 64
# int8 scores err by about 1.5 % on independent normal values, e4m3 values and weights by 3.6 %;
# 16-bit kernels by 0.25 %.
EXACT, INT8, E4M3 = 4e-3, 3e-2, 5e-2


@dataclass(frozen=True, kw_only=True)
class QuantizedCase(Case):
    """One model's self-attention; with a ratio, Sparse-Linear Attention on it."""

    ratio: float | None = None


CASES = (
    QuantizedCase(name="hunyuan 117f 768x1280", grid=(30, 48, 80), heads=24),
    QuantizedCase(name="wan 14B 720p 81f", grid=(21, 45, 80), heads=40),
    QuantizedCase(name="wan 14B 480p 81f", grid=(21, 30, 52), heads=40),
    QuantizedCase(name="wan 1.3B 480p 81f", grid=(21, 30, 52), heads=12),
    QuantizedCase(name="sla bench", grid=(21, 30, 52), heads=16, batch=2, ratio=0.05),
    QuantizedCase(name="sla bench", grid=(21, 30, 52), heads=16, batch=2, ratio=0.1),
    QuantizedCase(name="sla bench", grid=(21, 30, 52), heads=16, batch=2, ratio=0.25),
    QuantizedCase(name="sla bench", grid=(21, 30, 52), heads=16, batch=2, ratio=0.5),
    QuantizedCase(name="wan 14B 720p 81f, sla", grid=(21, 45, 80), heads=40, ratio=0.5),
)
SMOKE = (
    QuantizedCase(name="smoke", grid=(3, 8, 16), heads=2),
    QuantizedCase(name="smoke sla", grid=(3, 8, 16), heads=2, ratio=0.5),
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is timed, and the relative error it may have."""

    run: Run
    version: str
    bound: float


def make_layer(case: QuantizedCase, backend: str, config: dict[str, object]) -> LocalAttention:
    """Return a layer on a backend, with a projection where it has a linear branch."""
    layer = layer_on(case, backend, config, dtype=DTYPE)
    if case.ratio is not None:
        size = case.head_size
        torch.manual_seed(1)
        layer.set_projection(nn.Linear(size, size, device=DEVICE).requires_grad_(False))
    return layer


def dense_contenders(
    case: QuantizedCase, qkv: tuple[torch.Tensor, ...]
) -> Iterator[tuple[str, Contender]]:
    """Yield dense kernels; what is not installed or not for this device is named and left out."""
    triton = version_of("triton")
    blocks = Blocks.regular(case.tokens, 128)
    plan = BlockPlan.dense(blocks, blocks, DEVICE)
    if DEVICE == "cuda":
        for run in fa3_run(qkv).values():
            yield "fa3", Contender(run=run, version=version_of("fa3-fwd"), bound=EXACT)
        for name, kernel, values, bound in (
            ("engine, e4m3 values", "gluon", "e4m3", E4M3),
            ("engine, portable", "triton", "16-bit", INT8),
        ):
            run = partial(quantized_attention, *qkv, plan, kernel=kernel, values=values)
            yield name, Contender(run=run, version=triton, bound=bound)
    else:
        run = partial(quantized_attention, *qkv, plan)
        yield "engine, reference", Contender(run=run, version=version_of("torch"), bound=INT8)
    for name, kernel in (("sage_attn layer", "triton"), ("sageattention", "sageattention")):
        try:
            layer = make_layer(case, "sage_attn", {"kernel": kernel})
        except UnsupportedBackendError as error:
            print(f"left out: {name}, {error}", flush=True)
            continue
        version = version_of("sageattention") if name == kernel else triton
        yield name, Contender(run=partial(layer, *qkv), version=version, bound=INT8)


def sparse_contenders(
    case: QuantizedCase, qkv: tuple[torch.Tensor, ...]
) -> Iterator[tuple[str, Contender]]:
    """Yield whole layers of Sparse-Linear Attention: in 16 bits, and in 8."""
    triton = version_of("triton")
    for backend in ("sla_attn", "sage_sla_attn"):
        layer = make_layer(case, backend, {"topk_ratio": case.ratio})
        yield f"{backend} layer", Contender(run=partial(layer, *qkv), version=triton, bound=INT8)


def measure(case: QuantizedCase, bench: Bench) -> None:
    """Check, time and write a case."""
    qkv = case.normal()
    rows = torch.linspace(0, case.tokens - 1, SAMPLES, device=DEVICE).long()
    dense = case.ratio is None
    expected = [attention_rows(qkv, rows)] if dense else []

    def error_of(name: str, contender: Contender) -> float:
        out = contender.run()[:, rows]
        # Sparse layers are held to the 16-bit layer, whose own benchmark checks its definition.
        expected.append(out)
        return relative_error(out, expected[0])

    make = dense_contenders if dense else sparse_contenders
    with torch.no_grad(), set_forward_context(0, latent_grid=case.grid):
        right, errors = bench.check(make(case, qkv), error_of, lambda c: c.bound)
        times = bench.time({name: contender.run for name, contender in right.items()})
    bench.write(
        times,
        case,
        shape=case.shape if dense else f"{case.shape} ratio {case.ratio}",
        flop=case.flop if dense else case.flop * case.ratio,
        flop_formula="4*B*H*S*S*D" if dense else "4*B*H*S*S*D*ratio",
        errors=errors,
        versions={name: contender.version for name, contender in right.items()},
    )
