"""Block plans: what they accept, what they refuse, what they count."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse import plan as plan_module
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks, check_arguments
from tests.helpers.block_plans import PlanShape, dense_mask, random_plan
from tests.helpers.drawn import plan_shapes

Q = Blocks.regular(100, 64)
KV = Blocks.regular(190, 64)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plan_of(**changes: object) -> BlockPlan:
    every = torch.arange(3, dtype=torch.int32).expand(1, 1, 2, 3)
    fields = {"indices": every, "counts": int32(3, 3).view(1, 1, 2), "q": Q, "kv": KV}
    return BlockPlan(**(fields | changes))


SHAPES = plan_shapes(
    heads=(1, 3), num_q=4, num_kv=40, q_size=(1, 5, 16), kv_size=(1, 7, 16), row_bits=True
)


@given(SHAPES, st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_a_random_plan_is_valid_and_counts_the_pairs_of_its_mask(
    shape: PlanShape, seed: int
) -> None:
    plan = random_plan(shape, seed=seed).check()
    mask = dense_mask(plan, shape.batch, shape.heads)
    pairs = plan.pairs().expand(shape.batch, shape.heads)
    assert torch.equal(pairs, mask.sum((2, 3)))


def test_density_is_the_share_of_kept_pairs() -> None:
    keep = torch.tensor([[True, False, True], [False, False, True]]).view(1, 1, 2, 3)
    plan = BlockPlan.from_map(keep, Q, KV)
    assert float(plan.density()) == pytest.approx((64 * (64 + 62) + 36 * 62) / (100 * 190))


def test_padding_does_not_count_towards_density() -> None:
    padded = Blocks.padded(int32(64, 10), 64)
    plan = BlockPlan.dense(padded, padded, "cpu")
    assert float(plan.density()) == pytest.approx(1.0)


def test_density_of_a_plan_without_rows_is_zero() -> None:
    none = Blocks.padded(int32(0, 0), 64)
    assert float(BlockPlan.dense(none, none, "cpu").density()) == 0.0


def test_a_dense_plan_takes_no_memory_per_row() -> None:
    plan = BlockPlan.dense(Blocks.regular(10**6, 64), Blocks.regular(10**6, 64), "cpu")
    assert plan.indices.untyped_storage().nbytes() < 10**5
    assert plan.counts.untyped_storage().nbytes() == 4
    assert plan.uniform


def test_a_map_becomes_increasing_lists() -> None:
    keep = torch.tensor([[True, False, True], [False, False, False]]).view(1, 1, 2, 3)
    plan = BlockPlan.from_map(keep, Q, KV).check()
    assert plan.counts.flatten().tolist() == [2, 0]
    assert plan.indices[0, 0, 0, :2].tolist() == [0, 2]


def test_max_count_bounds_the_lists_and_drops_the_last_blocks() -> None:
    keep = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    plan = BlockPlan.from_map(keep, Q, KV, max_count=2).check()
    assert plan.indices.shape == (1, 1, 2, 2)
    assert plan.indices[0, 0, 1].tolist() == [0, 1]
    assert plan.counts.flatten().tolist() == [2, 2]


def test_longest_first_orders_rows_by_their_counts_and_keeps_ties_in_place() -> None:
    plan = BlockPlan.from_map(
        torch.tensor([[True, False, False], [True, True, True]]).view(1, 1, 2, 3), Q, KV
    )
    ordered = plan.longest_first()
    assert ordered.order is not None
    assert ordered.order.tolist() == [1, 0]
    assert ordered.longest_first() is ordered


def test_heads_follow_each_other_behind_rows_that_would_end_late() -> None:
    counts = torch.tensor([[[3, 4, 3], [4, 20, 0]]], dtype=torch.int32)
    blocks = Blocks(num=20, size=1, total=20)
    indices = torch.arange(20, dtype=torch.int32).expand(1, 2, 3, 20).contiguous()
    plan = BlockPlan(indices=indices, counts=counts, q=Blocks(num=3, size=1, total=3), kv=blocks)
    ordered = plan.head_by_head().check()
    assert ordered.order is not None
    assert ordered.order.tolist() == [4, 1, 0, 2, 3, 5]


def test_a_uniform_plan_needs_no_order() -> None:
    plan = BlockPlan.dense(Q, KV, "cpu")
    assert plan.longest_first() is plan


def test_moving_a_plan_keeps_its_values() -> None:
    plan = random_plan(PlanShape(q_form="ragged", kv_form="padded", row_bits=True), seed=1)
    moved = plan.longest_first().to("cpu")
    assert torch.equal(dense_mask(plan, 1, 1), dense_mask(moved, 1, 1))
    assert moved.order is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Blocks.regular(10, 0), "`size` must be at least 1, got 0"),
        (lambda: Blocks.regular(0, 64), "must be at least 1, got 0"),
        (lambda: Blocks(num=1, size=64, total=100), r"`num` must be ceil\(total / size\) = 2"),
        (lambda: Blocks(num=3, size=64, total=100), r"`num` must be ceil\(total / size\) = 2"),
        (lambda: Blocks.padded(torch.ones(3), 64), "`lengths` must be int32, got torch.float32"),
        (lambda: Blocks.padded(int32(1, 2).view(1, 2), 64), r"`lengths` must be \[B\|1, H\|1, N\]"),
        (
            lambda: Blocks(num=3, size=4, total=12, lengths=int32(1, 2).view(1, 1, 2)),
            "`lengths` must hold one value per block, got 2 values for 3 blocks",
        ),
        (
            lambda: Blocks(num=2, size=4, total=9, lengths=int32(1, 2).view(1, 1, 2)),
            r"`total` must be num \* size = 8 for padded blocks, got 9",
        ),
        (
            lambda: Blocks(num=2, size=4, total=9, starts=int32(1, 2).view(1, 1, 2)),
            "`lengths` must be given with `starts`",
        ),
        (lambda: plan_of(indices=torch.zeros(1, 1, 2, 3)), "`indices` must be int32"),
        (lambda: plan_of(counts=int32(1, 1)), r"`counts` must be \[B\|1, H\|1, Nq\]"),
        (lambda: plan_of(counts=int32(1, 1, 1).view(1, 1, 3)), "`counts` must have the shape of"),
        (lambda: plan_of(q=Blocks.regular(64, 64)), r"one value per query block \(1\), got 2"),
        (lambda: plan_of(kv=Blocks.regular(65, 64)), "room for 1 to 2 key blocks per row, got 3"),
        (
            lambda: plan_of(row_bits=torch.zeros(1, 1, 100, 2, dtype=torch.int32)),
            r"`row_bits` must be \[B\|1, H\|1, 100, 1\]",
        ),
        (lambda: plan_of(order=int32(0)), r"one value per row of `counts` \(2\), got 1"),
        (lambda: plan_of(counts=torch.zeros(1, 1, 2, dtype=torch.int32, device="meta")), "on one"),
        (
            lambda: BlockPlan.from_map(torch.ones(1, 1, 2, 3), Q, KV),
            r"`block_mask` must be bool \[B\|1, H\|1, Nq, Nk\], got torch.float32",
        ),
        (
            lambda: BlockPlan.from_map(torch.ones(1, 1, 3, 3, dtype=torch.bool), Q, KV),
            "`block_mask` must map 2 query blocks to 3 key blocks",
        ),
    ],
)
def test_a_malformed_plan_is_refused_with_the_reason(make: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": int32(4, 0).view(1, 1, 2)}, r"`counts` must lie in \[0, 3\]"),
        ({"indices": int32(0, 1, 3).expand(1, 1, 2, 3)}, r"`indices` must lie in \[0, 3\)"),
        ({"indices": int32(0, 2, 2).expand(1, 1, 2, 3)}, "`indices` must be strictly increasing"),
        (
            {
                "q": Blocks.ragged(int32(0, 60), int32(60, 61), total=100, size=64),
            },
            r"`q` blocks must lie in \[0, 100\)",
        ),
        (
            {"kv": Blocks.padded(int32(64, 65, 1), 64)},
            r"`kv.lengths` must lie in \[0, 64\]",
        ),
        (
            {"q": Blocks.ragged(int32(0, 40), int32(50, 50), total=100, size=64)},
            "`q` blocks must be disjoint, two of them overlap",
        ),
        ({"order": int32(1, 1)}, "`order` must hold each of the 2 rows of `counts` once"),
        ({"order": int32(5, -1)}, "`order` must hold each of the 2 rows of `counts` once"),
        (
            {"uniform": True, "counts": int32(1, 3).view(1, 1, 2)},
            "`uniform` must be given only where all counts are equal",
        ),
        (
            {"uniform": True, "causal": True, "counts": int32(1, 1).view(1, 1, 2)},
            "`causal` must be given only with plans that keep every block",
        ),
    ],
)
def test_values_out_of_range_are_found_by_check(changes: dict[str, object], message: str) -> None:
    plan = plan_of(**changes)
    with pytest.raises(UsageError, match=message):
        plan.check()


def test_entries_past_the_count_are_not_checked() -> None:
    indices = int32(2, 99, -1).expand(1, 1, 2, 3)
    plan = plan_of(indices=indices, counts=int32(1, 0).view(1, 1, 2)).check()
    assert plan.pairs().item() == 64 * 62


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
        plan_of().uniform = True  # type: ignore[misc]


@pytest.mark.parametrize("capturing", [False, True])
def test_what_is_derived_while_a_graph_is_captured_is_not_kept(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks.regular(8, 4)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    assert plan.remember("here", 1) == plan.cache["here"] == 1
    monkeypatch.setattr(BlockPlan, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert plan.remember("there", 2) == 2
    assert ("there" in plan.cache) is not capturing


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_derived_from_a_shared_plan_is_there_for_every_stream(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    plan = dataclasses.replace(plan_of(), shared=shared)
    monkeypatch.setattr(
        plan_module, "wait_for_devices", lambda device: done.append((device, "lists" in plan.cache))
    )
    for _ in range(2):
        plan.derive("lists", lambda: done.append("made") or 1)
    # No other thread finds it before.
    assert done == ["made", (plan.device, False)][: 1 + shared]


def test_a_plan_remembers_what_fits_it_and_nothing_else() -> None:
    blocks = Blocks.regular(8, 4)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    q, k = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 2, 4)
    for _ in range(2):
        check_arguments(q, k, k, plan, None)
        with pytest.raises(UsageError, match="`k` must have q's dtype"):
            check_arguments(q, k.half(), k, plan, None)
        with pytest.raises(UsageError, match="`q` must have the 8 tokens"):
            check_arguments(q[:, 1:], k, k, plan, None)
        with pytest.raises(UsageError, match="`scale` must be positive"):
            check_arguments(q, k, k, plan, -1.0)
