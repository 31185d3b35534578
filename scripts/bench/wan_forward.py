"""One denoiser forward of Wan2.1-T2V with random bf16 weights: stock diffusers against `apply`.

    python3 scripts/bench/wan_forward.py --commit HASH [--only "14B 720p"]

Needs diffusers. Contenders take turns on one model, so the weights and the inputs are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from _harness import (
    event_ms,
    parse_arguments,
    relative_error,
    rows_of,
    shuffled_rounds,
    version_of,
    write_rows,
)
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import attention_backend

import multimodal_gen


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a latent: (frames, height, width) before patching."""

    name: str
    heads: int
    layers: int
    ffn: int
    latent: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        """Tokens after 1x2x2 patches."""
        frames, height, width = self.latent
        return frames * (height // 2) * (width // 2)

    @property
    def flop(self) -> float:
        """Operations of self-attention, the part that differs."""
        return 4.0 * self.layers * self.heads * self.tokens**2 * 128


CASES = (
    Case(name="wan 1.3B 480p 81f", heads=12, layers=30, ffn=8960, latent=(21, 60, 104)),
    Case(name="wan 14B 720p 81f", heads=40, layers=40, ffn=13824, latent=(21, 90, 160)),
)


def build(case: Case) -> tuple[WanTransformer3DModel, dict[str, torch.Tensor]]:
    """Return the model with random weights, and the arguments of one call."""
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=case.heads, num_layers=case.layers, ffn_dim=case.ffn
        )
    model = model.to(torch.bfloat16).to_empty(device="cuda").eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    # The rotary table is a buffer without a checkpoint entry; rebuild it from a real instance.
    fresh = WanTransformer3DModel(num_attention_heads=case.heads, num_layers=1, ffn_dim=8)
    model.rope = fresh.rope.to("cuda")
    frames, height, width = case.latent
    inputs = {
        "hidden_states": torch.randn(1, 16, frames, height, width).to("cuda", torch.bfloat16),
        "timestep": torch.tensor([500], device="cuda"),
        "encoder_hidden_states": torch.randn(1, 512, 4096).to("cuda", torch.bfloat16),
    }
    return model, inputs


@contextmanager
def stock(name: str) -> Iterator[None]:
    """Run diffusers' own attention."""
    with attention_backend(name):
        yield


def contenders(model: WanTransformer3DModel) -> dict[str, Callable[[], AbstractContextManager]]:
    """Return what to compare, each as a context in which the model runs."""
    return {
        "stock native": lambda: stock("native"),
        "stock _native_cudnn": lambda: stock("_native_cudnn"),
        "apply torch_sdpa": lambda: multimodal_gen.apply(model, attention_backend="torch_sdpa"),
        "apply auto": lambda: multimodal_gen.apply(model),
    }


def measure(
    case: Case,
    model: WanTransformer3DModel,
    inputs: dict[str, torch.Tensor],
    *,
    rounds: int,
    mode: str,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return times and errors of every contender."""
    contexts = contenders(model)
    outputs = {}
    for name, context in contexts.items():
        with torch.inference_mode(), context() as handle:
            outputs[name] = model(**inputs, return_dict=False)[0]
            if isinstance(handle, multimodal_gen.AttentionHandle):
                idle = [layer.name for layer in handle.report().layers if layer.calls != 1]
                if idle:
                    raise SystemExit(f"{case.name} {mode}: {name} did not run in {idle}")
    expected = outputs["stock native"]
    errors = {name: relative_error(out, expected) for name, out in outputs.items()}
    for name, error in errors.items():
        if not error < 5e-2:
            raise SystemExit(f"{case.name} {mode}: {name} is wrong, relative error {error:.2e}")
    times: dict[str, list[float]] = {name: [] for name in contexts}
    for name in shuffled_rounds(contexts, rounds):
        # The outputs above were the warm-up; attaching is outside the timed region.
        with torch.inference_mode(), contexts[name]():
            times[name].append(event_ms(lambda: model(**inputs, return_dict=False)))
    return times, errors


def main() -> None:
    """Check, then time, eager and regionally compiled; append to `wan_forward.csv`."""
    arguments = parse_arguments(__doc__ or "")
    for case in CASES:
        if arguments.only not in case.name:
            continue
        model, inputs = build(case)
        for mode in ("eager", "compiled"):
            if mode == "compiled":
                model.compile_repeated_blocks(fullgraph=True)
            times, errors = measure(case, model, inputs, rounds=arguments.rounds, mode=mode)
            rows = rows_of(
                times,
                commit=arguments.commit,
                benchmark="wan_forward",
                case=f"{case.name}, {mode}",
                shape=f"B1 H{case.heads} S{case.tokens} D128 L{case.layers} bf16",
                flop=case.flop,
                flop_formula="4*L*H*S*S*D, self-attention only",
                errors=errors,
                versions=dict.fromkeys(times, version_of("diffusers")),
            )
            write_rows(arguments.out / "wan_forward.csv", rows)
        del model


if __name__ == "__main__":
    main()
