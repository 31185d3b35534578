"""Runs tiny models of a real ComfyUI through the node: run by the Python that runs ComfyUI.

    python real_models.py CHECKOUT

prints one JSON object: what was found, by model. Weights and inputs are random, on the CPU.
"""

import json
import sys
from types import SimpleNamespace

import torch

sys.path.insert(0, sys.argv[1])
from comfy.cli_args import args

args.cpu = True
import comfy.ops  # noqa: E402
from comfy.ldm.flux.model import Flux  # noqa: E402
from comfy.ldm.hunyuan_video.model import HunyuanVideo  # noqa: E402
from comfy.ldm.lightricks.av_model import LTXAVModel  # noqa: E402
from comfy.ldm.lightricks.model import LTXVModel  # noqa: E402
from comfy.ldm.minimax.model import MiniMaxH3Model  # noqa: E402
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel  # noqa: E402
from comfy.ldm.wan.model import VaceWanModel, WanModel  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from comfy.model_sampling import CONST, ModelSamplingDiscreteFlow  # noqa: E402
from comfy.patcher_extension import WrapperExecutor, get_all_wrappers  # noqa: E402

from multimodal_gen.integrations.comfyui.takeover import KEY, Settings, take_over  # noqa: E402
from multimodal_gen.runtime.layers.attention.call import watching  # noqa: E402
from multimodal_gen.runtime.managers.forward_context import (  # noqa: E402
    current_forward_context,
)

COMMON = {"operations": comfy.ops.disable_weight_init, "device": "cpu", "dtype": torch.float32}
FLUX = {
    "in_channels": 4,
    "out_channels": 4,
    "vec_in_dim": 8,
    "context_in_dim": 16,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "theta": 10000,
    "qkv_bias": True,
    "guidance_embed": False,
}
TILES = "tile_size=[1,2,2],dense_above=1.0,skip_time_steps=0"
VIDEO = (1, 4, 3, 8, 12)


def noise(*shape):
    return torch.randn(shape)


def wan(cls=WanModel, **given):
    return cls(
        in_dim=4,
        out_dim=4,
        dim=64,
        ffn_dim=32,
        text_dim=16,
        num_heads=2,
        num_layers=2,
        freq_dim=16,
        **COMMON,
        **given,
    )


def hunyuan():
    return HunyuanVideo(
        **FLUX,
        axes_dim=[8, 12, 12],
        patch_size=[1, 2, 2],
        byt5=False,
        meanflow=False,
        use_cond_type_embedding=False,
        vision_in_dim=None,
        meanflow_sum=False,
        **COMMON,
    )


def ltx_video():
    return LTXVModel(
        in_channels=4,
        cross_attention_dim=64,
        attention_head_dim=32,
        num_attention_heads=2,
        caption_channels=16,
        num_layers=2,
        **COMMON,
    )


def ltx2():
    return LTXAVModel(
        in_channels=4,
        audio_in_channels=128,
        cross_attention_dim=64,
        audio_cross_attention_dim=64,
        attention_head_dim=32,
        audio_attention_head_dim=32,
        num_attention_heads=2,
        audio_num_attention_heads=2,
        caption_channels=16,
        num_layers=2,
        **COMMON,
    )


def qwen_image():
    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 12, 12),
        **COMMON,
    )


def minimax_h3():
    return MiniMaxH3Model(
        hidden_size=64,
        num_layers=2,
        token_refiner_num_layers=1,
        num_attention_heads=2,
        attention_head_dim=32,
        ffn_hidden_size=32,
        latents_dim=4,
        audio_latents_dim=8,
        text_dim=16,
        timestep_input_dim=16,
        time_embed_hidden_size=32,
        time_embed_dim=32,
        rope_inv_freq_len=4,
        **COMMON,
    )


