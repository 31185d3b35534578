"""One denoiser forward of Wan2.1-T2V with random bf16 weights: stock diffusers against `apply`.

    python3 scripts/bench/run.py wan_forward --commit HASH [--only "14B 720p"]
        [--contenders "stock native,apply auto,apply video_sparse_attn"] [--modes compiled]
    python3 scripts/bench/run.py wan_forward --commit HASH --against CHECKOUT    # see _against.py
    python3 scripts/bench/run.py wan_forward --commit HASH --smoke    # a tiny model, on any machine

Needs diffusers. Contenders take turns on one model, so the weights and the inputs are the same.
Dense outputs are checked against the first dense contender's. Sparse ones differ from them by
design: there it is checked that every self-attention ran sparse, at the density it should have.
"""

import argparse
import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from _harness import DEVICE, Bench, relative_error, time_calls, version_of
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import attention_backend

import multimodal_gen
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.sparse.windows import pair_density

SPARSE = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text("utf-8"))
TILE = (6, 8, 8)
MODES = ("eager", "compiled")

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
Context = Callable[[], AbstractContextManager]
Contexts = dict[str, Context]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a latent: (frames, height, width) before patching."""

    name: str
    heads: int
    layers: int
    ffn: int
    latent: tuple[int, int, int]

    @property
    def grid(self) -> tuple[int, int, int]:
        """The latent in patches of 1x2x2."""
        frames, height, width = self.latent
        return frames, height // 2, width // 2

    @property
    def tokens(self) -> int:
        """Tokens of the video."""
        return math.prod(self.grid)

    @property
    def shape(self) -> str:
        """What the results file calls it."""
        return f"B1 H{self.heads} S{self.tokens} D128 L{self.layers} bf16"

    @property
    def flop(self) -> float:
        """Operations of dense self-attention, the part that differs."""
        return 4.0 * self.layers * self.heads * self.tokens**2 * 128


CASES = (
    Case(name="wan 1.3B 480p 81f", heads=12, layers=30, ffn=8960, latent=(21, 60, 104)),
    Case(name="wan 14B 720p 81f", heads=40, layers=40, ffn=13824, latent=(21, 90, 160)),
)
SMOKE = (Case(name="smoke", heads=1, layers=2, ffn=64, latent=(7, 4, 52)),)


def draw_weights(model: torch.nn.Module) -> None:
    """Give a model random weights, in place."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


