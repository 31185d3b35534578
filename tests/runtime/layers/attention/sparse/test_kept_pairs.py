"""What sparse calls tell of the pairs they keep, against what came out of them."""

import pytest
import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import record_plan, recorded_pairs
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context

GRID, TEXT, HEADS, SIZE = (3, 5, 6), 4, 4, 32
TOKENS = GRID[0] * GRID[1] * GRID[2] + TEXT
METHODS = (
    "sol_attn:topk_ratio=0.3,neighbours=0,tail=none,dense_steps=0,dense_layers=9",
    "sliding_tile_attn:window=[1,1,3],skip_time_steps=0,tile_size=[1,2,2]",
    "video_sparse_attn:sparsity=0.5",
    "sla_attn:topk_ratio=0.3,BLKQ=64,BLKK=64",
    "vmoba_attn:temporal_chunk_size=1,temporal_topk=2,spatial_chunk_size=[2,3],spatial_topk=2,"
    "st_chunk_size=[1,2,3],st_topk=3,moba_select_mode=topk,first_full_step=0,first_full_layer=0",
    "sparse_video_gen_2_attn:svg2_top_p_kmeans=0.5,svg2_num_q_centroids=5,svg2_num_k_centroids=9,"
    "svg2_kmeans_iter_init=2,svg2_first_layers_fp=0,svg2_first_times_fp=0",
)


def layer_of(text: str) -> LocalAttention:
    backend, _, parameters = text.partition(":")
    scope = scope_from(
        attention_backend=backend, attention_backend_config=f"{parameters},dense_above=1"
    )
    site = LayerSite(name="blocks.1", component="transformer", layer=1, num_layers=2)
    return LocalAttention(HEADS, SIZE, HEADS // 2, site=site, scope=scope)


@pytest.mark.slow_cases("sparse_video_gen_2_attn-True-True")
@pytest.mark.parametrize(
    ("masked", "text_first"),
    [
        (False, False),
        (True, True),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("text", METHODS, ids=lambda text: text.partition(":")[0])
def test_what_is_told_is_what_rows_attend_to(text: str, masked: bool, text_first: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, TOKENS, h, SIZE, generator=generator) for h in (HEADS, HEADS // 2))
    mask = None
    if masked:
        mask = torch.ones(1, TOKENS, dtype=torch.bool)
        mask[:, 20:33] = False
    span = TextSpan(start=0 if text_first else TOKENS - TEXT, length=TEXT)
    layer, parts = layer_of(text), []
    with set_forward_context(0, num_steps=1, latent_grid=GRID, text_span=span):
        with recorded_pairs() as told:
            layer(q, k, torch.zeros_like(k), attn_mask=mask)
        for first in range(0, TOKENS, SIZE):  # values that name their key
            count = min(SIZE, TOKENS - first)
            v = torch.zeros_like(k)
            v[0, first : first + count, :, :count] = torch.eye(count).unsqueeze(1)
            parts.append(layer(q, k, v, attn_mask=mask)[0, :, :, :count])
    seen = torch.cat(parts, dim=2).transpose(0, 1) > 0  # [H, S, S]
    rows = torch.arange(0, TOKENS, 3)
    kept = torch.zeros(HEADS, len(rows), TOKENS, dtype=torch.bool)
    for part in told:
        count = part.heads.stop - part.heads.start
        for head in range(count):  # some of the heads at a time
            kept[part.heads.start + head] = part.of_rows(rows, slice(head, head + 1))[0, 0]
    assert sorted(h for p in told for h in range(p.heads.start, p.heads.stop)) == [*range(HEADS)]
    if mask is not None:  # masked pairs have no weight, whether they are kept or not
        kept &= mask
        rows, kept = rows[mask[0, rows]], kept[:, mask[0, rows]]
    assert 0.05 < seen.double().mean() < 0.99
    assert torch.equal(kept, seen[:, rows])


def test_nothing_is_told_where_nobody_asks() -> None:
    blocks = Blocks.regular(8, 4)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    record_plan(slice(0, 1), plan, (8, 8))
    with recorded_pairs() as told:
        record_plan(slice(0, 1), plan, (8, 8))
    record_plan(slice(0, 1), plan, (8, 8))
    assert len(told) == 1
    assert told[0].of_rows(torch.tensor([1, 6]), slice(0, 1)).all()