# By name: how to make the model, its latents, further arguments, the patch of a token, and what is
# known of its rows: (T, H, W), rows in front.
MODELS = {
    "wan": (wan, [noise(*VIDEO)], {"context": noise(1, 5, 16)}, (1, 2, 2), (3, 4, 6), 0),
    "wan with a reference": (
        lambda: wan(in_dim_ref_conv=4),
        [noise(*VIDEO)],
        {"context": noise(1, 5, 16), "reference_latent": noise(1, 4, 8, 12)},
        (1, 2, 2),
        (3, 4, 6),
        24,
    ),
    "wan vace": (
        lambda: wan(VaceWanModel, vace_layers=1, vace_in_dim=4),
        [noise(*VIDEO)],
        {
            "context": noise(1, 5, 16),
            "vace_context": noise(1, 1, 4, 3, 8, 12),
            "vace_strength": [1.0],
        },
        (1, 2, 2),
        (3, 4, 6),
        0,
    ),
    "hunyuan video": (
        hunyuan,
        [noise(*VIDEO)],
        {
            "context": noise(1, 7, 16),
            "y": noise(1, 8),
            "attention_mask": torch.tensor([[1] * 5 + [0] * 2]),
        },
        (1, 2, 2),
        (3, 4, 6),
        7,
    ),
    "ltx video": (
        ltx_video,
        [noise(1, 4, 3, 4, 6)],
        {"context": noise(1, 5, 16), "attention_mask": None},
        (1, 1, 1),
        (3, 4, 6),
        0,
    ),
    "ltx 2": (
        ltx2,
        [noise(1, 4, 3, 4, 6), noise(1, 8, 5, 16)],
        {"context": noise(1, 5, 32), "attention_mask": None},
        (1, 1, 1),
        (3, 4, 6),
        0,
    ),
    "flux": (
        lambda: Flux(**FLUX, axes_dim=[8, 12, 12], patch_size=2, txt_ids_dims=[], **COMMON),
        [noise(1, 4, 16, 12)],
        {"context": noise(1, 5, 16), "y": noise(1, 8), "ref_latents": [noise(1, 4, 6, 8)]},
        (2, 2),
        (1, 8, 6),
        5,
    ),
    "qwen image": (
        qwen_image,
        [noise(1, 4, 1, 16, 12)],
        {"context": noise(1, 5, 16), "ref_latents": [noise(1, 4, 1, 6, 8)]},
        (1, 2, 2),
        (1, 8, 6),
        5,
    ),
    "minimax h3": (
        minimax_h3,
        [noise(*VIDEO), noise(1, 8, 2, 5)],
        {"context": noise(1, 5, 16)},
        (1, 2, 2),
        (3, 4, 6),
        15,
    ),
}


def patcher(model):
    torch.manual_seed(0)
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        x.data.copy_(0.3 * torch.randn_like(x) if "norm" not in name else torch.ones_like(x))
    outer = torch.nn.Module()
    outer.diffusion_model = model.requires_grad_(False)
    sampling = type("Sampling", (ModelSamplingDiscreteFlow, CONST), {})
    outer.model_sampling = sampling()
    return ModelPatcher(outer, torch.device("cpu"), torch.device("cpu"))


def sample(patched, x, arguments, *, sigmas=(1.0, 0.75, 0.25, 0.0)):
    """Call the denoiser once per step, as samplers do, and return the outputs."""
    options = {**patched.model_options.get("transformer_options", {})}
    options["wrappers"] = patched.wrappers
    levels = torch.tensor(sigmas)
    model, outputs = patched.model.diffusion_model, []

    def run():
        for sigma in levels[:-1]:
            now = {**options, "sigmas": sigma[None], "sample_sigmas": levels, "cond_or_uncond": [0]}
            given = [part.clone() for part in x]
            given = given if len(given) > 1 else given[0]
            out = model(given, 1000 * sigma[None], transformer_options=now, **arguments)
            outputs.extend(out if isinstance(out, (list, tuple)) else [out])

    wrappers = get_all_wrappers("outer_sample", {"wrappers": patched.wrappers})
    guider = SimpleNamespace(model_patcher=patched)
    WrapperExecutor.new_class_executor(run, guider, wrappers).execute()
    return outputs


