"""."""

import pytest
import torch

from tests.helpers.inputs import LAYOUTS, make_qkv, with_layout


def test_shapes_and_dtype_are_as_asked():
    q, k, v = make_qkv(2, 5, 4, 16, num_keys=7, num_kv_heads=2, dtype=torch.float16)
    assert q.shape == (2, 5, 4, 16)
    assert k.shape == v.shape == (2, 7, 2, 16)
    assert {x.dtype for x in (q, k, v)} == {torch.float16}


def test_no_keys_are_no_keys():
    q, k, v = make_qkv(1, 5, 2, 16, num_keys=0)
    assert (q.shape[1], k.shape[1], v.shape[1]) == (5, 0, 0)


def test_the_same_seed_gives_the_same_numbers_and_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = make_qkv(1, 4, 2, 8, seed=3), make_qkv(1, 4, 2, 8, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first.query, make_qkv(1, 4, 2, 8, seed=4).query)
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_are_as_spread_as_in_a_diffusion_transformer():
    for head_size in (64, 128):
        q, k, _ = make_qkv(1, 256, 4, head_size)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * head_size**-0.5
        assert 1.0 < logits.std() < 3.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_values_are_kept_in_memory_of_their_own(layout: str) -> None:
    values = torch.randn(2, 5, 3, 8)
    found = with_layout(values, layout)
    assert torch.equal(found, values)
    assert found.data_ptr() != values.data_ptr()


def test_the_layouts_differ_in_their_strides() -> None:
    values = torch.randn(2, 5, 3, 8)
    assert len({with_layout(values, layout).stride() for layout in LAYOUTS}) == len(LAYOUTS)


def test_what_lies_around_a_slice_of_the_heads_is_nan() -> None:
    found = with_layout(torch.zeros(1, 2, 3, 8), "a slice of the heads")
    assert found._base is not None
    assert int(found._base.isnan().sum()) == 2 * 4 * 8
