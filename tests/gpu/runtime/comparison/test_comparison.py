"""A comparison on a GPU: its events, its memory, and the rows that are recomputed."""

import pytest
import torch

import multimodal_gen
from multimodal_gen.runtime.generator.attention_check import exact_rows, row_errors, sample_rows
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.testing.tiny_models import FAMILIES


def test_recomputed_rows_agree_with_every_exact_kernel_of_this_gpu() -> None:
    q, k, v = (torch.randn(1, 3000, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    layer, rows = LocalAttention(4, 128), sample_rows(3000, seed=0, device="cuda")
    (truth,) = exact_rows(layer, AttentionCall(q, k, v), rows, (v,))
    l1, l2, cosine = row_errors(layer(q, k, v)[:, rows.cuda()], truth)
    assert truth.dtype == torch.float64
    assert float(l1.max()) < 0.01
    assert float(l2.max()) < 0.01
    assert float(cosine.min()) > 0.9999


def test_a_comparison_measures_time_memory_and_layers(tmp_path) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("imageio_ffmpeg")
    family = FAMILIES["wan"]
    pipe = family.build(0).to("cuda", torch.bfloat16)
    report = multimodal_gen.compare(
        pipe,
        prompts="a fox",
        backends="video_sparse_attn:topk=1,dense_above=1;sage_attn",
        output=tmp_path / "out",
        height=family.height,
        width=family.width,
        num_frames=family.num_frames,
        num_inference_steps=3,
        page=False,
    )
    assert report.floor, report.notes
    for run in report.runs:
        assert run.status == "done", run.message
        assert run.cost is not None
        assert 0 < run.cost.attention_share < 1
        assert 0 < run.cost.peak_memory <= report.peak_memory
        assert run.layers
    assert max(error for run in report.floor for x in run.layers for error in x.relative_l2) < 0.02
    sparse, quantised = report.candidates
    assert sparse.cost.density < 1
    assert sparse.masks
    assert quantised.cost.density == 1
