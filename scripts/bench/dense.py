"""Dense attention at the shapes of video models: every kernel present, and what `auto` picks.

python3 scripts/bench/run.py dense --commit HASH
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _harness import (
    interleave,
    relative_error,
    rows_of,
    version_of,
    write_rows,
)

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.flash_attn import FlashAttnConfig
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    SelectionScope,
    Source,
    global_force_attn_backend_context_manager,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum

HEAD_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model's self-attention."""

    name: str
    batch: int = 1
    tokens: int
    heads: int

    @property
    def flop(self) -> float:
        """Operations of the two matrix products."""
        return 4.0 * self.batch * self.heads * self.tokens**2 * HEAD_SIZE


CASES = (
    Case(name="hunyuan 117f 768x1280", tokens=115_200, heads=24),
    Case(name="hunyuan 129f 720x1280", tokens=118_800, heads=24),
    Case(name="wan 14B 720p 81f", tokens=75_600, heads=40),
    Case(name="wan 14B 480p 81f", tokens=32_760, heads=40),
    Case(name="wan 1.3B 480p 81f", tokens=32_760, heads=12),
    Case(name="wan 69f 768x1280", tokens=69_120, heads=40),
    Case(name="stepvideo 204f", tokens=82_944, heads=48),
    Case(name="wan 14B 77f 768x1280", tokens=76_800, heads=40),
    Case(name="wan 1.3B 77f 448x832", tokens=29_120, heads=12),
    Case(name="wan 1.3B 61f 448x832", tokens=23_296, heads=12),
    Case(name="sla bench", batch=2, tokens=32_760, heads=16),
    Case(name="svg2 bench", tokens=74_256, heads=32),
    Case(name="flashinfer bench", tokens=109_632, heads=7),
    Case(name="vsa bench", tokens=49_152, heads=16),
)

# Which distribution a variant comes from; the others come with torch.
DISTRIBUTIONS = {
    "fa3": "flash_attn_3",
    "fa3_fwd": "fa3-fwd",
    "fa4": "flash-attn-4",
    "fa4_fwd": "flash-attn-4",
    "fa2": "flash-attn",
    "sage1": "sageattention",
    "sage2": "sageattention",
}
BACKENDS = ("torch_sdpa", "torch_cudnn_sdpa", "fa", "triton_attn", "sage_attn", "flex_attn")


def contenders_of(
    case: Case,
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, str], tuple[torch.Tensor, ...]]:
    """Return the layers to time, the variant each runs, and their inputs."""
    torch.manual_seed(0)
    shape = (case.batch, case.tokens, case.heads, HEAD_SIZE)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    layers = {"auto": LocalAttention(case.heads, HEAD_SIZE, compute_dtype=torch.bfloat16)}
    for name in BACKENDS:
        backend = AttentionBackendEnum.parse(name)
        try:
            with global_force_attn_backend_context_manager(backend):
                probe = LocalAttention(case.heads, HEAD_SIZE, compute_dtype=torch.bfloat16)
                label = probe.report().entries[-1].selection.label
                if probe.backend is backend:
                    layers[label] = _pinned(case.heads, backend)
        except UnsupportedBackendError as error:
            print(f"left out: {error}")
    layers |= _other_flash_versions(case.heads)
    runs = {name: lambda layer=layer: layer(q, k, v) for name, layer in layers.items()}
    variants = {n: layer.report().entries[-1].selection.variant for n, layer in layers.items()}
    return runs, variants, (q, k, v)


def _pinned(heads: int, backend: AttentionBackendEnum, config: object = None) -> LocalAttention:
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    return LocalAttention(
        heads, HEAD_SIZE, compute_dtype=torch.bfloat16, scope=SelectionScope(default=asked)
    )


def _other_flash_versions(heads: int) -> dict[str, LocalAttention]:
    found = {}
    for version in ("2", "3", "4"):
        layer = None
        try:
            layer = _pinned(heads, AttentionBackendEnum.FA, FlashAttnConfig(version=version))
        except UnsupportedBackendError:
            continue
        selection = layer.report().entries[-1].selection
        if selection.backend is AttentionBackendEnum.FA:
            found[selection.label] = layer
    return found


def reference_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Return fp32 attention of the sampled query rows: [B, len(rows), H, D]."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows].float(), k.float())
    weights = (scores * HEAD_SIZE**-0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.float())


def main(arguments: argparse.Namespace) -> None:
    """Check, then time, every case; append to `dense.csv`."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in CASES:
        if arguments.only not in case.name:
            continue
        runs, variants, (q, k, v) = contenders_of(case)
        rows = torch.randint(0, case.tokens, (64,), device="cuda")
        expected = reference_rows(q, k, v, rows)
        errors = {name: relative_error(run()[:, rows], expected) for name, run in runs.items()}
        for name, error in errors.items():
            # Weights and values of 4 significant bits err by 2.6 % each; more is a wrong kernel.
            bound = 5e-2 if "sage" in name else 4e-3
            if not error < bound:
                raise SystemExit(f"{case.name}: {name} is wrong, relative error {error:.2e}")
        times = interleave(runs, rounds=arguments.rounds)
        write_rows(
            arguments.out / "dense.csv",
            rows_of(
                times,
                commit=arguments.commit,
                benchmark="dense",
                case=case.name,
                shape=f"B{case.batch} H{case.heads} S{case.tokens} D{HEAD_SIZE} bf16",
                flop=case.flop,
                flop_formula="4*B*H*S*S*D",
                errors=errors,
                versions={
                    name: version_of(DISTRIBUTIONS.get(v, "torch")) for name, v in variants.items()
                },
            ),
        )
        del runs, q, k, v