def difference(outputs, expected):
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
        for a, b in zip(outputs, expected, strict=True)
    )


def first_rows(patched, x, arguments):
    """Return q, the grid and the text span of the first self-attention call with a grid."""
    seen = []

    def watch(layer, call, serve):
        context = current_forward_context()
        if context.latent_grid is not None and not seen:
            span = context.text_span
            seen.append((call.query.clone(), context.latent_grid, 0 if span is None else span.stop))
        return serve(call)

    with watching(watch):
        sample(patched, x, arguments, sigmas=(1.0, 0.0))
    return seen[0]


def changed_row(patched, x, arguments, patch):
    """Return which rows change where the latent does, at patch (-2, -3) of its last axes."""
    before = first_rows(patched, x, arguments)
    other = [part.clone() for part in x]
    rows, columns = patch[-2:]
    other[0][..., -2 * rows, -3 * columns] += 1.0
    after = first_rows(patched, other, arguments)
    changed = (before[0] - after[0]).abs().amax((0, 2, 3)) > 0
    return before[1], before[2], changed.nonzero().flatten().tolist()


def facts(name):
    make, x, arguments, patch, grid, front = MODELS[name]
    model = patcher(make())
    stock = sample(model, x, arguments)
    dense = take_over(model, Settings(backend="torch_sdpa", strict=True))
    whole = Settings(backend="sliding_tile_attn", config=f"window=[9,9,9],{TILES}")
    few = f"window=[1,3,1],{TILES}"
    sparse = take_over(model, Settings(backend="sliding_tile_attn", config=few, start_percent=0.2))
    report = {}
    found = {
        "dense": difference(sample(dense, x, arguments), stock),
        "whole": difference(sample(take_over(model, whole), x, arguments), stock),
        "sparse": difference(sample(sparse, x, arguments), stock),
        "dense again": difference(sample(dense, x, arguments), stock),
        "removed": difference(sample(model, x, arguments), stock),
    }
    report = {
        part: taken.get_attachment(KEY).report()
        for part, taken in (("dense", dense), ("sparse", sparse))
    }
    located = changed_row(dense, x, arguments, patch)
    hooks = [n for n, m in model.model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    frames, rows, columns = grid
    # At the last or only frame: frames before it hold what was not changed.
    moved = [front + (t * rows + rows - 2) * columns + columns - 3 for t in range(frames)]
    return {
        **found,
        "grid": located[0],
        "expected grid": grid,
        "front": located[1],
        "expected front": front,
        "changed": located[2],
        "expected changed": moved,
        "backends": sorted(
            {
                f"{layer.role}: {entry.selection.backend}, {entry.calls > 0}"
                for layer in report["dense"].layers
                for entry in layer.entries
            }
        ),
        "dense layers": len(report["dense"].layers),
        "sparse": found["sparse"],
        "summary": report["sparse"].summary(),
        "hooks left": hooks,
        "options left": sorted(model.model_options.get("transformer_options", {})),
    }


def two_at_once():
    """Sample one model inside a step of another, with other backends, as wrappers may."""
    make, x, arguments, *_ = MODELS["wan"]
    first, second = patcher(make()), patcher(make())
    stock = sample(first, x, arguments)
    a = take_over(first, Settings(backend="torch_sdpa"))
    few = f"window=[1,1,1],{TILES}"
    b = take_over(second, Settings(backend="sliding_tile_attn", config=few))
    other = []
    a.add_wrapper_with_key(
        "diffusion_model",
        "inside",
        lambda execute, *given, **named: (
            other.append(sample(b, x, arguments)),
            execute(*given, **named),
        )[1],
    )
    return {
        "first": difference(sample(a, x, arguments), stock),
        "second": difference(other[0], sample(b, x, arguments)),
        "reports": [taken.get_attachment(KEY).report().summary() for taken in (a, b)],
    }


if __name__ == "__main__":
    with torch.inference_mode():
        found = {name: facts(name) for name in MODELS}
        found["two at once"] = two_at_once()
    sys.stdout.write(json.dumps(found))
