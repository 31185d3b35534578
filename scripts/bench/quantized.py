"""8-bit attention: dense layers beside FlashAttention 3 and SageAttention, and SageSLA beside SLA.

Sampled rows of every output are checked against float32 first; what is wrong is not timed, and
makes the script fail at the end. Quantisation is part of what is timed.

    python3 scripts/bench/run.py quantized --commit HASH [--only "wan 14B"] [--rounds 7]
    python3 scripts/bench/run.py quantized --commit HASH --smoke    # tiny cases, on any machine
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from _harness import (
    DEVICE,
    interleave,
    relative_error,
    rows_of,
    version_of,
    write_rows,
)
from torch import nn

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.sage_attn import SageAttnConfig
from multimodal_gen.runtime.layers.attention.config import BackendConfig
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sla import SageSLAConfig, SLAConfig
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

HEAD_SIZE = 128
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SAMPLES = 64
# int8 scores err by about 1.5 % on independent normal values, e4m3 values and weights by 3.6 %;
# 16-bit kernels by 0.25 %.
EXACT, INT8, E4M3 = 4e-3, 3e-2, 5e-2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model's self-attention; with a ratio, Sparse-Linear Attention on it."""

    name: str
    grid: tuple[int, int, int]
    heads: int
    batch: int = 1
    ratio: float | None = None

    @property
    def tokens(self) -> int:
        """S."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def shape(self) -> str:
        """What the results file calls it."""
        ratio = "" if self.ratio is None else f" ratio {self.ratio}"
        return f"B{self.batch} H{self.heads} S{self.tokens} D{HEAD_SIZE} bf16{ratio}"

    @property
    def flop(self) -> float:
        """Operations of the two products, on the kept pairs."""
        share = 1.0 if self.ratio is None else self.ratio
        return 4.0 * self.batch * self.heads * HEAD_SIZE * self.tokens**2 * share


CASES = (
    Case(name="hunyuan 117f 768x1280", grid=(30, 48, 80), heads=24),
    Case(name="wan 14B 720p 81f", grid=(21, 45, 80), heads=40),
    Case(name="wan 14B 480p 81f", grid=(21, 30, 52), heads=40),
    Case(name="wan 1.3B 480p 81f", grid=(21, 30, 52), heads=12),
    Case(name="sla bench", grid=(21, 30, 52), heads=16, batch=2, ratio=0.05),
    Case(name="sla bench", grid=(21, 30, 52), heads=16, batch=2, ratio=0.1),
    Case(name="sla bench", grid=(21, 30, 52), heads=16, batch=2, ratio=0.25),
    Case(name="sla bench", grid=(21, 30, 52), heads=16, batch=2, ratio=0.5),
    Case(name="wan 14B 720p 81f, sla", grid=(21, 45, 80), heads=40, ratio=0.5),
)
SMOKE = (
    Case(name="smoke", grid=(3, 8, 16), heads=2),
    Case(name="smoke sla", grid=(3, 8, 16), heads=2, ratio=0.5),
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is timed, and the relative error it may have; None where nothing is known exactly."""

    run: Callable[[], torch.Tensor]
    version: str
    bound: float | None


def make_layer(
    case: Case, backend: AttentionBackendEnum, config: BackendConfig
) -> Callable[..., torch.Tensor]:
    """Return a layer on a backend, with a projection where it has a linear branch."""
    layer = LocalAttention(
        case.heads,
        HEAD_SIZE,
        compute_dtype=DTYPE,
        site=LayerSite(name="blocks.0.attn1", layer=0),
        scope=SelectionScope(
            default=BackendPreference(source=Source.SETTINGS, backend=backend, config=config),
            strict=True,
        ),
    )
    if case.ratio is not None:
        torch.manual_seed(1)
        layer.set_projection(nn.Linear(HEAD_SIZE, HEAD_SIZE, device=DEVICE).requires_grad_(False))
    return layer


