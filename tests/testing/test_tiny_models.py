import hashlib
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.testing.tiny_models import (
    FAMILIES,
    STREAMING_FAMILIES,
    make_tiny_model,
    tokenizers,
)
from multimodal_gen.testing.tiny_models import make as make_module

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 20_000_000

# Attention modules of the denoiser, as the classes of (module, processor).
ATTENTION = {
    "wan": {("WanAttention", "WanAttnProcessor"): 4},
    "wan22": {("WanAttention", "WanAttnProcessor"): 4},
    "hunyuan_video": {
        ("Attention", "HunyuanVideoAttnProcessor2_0"): 4,
        ("Attention", "AttnProcessor2_0"): 2,
    },
    "hunyuan_video_15": {
        ("Attention", "HunyuanVideo15AttnProcessor2_0"): 2,
        ("Attention", "AttnProcessor2_0"): 2,
    },
    "ltx": {("LTXAttention", "LTXVideoAttnProcessor"): 4},
    "flux": {("FluxAttention", "FluxAttnProcessor"): 4},
    "flux2_klein": {
        ("Flux2Attention", "Flux2AttnProcessor"): 2,
        ("Flux2ParallelSelfAttention", "Flux2ParallelSelfAttnProcessor"): 2,
    },
    "qwen_image": {("Attention", "QwenDoubleStreamAttnProcessor2_0"): 2},
    "cogvideox": {("Attention", "CogVideoXAttnProcessor2_0"): 2},
}


def load(folder):
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe, family, **overrides):
    generator = torch.Generator().manual_seed(0)
    kwargs = {"output_type": "latent", **family.generate_kwargs, **overrides}
    return pipe(generator=generator, **kwargs)[0]


def denoisers(pipe):
    found = [getattr(pipe, name, None) for name in ("transformer", "transformer_2")]
    return [model for model in found if model is not None]


def digest(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


# Tests of pipelines make the others.
QUICK = ("wan", "qwen_image", "ltx")


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=[] if f in QUICK else [pytest.mark.slow]) for f in FAMILIES],
)
def tiny(request, tmp_path_factory):
    """A family made once, loaded by the stock library, with one run's latents."""
    family = FAMILIES[request.param]
    folder = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param) / "model")
    pipe = load(folder)
    return SimpleNamespace(
        family=family, folder=folder, pipe=pipe, latents=generate(pipe, family).clone()
    )


@pytest.mark.slow_cases("qwen_image", "wan")
def test_the_folder_holds_the_family_and_stays_under_20_mb(tiny):
    assert type(tiny.pipe).__name__ == tiny.family.pipeline_class
    assert sum(path.stat().st_size for path in tiny.folder.rglob("*")) < MAX_BYTES


def test_every_model_loads_in_fp32_without_asking(tiny):
    models = [c for c in tiny.pipe.components.values() if isinstance(c, torch.nn.Module)]
    assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}


def test_the_denoiser_has_the_attention_modules_of_its_family(tiny):
    for model in denoisers(tiny.pipe):
        modules = [module for module in model.modules() if hasattr(module, "processor")]
        counts = Counter((type(m).__name__, type(m.processor).__name__) for m in modules)
        assert counts == ATTENTION[tiny.family.name]
        assert {module.heads for module in modules} == {4}


def test_two_runs_of_one_seed_give_the_same_latents(tiny):
    assert torch.equal(generate(tiny.pipe, tiny.family), tiny.latents)


def test_latents_neither_vanish_nor_blow_up(tiny):
    assert torch.isfinite(tiny.latents).all()
    assert 0.3 < tiny.latents.std() < 3.0


def test_the_prompt_changes_the_latents(tiny):
    other = generate(tiny.pipe, tiny.family, prompt="An old train crosses a high bridge")
    assert (other - tiny.latents).abs().max() > 1e-2


def test_a_prompt_in_another_script_can_be_encoded(tiny):
    prompt = '\u8d64\u3044\u72d0 caf\u00e9 says "na\u00efve"'
    assert torch.isfinite(generate(tiny.pipe, tiny.family, prompt=prompt)).all()


