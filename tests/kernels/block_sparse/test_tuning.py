"""The tuned constants: every request has a tile that fits the machine."""

import itertools

import pytest

from multimodal_gen.kernels.block_sparse.tuning import portable_tile


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0), None])
@pytest.mark.parametrize("limit", [65536, 101376, 166912, 232448])
def test_portable_tiles_fit_into_shared_memory(
    capability: tuple[int, int] | None, limit: int
) -> None:
    for head_size, q_size in itertools.product((32, 64, 96, 128), (16, 64, 128, 384)):
        tile = portable_tile(
            head_size=head_size, q_size=q_size, capability=capability, shared_memory=limit
        )
        padded = 64 if head_size <= 64 else 128
        assert tile.shared_memory(padded) <= limit
        assert tile.rows == (64 if q_size <= 64 else 128)


def test_a_small_machine_gets_fewer_stages_not_another_tile() -> None:
    large, small = (
        portable_tile(head_size=128, q_size=64, capability=(9, 0), shared_memory=limit)
        for limit in (232448, 101376)
    )
    assert small.stages < large.stages
    assert (small.rows, small.keys, small.warps) == (large.rows, large.keys, large.warps)
