"""Kept pairs are told while somebody asks; test_method.py compares them with every method's."""

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import record_plan, recorded_pairs


def test_nothing_is_told_where_nobody_asks() -> None:
    blocks = Blocks.regular(8, 4)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    record_plan(slice(0, 1), plan, (8, 8))
    with recorded_pairs() as told:
        record_plan(slice(0, 1), plan, (8, 8))
    record_plan(slice(0, 1), plan, (8, 8))
    assert len(told) == 1
    assert told[0].of_rows(torch.tensor([1, 6]), slice(0, 1)).all()


def test_queries_beyond_a_plan_attend_to_every_key() -> None:
    blocks = Blocks.regular(8, 4)
    plan = BlockPlan.from_map(torch.eye(2, dtype=torch.bool)[None, None], blocks, blocks)
    with recorded_pairs() as told:
        record_plan(slice(0, 1), plan, (10, 8))
    own, other, beyond = told[0].of_rows(torch.tensor([1, 6, 9]), slice(0, 1))[0, 0].tolist()
    assert own == 4 * [True] + 4 * [False]
    assert other == 4 * [False] + 4 * [True]
    assert beyond == 8 * [True]