def test_uniform_attention_in_the_denoiser_gives_clearly_other_latents(tiny, monkeypatch):
    exact = F.scaled_dot_product_attention
    inside = []

    def uniform(query, key, value, *args, **kwargs):
        return exact(query * 0 if inside else query, key, value, *args, **kwargs)

    handles = []
    for model in denoisers(tiny.pipe):
        handles.append(model.register_forward_pre_hook(lambda *_: inside.append(True)))
        handles.append(model.register_forward_hook(lambda *_: inside.clear()))
    monkeypatch.setattr(F, "scaled_dot_product_attention", uniform)
    try:
        changed = generate(tiny.pipe, tiny.family)
    finally:
        for handle in handles:
            handle.remove()
    # Ten thousand times what the order of fp32 additions does to these latents.
    assert (changed - tiny.latents).abs().max() > 3e-2


def test_the_record_names_the_latent_grid_that_the_denoiser_sees(tiny):
    lengths = set()
    handle = tiny.pipe.transformer.proj_out.register_forward_pre_hook(
        lambda _, args: lengths.add(args[0].shape[1])
    )
    try:
        generate(tiny.pipe, tiny.family, num_inference_steps=2)
    finally:
        handle.remove()
    frames, height, width = tiny.family.latent_grid
    assert lengths == {frames * height * width}


@pytest.mark.slow_cases("wan")
def test_decoding_gives_finite_frames_of_the_size_asked_for(tiny):
    family = tiny.family
    frames = np.asarray(generate(tiny.pipe, family, output_type="np"))
    size = (family.height, family.width, 3)
    assert frames.shape == (
        (1, *size) if family.output == "image" else (1, family.num_frames, *size)
    )
    assert np.isfinite(frames).all()
    assert frames.std() > 0.05


@pytest.mark.slow_cases("qwen_image", "wan")
def test_another_seed_gives_other_weights_and_the_same_seed_the_same_bytes(tiny, tmp_path):
    name = tiny.family.name
    assert digest(make_tiny_model(name, tmp_path / "same")) == digest(tiny.folder)
    first = digest(tiny.folder)
    other = digest(make_tiny_model(name, tmp_path / "other", seed=1))
    assert other.keys() == first.keys()
    changed = {path for path in first if other[path] != first[path]}
    assert changed == {path for path in first if path.endswith(".safetensors")}


def test_both_wan22_transformers_run_and_differ(tmp_path):
    family = FAMILIES["wan22"]
    pipe = load(make_tiny_model("wan22", tmp_path / "model"))
    calls = Counter()
    pipe.transformer.register_forward_pre_hook(lambda *_: calls.update(["high noise"]))
    pipe.transformer_2.register_forward_pre_hook(lambda *_: calls.update(["low noise"]))
    generate(pipe, family)
    assert calls == {"high noise": 4, "low noise": 4}  # two steps each, with guidance
    assert not torch.equal(pipe.transformer.proj_out.weight, pipe.transformer_2.proj_out.weight)


