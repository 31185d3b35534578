"""Dense attention at the shapes of video models: every kernel present, and what `auto` picks.

python3 scripts/bench/run.py dense --commit HASH
"""

import torch
from _attention import Case, attention_rows, layer_on
from _harness import Bench, relative_error, version_of

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.flash_attn import FlashAttnConfig
from multimodal_gen.runtime.layers.attention.scope import global_force_attn_backend_context_manager
from multimodal_gen.runtime.platforms import AttentionBackendEnum

CASES = (
    Case(name="hunyuan 117f 768x1280", grid=(1, 1, 115_200), heads=24),
    Case(name="hunyuan 129f 720x1280", grid=(1, 1, 118_800), heads=24),
    Case(name="wan 14B 720p 81f", grid=(1, 1, 75_600), heads=40),
    Case(name="wan 14B 480p 81f", grid=(1, 1, 32_760), heads=40),
    Case(name="wan 1.3B 480p 81f", grid=(1, 1, 32_760), heads=12),
    Case(name="wan 69f 768x1280", grid=(1, 1, 69_120), heads=40),
    Case(name="stepvideo 204f", grid=(1, 1, 82_944), heads=48),
    Case(name="wan 14B 77f 768x1280", grid=(1, 1, 76_800), heads=40),
    Case(name="wan 1.3B 77f 448x832", grid=(1, 1, 29_120), heads=12),
    Case(name="wan 1.3B 61f 448x832", grid=(1, 1, 23_296), heads=12),
    Case(name="sla bench", batch=2, grid=(1, 1, 32_760), heads=16),
    Case(name="svg2 bench", grid=(1, 1, 74_256), heads=32),
    Case(name="flashinfer bench", grid=(1, 1, 109_632), heads=7),
    Case(name="vsa bench", grid=(1, 1, 49_152), heads=16),
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


def layers_of(case: Case) -> dict[str, LocalAttention]:
    """Return the layers to time, by the backend and variant that each runs."""
    layers = {"auto": layer_on(case, strict=False)}
    for name in BACKENDS:
        backend = AttentionBackendEnum.parse(name)
        try:
            with global_force_attn_backend_context_manager(backend):
                probe = layer_on(case, strict=False)
                label = probe.report().entries[-1].selection.label
                if probe.backend is backend:
                    layers[label] = layer_on(case, name, strict=False)
        except UnsupportedBackendError as error:
            print(f"left out: {error}")
    return layers | _other_flash_versions(case)


def _other_flash_versions(case: Case) -> dict[str, LocalAttention]:
    found = {}
    for version in ("2", "3", "4"):
        try:
            layer = layer_on(case, "fa", FlashAttnConfig(version=version), strict=False)
        except UnsupportedBackendError:
            continue
        selection = layer.report().entries[-1].selection
        if selection.backend is AttentionBackendEnum.FA:
            found[selection.label] = layer
    return found


def measure(case: Case, bench: Bench) -> None:
    """Check, time and write a case."""
    qkv, layers = case.normal(), layers_of(case)
    rows = torch.randint(0, case.tokens, (64,), device="cuda")
    expected = attention_rows(qkv, rows)
    runs = {name: lambda layer=layer: layer(*qkv) for name, layer in layers.items()}
    errors = {name: relative_error(run()[:, rows], expected) for name, run in runs.items()}
    for name, error in errors.items():
        # Weights and values of 4 significant bits err by 2.6 % each; more is a wrong kernel.
        bound = 5e-2 if "sage" in name else 4e-3
        if not error < bound:
            raise SystemExit(f"{case.name}: {name} is wrong, relative error {error:.2e}")
    variants = {n: layer.report().entries[-1].selection.variant for n, layer in layers.items()}
    bench.write(
        bench.time(runs),
        case,
        flop_formula="4*B*H*S*S*D",
        errors=errors,
        versions={name: version_of(DISTRIBUTIONS.get(v, "torch")) for name, v in variants.items()},
    )
