"""The Triton kernels against the definition, under the interpreter.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own:
test_children.py starts it.
"""

import pytest
import torch

from multimodal_gen.kernels.select.row_reference import (
    ChunkGroups,
    SortedRows,
    merge_parts_reference,
)
from tests.helpers.inputs import random
from tests.kernels.select.naive_rows import assert_sorted, random_bits

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)


def sort(bits: torch.Tensor, groups: ChunkGroups, *, extra: bool, block: int = 128) -> SortedRows:
    from multimodal_gen.kernels.select.row_kernel import sort_rows

    return sort_rows(bits, groups, block=block, extra=extra)


@pytest.mark.slow_cases("13-4-192-True", "5-5-192-False")
@pytest.mark.parametrize(
    ("num_chunks", "size", "block", "extra"),
    [
        (1, 1, 128, True),
        (5, 5, 192, False),
        pytest.param(13, 4, 128, False, marks=pytest.mark.slow),
        (13, 4, 192, True),
        pytest.param(40, 7, 128, True, marks=pytest.mark.slow),
    ],
)
def test_every_group_holds_the_rows_that_chose_any_of_its_chunks(num_chunks, size, block, extra):
    from multimodal_gen.kernels.select.row_kernel import move_rows

    query = random(2, 2, 200, 24).transpose(1, 2)
    bits = random_bits((2, 2, 200), num_chunks)
    groups = ChunkGroups(num_chunks=num_chunks, size=size)
    rows = sort(bits, groups, extra=extra, block=block)
    moved = move_rows(query, rows)
    assert_sorted(rows, moved, query, bits, groups, extra=extra)


def test_the_rows_of_some_heads_move_and_merge_as_those_heads_rows():
    from multimodal_gen.kernels.select.row_kernel import merge_parts, move_rows

    groups = ChunkGroups(num_chunks=5, size=2)
    query, bits = random(2, 140, 3, 16), random_bits((2, 3, 140), 5)
    rows = sort(bits, groups, extra=True).of_heads(slice(1, 3))
    query, bits = query[:, :, 1:], bits[:, 1:]
    moved = move_rows(query, rows)
    assert_sorted(rows, moved, query, bits, groups, extra=True)
    out = torch.empty_like(query)
    merge_parts(moved, torch.zeros(2, 6, rows.room), rows, out)
    torch.testing.assert_close(out, query, rtol=1e-6, atol=1e-6)


@pytest.mark.slow_cases("dtype1")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_merged_parts_are_the_definition(dtype):
    from multimodal_gen.kernels.select.row_kernel import merge_parts

    groups = ChunkGroups(num_chunks=9, size=4)
    rows = sort(random_bits((2, 2, 140), 9), groups, extra=False)
    room = rows.room
    parts, lse = random(2, room, 6, 24, dtype=dtype), random(2, 6, room, seed=1) * 5
    lse[:, :, ::7] = -torch.inf
    parts[:, ::7] = torch.nan
    out = torch.empty(2, 140, 3, 24, dtype=dtype)[:, :, 1:]
    merge_parts(parts, lse, rows, out)
    wanted = merge_parts_reference(parts, lse, rows)
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, wanted, rtol=rounding, atol=rounding)