def test_making_a_model_leaves_the_random_state_of_the_caller_alone(tmp_path):
    before = torch.get_rng_state()
    make_tiny_model("ltx", tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_hunyuan_video_template_takes_exactly_the_tokens_that_are_cropped():
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import (
        DEFAULT_PROMPT_TEMPLATE as TEMPLATE,
    )

    tokenizer = tokenizers.llama_tokenizer(TEMPLATE["template"])
    ids = tokenizer(TEMPLATE["template"].format("A red fox")).input_ids
    kept = tokenizer.convert_ids_to_tokens(ids[TEMPLATE["crop_start"] :])
    assert kept == ["A", "\u2581red", "\u2581fox", "<|eot_id|>"]


def test_the_qwen_image_template_takes_exactly_the_tokens_that_are_cropped(tmp_path):
    pipe = load(make_tiny_model("qwen_image", tmp_path / "model"))
    ids = pipe.tokenizer(pipe.prompt_template_encode.format("A red fox")).input_ids
    kept = pipe.tokenizer.decode(ids[pipe.prompt_template_encode_start_idx :])
    assert kept == "A red fox<|im_end|>\n<|im_start|>assistant\n"


def test_the_hunyuan_video_15_message_takes_exactly_the_tokens_that_are_cropped(tmp_path):
    pipe = load(make_tiny_model("hunyuan_video_15", tmp_path / "model"))
    chat = [
        {"role": "system", "content": pipe.system_message},
        {"role": "user", "content": "A red fox"},
    ]
    ids = pipe.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    kept = pipe.tokenizer.decode(ids["input_ids"][pipe.prompt_template_encode_start_idx :])
    assert kept == "A red fox<|im_end|>\n<|im_start|>assistant\n"


def test_an_unknown_family_names_the_nearest_one(tmp_path):
    with pytest.raises(UsageError, match=r"got 'hunyuan', did you mean 'hunyuan_video'\?"):
        make_tiny_model("hunyuan", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_a_seed_out_of_range_is_refused(tmp_path, seed):
    with pytest.raises(UsageError, match=rf"seed must be in \[0, 2147483648\), got {seed}"):
        make_tiny_model("wan", tmp_path / "model", seed=seed)


def test_a_folder_with_files_in_it_is_refused_and_kept(tmp_path):
    (tmp_path / "mine.txt").write_text("token_mask")
    with pytest.raises(UsageError, match=r"out must be a new or empty folder, got .*files in it"):
        make_tiny_model("wan", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("below", ["", "sub/folder"])
def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("token_mask")
    with pytest.raises(UsageError, match=r"out must not be, or lie below, a file, got .*file"):
        make_tiny_model("wan", tmp_path / "file" / below)


def test_an_empty_folder_and_missing_parents_are_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b"):
        assert make_tiny_model("ltx", out) == out
        assert (out / "model_index.json").is_file()
        assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def fake_family(monkeypatch, build):
    family = SimpleNamespace(name="fake", build=build)
    monkeypatch.setattr(make_module, "FAMILIES", {"fake": family})


class HalfSaved:
    def save_pretrained(self, folder):
        folder.mkdir()
        (folder / "half.bin").write_bytes(b"half")
        raise KeyboardInterrupt


def test_an_interrupted_save_leaves_nothing_behind(monkeypatch, tmp_path):
    fake_family(monkeypatch, lambda seed: HalfSaved())
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        make_tiny_model("fake", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named_with_the_install_line(monkeypatch, tmp_path):
    def build(seed):
        raise ImportError("No module named 'diffusers'")

    fake_family(monkeypatch, build)
    with pytest.raises(
        MissingDependencyError, match=r"No module named 'diffusers'.*multimodal_gen\[video\]"
    ):
        make_tiny_model("fake", tmp_path / "model")


def run(*args):
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_importing_the_package_imports_no_heavy_library():
    heavy = "{'torch', 'diffusers', 'transformers', 'tokenizers', 'numpy'}"
    done = run(
        "-c",
        "import sys, multimodal_gen.testing.tiny_models; "
        f"print(*sorted({heavy} & set(sys.modules)))",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


@pytest.mark.slow
def test_the_script_prints_the_folder_its_size_and_a_command(tmp_path):
    out = tmp_path / "my model"
    done = run("scripts/make_tiny_model.py", "wan", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    folder, size, command = done.stdout.splitlines()
    assert folder == str(out)
    assert size.endswith(" MB")
    assert command == (
        f"sglang generate --model-path '{out}' "
        "--prompt 'A red fox runs through fresh snow at sunrise' "
        "--negative-prompt 'Blurry, low quality, static' --height 64 --width 96 --num-frames 9 "
        "--num-inference-steps 3 --guidance-scale 3.0 --seed 0"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["wam"], "error: the following arguments are required: OUT"),
        (["wam", "OUT"], "got 'wam', did you mean 'wan'?"),
        (["wan", "OUT", "--seed", "x"], "error: argument --seed: invalid int value: 'x'"),
        (["wan", "OUT", "--seed", "-1"], "error: seed must be in [0, 2147483648), got -1"),
        (["wan", "pyproject.toml"], "error: out must not be, or lie below, a file, got "),
    ],
)
def test_the_script_answers_bad_input_with_one_line_and_status_2(args, message):
    done = run("scripts/make_tiny_model.py", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (ROOT / "OUT").exists()


@pytest.mark.parametrize(
    "name", [pytest.param(f, marks=pytest.mark.slow) for f in STREAMING_FAMILIES]
)
def test_the_script_makes_families_that_stream_and_a_command_that_does(name, tmp_path, monkeypatch):
    made = run("scripts/make_tiny_model.py", name, str(tmp_path / "model"))
    assert made.returncode == 0, made.stderr
    command = shlex.split(made.stdout.splitlines()[-1])
    assert command[:2] == ["sglang", "generate"]
    assert "--stream" in command
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    flags = [*command[1:], "--output-path", str(tmp_path / "a.mp4")]
    done = subprocess.run(
        [sys.executable, "-m", "multimodal_gen", *flags],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "stream: first frames after" in done.stdout
    assert (tmp_path / "a.mp4").stat().st_size > 0
