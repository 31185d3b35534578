import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.tile_order.api import tile_order
from multimodal_gen.runtime.layers.attention.sparse.sta.upstream import (
    UpstreamCall,
    attend_upstream,
)

WAN = UpstreamCall(
    grid=(18, 48, 80),
    tile=(6, 8, 8),
    windows=((3, 3, 3), (1, 6, 10)),
    query_text=0,
    key_text=0,
    masked=False,
    scale=128**-0.5,
    head_size=128,
    kv_heads=2,
)
HUNYUAN = replace(WAN, grid=(30, 48, 80), query_text=64, key_text=64)


def test_published_grids_and_windows_fit() -> None:
    assert WAN.reasons() == ()
    assert HUNYUAN.reasons() == ()
    assert replace(WAN, grid=(36, 48, 48), windows=((6, 6, 6), (1, 6, 1))).reasons() == ()


def test_windows_are_spelled_as_what_they_keep() -> None:
    call = replace(WAN, windows=((2, 2, 2), (99, 99, 99)))
    assert call.effective() == [(3, 3, 3), (3, 6, 10)]
    assert call.reasons() == ()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (replace(WAN, grid=(21, 45, 80)), "needs a latent grid of 30x48x80, .*, got 21x45x80"),
        (replace(WAN, tile=(4, 4, 4)), "needs tiles of 6x8x8 tokens, got 4x4x4"),
        (replace(WAN, windows=((3, 3, 9), (3, 3, 3))), "needs windows among .*, got 3x3x9$"),
        (replace(WAN, query_text=5, key_text=5), "needs no text on this grid, got 5 text tokens"),
        (replace(HUNYUAN, query_text=0, key_text=0), "1 to 256 text tokens on this grid, got 0"),
        (replace(HUNYUAN, query_text=300, key_text=300), "1 to 256 text tokens .*, got 300"),
        (replace(HUNYUAN, key_text=20), "got 64 queries and 20 keys"),
        (replace(WAN, masked=True), "has no key mask, and keys are masked"),
        (replace(WAN, head_size=64), "needs a head size of 128 .*, got 64 and 0.0883883"),
        (replace(WAN, scale=1.0), "its inverse root as scale, got 128 and 1"),
        (replace(WAN, kv_heads=1), "needs as many key heads as the 2, got 1"),
    ],
)
def test_each_reason_gives_requirement_and_actual(call, reason) -> None:
    (found,) = call.reasons()
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found)


def test_a_call_that_does_not_fit_is_refused_with_every_reason() -> None:
    empty = torch.empty(1, 1, 2, 128)
    call = replace(WAN, grid=(21, 45, 80), masked=True)
    with pytest.raises(
        UnsupportedBackendError, match=r"kernel st_attn .*21x45x80; has no key mask.*kernel=auto"
    ):
        attend_upstream("st_attn", empty, empty, empty, torch.zeros(1, dtype=torch.int32), call)


@pytest.mark.parametrize(
    ("package", "shape"), [("st_attn", "dit_seq_shape"), ("fastvideo_kernel", "seq_shape")]
)
def test_tokens_go_there_in_tile_order_and_come_back(monkeypatch, package, shape) -> None:
    """The stand-in weighs every token by its position, so that a wrong order shows."""
    call = replace(WAN, windows=((3, 3, 3),), kv_heads=1)
    order = tile_order(call.grid, call.tile).order
    weights = torch.linspace(0, 1, len(order))

    def sliding_tile_attention(q, k, v, window_size, text_length, has_text=True, **grid):
        assert grid == {shape: "18x48x80"}
        assert (window_size, text_length, has_text) == ([(3, 3, 3)], 0, False)
        assert q.shape == k.shape == v.shape == (1, 1, len(order), 128)
        assert q.is_contiguous()
        assert k.is_contiguous()
        assert v.is_contiguous()
        return v * weights[:, None]

    module = ModuleType(package)
    module.sliding_tile_attention = sliding_tile_attention
    monkeypatch.setitem(sys.modules, package, module)
    value = torch.randn(2, len(order), 1, 128)
    query, key = torch.zeros(2, 2, len(order), 1, 128)
    out = attend_upstream(package, query, key, value, order, call)
    expected = torch.empty_like(value)
    expected[:, order.long()] = value[:, order.long()] * weights[:, None, None]
    assert torch.equal(out, expected)
