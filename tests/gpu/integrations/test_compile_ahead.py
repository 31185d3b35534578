"""Kernels of a loaded pipeline are compiled from `apply` on, and are those that its call needs."""

from pathlib import Path
from typing import Any

import pytest
import torch

import multimodal_gen
from multimodal_gen.testing.tiny_models import make_tiny_model

SIZE = {"height": 480, "width": 832, "num_frames": 9, "num_inference_steps": 3}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("offloaded", [False, True], ids=["on the GPU", "offloaded"])
def test_what_was_compiled_ahead_is_what_the_pipeline_needs(
    offloaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from diffusers import DiffusionPipeline

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    folder = make_tiny_model("wan", tmp_path / "wan")
    pipe: Any = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    if offloaded:
        pipe.enable_model_cpu_offload()
    else:
        pipe.to("cuda")
    compiled: list[str] = []

    def listener(*, src: Any, cache_hit: bool, **told: object) -> None:
        if not cache_hit:
            compiled.append(src.name)

    config = {"sparsity": 0.9, "dense_steps": "0"}
    with multimodal_gen.apply(
        pipe,
        attention_backend="video_sparse_attn",
        attention_backend_config=config,
        compile_ahead=SIZE,
    ) as handle:
        assert handle.ahead is not None
        handle.ahead.wait()
        found = handle.report().ahead
        assert found is not None
        assert (found.failed, bool(found.kernels)) == (None, True)
        assert list((tmp_path / "cache").rglob("*.cubin"))
        triton.knobs.compilation.listener = listener
        try:
            latents = pipe("A fox", output_type="latent", **SIZE)[0]
        finally:
            triton.knobs.compilation.listener = None
        assert compiled == []
        assert bool(latents.isfinite().all())
        assert handle.report().ahead == found


@pytest.mark.timeout(300)
def test_a_generator_compiles_for_its_first_generation(tmp_path: Path) -> None:
    folder = make_tiny_model("wan", tmp_path / "wan")
    with multimodal_gen.DiffGenerator.from_pretrained(
        folder, attention_backend="triton_attn", compile_ahead=True
    ) as generator:
        for _ in range(2):
            made = generator.generate(prompt="A fox", seed=0, **SIZE)
            assert generator._ahead is not None
            assert generator._ahead.wait() == 0
    assert made is not None
    attention: Any = made.record["attention"]
    assert "attention_kernel" in attention["compile_ahead"]["kernels"]
    assert attention["compile_ahead"]["failed"] is None
