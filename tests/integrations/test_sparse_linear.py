"""Sparse-Linear Attention in whole pipelines: dense at ratio 1, and to the end at any other."""

import pytest

from multimodal_gen.integrations.diffusers import apply
from tests.integrations.conftest import generate

FAMILIES = [
    "wan",
    pytest.param("wan22", marks=pytest.mark.slow),
    "hunyuan_video",
    pytest.param("flux", marks=pytest.mark.slow),
    "qwen_image",
]
SLA = "sla_attn"
SAGE = "sage_sla_attn"


@pytest.mark.slow_cases("hunyuan_video", "wan")
@pytest.mark.parametrize("family", FAMILIES)
def test_at_ratio_one_the_latents_are_those_of_dense_attention(family, fresh, stock_latents):
    pipe = fresh(family)
    config = {"topk_ratio": 1.0, "BLKQ": 64}
    with apply(pipe, attention_backend=SLA, attention_backend_config=config) as handle:
        latents = generate(pipe, family)
        entries = [
            entry
            for layer in handle.report().layers
            for entry in layer.entries
            if str(entry.selection.backend) == SLA and entry.calls
        ]
    assert (latents - stock_latents(family)).abs().max() <= 1e-3
    assert entries
    assert {density for entry in entries for _, density in entry.densities} == {1.0}


@pytest.mark.slow_cases("hunyuan_video")
@pytest.mark.parametrize("family", FAMILIES[:3])  # the others' images are one block
def test_with_fewer_blocks_the_latents_change_and_the_report_tells_the_density(
    family, fresh, stock_latents
):
    pipe = fresh(family)
    config = {"topk_ratio": 0.0, "BLKQ": 64}
    with apply(pipe, attention_backend=SLA, attention_backend_config=config) as handle:
        latents = generate(pipe, family)
        entries = [e for layer in handle.report().layers for e in layer.entries if e.densities]
    assert latents.isfinite().all()
    assert (latents - stock_latents(family)).abs().max() > 1e-3
    assert entries
    assert all(0.0 < density < 1.0 for entry in entries for _, density in entry.densities)


def test_dense_steps_and_layers_run_on_the_dense_backend(fresh, stock_latents):
    pipe = fresh("wan")
    config = {"topk_ratio": 0.0, "dense_steps": "0-", "dense_layers": "0"}
    with apply(pipe, attention_backend=SLA, attention_backend_config=config):
        latents = generate(pipe, "wan")
    assert (latents - stock_latents("wan")).abs().max() <= 1e-3


@pytest.mark.slow_cases("flux", "hunyuan_video")
@pytest.mark.parametrize("family", ["wan", "hunyuan_video", "flux"])
def test_in_8_bits_the_latents_are_near_those_of_16(family, fresh, stock_latents):
    """The latents' errors are those of the scores, a hundredth of their spread, step by step."""
    pipe = fresh(family)
    config = {"topk_ratio": 1.0, "BLKQ": 64}
    with apply(pipe, attention_backend=SAGE, attention_backend_config=config) as handle:
        latents = generate(pipe, family)
        entries = [
            entry
            for layer in handle.report().layers
            for entry in layer.entries
            if str(entry.selection.backend) == SAGE and entry.calls
        ]
    stock = stock_latents(family)
    difference = (latents - stock).norm() / stock.norm()
    assert 0 < difference <= 0.05
    assert entries
    assert {density for entry in entries for _, density in entry.densities} == {1.0}


def test_in_8_bits_fewer_blocks_are_reported_and_dense_steps_stay_dense(fresh, stock_latents):
    pipe = fresh("wan")
    config = {"topk_ratio": 0.0, "BLKQ": 64}
    with apply(pipe, attention_backend=SAGE, attention_backend_config=config) as handle:
        assert generate(pipe, "wan").isfinite().all()
        entries = [e for layer in handle.report().layers for e in layer.entries if e.densities]
    assert entries
    assert all(0.0 < density < 1.0 for entry in entries for _, density in entry.densities)
    pipe = fresh("wan")
    with apply(
        pipe, attention_backend=SAGE, attention_backend_config={**config, "dense_steps": "0-"}
    ):
        latents = generate(pipe, "wan")
    assert (latents - stock_latents("wan")).abs().max() <= 1e-3