def dense_contenders(case: Case, qkv: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, Contender]]:
    """Yield dense kernels; what is not installed or not for this device is named and left out."""
    triton = version_of("triton")
    blocks = Blocks.regular(case.tokens, 128)
    plan = BlockPlan.dense(blocks, blocks, DEVICE)
    if DEVICE == "cuda":
        fa3 = importlib.import_module("fa3_fwd_interface").flash_attn_func
        run = partial(_first, fa3, *qkv)
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
        config = SageAttnConfig(kernel=kernel)
        try:
            layer = make_layer(case, AttentionBackendEnum.SAGE_ATTN, config)
        except UnsupportedBackendError as error:
            print(f"left out: {name}, {error}", flush=True)
            continue
        version = version_of("sageattention") if name == kernel else triton
        yield name, Contender(run=partial(layer, *qkv), version=version, bound=INT8)


def sparse_contenders(case: Case, qkv: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, Contender]]:
    """Yield whole layers of Sparse-Linear Attention: in 16 bits, and in 8."""
    assert case.ratio is not None
    triton = version_of("triton")
    for name, backend, config_cls in (
        ("sla_attn layer", AttentionBackendEnum.SLA_ATTN, SLAConfig),
        ("sage_sla_attn layer", AttentionBackendEnum.SAGE_SLA_ATTN, SageSLAConfig),
    ):
        layer = make_layer(case, backend, config_cls(topk_ratio=case.ratio))
        yield name, Contender(run=partial(layer, *qkv), version=triton, bound=INT8)


def _first(function: Callable[..., object], *args: torch.Tensor) -> torch.Tensor:
    result = function(*args)
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, torch.Tensor)
    return out


def exact_rows(qkv: tuple[torch.Tensor, ...], rows: torch.Tensor) -> torch.Tensor:
    """Return float32 attention of some query rows: [B, len(rows), H, D]."""
    q, k, v = qkv
    scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows].float(), k.float())
    weights = (scores * HEAD_SIZE**-0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.float())


def run_case(case: Case, commit: str, rounds: int) -> tuple[list[object], bool]:
    """Check and time one case; return its rows, and whether all were right."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (case.batch, case.tokens, case.heads, HEAD_SIZE)
    qkv = tuple(torch.randn(shape, device=DEVICE, generator=generator).to(DTYPE) for _ in range(3))
    make = dense_contenders if case.ratio is None else sparse_contenders
    rows = torch.linspace(0, case.tokens - 1, SAMPLES, device=DEVICE).long()
    right, errors, runs, versions = True, {}, {}, {}
    expected = exact_rows(qkv, rows) if case.ratio is None else None
    for name, contender in make(case, qkv):
        out = contender.run()[:, rows]
        # Sparse layers are held to the 16-bit layer, whose own benchmark checks its definition.
        expected = out if expected is None else expected
        errors[name] = relative_error(out, expected)
        if contender.bound is not None and not errors[name] < contender.bound:
            print(f"{case.name}: {name} is wrong, relative error {errors[name]:.2e}", flush=True)
            right = False
            continue
        runs[name], versions[name] = contender.run, contender.version
    formula = "4*B*H*S*S*D" if case.ratio is None else "4*B*H*S*S*D*ratio"
    times = interleave(runs, rounds=rounds)
    found = rows_of(
        times,
        commit=commit,
        benchmark="quantized",
        case=case.name,
        shape=case.shape,
        flop=case.flop,
        flop_formula=formula,
        errors=errors,
        versions=versions,
    )
    return list(found), right


def main(arguments: argparse.Namespace) -> None:
    """Check, then time, every case; append to `quantized.csv`."""
    torch.backends.cuda.matmul.allow_tf32 = False
    right = True
    for case in SMOKE if arguments.smoke else CASES:
        if arguments.only not in case.name:
            continue
        with torch.no_grad(), set_forward_context(0, latent_grid=case.grid):
            rows, fine = run_case(case, arguments.commit, arguments.rounds)
        right = right and fine
        if not arguments.smoke:
            write_rows(arguments.out / "quantized.csv", rows)
    if not right:
        sys.exit("a contender was wrong")
