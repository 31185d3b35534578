"""What Sol-Attn has of its own, against its definition written down block by block."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.block_sparse import api
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.sparse.methods.sol import SolConfig
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.settings import read_mapping
from tests.helpers.methods import DEFINED, above, tiles
from tests.helpers.sparse import run_sparse, text_places

SOL = DEFINED["sol"]
METHOD, GRID, layer = SOL.method, SOL.grid, SOL.method.layer
TEXTS = text_places(GRID, 70)


@pytest.mark.slow_cases("tile0")
@pytest.mark.parametrize("tile", [(4, 4, 4), (2, 8, 8)])
def test_blocks_may_be_tiles_of_the_grid(tile):
    in_tiles = replace(SOL, cut=tiles(*tile), varied=tiles(*tile))
    in_tiles.check(TEXTS["text last"], tile_size=tile, tail="pooled")


def test_the_best_blocks_may_be_exact_instead():
    SOL.check(topk_ratio=0.3, tail="pooled", rule={"topk": 0.3})


@pytest.mark.slow_cases("0-inside0", "130-inside1")
@pytest.mark.parametrize(("start", "inside"), [(0, [0, 1]), (130, [2, 3]), (None, [8, 9])])
def test_the_sink_is_exact_for_all_and_attends_to_all_where_asked(start, inside):
    sink = replace(SOL, choose=partial(above, inside=inside))
    given = {"sink_tokens": 70, "sink_start": start, "tail": "pooled"}
    sink.check(**given)
    sink.check(**given, sink_rows=True, rule={"rows": True})


def test_positions_of_the_sink_are_those_of_the_sequence():
    text = TEXTS["text first"]  # 70 tokens, then the video
    SOL.check(text, sink_tokens=100, sink_start=0, tail="pooled", rule={"inside": [0]})


def test_a_number_of_dense_steps_means_the_first_ones():
    assert METHOD.config(dense_steps=10).dense_parts("steps")[0].given == "dense_steps=10"
    for given, dense in ((2, {0, 1}), ("1", {1}), ("0-1,3", {0, 1, 3}), (0, set())):
        parts = METHOD.config(dense_steps=given).dense_parts("steps")
        steps = {i for i in range(5) if any(part.indices.holds(i, 5) for part in parts)}
        assert steps == dense, given
    defaults = SolConfig()
    assert {i for part in defaults.dense_parts("steps") for i in range(50)
            if part.indices.holds(i, 50)} == set(range(10))  # fmt: skip
    assert [str(part.indices) for part in defaults.dense_parts("layers")] == ["0-1"]
    assert defaults.tail == "pooled"


def test_settings_of_the_sources_are_taken():
    folder = Path(__file__).parents[6] / "configs" / "attention"
    files = [folder / "sol_attn.yaml", *sorted((folder / "sol_attn").glob("*.yaml"))]
    assert len(files) == 4
    for file in files:
        METHOD.config(**read_mapping(str(file)))
    for splits in ("auto", 1, 2, 4):
        assert METHOD.config(kv_splits=splits).kv_splits == splits


def test_blocks_are_cut_in_one_way():
    with pytest.raises(ConfigError, match="`tile_size` of sol_attn must not be given with"):
        METHOD.config(block_size=128, tile_size=[4, 4, 4])


def calls_of(layer):
    """Return how many calls were dense, and how many were not."""
    counts = {True: 0, False: 0}
    for entry in layer.report().entries:
        counts[not entry.selection.backend.is_sparse] += entry.calls
    return counts[True], counts[False]


def test_two_passes_of_guidance_are_one_step_and_every_run_begins_anew():
    attention, qkv = layer(dense_steps=2), METHOD.inputs(GRID, batch=1)
    for run in range(1, 3):
        for step in range(4):
            for branch in ("cond", "uncond"):
                known = {"num_steps": 4, "request_id": str(run), "cfg_branch": branch}
                run_sparse(attention, qkv, GRID, step=step, known=known)
        assert calls_of(attention) == (4 * run, 4 * run)


def test_a_kernel_that_fails_is_not_replaced_by_dense_attention(monkeypatch):
    def fail(call):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(api, "RUN", {**api.RUN, "reference": fail})
    attention = layer(kernel="reference", tail="pooled")
    with pytest.raises(RuntimeError, match="out of registers"):
        run_sparse(attention, METHOD.inputs(GRID), GRID)
    assert calls_of(attention) == (0, 0)


def test_dense_steps_are_those_of_the_dense_baseline():
    qkv = METHOD.inputs(GRID)
    baseline = LocalAttention(METHOD.heads, METHOD.head_size, compute_dtype=torch.float32)
    with torch.no_grad(), set_forward_context(0, latent_grid=GRID, num_steps=2):
        assert torch.equal(layer(dense_steps=1)(*qkv), baseline(*qkv))
