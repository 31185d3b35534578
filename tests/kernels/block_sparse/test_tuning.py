"""The tuned constants: every request has a tile that fits the machine."""

import itertools

import pytest

from multimodal_gen.kernels.block_sparse.tuning import gluon_tile, triton_tile


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0), None])
@pytest.mark.parametrize("limit", [65536, 101376, 166912, 232448])
def test_portable_tiles_fit_into_shared_memory(
    capability: tuple[int, int] | None, limit: int
) -> None:
    sizes = (1, 16, 64, 128, 384)
    for head_size, q_size, kv_size in itertools.product((32, 64, 96, 128), sizes[1:], sizes):
        tile = triton_tile(
            head_size=head_size,
            q_size=q_size,
            kv_size=kv_size,
            capability=capability,
            shared_memory=limit,
        )
        assert kv_size % 128 == 0 or tile.keys <= 64
        padded = 64 if head_size <= 64 else 128
        assert 2 * padded * (tile.rows + 2 * tile.keys * tile.stages) <= limit
        assert tile.rows == (64 if q_size <= 64 else 128)


def test_a_small_machine_gets_fewer_stages_not_another_tile() -> None:
    large, small = (
        triton_tile(head_size=128, q_size=128, kv_size=128, capability=(9, 0), shared_memory=limit)
        for limit in (232448, 166912)
    )
    assert small.stages < large.stages
    assert (small.rows, small.keys, small.warps) == (large.rows, large.keys, large.warps)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("regular", [True, False])
def test_hopper_tiles_fit_into_shared_memory_and_registers(fast: bool, regular: bool) -> None:
    for q_size, kv_size in itertools.product((16, 64, 128, 192, 256, 384), (16, 64, 96, 128, 384)):
        tile = gluon_tile(
            q_size=q_size, kv_size=kv_size, regular=regular, fast=fast, deterministic=False
        )
        rings = tile.consumers if tile.own else 1
        rows = 64 * tile.consumers + 2 * tile.keys * tile.stages * rings
        assert rows * 128 * 2 <= 232448 - 1024
        threads = 128 * tile.consumers
        assert tile.registers * threads + tile.producer_registers * 128 <= 65536
        assert tile.fast is fast


def test_a_deterministic_tile_does_not_follow_its_neighbours() -> None:
    options = {"q_size": 64, "kv_size": 64, "regular": True, "fast": True}
    assert gluon_tile(**options, deterministic=False).sync > 0
    assert gluon_tile(**options, deterministic=True).sync == 0
