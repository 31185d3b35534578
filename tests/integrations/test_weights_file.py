"""Weights from a file of their own: the layouts that authors publish, with random weights."""

import re
import shutil

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

import multimodal_gen
from multimodal_gen import DiffGenerator
from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.weights_file import load_weights
from multimodal_gen.runtime.server_args import ServerArgs

pytestmark = pytest.mark.usefixtures("black_frames")

FILE = "diffusion_pytorch_model.safetensors"
VIDEO = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 1}
# diffusers' names -> those of the original Wan, as its repository has them.
ORIGINAL = (
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"\.attn1\.to_([qkv])\.", r".self_attn.\1."),
    (r"\.attn2\.to_([qkv])\.", r".cross_attn.\1."),
    (r"\.attn1\.to_out\.0\.", ".self_attn.o."),
    (r"\.attn2\.to_out\.0\.", ".cross_attn.o."),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"\.norm2\.", ".norm3."),
    (r"^(blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
    (r"^scale_shift_table$", "head.modulation"),
    (r"^proj_out\.", "head.head."),
)
# diffusers' names -> those of FastVideo, as its configuration of Wan maps them.
FASTVIDEO = (
    (r"^patch_embedding\.", "patch_embedding.proj."),
    (r"text_embedder\.linear_1\.", "text_embedder.fc_in."),
    (r"text_embedder\.linear_2\.", "text_embedder.fc_out."),
    (r"time_embedder\.linear_1\.", "time_embedder.mlp.fc_in."),
    (r"time_embedder\.linear_2\.", "time_embedder.mlp.fc_out."),
    (r"\.time_proj\.", ".time_modulation.linear."),
    (r"^(blocks\.\d+)\.attn1\.(to_[qkv]|norm_[qk])\.", r"\1.\2."),
    (r"^(blocks\.\d+)\.attn1\.to_out\.0\.", r"\1.to_out."),
    (r"^(blocks\.\d+\.attn2)\.to_out\.0\.", r"\1.to_out."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.fc_in."),
    (r"\.ffn\.net\.2\.", ".ffn.fc_out."),
    (r"^(blocks\.\d+)\.norm2\.", r"\1.self_attn_residual_norm.norm."),
)


def renamed(state, rules):
    """Return the tensors of a state under other names."""
    found = {}
    for key, value in state.items():
        for pattern, name in rules:
            key = re.sub(pattern, name, key)
        found[key] = value
    assert len(found) == len(state)
    return found


def trained_state(folder, component="transformer"):
    """Return weights of a model that was trained on: other values under diffusers' names."""
    generator = torch.Generator().manual_seed(3)
    state = load_file(folder / component / FILE)
    return {k: v + 0.05 * torch.randn(v.shape, generator=generator) for k, v in state.items()}


def with_projections(state, size=32):
    """Return a state in the original names with the linear branches of TurboDiffusion."""
    generator = torch.Generator().manual_seed(5)
    for block in range(2):
        name = f"blocks.{block}.self_attn.attn_op.local_attn.proj_l"
        state[f"{name}.weight"] = torch.randn(size, size, generator=generator)
        state[f"{name}.bias"] = torch.randn(size, generator=generator)
    return state


def with_gates(state, width=128):
    """Return a state with FastVideo's gates of Video Sparse Attention."""
    generator = torch.Generator().manual_seed(5)
    for block in range(2):
        name = f"blocks.{block}.to_gate_compress"
        state[f"{name}.weight"] = torch.randn(width, width, generator=generator) * width**-0.5
        state[f"{name}.bias"] = torch.randn(width, generator=generator)
    return state


def original(state):
    """Return a state as TurboDiffusion has it: its embedding of patches is a linear layer."""
    found = renamed(state, ORIGINAL)
    found["patch_embedding.weight"] = found["patch_embedding.weight"].flatten(1)
    return found


def prefixed(state, prefix):
    return {f"{prefix}{key}": value for key, value in state.items()}


@pytest.fixture
def source(tiny_pipeline):
    return tiny_pipeline("wan")


LAYOUTS = {
    "diffusers": lambda s: s,
    "TurboDiffusion": original,
    "trainer of rCM": lambda s: {"state_dict": prefixed(original(s), "net."), "iteration": 3},
    "original": lambda s: renamed(s, ORIGINAL),
    "ComfyUI": lambda s: prefixed(renamed(s, ORIGINAL), "model.diffusion_model."),
    "FastVideo": lambda s: renamed(s, FASTVIDEO),
    "Self Forcing": lambda s: {
        "generator": prefixed(renamed({k: v * 0 for k, v in s.items()}, ORIGINAL), "model."),
        "generator_ema": prefixed(renamed(s, ORIGINAL), "model._fsdp_wrapped_module."),
    },
}


NESTED = ("trainer of rCM", "Self Forcing")  # safetensors holds tensors alone
FORMS = [(x, "pth") for x in LAYOUTS] + [(x, "safetensors") for x in LAYOUTS if x not in NESTED]


@pytest.mark.parametrize(("layout", "form"), FORMS)
def test_every_layout_loads_the_weights_that_a_folder_of_diffusers_would(
    source, tmp_path, layout, form
):
    state = trained_state(source)
    told = LAYOUTS[layout](state)
    file = tmp_path / f"weights.{form}"
    if form == "pth":
        torch.save(told, file)
    else:
        save_file({key: value.contiguous() for key, value in told.items()}, file)
    folder = shutil.copytree(source, tmp_path / "whole")
    save_file(state, folder / "transformer" / FILE, metadata={"format": "pt"})
    for dtype in (torch.float32, torch.bfloat16):
        expected = WanTransformer3DModel.from_pretrained(
            folder, subfolder="transformer", dtype=dtype
        )
        index = PipelineIndex.read(str(source))
        found = load_weights(index, "transformer", str(file), dtype)
        assert not found.training
        assert all(p.requires_grad for p in found.parameters())
        assert found.state_dict().keys() == expected.state_dict().keys()
        for key, value in expected.state_dict().items():
            assert found.state_dict()[key].dtype is value.dtype, key
            assert torch.equal(found.state_dict()[key], value), key
        for key, value in expected.named_buffers():
            assert torch.equal(found.get_buffer(key), value), key


def made(folder, **settings):
    """Return the latents of a run."""
    settings |= {"device": "cpu", "prompt": "a fox", "seed": 0}
    return multimodal_gen.generate(folder, **VIDEO, **settings).latents


@pytest.mark.parametrize(
    ("add", "layout", "backend"),
    [
        (with_projections, original, {"attention_backend": "sla_attn"}),
        (with_projections, LAYOUTS["trainer of rCM"], {"attention_backend": "sla_attn"}),
        (with_gates, lambda s: s, {"attention_backend": "video_sparse_attn"}),
        (with_gates, LAYOUTS["FastVideo"], {"attention_backend": "video_sparse_attn"}),
    ],
    ids=["TurboDiffusion", "trainer of rCM", "FastWan", "FastVideo"],
)
def test_trained_layers_of_a_file_are_those_of_a_folder(source, tmp_path, add, layout, backend):
    settings = {"sla_attn": {"topk_ratio": 0.5}, "video_sparse_attn": {"sparsity": 0.5}}
    backend = {**backend, "attention_backend_config": settings[backend["attention_backend"]]}
    state = add(trained_state(source))
    folder = shutil.copytree(source, tmp_path / "whole")
    save_file(state, folder / "transformer" / FILE, metadata={"format": "pt"})
    file = tmp_path / "weights.pth"
    torch.save(layout(state), file)
    expected = made(folder, **backend)
    found = made(source, transformer_weights_path=file, **backend)
    torch.testing.assert_close(found, expected)
    plain = made(source, transformer_weights_path=without(state, tmp_path), **backend)
    assert not torch.allclose(plain, expected, atol=1e-3), "trained layers change what is made"


def without(state, tmp_path):
    """Write the weights without their trained layers."""
    file = tmp_path / "plain.safetensors"
    kept = {k: v for k, v in state.items() if "proj_l" not in k and "gate" not in k}
    save_file(kept, file)
    return file


def test_trained_layers_of_the_folder_are_not_those_of_the_file(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "gated")
    state = trained_state(source)
    save_file(with_gates(dict(state)), folder / "transformer" / FILE, metadata={"format": "pt"})
    backend = {
        "attention_backend": "video_sparse_attn",
        "attention_backend_config": {"sparsity": 0.5},
        "transformer_weights_path": without(state, tmp_path),
    }
    torch.testing.assert_close(made(folder, **backend), made(source, **backend))


def test_a_folder_of_shards_and_the_second_expert(tiny_pipeline, tmp_path):
    source = tiny_pipeline("wan22")
    shards = tmp_path / "shards"
    model = WanTransformer3DModel.from_pretrained(source, subfolder="transformer_2")
    model.load_state_dict(trained_state(source, "transformer_2"))
    model.save_pretrained(shards, max_shard_size="100KB")
    assert len([*shards.glob("*.safetensors")]) > 2
    folder = shutil.copytree(source, tmp_path / "whole")
    model.save_pretrained(folder / "transformer_2")
    found = made(source, transformer_weights_path=[f"transformer_2={shards}"])
    torch.testing.assert_close(found, made(folder))
    assert not torch.allclose(found, made(source), atol=1e-3)


def refusal(source, file, **settings):
    with pytest.raises(UsageError) as refused:
        DiffGenerator.from_pretrained(
            source, device="cpu", transformer_weights_path=file, **settings
        )
    return str(refused.value)


def test_weights_that_differ_are_listed_in_one_error(source, tmp_path):
    state = trained_state(source)
    gone = [key for key in state if key.startswith("blocks.1.attn2.")]
    state = {key: value for key, value in state.items() if key not in gone}
    state["blocks.0.extra.weight"] = torch.zeros(2)
    state["proj_out.bias"] = torch.zeros(3)
    file = tmp_path / "other.safetensors"
    save_file(state, file)
    said = refusal(source, file)
    assert f"{len(gone)} missing ({', '.join(sorted(gone)[:5])} and {len(gone) - 5} more)" in said
    assert "1 unexpected (blocks.0.extra.weight)" in said
    assert re.search(r"1 of another shape \(proj_out.bias \[3\] in place of \[\d+\]\)", said)
    assert said.startswith(f"transformer_weights_path transformer={file} must hold the weights")
    assert "\n" not in said


def test_names_that_diffusers_cannot_convert_are_listed_too(tiny_pipeline, tmp_path):
    file = tmp_path / "other.safetensors"
    save_file({"blocks.0.self_attn.q.weight": torch.zeros(2, 2)}, file)
    said = refusal(tiny_pipeline("flux"), file)
    assert "must hold the weights of this FluxTransformer2DModel: " in said
    assert "1 unexpected (blocks.0.self_attn.q.weight)" in said


def test_quantised_layers_are_refused_with_the_remedy(source, tmp_path):
    state = original(trained_state(source))
    key = "blocks.0.self_attn.q.weight"
    state["blocks.0.self_attn.q.int8_weight"] = state.pop(key).to(torch.int8)
    state["blocks.0.self_attn.q.scale"] = torch.ones(1, 1)
    file = tmp_path / "quant.pth"
    torch.save(state, file)
    said = refusal(source, file)
    assert "missing (blocks.0.attn1.to_q.weight)" in said
    assert "take the file without -quant" in said


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda f: None, "must name an existing file, or a folder with files in .safetensors"),
        (lambda f: f.write_bytes(b"nothing"), "could not be loaded"),
        (lambda f: torch.save({"step": 3, "lr": 0.1}, f), "must hold tensors by name, .* a dict"),
        (lambda f: torch.save([torch.zeros(2)], f), "must hold tensors by name, .* got a list"),
        (lambda f: torch.save({"model": Harmful()}, f), "could not be loaded"),
    ],
    ids=["absent", "noise", "no tensors", "a list", "code"],
)
def test_what_holds_no_weights_is_refused_and_nothing_is_executed(
    source, tmp_path, write, said, capfd
):
    file = tmp_path / "weights.pth"
    write(file)
    assert re.search(said, refusal(source, file))
    assert "executed" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("given", "more", "said"),
    [
        ("transformer_3={}", {}, r"must name a component of WanPipeline \(.*\), got"),
        ("tokenizer={}", {}, "must name a model of diffusers, got tokenizer, a "),
        (
            "{}",
            {"quantize": "transformer=torchao-int8"},
            "must not be given with quantize transfor",
        ),
        ("transformer={}.gguf", {}, "give quantize transformer="),
    ],
)
def test_components_that_cannot_have_it_are_refused(source, tmp_path, given, more, said):
    file = tmp_path / "weights.safetensors"
    save_file(trained_state(source), file)
    assert re.search(said, refusal(source, given.format(file), **more))


def test_components_are_named_before_an_equals_sign_and_once():
    def normalised(value):
        return dict(
            ServerArgs(model_path="x", transformer_weights_path=value).transformer_weights_path
        )

    assert normalised("/a/b=c.pth") == {"transformer": "/a/b=c.pth"}
    assert normalised("a.pth") == {"transformer": "a.pth"}
    assert normalised(["a.pth", "transformer-2=b=c.pth"]) == {
        "transformer": "a.pth",
        "transformer_2": "b=c.pth",
    }
    assert normalised({"vae": "c.pth"}) == {"vae": "c.pth"}
    assert ServerArgs(model_path="x", transformer_weights_path={}).transformer_weights_path is None
    for wrong in ("", ["a", "b"], 3, {"transformer": ""}, {"a.self": "b"}):
        with pytest.raises(ConfigError, match="--transformer-weights-path"):
            normalised(wrong)
