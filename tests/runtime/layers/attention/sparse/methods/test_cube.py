"""Cube sparse attention through the layer, against its definition, one cube at a time."""

import pytest
import torch

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.layers.attention.sparse.methods.cube import CubeConfig
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    SparseMethod,
    best_blocks,
    block_inputs,
    joint_mask,
    pair_mask,
    run_sparse,
    text_places,
    tokens_of_tiles,
    video_tokens,
)
from tests.helpers.tail import pooled_attention

GRID, CUBE = (5, 6, 9), (2, 4, 4)  # 18 cubes, of which those at the borders are smaller
TEXTS = text_places(GRID, 20)
METHOD = SparseMethod(
    backend=AttentionBackendEnum.CUBE_SPARSE_ATTN,
    config_cls=CubeConfig,
    given={"local_cube_size": list(CUBE), "dense_above": 1.0},
    heads=2,
)
SCALE, layer = METHOD.scale, METHOD.layer


def check(attention, text=None, *, kept, token_mask=None, batch=1, step=0, tail=False, known=None):
    blocks, video = tokens_of_tiles(GRID, CUBE, text), video_tokens(GRID, text)
    qkv = block_inputs(METHOD.inputs(GRID, text=text, batch=batch, kv_heads=1), blocks)
    out = run_sparse(attention, qkv, GRID, text=text, attn_mask=token_mask, step=step, known=known)
    chosen = best_blocks(qkv.query, qkv.key, blocks, blocks, kept, token_mask=token_mask)
    chosen |= torch.eye(len(blocks), dtype=torch.bool)
    tokens = qkv.query.shape[1]
    mask = joint_mask(pair_mask(chosen, blocks, blocks, tokens, tokens), video, token_mask)
    if tail:
        want = pooled_attention(*qkv, mask, blocks, scale=SCALE, rows=video, token_mask=token_mask)
    else:
        want, _ = reference_attention(*qkv, scale=SCALE, mask=mask)
    real = slice(None) if token_mask is None else token_mask[:, :, None, None].expand_as(out)
    torch.testing.assert_close(out.double()[real], want[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", TEXTS)
def test_the_best_cubes_and_itself_are_kept_and_text_is(where):
    check(layer(kv_heads=1, topk_ratio=0.25), TEXTS[where], kept=4)  # floor(0.25 * 18)


def test_masked_tokens_are_in_no_mean():
    token_mask = torch.arange(2 * 290).view(2, -1) % 7 != 3
    check(
        layer(kv_heads=1, topk_ratio=0.2),
        TEXTS["text last"],
        kept=3,
        token_mask=token_mask,
        batch=2,
    )


def test_what_is_not_kept_may_count_by_its_means():
    check(layer(kv_heads=1, topk_ratio=0.2, tail="pooled"), kept=3, tail=True)


def test_every_step_has_a_ratio_of_its_own_and_those_of_1_are_dense():
    attention = layer(kv_heads=1, topk_ratio_list=[1.0, 0.5, 0.01])
    for step, kept in enumerate((18, 9, 1)):
        check(attention, kept=kept, step=step, known={"num_steps": 3})
    dense, sparse = attention.report().entries
    assert dense.steps == "0"
    assert "topk_ratio_list of 1" in dense.selection.reason
    assert [step for step, _ in sparse.densities] == [1, 2]


def test_a_step_keeps_its_ratio_however_often_the_model_is_called():
    # As it is twice, where the branches of guidance are calls of their own.
    attention = layer(kv_heads=1, topk_ratio_list=[0.5, 0.1])
    for step, kept in ((0, 9), (0, 9), (1, 1), (1, 1)):
        check(attention, kept=kept, step=step, known={"num_steps": 2})


def test_a_list_for_another_number_of_steps_is_refused():
    attention = layer(topk_ratio_list=[0.5, 0.5])
    wanted = "`topk_ratio_list` of cube_sparse_attn must have one ratio for each of the run's 3"
    with set_forward_context(0, latent_grid=GRID, num_steps=3) as context:
        for route in attention.schedule():
            with pytest.raises(ConfigError, match=wanted):
                route.check_run(context)
    with pytest.raises(ConfigError, match="must have a ratio for step 2, got 2 ratios"):
        run_sparse(attention, METHOD.inputs(GRID), GRID, step=2)


def test_a_ratio_is_given_once():
    with pytest.raises(ConfigError, match="`topk_ratio` of cube_sparse_attn must not be given wi"):
        METHOD.config(topk_ratio=0.3, topk_ratio_list=[0.5])
    with pytest.raises(ConfigError, match="must have one ratio for every step, got none"):
        METHOD.config(topk_ratio_list=[])
