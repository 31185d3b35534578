import re
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.engine import SelectedKernel
from multimodal_gen.kernels.tile_order.api import tile_order
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.router import window_patterns
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.upstream import (
    attend_upstream,
    upstream_reasons,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    tiled_sequence,
)

WAN = {"grid": (18, 48, 80), "tile": (6, 8, 8), "windows": ((3, 3, 3), (1, 6, 10))}
HUNYUAN = {**WAN, "grid": (30, 48, 80), "query_text": 64, "key_text": 64}


def make_call(
    *, grid, query_text=0, key_text=0, masked=False, scale=None, head_size=128, heads=2, kv_heads=2
) -> SparseCall:
    """Return a call of so many tokens, whose tensors take no memory."""
    video = grid[0] * grid[1] * grid[2]
    queries, keys = video + query_text, video + key_text
    key = torch.empty(1, keys, kv_heads, head_size, device="meta")
    return SparseCall(
        query=torch.empty(1, queries, heads, head_size, device="meta"),
        key=key,
        value=key,
        layout=SequenceLayout(grid=grid, start=0, num_queries=queries, num_keys=keys),
        scale=head_size**-0.5 if scale is None else scale,
        kernel=SelectedKernel("st_attn"),
        mask=torch.empty(1, keys, dtype=torch.bool, device="meta") if masked else None,
    )


def reasons(*, tile, windows, **call) -> tuple[str, ...]:
    return upstream_reasons(make_call(**call), tile_order(call["grid"], tile), windows)


def test_published_grids_and_windows_fit() -> None:
    assert reasons(**WAN) == ()
    assert reasons(**HUNYUAN) == ()
    assert reasons(**{**WAN, "grid": (36, 48, 48), "windows": ((6, 6, 6), (1, 6, 1))}) == ()


def test_windows_are_spelled_as_what_they_keep() -> None:
    tiles = tile_order(WAN["grid"], WAN["tile"]).tiles
    patterns = window_patterns(((2, 2, 2), (99, 99, 99)), tiles)
    windows = tuple(pattern.window for pattern in patterns)
    assert windows == ((3, 3, 3), (3, 6, 10))
    assert reasons(**{**WAN, "windows": windows}) == ()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({**WAN, "grid": (21, 45, 80)}, "needs a latent grid of 30x48x80, .*, got 21x45x80"),
        ({**WAN, "tile": (4, 4, 4)}, "needs tiles of 6x8x8 tokens, got 4x4x4"),
        ({**WAN, "windows": ((3, 3, 9), (3, 3, 3))}, "needs windows among .*, got 3x3x9$"),
        ({**WAN, "query_text": 5, "key_text": 5}, "needs no text on this grid, got 5 text tokens"),
        ({**HUNYUAN, "query_text": 0, "key_text": 0}, "1 to 256 text tokens on this grid, got 0"),
        ({**HUNYUAN, "query_text": 300, "key_text": 300}, "1 to 256 text tokens .*, got 300"),
        ({**HUNYUAN, "key_text": 20}, "got 64 queries and 20 keys"),
        ({**WAN, "masked": True}, "has no key mask, and keys are masked"),
        ({**WAN, "head_size": 64}, "needs a head size of 128, got 64"),
        ({**WAN, "scale": 1.0}, "inverse root of the head size as scale, got 1 for 128"),
        ({**WAN, "kv_heads": 1}, "needs as many key heads as the 2, got 1"),
    ],
)
def test_each_reason_gives_requirement_and_actual(call, reason) -> None:
    (found,) = reasons(**call)
    assert re.search(reason, found)


def test_a_call_that_does_not_fit_is_refused_with_every_reason() -> None:
    call = make_call(grid=(3, 8, 8), masked=True)
    keys = tiled_sequence(call.layout, call.layout.num_keys, (3, 8, 8), torch.device("cpu"))
    with pytest.raises(
        UnsupportedBackendError, match=r"kernel st_attn .*3x8x8; .*has no key mask.*kernel=auto"
    ):
        attend_upstream(call, keys, ((1, 1, 1),) * 2, "sliding_tile_attn")


@pytest.mark.slow_cases("fastvideo_kernel-seq_shape")
@pytest.mark.parametrize(
    ("package", "shape"), [("st_attn", "dit_seq_shape"), ("fastvideo_kernel", "seq_shape")]
)
def test_tokens_go_there_in_tile_order_and_come_back(monkeypatch, package, shape) -> None:
    """The stand-in weighs every token by its position, so that a wrong order shows."""
    call = make_call(grid=WAN["grid"], heads=1, kv_heads=1)
    layout = call.layout
    keys = tiled_sequence(layout, layout.num_keys, WAN["tile"], torch.device("cpu"))
    order = keys.order.order
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
    call = replace(call, query=query, key=key, value=value, kernel=SelectedKernel(package))
    out = attend_upstream(call, keys, ((3, 3, 3),), "sliding_tile_attn")
    expected = torch.empty_like(value)
    expected[:, order.long()] = value[:, order.long()] * weights[:, None, None]
    assert torch.equal(out, expected)
