"""A generator on a GPU: offload of every kind, weights in fewer bits, compiled blocks."""

import pytest
import torch

from multimodal_gen.integrations.generator import DiffGenerator

CALL = {
    "prompt": "a fox",
    "height": 64,
    "width": 96,
    "num_frames": 9,
    "num_inference_steps": 2,
    "seed": 0,
}


@pytest.fixture(scope="module")
def folder(tiny_pipeline):
    pytest.importorskip("diffusers")
    return tiny_pipeline("wan")


@pytest.fixture(scope="module")
def plain(folder) -> torch.Tensor:
    with DiffGenerator.from_pretrained(folder, device="cuda", dtype="bfloat16") as generator:
        return generator.generate(**CALL).latents.cpu()


@pytest.mark.parametrize("kind", ["model", "block", "leaf", "sequential"])
def test_offload_changes_nothing_but_where_weights_are(kind, folder, plain) -> None:
    settings = {"device": "cuda", "dtype": "bfloat16", "offload": kind}
    with DiffGenerator.from_pretrained(folder, **settings) as generator:
        first = generator.generate(**CALL)
        second = generator.generate(**CALL)
    assert torch.equal(first.latents.cpu(), plain)
    assert torch.equal(second.latents.cpu(), plain)


def test_weights_in_files_change_nothing(folder, plain, tmp_path) -> None:
    settings = {"device": "cuda", "dtype": "bfloat16", "offload": "block"}
    with DiffGenerator.from_pretrained(folder, offload_folder=tmp_path, **settings) as generator:
        made = generator.generate(**CALL)
    assert any(tmp_path.rglob("*.safetensors"))
    assert torch.equal(made.latents.cpu(), plain)


@pytest.mark.parametrize(
    ("way", "package"),
    [
        *(("bnb-nf4", "bitsandbytes"), ("bnb-int8", "bitsandbytes")),
        *(("torchao-int8", "torchao"), ("torchao-fp8", "torchao")),
        ("torchao-fp8-dynamic", "torchao"),
    ],
)
def test_fewer_bits_are_near_the_weights_they_stand_for(way, package, folder, plain) -> None:
    pytest.importorskip(package)
    settings = {"device": "cuda", "dtype": "bfloat16", "quantize": {"transformer": way}}
    with DiffGenerator.from_pretrained(folder, **settings) as generator:
        made = generator.generate(**CALL).latents.cpu()
    assert not torch.equal(made, plain)
    error = (made - plain).float().norm() / plain.float().norm()
    assert float(error) < 0.2


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what inductor imports
def test_compiled_blocks_are_compiled_once_and_the_time_is_on_record(folder, plain) -> None:
    settings = {"device": "cuda", "dtype": "bfloat16", "enable_torch_compile": True}
    with DiffGenerator.from_pretrained(folder, **settings) as generator:
        first = generator.generate(**CALL)
        second = generator.generate(**CALL)
    assert first.record["timings_s"]["compile"] > 0
    assert "compile" not in second.record["timings_s"]
    error = (first.latents.cpu() - plain).float().norm() / plain.float().norm()
    assert float(error) < 0.05
