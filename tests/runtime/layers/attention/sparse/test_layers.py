"""What all sparse layers have in common: autocast, and a word where no step is sparse."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.declaration import SAGE
from multimodal_gen.runtime.layers.attention.backends.registry import backends_of
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.scope import LayerSite
from multimodal_gen.runtime.layers.attention.sparse import tiles
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.methods import SMALL
from tests.helpers.sparse import SparseMethod

GRID = (4, 6, 8)
GIVEN = {
    **{
        name: SMALL[name] for name in ("sliding_tile_attn", "vmoba_attn", "sparse_video_gen_2_attn")
    },
    "video_sparse_attn": {"sparsity": 0.7},
    "sla_attn": {"topk_ratio": 0.3},
    "sage_sla_attn": {"topk_ratio": 0.3},
}
METHODS = {
    name: SparseMethod(backend=AttentionBackendEnum(name), given=given, heads=2)
    for name, given in GIVEN.items()
}


def make_layer(method: str, **more: Any) -> LocalAttention:
    layer = METHODS[method].layer(strict=True, **more)
    if "sla" in method:
        torch.manual_seed(1)
        layer.set_projection(nn.Linear(32, 32).requires_grad_(False))
    return layer


def attend_with(layer: LocalAttention, *qkv: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), set_forward_context(0, latent_grid=GRID, num_steps=2):
        return layer(*qkv)


def attend(method: str, *qkv: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    layer = make_layer(method)
    out = attend_with(layer, *qkv)
    assert str(layer.backend) == method
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_the_inputs_and_nothing_else(method: str, dtype: torch.dtype) -> None:
    qkv = [x.to(dtype) for x in make_qkv(1, math.prod(GRID), 2, 32)]
    expected = attend(method, *(x.bfloat16() for x in qkv))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(method, *qkv)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)


@pytest.mark.parametrize("method", ["sliding_tile_attn", "video_sparse_attn"])
def test_queries_keys_and_values_move_into_tiles_at_once(method: str, monkeypatch) -> None:
    moved = []

    def gather(tensors: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved.append(len(tensors))
        return gather_tokens(tensors, index)

    monkeypatch.setattr(tiles, "gather_tokens", gather)
    attend(method, *make_qkv(1, math.prod(GRID), 2, 32))
    assert set(moved) == {3}


# By method: parameters that leave no step of so many to it, and what is said of that.
TOLD = [
    *(
        (method, {"dense_steps": "0-1"}, 2, "dense_steps=0-1 keep all 2 steps")
        for method in METHODS
    ),
    ("sliding_tile_attn", {"skip_time_steps": 15}, 3, "skip_time_steps=15 keep all 3 steps"),
    ("sliding_tile_attn", {"dense_steps": "0-5"}, 3, "dense_steps=0-5 keep all 3 steps"),
    (
        "sliding_tile_attn",
        {"skip_time_steps": 1, "dense_steps": "1-"},
        3,
        "=1 and dense_steps=1- keep all 3 steps",
    ),
    ("sliding_tile_attn", {"skip_time_steps": 2}, 3, None),
    ("sliding_tile_attn", {"dense_steps": "0-1"}, 3, None),
    ("vmoba_attn", {"first_full_step": 12}, 3, "first_full_step=12 keep"),
    (
        "vmoba_attn",
        {"first_full_step": 2, "dense_steps": "2-"},
        4,
        "first_full_step=2 and dense_steps=2- keep all 4 steps of this run dense; give fewer, "
        "such as first_full_step=0",
    ),
    ("vmoba_attn", {"first_full_step": 12}, 13, None),
    *(
        ("sparse_video_gen_2_attn", {"svg2_first_times_fp": share}, 3, found)
        for share, found in (
            (1, "svg2_first_times_fp=1.0 keep all 3 steps"),
            (8, "svg2_first_times_fp=8.0 keep all 3 steps"),
            (0.67, None),
        )
    ),
    ("sparse_video_gen_2_attn", {"dense_steps": "0-"}, 3, "dense_steps=0- keep all 3 steps"),
]


@pytest.mark.parametrize(("method", "given", "num_steps", "found"), TOLD)
def test_a_run_without_a_sparse_step_is_told_of_once(
    method: str, given: dict[str, object], num_steps: int, found: str | None, caplog
) -> None:
    sites = [LayerSite(name=str(index), layer=index, num_layers=2) for index in (0, 1)]
    layers = [make_layer(method, site=site, **given) for site in sites]
    qkv = make_qkv(1, math.prod(GRID), 2, 32)
    with torch.no_grad(), set_forward_context(0, latent_grid=GRID, num_steps=num_steps):
        for layer in layers:
            layer(*qkv)
    told = [r.getMessage() for r in caplog.records if "is sparse in no step" in r.getMessage()]
    assert len(told) == (found is not None)
    assert all(text.startswith(f"{method} is sparse in no step: ") for text in told)
    assert all(found in text for text in told)


@pytest.mark.parametrize(
    ("method", "kernel"),
    [
        *(("sliding_tile_attn", name)
          for name in ("gluon", "fa4", "triton", "st_attn", "fastvideo_kernel")),
        ("video_sparse_attn", "triton"),
        ("sage_sla_attn", "gluon"),
        ("sparse_video_gen_2_attn", "gluon"),
    ],
)  # fmt: skip
def test_a_kernel_that_cannot_run_here_is_named_in_the_refusal(method: str, kernel: str) -> None:
    with pytest.raises(UnsupportedBackendError, match=r"needs platform .*, this is cpu") as refusal:
        attend_with(make_layer(method, kernel=kernel), *make_qkv(1, math.prod(GRID), 2, 32))
    text = str(refusal.value)
    assert text.startswith(f"attention backend {method} (settings) with kernel={kernel} cannot ")
    assert text.endswith("what runs here), leave kernel out, or leave the choice to auto")


@pytest.mark.parametrize("name", ["auto", "reference"])
@pytest.mark.parametrize("method", METHODS)
def test_the_kernel_parameter_leaves_the_kernel_it_names(method: str, name: str) -> None:
    (backend,) = backends_of(AttentionBackendEnum(method))
    config = build_config(backend.config_cls, {**GIVEN[method], "kernel": name}, backend=method)
    left = [variant.name for variant in backend.variants_for(config)]
    unasked = [v.name for v in backend.variants if not v.name.endswith(SAGE)]
    assert left == (unasked if name == "auto" else [name])


@pytest.mark.parametrize(
    ("method", "parameters", "given"),
    [
        ("video_sparse_attn", {"sparsity": 0}, "with defaults on the latent grid (4, 6, 8), as"),
        ("sla_attn", {"topk_ratio": 1.0}, "with topk_ratio=1.0 on the latent"),
        ("sliding_tile_attn", {"window": [99, 99, 99]}, "with window=(99,"),
    ],
)
def test_a_method_that_leaves_nothing_out_says_so_once(
    method: str, parameters: dict[str, object], given: str, caplog
) -> None:
    layer, qkv = make_layer(method, **parameters), make_qkv(1, math.prod(GRID), 2, 32)
    for _ in range(2):
        attend_with(layer, *qkv)
    told = [r.getMessage() for r in caplog.records if "leaves nothing out" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"{method} leaves nothing out in any step, {given}")


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("video_sparse_attn", {"sparsity": 0.5}),
        ("sliding_tile_attn", {"window": [1, 1, 1]}),
    ],
)
def test_a_method_that_leaves_some_out_says_nothing(
    method: str, parameters: dict[str, object], caplog
) -> None:
    attend_with(make_layer(method, **parameters), *make_qkv(1, math.prod(GRID), 2, 32))
    assert "leaves nothing out" not in caplog.text
