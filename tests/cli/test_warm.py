"""`sglang attention warm`, and `--compiled-kernels` of what it wrote."""

import json
import subprocess
import sys

import pytest

from multimodal_gen.integrations import warm
from multimodal_gen.kernels.launch.ahead import Made, Place

PLACE = Place(
    gpu="NVIDIA H200",
    capability="9.0",
    machine="x86_64",
    multimodal_gen="0.2.0",
    torch="2.11.0",
    triton="3.6.0",
)
MADE = (
    Made(name="attention_kernel", key="A", seconds=2.5),
    Made(name="pool_kernel", key="B", seconds=0.25),
    Made(name="attention_kernel", key="C", seconds=2.0),
)


def test_it_says_what_it_made_for_which_gpu_and_releases(sglang, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(warm, "warm", lambda *given: asked.append(given) or (PLACE, MADE))
    folder = tmp_path / "kernels"
    given = ("--model-path", "a/M", "--height", 480, "--attention-backend", "sage_attn")
    found = sglang("attention", "warm", *given, "--output", folder)
    assert found.code == 0, found.err
    ((args, output),) = asked
    assert (args.height, str(args.attention_backend), output) == (480, "sage_attn", folder)
    assert "kernels: 3 (attention_kernel x2, pool_kernel)" in found.out
    place = "NVIDIA H200 (compute capability 9.0), x86_64, torch 2.11.0, triton 3.6.0"
    assert place in " ".join(found.out.split())
    assert "4.8 s of compiling" in found.out
    assert f"next: sglang generate ... --compiled-kernels {folder}" in found.out
    document = json.loads(sglang("attention", "warm", *given, "--json").out)
    assert document["place"]["capability"] == "9.0"
    assert [each["name"] for each in document["kernels"]] == [each.name for each in MADE]
    assert document["output"] is None


def test_there_must_be_a_gpu(sglang, tiny_pipeline):
    found = sglang("attention", "warm", "--model-path", tiny_pipeline("wan"), "--device", "cpu")
    assert found.code == 2
    assert "kernels must be compiled ahead for an NVIDIA GPU, with triton, got cpu" in found.err
    assert "; run it on the machine that will generate\n" in found.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--model-path", "/nonexistent"), "--model-path must be an existing pipeline folder or"),
        (("--model-path", "a/b", "--output", "."), "--output must be a new folder, '.' exists"),
    ],
    ids=str,
)
def test_arguments_are_looked_at_before_the_machine(given, message):
    words = ["attention", "warm", *given]
    line = f"import sys; from multimodal_gen.cli.main import main; main({words})"
    line += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stderr.startswith(f"error: {message}")
    assert done.stdout == "False\n"


def test_compiled_kernels_are_refused_where_none_run(sglang, tiny_pipeline, tmp_path):
    given = ("--model-path", tiny_pipeline("wan"), "--prompt", "a fox", "--device", "cpu")
    found = sglang("generate", *given, "--compiled-kernels", tmp_path, "--output-path", tmp_path)
    assert found.code == 2
    assert "compiled_kernels (--compiled-kernels): kernels must be compiled ahead" in found.err