def twin_of(model: ModelT) -> ModelT:
    """Return another model with the same weights, in the same memory."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def build(case: Case) -> tuple[WanTransformer3DModel, dict[str, torch.Tensor]]:
    """Return the model with random weights, and the arguments of one call."""
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=case.heads, num_layers=case.layers, ffn_dim=case.ffn
        )
    model = model.to(torch.bfloat16).to_empty(device=DEVICE).eval()
    draw_weights(model)
    # The rotary table is a buffer without a checkpoint entry; rebuild it from a real instance.
    fresh = WanTransformer3DModel(num_attention_heads=case.heads, num_layers=1, ffn_dim=8)
    model.rope = fresh.rope.to(DEVICE)
    frames, height, width = case.latent
    inputs = {
        "hidden_states": torch.randn(1, 16, frames, height, width).to(DEVICE, torch.bfloat16),
        "timestep": torch.tensor([500], device=DEVICE),
        "encoder_hidden_states": torch.randn(1, 512, 4096).to(DEVICE, torch.bfloat16),
    }
    return model, inputs


def applied(
    model: torch.nn.Module, backend: str | None = None, **options: Any
) -> multimodal_gen.AttentionHandle:
    """Run a model on a backend with what `models.yaml` has for it, or on the automatic choice.

    Options are those of `multimodal_gen.apply`.
    """
    return multimodal_gen.apply(
        model,
        attention_backend=backend,
        attention_backend_config=SPARSE.get(backend, {}).get("config"),
        **options,
    )


def contenders(model: WanTransformer3DModel) -> Contexts:
    """Return what to compare, each as a context in which the model runs."""
    cudnn = (
        {}
        if DEVICE == "cpu"
        else {"stock _native_cudnn": partial(attention_backend, "_native_cudnn")}
    )
    return {
        "stock native": partial(attention_backend, "native"),
        **cudnn,
        "apply torch_sdpa": partial(applied, model, "torch_sdpa"),
        "apply auto": partial(applied, model),
        "apply sage_attn": partial(applied, model, "sage_attn"),
        **{f"apply {backend}": partial(applied, model, backend) for backend in SPARSE},
    }


def sparse_backend(contender: str) -> str | None:
    """Return the sparse backend of a contender, or None where it is dense."""
    name = contender.removeprefix("apply ").partition(",")[0]
    return name if name in SPARSE else None


def expected_density(case: Case, backend: str) -> tuple[float, float]:
    """Return bounds of the share of token pairs that a sparse backend should attend to."""
    if backend == "sliding_tile_attn":
        window = SPARSE[backend]["config"]["window"]
        density = pair_density(tuple(window), case.grid, TILE)
        return density - 1e-3, density + 1e-3
    # Few blocks round far.
    return (0.0, 1.01) if case.name == SMOKE[0].name else tuple(SPARSE[backend]["density"])


def check_report(
    case: Case,
    name: str,
    report: AttentionReport,
    *,
    calls: int | None = 1,
    mean: Callable[[list[float]], list[float]] = list,
    say: Callable[[str], None] = print,
) -> None:
    """Stop unless every layer ran, and every self-attention of a sparse contender sparse.

    Args:
        case: the model.
        name: the contender.
        report: what it says of itself.
        calls: how often every layer must have run, if that is known.
        mean: returns the means over the ranks: a rank's report speaks of its own heads.
        say: prints.
    """
    idle = [layer.name for layer in report.layers if layer.calls != (calls or layer.calls or 1)]
    if idle:
        raise SystemExit(f"{case.name}: {name} did not run in {idle}")
    backend = sparse_backend(name)
    if backend is None:
        return
    least, most = expected_density(case, backend)
    layers = [layer for layer in report.layers if layer.role is AttentionRole.SELF]
    if not layers:
        raise SystemExit(f"{case.name}: {name} has no self-attention")
    ran = [[e for e in (*x.entries, *x.detours) if e.calls] for x in layers]
    densities = mean([entries[0].density or 0.0 for entries in ran])
    for layer, entries, density in zip(layers, ran, densities, strict=True):
        found = [(str(entry.selection.backend), entry.density) for entry in entries]
        if not (least < density < most and all(b == backend for b, _ in found)):
            raise SystemExit(
                f"{case.name}: {name} must run {backend} at density {least:.3f} to {most:.3f} in "
                f"{layer.name}, ran {found}"
            )
    density = sum(densities) / len(layers)
    say(f"{case.name}: {name} at density {density:.4f} in {len(layers)} layers")


def check(
    case: Case, model: WanTransformer3DModel, inputs: dict[str, torch.Tensor], contexts: Contexts
) -> dict[str, float]:
    """Run every contender once and return the relative errors; NaN where there is no reference."""
    expected: torch.Tensor | None = None
    errors = {}
    for name, context in contexts.items():
        with torch.inference_mode(), context() as handle:
            out = model(**inputs, return_dict=False)[0]
            if isinstance(handle, multimodal_gen.AttentionHandle):
                check_report(case, name, handle.report())
        if not out.isfinite().all():
            raise SystemExit(f"{case.name}: {name} is not finite")
        if sparse_backend(name) is None and expected is None:
            expected = out
        errors[name] = math.nan if expected is None else relative_error(out, expected)
        if sparse_backend(name) is None and not errors[name] < 5e-2:
            raise SystemExit(f"{case.name}: {name} is wrong, relative error {errors[name]:.2e}")
    return errors


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--contenders", default="", help="names by commas; all by default")
    parser.add_argument("--modes", default=",".join(MODES), help="eager, compiled, or both")


def listed(text: str) -> list[str]:
    """Return the parts of a text between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def pick(contexts: Contexts, names: list[str]) -> Contexts:
    """Return the contenders asked for, or all; in their own order."""
    unknown = sorted(set(names) - contexts.keys())
    if unknown:
        raise SystemExit(f"--contenders must be among {', '.join(contexts)}, got {unknown}")
    return {name: context for name, context in contexts.items() if not names or name in names}


def measure(case: Case, bench: Bench) -> None:
    """Check, then time, eager and regionally compiled, and write a case."""
    options = bench.options
    modes = listed(options.modes)
    if not set(modes) <= set(MODES):
        raise argparse.ArgumentError(None, f"--modes must be among {', '.join(MODES)}, got {modes}")
    model, inputs = build(case)
    contexts = pick(contenders(model), listed(options.contenders))
    for mode in modes:
        if mode == "compiled":
            model.compile_repeated_blocks(
                fullgraph=True, backend="eager" if options.smoke else "inductor"
            )
        errors = check(case, model, inputs, contexts)
        with torch.inference_mode():
            times, _ = time_calls(
                dict.fromkeys(contexts, lambda: model(**inputs, return_dict=False)),
                options.rounds,
                around=lambda name: contexts[name](),
            )
        bench.write(
            times,
            case,
            case=f"{case.name}, {mode}",
            flop_formula="4*L*H*S*S*D, self-attention only, as if dense",
            errors=errors,
            versions=version_of("diffusers"),
        )
