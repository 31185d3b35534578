"""A cache of chunks against attention over the whole past, computed anew in float64."""

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.kernels.coded_attention.codes import (
    OF_KEYS,
    OF_VALUES,
    dequantise,
    quantise,
)
from multimodal_gen.runtime.layers.attention import (
    LocalAttention,
    UlyssesAttention,
    USPAttention,
    causal_cache,
)
from multimodal_gen.runtime.layers.attention.causal_cache import (
    CacheSize,
    CausalCache,
    key_heads_of_rank,
)
from multimodal_gen.runtime.layers.attention.scope import (
    LayerSite,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import SparseMethod
from tests.helpers.tile_choice import best_tiles, token_tiles

BATCH, HEADS, KV_HEADS, SIZE, TOKENS = 2, 4, 2, 8, 6
SCALE = SIZE**-0.5


def size_of(**fields) -> CacheSize:
    given = {
        "num_layers": 1,
        "batch": BATCH,
        "num_kv_heads": KV_HEADS,
        "head_size": SIZE,
        "chunk_tokens": TOKENS,
        "window": 3,
        "sink": 1,
        "dtype": torch.float64,
    }
    return CacheSize(**{**given, **fields})


def draw(tokens: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(BATCH, tokens, heads, SIZE, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
    """Give tokens from `position` on their rotary embedding."""
    places = torch.arange(position, position + x.shape[1], dtype=torch.float64)
    rates = 100.0 ** -torch.linspace(0, 1, x.shape[3] // 2, dtype=torch.float64)
    turn = torch.polar(torch.ones(()).double(), 0.0 * places[:, None] + places[:, None] * rates)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn[:, None]
    return torch.view_as_real(turned).flatten(-2)


def seen_by(number: int, past: list, window: int, sink: int):
    """Return the chunks that one sees of `past`, whose last is itself."""
    return [x for i, x in enumerate(past) if i < sink or i > number - window]


def assert_sees(out: torch.Tensor, q: torch.Tensor, seen: list, atol: float = 1e-13) -> None:
    """Raise AssertionError unless `out` is attention over keys and values of chunks."""
    keys, values = (torch.cat(x, dim=1) for x in zip(*seen, strict=True))
    want, _ = reference_attention(q, keys, values, scale=SCALE)
    torch.testing.assert_close(out, want.to(out.dtype), rtol=0, atol=atol)


def filled(cache: CausalCache, count: int) -> list:
    """Write chunks into all layers, and return their keys and values."""
    past = []
    for number in range(count):
        past.append(draw(TOKENS, seed=number)[1:])
        for part in cache.layers:
            part.append(*past[-1], start=number * TOKENS)
        cache.commit()
    return past


def lengths_of(count: int, last: int) -> list[int]:
    return [*[TOKENS] * (count - 1), last]


@pytest.fixture
def layer():
    return LocalAttention(HEADS, SIZE, KV_HEADS)


SIZES = [(sink, window) for sink in range(4) for window in (1, 2, 5, 12)]
QUICK = {(0, 1), (1, 5), (2, 2), (3, 12)}


@pytest.mark.parametrize(
    ("sink", "window"),
    [x if x in QUICK else pytest.param(*x, marks=pytest.mark.slow) for x in SIZES],
)
def test_every_step_of_30_chunks_sees_the_past_that_the_model_says(layer, window, sink):
    cache = CausalCache(size_of(window=window, sink=sink))
    past, start = [], 0
    for number, tokens in enumerate(lengths_of(30, last=4)):
        cache.begin(start, tokens)
        for step in range(2):
            q, k, v = draw(tokens, seed=100 * number + step)
            q, k = rotate(q, start), rotate(k, start)
            out = layer(q, k, v, cache=cache.layers[0])
            seen = seen_by(number, [*past, (k, v)], window, sink)
            assert_sees(out, q, seen)
        past.append((k, v))
        cache.commit()
        start += tokens


@pytest.mark.parametrize("positions", ["start", "window"])
def test_keys_before_their_rotary_embedding_get_it_where_they_are_seen(layer, positions):
    cache = CausalCache(size_of(before_rope=True), rotate=rotate, positions=positions)
    past, start = [], 0
    for number, tokens in enumerate([2, *lengths_of(29, last=5)]):
        cache.begin(start, tokens)
        q, k, v = draw(tokens, seed=number)
        seen = seen_by(number, [*past, (start, k, v)], 3, 1)
        places = [x[0] for x in seen]
        if positions == "window":
            places = [sum(x[1].shape[1] for x in seen[:i]) for i in range(len(seen))]
        assert cache.position == places[-1]
        q = rotate(q, cache.position)
        out = layer(q, k, v, cache=cache.layers[0])
        keys = torch.cat([rotate(x[1], p) for x, p in zip(seen, places, strict=True)], dim=1)
        values = torch.cat([x[2] for x in seen], dim=1)
        want, _ = reference_attention(q, keys, values, scale=SCALE)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
        past.append((start, k, v))
        cache.commit()
        start += tokens


@pytest.mark.parametrize(("sink", "window"), [(0, 1), (0, 3), (1, 2), (2, 4)])
def test_a_layer_may_see_less_than_is_kept(layer, sink, window):
    cache = CausalCache(size_of(window=4, sink=2))
    part = cache.layers[0].view(sink, window)
    past = []
    for number, tokens in enumerate(lengths_of(12, last=3)):
        q, k, v = draw(tokens, seed=number)
        cache.begin(number * TOKENS, tokens)
        out = layer(q, k, v, cache=part)
        past.append((k, v))
        seen = seen_by(number, past, window, sink)
        keys, values = (torch.cat(x, dim=1) for x in zip(*seen, strict=True))
        want, _ = reference_attention(q, keys, values, scale=SCALE)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-6)  # merged by an lse in fp32
        cache.commit()


def test_past_chunks_in_8_bits_err_as_their_rounding_lets_them(layer):
    """Errors of 1/254 of a row's largest entry, in K through the weights and in V themselves."""
    cache = CausalCache(size_of(bits=8, window=5))
    past = []
    for number in range(14):
        q, k, v = draw(TOKENS, seed=number)
        cache.begin(number * TOKENS, TOKENS)
        out = layer(q, k, v, cache=cache.layers[0])
        past.append((k, v))
        keys, values = (torch.cat(x, dim=1) for x in zip(*seen_by(number, past, 5, 1), strict=True))
        want, _ = reference_attention(q, keys, values, scale=SCALE)
        off = SCALE * q.abs().sum(-1).max() * keys.abs().max() / 254
        budget = (math.exp(2 * off) - 1) * values.abs().max() + values.abs().max() / 254
        error = (out - want).abs().max()
        assert error <= budget < 0.5
        assert (error > 1e-9) == (number > 0)  # the running chunk itself is exact
        cache.commit()


def in_codes(chunk: tuple, bits: int) -> tuple:
    """Return the keys and values of a chunk as a cache keeps them in codes."""
    sides = zip(chunk, (OF_KEYS, OF_VALUES), strict=True)
    return tuple(dequantise(quantise(x, bits, g), bits, g, x.dtype) for x, g in sides)


def kept_in_codes(past: list, bits: int, recent: int, sink: int) -> list:
    """Return chunks as they are kept while the last of them runs."""
    exact = len(past) - 1 - recent
    return [in_codes(x, bits) if sink <= i < exact else x for i, x in enumerate(past)]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("sink", "window", "recent"), [(1, 5, 1), (0, 4, 0), (2, 4, 2), (3, 3, 1), (0, 2, 0)]
)
def test_chunks_become_codes_when_newer_ones_are_kept(layer, bits, sink, window, recent):
    cache = CausalCache(size_of(bits=bits, window=window, sink=sink, keep_recent_chunks=recent))
    past = []
    for number, tokens in enumerate(lengths_of(14, last=4)):
        cache.begin(number * TOKENS, tokens)
        for step in range(2):
            q, k, v = draw(tokens, seed=100 * number + step)
            out = layer(q, k, v, cache=cache.layers[0])
            kept = kept_in_codes([*past, (k, v)], bits, recent, sink)
            assert_sees(out, q, seen_by(number, kept, window, sink), atol=1e-6)  # merged in fp32
        past.append((k, v))
        cache.commit()


@pytest.mark.parametrize("bits", [2, 4])
def test_past_chunks_in_codes_err_as_half_a_step_lets_them(layer, bits):
    cache = CausalCache(size_of(bits=bits, window=5))
    past = []
    for number in range(10):
        q, k, v = draw(TOKENS, seed=number)
        cache.begin(number * TOKENS, TOKENS)
        out = layer(q, k, v, cache=cache.layers[0])
        past.append((k, v))
        seen = seen_by(number, past, 5, 1)
        keys, values = (torch.cat(x, dim=1) for x in zip(*seen, strict=True))
        want, _ = reference_attention(q, keys, values, scale=SCALE)
        step_of_keys, step_of_values = (
            max(float(quantise(x[side], bits, grouping).scales[..., 1].max()) for x in past)
            for side, grouping in enumerate((OF_KEYS, OF_VALUES))
        )
        # A score is off by this at most, and so a weight by twice that in its exponent.
        off = SCALE * float(q.abs().sum(-1).max()) * step_of_keys / 2
        budget = math.expm1(2 * off) * float(values.abs().max()) + step_of_values / 2
        error = float((out - want).abs().max())
        assert error <= budget
        assert (error > 1e-6) == (number > 2)  # the sink, the newest and the running one are exact
        cache.commit()


# Of docs/pages/guides/streaming.md: the relative error of the output, by window and bits.
ERRORS = {
    (4, 8): 0.008, (4, 4): 0.084, (4, 2): 0.48,
    (20, 8): 0.009, (20, 4): 0.12, (20, 2): 0.66,
}  # fmt: skip


@pytest.mark.parametrize(("window", "bits"), ERRORS)
def test_the_output_errs_as_steps_that_round_at_random_let_it(window, bits):
    """To first order keys and values add sqrt(step^2 / 12) each, in the share that is in codes."""
    tokens, coded = 64, window if bits == 8 else window - 2
    sizes = [
        size_of(
            batch=1,
            num_kv_heads=4,
            head_size=128,
            chunk_tokens=tokens,
            window=window,
            sink=1,
            dtype=torch.float32,
            bits=each,
        )
        for each in (16, bits)
    ]
    caches, layer = [CausalCache(size) for size in sizes], LocalAttention(4, 128)
    generator = torch.Generator().manual_seed(0)
    for number in range(window + 3):
        q, k, v = torch.randn(3, 1, tokens, 4, 128, generator=generator)
        made = []
        for cache in caches:
            cache.begin(start=number * tokens, tokens=tokens)
            made.append(layer(q, k, v, cache=cache.layers[0]))
            cache.commit()
    error = float((made[1] - made[0]).norm() / made[0].norm())
    sides = zip((k, v), (OF_KEYS, OF_VALUES), strict=True)
    steps = [
        x.abs().amax(-1) / 127 if bits == 8 else quantise(x, bits, grouping).scales[..., 1].float()
        for x, grouping in sides
    ]
    noise = sum(float(step.square().mean()) / 12 for step in steps)
    expected = math.sqrt(noise * coded / (window + 1))
    assert 0.9 * expected < error < 1.25 * expected
    assert error == pytest.approx(ERRORS[window, bits], rel=0.07)


def test_at_short_windows_4_bits_take_more_than_8():
    fields = {"num_kv_heads": 12, "head_size": 128, "chunk_tokens": 4680, "num_layers": 30}
    for window in range(3, 13):
        four, eight = (
            size_of(bits=b, window=window, batch=1, dtype=torch.bfloat16, **fields).num_bytes
            for b in (4, 8)
        )
        assert (four < eight) == (window >= 9)


def test_a_view_sees_fewer_codes_or_none(layer):
    cache = CausalCache(size_of(bits=4, window=5, sink=1))
    past = []
    for number in range(9):
        q, k, v = draw(TOKENS, seed=number)
        cache.begin(number * TOKENS, TOKENS)
        past.append((k, v))
        kept = kept_in_codes(past, 4, 1, 1)
        for sink, window in ((1, 5), (0, 2), (0, 3), (1, 1)):
            part = cache.layers[0].view(sink, window)
            out = layer(q, k, v, cache=part)
            assert_sees(out, q, seen_by(number, kept, window, sink), atol=1e-6)
            some = number >= 3 and window > 2
            assert (part.visible().codes is not None) == some
        cache.commit()


def test_samples_and_heads_of_codes_are_those_of_a_part():
    cache = CausalCache(size_of(bits=4, window=4, sink=0))
    past = filled(cache, 5)
    one_head = LocalAttention(HEADS // KV_HEADS, SIZE, 1)
    q, k, v = draw(TOKENS, seed=77)
    cache.begin(5 * TOKENS, TOKENS)
    kept = seen_by(5, kept_in_codes([*past, (k, v)], 4, 1, 0), 4, 0)
    for sample in range(BATCH):
        for head in range(KV_HEADS):
            part = cache.layers[0].part(samples=(sample, sample + 1), heads=(head, head + 1))
            queries = q[sample : sample + 1, :, 2 * head : 2 * head + 2]
            own = [[x[sample : sample + 1, :, head : head + 1] for x in pair] for pair in kept]
            out = one_head(queries, *own[-1], cache=part)
            assert_sees(out, queries, own, atol=1e-6)
    cache.commit()


@pytest.mark.parametrize("recent", [0, 1, 2])
def test_chunks_in_codes_are_written_anew_and_become_codes_again(layer, recent):
    size = size_of(bits=4, window=5, sink=1, num_layers=2, keep_recent_chunks=recent)
    cache = CausalCache(size)
    past = filled(cache, 9)
    for start, tokens in cache.recache():
        number = start // TOKENS
        q, *pair = draw(tokens, seed=1000 + number)
        kept = kept_in_codes(past, 4, recent - 1, 1)
        kept[number] = past[number] = tuple(pair)
        for part in cache.layers:
            out = layer(q, *pair, cache=part)
            first = max(1, 9 - 5)  # of the window as it is kept
            seen = [x for i, x in enumerate(kept) if i <= number and (i < 1 or i >= first)]
            assert_sees(out, q, seen, atol=1e-6)
    q, k, v = draw(TOKENS, seed=5)
    cache.begin(9 * TOKENS, TOKENS)
    kept = kept_in_codes([*past, (k, v)], 4, recent, 1)
    for part in cache.layers:
        assert_sees(layer(q, k, v, cache=part), q, seen_by(9, kept, 5, 1), atol=1e-6)
    for part in cache.layers:
        assert torch.equal(layer(q, k, v, cache=part), layer(q, k, v, cache=part))
    cache.discard()
    cache.begin(9 * TOKENS, TOKENS)
    for part in cache.layers:
        assert_sees(layer(q, k, v, cache=part), q, seen_by(9, kept, 5, 1), atol=1e-6)


def test_a_chunk_in_codes_that_is_not_written_anew_stays_as_it_was(layer):
    cache = CausalCache(size_of(bits=2, window=5, sink=0))
    filled(cache, 6)
    before = [x.clone() for coded in cache._store.coded for x in coded]
    cache.begin(2 * TOKENS, TOKENS)
    rows = cache._rows[:TOKENS]
    expected = in_codes(draw(TOKENS, seed=2)[1:], 2)  # what a graph that reads it would see
    for kept, want in zip((cache._store.keys, cache._store.values), expected, strict=True):
        assert torch.equal(kept[0].index_select(1, rows), want)
    cache.commit()
    after = [x for coded in cache._store.coded for x in coded]
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))


def test_what_a_graph_writes_anew_becomes_codes_again(layer, monkeypatch):
    cache = CausalCache(size_of(bits=4, window=5, sink=0))
    past = [draw(TOKENS, seed=number)[1:] for number in range(6)]
    anew = draw(TOKENS, seed=99)[1:]
    with monkeypatch.context() as capturing:
        capturing.setattr(causal_cache, "_is_captured", lambda x: True)
        for number, chunk in [*enumerate(past), (2, anew)]:  # every one by a graph
            cache.begin(number * TOKENS, TOKENS)
            cache.layers[0].append(*chunk)
            cache.commit()
    past[2] = anew
    q, k, v = draw(TOKENS, seed=6)
    cache.begin(6 * TOKENS, TOKENS)
    kept = kept_in_codes([*past, (k, v)], 4, 1, 0)
    assert_sees(layer(q, k, v, cache=cache.layers[0]), q, seen_by(6, kept, 5, 0), atol=1e-6)


def test_a_graph_depends_on_whether_codes_are_seen(layer):
    cache = CausalCache(size_of(bits=4, window=4, sink=0))
    kinds = []
    for number in range(12):
        q, k, v = draw(TOKENS, seed=number)
        cache.begin(number * TOKENS, TOKENS)
        layer(q, k, v, cache=cache.layers[0])
        kinds.append(cache.kind)
        cache.commit()
    assert kinds[1] != kinds[3]  # as many places, without and with codes
    assert len({*kinds[3:]}) <= 2  # by which of both places has the running chunk


def test_the_report_says_what_read_the_codes(layer):
    cache = CausalCache(size_of(bits=4, window=4, sink=0, dtype=torch.float32))
    for number in range(5):
        q, k, v = (x.float() for x in draw(TOKENS, seed=number))
        cache.begin(number * TOKENS, TOKENS)
        layer(q, k, v, cache=cache.layers[0])
        cache.commit()
    (entry,), (detour,) = layer.report().entries, layer.report().detours
    assert (entry.calls, detour.calls) == (2, 3)
    assert detour.selection.label == "triton_attn (reference and reference on codes of 4 bits)"
    assert detour.selection.reason == (
        "torch_sdpa reads no codes, and older chunks of the cache are kept in them"
    )


def test_a_sparse_layer_runs_dense_over_codes_and_says_why():
    options = {"topk_ratio": 0.5, "dense_steps": 0, "dense_layers": None}
    cache = CausalCache(size_of(bits=4, window=4, sink=0, dtype=torch.float32))
    part, reason = cache.layers[0], "codes of chunks are read as a whole"
    q, k, v = (x.float() for x in draw(TOKENS, seed=0))
    cache.begin(0, TOKENS)
    with pytest.raises(UnsupportedBackendError, match=reason):
        sparse_layer(AttentionBackendEnum.SOL_ATTN, options, strict=True)(q, k, v, cache=part)
    layer = sparse_layer(AttentionBackendEnum.SOL_ATTN, options)
    assert_sees(layer(q, k, v, cache=part), q.double(), [(k.double(), v.double())], atol=1e-5)
    (detour,) = layer.report().detours
    assert detour.selection.label == "torch_sdpa"
    assert reason in detour.selection.reason


@pytest.mark.parametrize(("bits", "share"), [(4, 4.5 / 8.25), (2, 2.5 / 8.25)])
def test_older_chunks_take_about_a_half_and_a_quarter_of_those_in_8_bits(bits, share):
    fields = {"num_kv_heads": 12, "head_size": 128, "chunk_tokens": 4608, "num_layers": 30}
    at = {
        n: [size_of(bits=b, window=n, dtype=torch.bfloat16, **fields).num_bytes for b in (bits, 8)]
        for n in (20, 40)
    }
    codes, eight = (at[40][i] - at[20][i] for i in range(2))
    one_layer = 2 * 20 * BATCH * 4608 * 12 * 128 * 2  # that 8 bits are read back into
    assert codes / (eight - one_layer) == pytest.approx(share)
    exact = size_of(bits=16, window=2, sink=1, dtype=torch.bfloat16, **fields).num_bytes
    assert at[20][0] == exact + 19 * codes // 20


def test_the_bytes_are_known_in_advance_and_what_does_not_fit_is_refused():
    size = size_of(num_layers=3, dtype=torch.bfloat16)
    assert size.num_bytes == 3 * 2 * BATCH * 4 * TOKENS * KV_HEADS * SIZE * 2
    held = [x for x in vars(CausalCache(size)._store).values() if isinstance(x, torch.Tensor)]
    unique = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    assert sum(unique.values()) == size.num_bytes
    for bits in (8, 4, 2):
        fewer = size_of(num_layers=30, dtype=torch.bfloat16, bits=bits)
        store = CausalCache(fewer)._store
        coded = [x for each in store.coded for x in each]
        held = [*(x for x in vars(store).values() if isinstance(x, torch.Tensor)), *coded]
        unique = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
        assert sum(unique.values()) == fewer.num_bytes
    CausalCache(size, limit_bytes=size.num_bytes)
    with pytest.raises(
        UsageError, match=r"must fit into 9,215 B, the limit, got .* x 2 B = 9,216 B, for 3 layers"
    ):
        CausalCache(size, limit_bytes=size.num_bytes - 1)
    assert (
        "= 29,491,200 B (0.03 GiB), for 9600 layers"
        in size_of(num_layers=9600, dtype=torch.bfloat16).arithmetic()
    )
    with pytest.raises(
        UsageError, match=r"GiB\), what this machine has, got .* GiB\), for 40000000"
    ):
        CausalCache(size_of(num_layers=40_000_000, window=4000))
    rotated = size_of(dtype=torch.bfloat16, before_rope=True)
    assert rotated.num_bytes == size.num_bytes // 2


class Written(TorchDispatchMode):
    """Notes every operator that gives something as large as a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() >= BATCH * TOKENS * KV_HEADS * SIZE:
            self.names.append(str(func))
        return out


def test_evictions_touch_no_keys_and_values():
    cache = CausalCache(size_of(window=2, sink=1))
    _, k, v = draw(TOKENS, seed=0)
    for number in range(8):
        with Written() as begun:
            cache.begin(number * TOKENS, TOKENS)
        cache.layers[0].append(k, v)
        with Written() as seen:
            cache.layers[0].visible()
            cache.commit()
        assert begun.names == []
        assert {name for name in seen.names if "select" not in name} == set()
    with Written() as written:
        cache.layers[0].append(k, v, start=8 * TOKENS)
    assert [name for name in written.names if "select" not in name] == [
        "aten.index_copy_.default"
    ] * 2


def test_a_thousand_chunks_take_the_memory_of_ten(layer):
    cache = CausalCache(size_of())
    q, k, v = draw(TOKENS, seed=0)
    counts = {}
    for number in range(1000):
        cache.begin(number * TOKENS, TOKENS)
        layer(q, k, v, cache=cache.layers[0])
        cache.commit()
        if number in (10, 999):
            gc.collect()
            counts[number] = sum(type(x) is torch.Tensor for x in gc.get_objects())
    assert counts[10] == counts[999]
    assert len(layer.report().detours) == 0


def test_what_a_graph_depends_on_is_the_same_for_all_chunks_of_a_full_cache(layer):
    cache = CausalCache(size_of())
    kinds = []
    for number in range(9):
        cache.begin(number * TOKENS, TOKENS)
        layer(*draw(TOKENS, seed=number), cache=cache.layers[0])
        kinds.append(cache.kind)
        cache.commit()
    assert len(set(kinds[3:])) == 1
    assert len(set(kinds[:4])) == 4


def test_recaching_writes_the_past_anew_oldest_first(layer):
    cache = CausalCache(size_of())
    filled(cache, 7)
    past = []
    for start, tokens in cache.recache():
        q, k, v = draw(tokens, seed=1000 + start)
        past.append((k, v))
        out = layer(q, k, v, cache=cache.layers[0])
        assert_sees(out, q, past, atol=1e-6)
    assert len(past) == 4
    q, k, v = draw(TOKENS, seed=8)
    cache.begin(7 * TOKENS, TOKENS)
    out = layer(q, k, v, cache=cache.layers[0])
    assert_sees(out, q, [past[0], *past[2:], (k, v)])
    cache.commit()
    assert [start for start, _ in cache.recache(sink=False)] == [TOKENS * n for n in (5, 6, 7)]


def test_a_chunk_that_a_layer_did_not_write_is_not_committed():
    cache = CausalCache(size_of(num_layers=3, window=1, sink=0))
    _, k, v = draw(TOKENS, seed=0)
    first, second, third = cache.layers
    for number in range(2):
        for layer in cache.layers:
            layer.append(k, v, start=number * TOKENS)
        cache.commit()
    message = r"all of the 3 layers must write the chunk at token 12 .* from layers {}; run the mod"
    cache.begin(2 * TOKENS, TOKENS)
    with pytest.raises(UsageError, match=message.format("0, 1, 2")):
        cache.commit()
    first.append(k, v)
    second.part(samples=(0, 1)).append(k[:1], v[:1])
    second.part(samples=(1, 2), heads=(0, 1)).append(k[1:, :, :1], v[1:, :, :1])
    third.part(heads=(1, 2)).append(k[:, :, 1:], v[:, :, 1:])
    with pytest.raises(UsageError, match=message.format("1, 2")):
        cache.commit()
    second.part(samples=(1, 2), heads=(1, 2)).append(k[1:, :, 1:], v[1:, :, 1:])
    third.part(heads=(0, 1)).append(k[:, :, :1], v[:, :, :1])
    cache.commit()
    # What is kept may stay as it was, in all layers or in none.
    cache.begin(2 * TOKENS, TOKENS)
    cache.commit()
    first.append(k, v, start=2 * TOKENS)
    with pytest.raises(UsageError, match=message.format("1, 2")):
        cache.commit()
    # What was written of a chunk that was dropped is not what was written of the next one.
    cache.reset()
    for layer in cache.layers:
        layer.append(k, v, start=0)
    cache.discard()
    cache.begin(0, TOKENS)
    with pytest.raises(UsageError, match=r"must write the chunk at token 0 before commit\(\)"):
        cache.commit()


def test_what_was_written_while_a_graph_was_captured_counts_in_later_chunks(monkeypatch):
    cache = CausalCache(size_of(num_layers=2))
    _, k, v = draw(TOKENS, seed=0)
    first, second = cache.layers
    second.append(k, v, start=0)
    with monkeypatch.context() as capturing:
        capturing.setattr(causal_cache, "_is_captured", lambda x: True)
        first.append(k, v)
    cache.commit()
    cache.begin(TOKENS, TOKENS)
    with pytest.raises(UsageError, match="got nothing or a part of it from layers 1; run"):
        cache.commit()
    second.append(k, v)
    cache.commit()


def test_a_kept_chunk_that_was_not_written_anew_is_rotated_where_it_is_seen_next(layer):
    cache = CausalCache(size_of(before_rope=True, sink=0), rotate=rotate, positions="window")
    past = filled(cache, 4)
    cache.begin(2 * TOKENS, TOKENS)  # its place among what it sees is another one
    cache.commit()
    cache.begin(3 * TOKENS, TOKENS)
    q = rotate(draw(TOKENS, seed=9)[0], cache.position)
    out = layer(q, *past[3], cache=cache.layers[0])
    keys = torch.cat([rotate(k, n * TOKENS) for n, (k, _) in enumerate(past[1:])], dim=1)
    values = torch.cat([v for _, v in past[1:]], dim=1)
    want, _ = reference_attention(q, keys, values, scale=SCALE)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_whoever_writes_the_past_anew_may_commit_but_must_go_on(layer):
    cache = CausalCache(size_of(sink=0))
    filled(cache, 3)
    for start, tokens in cache.recache():
        cache.layers[0].append(*draw(tokens, seed=50 + start)[1:])
        cache.commit()
    cache.begin(3 * TOKENS, TOKENS)
    cache.discard()
    for _ in cache.recache():
        cache.layers[0].append(*draw(TOKENS, seed=9)[1:])
        cache.commit()
        break
    with pytest.raises(UsageError, match="must be written anew first"):
        cache.begin(3 * TOKENS, TOKENS)


def interrupted(cache: CausalCache, writes: int) -> None:
    """Write the kept chunks anew until an error in the second one, after some layers of it."""
    for start, tokens in cache.recache():
        _, k, v = draw(tokens, seed=100 + start)
        for layer in cache.layers[: 2 if start < 2 * TOKENS else writes]:
            layer.append(k, v)
        if start == 2 * TOKENS:
            raise KeyboardInterrupt


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("writes", [0, 1, 2])
def test_recaching_that_is_broken_off_can_be_done_once_more(layer, writes, bits):
    cache, past = CausalCache(size_of(num_layers=2, sink=0, bits=bits)), []
    filled(cache, 4)
    with pytest.raises(KeyboardInterrupt):
        interrupted(cache, writes)
    assert not cache.is_running
    for later in (3, 4):
        with pytest.raises(
            UsageError, match=r"token 12 must be written anew first, because recache\(\) was broken"
        ):
            cache.begin(later * TOKENS, TOKENS)
    for start, tokens in cache.recache():
        _, k, v = draw(tokens, seed=200 + start)
        past.append((k, v))
        for part in cache.layers:
            part.append(k, v)
    q, k, v = draw(TOKENS, seed=9)
    cache.begin(4 * TOKENS, TOKENS)
    if bits == 4:
        past[:2] = [in_codes(x, bits) for x in past[:2]]
    keys, values = (torch.cat(x, dim=1) for x in zip(*past[1:], (k, v), strict=True))
    want, _ = reference_attention(q, keys, values, scale=SCALE)
    for part in cache.layers:
        torch.testing.assert_close(layer(q, k, v, cache=part), want, rtol=0, atol=1e-6)


def test_a_cache_whose_recaching_was_broken_off_can_be_reset_and_needs_whole_chunks():
    cache = CausalCache(size_of(num_layers=2, sink=0))
    filled(cache, 4)
    with pytest.raises(KeyboardInterrupt):
        interrupted(cache, 1)
    with pytest.raises(UsageError, match="all of the 2 layers must write the chunk at token 12"):
        for _ in cache.recache():
            pass
    assert not cache.is_running
    cache.reset(start=90)
    cache.begin(90, TOKENS)
    cache.discard()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda keys, at: None, "rotate must return a tensor, got a NoneType"),
        (lambda keys, at: keys[:, 1:], r"like those .* \[2, 6, 2, 8\] .* got \[2, 5, 2, 8\]"),
        (lambda keys, at: keys.float(), r"torch.float64 on cpu, got .* torch.float32 on cpu"),
    ],
)
def test_what_gives_no_rotated_keys_is_refused(given, message):
    cache = CausalCache(size_of(before_rope=True), rotate=given)
    with pytest.raises(UsageError, match=message):
        cache.layers[0].append(*draw(TOKENS, seed=0)[1:], start=0)


def test_a_discarded_chunk_is_not_seen_and_another_takes_its_place(layer):
    cache = CausalCache(size_of(window=2, sink=0))
    first, second = draw(TOKENS, seed=0), draw(TOKENS, seed=1)
    layer_cache = cache.layers[0]
    layer_cache.append(*first[1:], start=0)
    cache.commit()
    layer_cache.append(*draw(TOKENS, seed=9)[1:], start=TOKENS)
    cache.discard()
    cache.begin(TOKENS, TOKENS)
    out = layer(*second, cache=layer_cache)
    assert_sees(out, second[0], [first[1:], second[1:]])
    cache.commit()
    cache.reset(start=600)
    cache.begin(600, TOKENS)
    want, _ = reference_attention(*second, scale=SCALE)
    torch.testing.assert_close(layer(*second, cache=layer_cache), want, rtol=0, atol=1e-13)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["next", "next", "next", "discard", "rewrite"]),
        st.integers(1, TOKENS),
        st.integers(0, 5),
        st.integers(1, 5),
    ),
    min_size=4,
    max_size=20,
)


@given(OPERATIONS, st.integers(0, 2), st.integers(1, 4), st.sampled_from([None, 0, 1, 2]))
@settings(max_examples=40, deadline=None)
def test_whatever_is_made_discarded_and_written_anew_is_what_is_seen(
    operations, sink, window, recent
):
    """A chunk is kept until one that is `window` later was begun, even if that was discarded.

    It is in codes from when `recent` others that follow it are past.
    """
    fields = {"sink": sink, "window": window}
    if recent is not None:
        window += recent + 1
        fields = {"sink": sink, "window": window, "bits": 4, "keep_recent_chunks": recent}
    cache = CausalCache(size_of(**fields))
    layer = LocalAttention(HEADS, SIZE, KV_HEADS)
    made, newest = [], -1
    for seed, (what, tokens, see_sink, see_window) in enumerate(operations):
        kept = [n for n in range(len(made)) if n < sink or n > newest - window]
        number = len(made)
        if what == "rewrite" and kept:
            number = kept[seed % len(kept)]
            tokens = made[number][0].shape[1]
        newest = max(newest, number)
        start = sum(k.shape[1] for k, _ in made[:number])
        q, k, v = draw(tokens, seed)
        cache.begin(start, tokens)
        see = (min(see_sink, sink), min(see_window, window))
        out = layer(q, k, v, cache=cache.layers[0].view(*see))
        first_exact = 0 if recent is None else len(made) - recent
        past = [
            in_codes(x, 4) if sink <= n < first_exact else x
            for n, x in enumerate(made[:number])
            if (n < sink or n > newest - window) and (n < see[0] or n > number - see[1])
        ]
        atol = 1e-13 if recent is None else 1e-6  # merged by an lse in fp32
        assert_sees(out, q, [*past, (k, v)], atol)
        if what == "discard" and number == len(made):
            cache.discard()
            continue
        cache.commit()
        made[number : number + 1] = [(k, v)]


def test_parts_of_a_cache_serve_some_samples_and_heads():
    cache = CausalCache(size_of())
    q, k, v = draw(TOKENS, seed=0)
    cache.begin(0, TOKENS)
    whole = LocalAttention(HEADS, SIZE, KV_HEADS)(q, k, v, cache=cache.layers[0])
    half = LocalAttention(HEADS // 2, SIZE, KV_HEADS // 2)
    part = cache.layers[0].part(samples=(1, 2), heads=(1, 2))
    out = half(q[1:, :, 2:], k[1:, :, 1:], v[1:, :, 1:], cache=part)
    torch.testing.assert_close(out, whole[1:, :, 2:])
    with pytest.raises(
        UsageError, match=r"heads must be two whole numbers, .* in \[0, 2\], got \(1, 3\)"
    ):
        cache.layers[0].part(heads=(1, 3))
    with pytest.raises(UsageError, match=r"samples must be two whole numbers, .* got 1"):
        cache.layers[0].part(samples=1)
    for window in (4, 1.5, True):
        with pytest.raises(
            UsageError, match=rf"window must be a whole number in \[1, 3\], .* got {window}"
        ):
            cache.layers[0].view(window=window)


def test_layers_find_their_part_in_the_context():
    cache = CausalCache(size_of(num_layers=2))
    q, k, v = draw(TOKENS, seed=0)
    layers = [UlyssesAttention(HEADS, SIZE, KV_HEADS, prefix=f"blocks.{i}.attn") for i in (0, 1)]
    across = USPAttention(HEADS, SIZE, KV_HEADS, prefix="blocks.0.x", is_cross_attention=True)
    for number in range(3):
        cache.begin(number * TOKENS, TOKENS)
        with set_forward_context(0, kv_cache=cache):
            outs = [layer(q, (1 + i) * k, v)[0] for i, layer in enumerate(layers)]
            text = across(q, k[:, :2], v[:, :2])
        cache.commit()
    for i, out in enumerate(outs):
        keys, values = torch.cat([(1 + i) * k] * 3, dim=1), torch.cat([v] * 3, dim=1)
        torch.testing.assert_close(out, reference_attention(q, keys, values, scale=SCALE)[0])
    want, _ = reference_attention(q, k[:, :2], v[:, :2], scale=SCALE)
    torch.testing.assert_close(text, want)
    cache.begin(3 * TOKENS, TOKENS)
    unnumbered = USPAttention(HEADS, SIZE, KV_HEADS)
    with (
        set_forward_context(0, kv_cache=cache),
        pytest.raises(UsageError, match="a layer must have a number below 2"),
    ):
        unnumbered(q, k, v)
    with (
        set_forward_context(0, kv_cache=cache.layers[0]),
        pytest.raises(UsageError, match="kv_cache must be a CausalCache or None, got a LayerCache"),
    ):
        layers[0](q, k, v)
    assert key_heads_of_rank(HEADS, KV_HEADS) == KV_HEADS


@pytest.mark.parametrize("kept", [None, (0, 2)])
def test_sink_logits_weigh_a_key_without_a_value(layer, kept):
    logits = torch.tensor([0.3, -1.0, 2.0, -torch.inf], dtype=torch.float64)
    cache = CausalCache(size_of(window=3, sink=1))
    q, k, v = draw(TOKENS, seed=0)
    for number in range(6):
        cache.begin(number * TOKENS, TOKENS)
        part = cache.layers[0] if kept is None else cache.layers[0].view(*kept)
        out = layer(q, k, v, cache=part, sink_logits=logits)
        cache.commit()
    times = 4 if kept is None else 2
    scores, values = q.transpose(1, 2) @ k.repeat_interleave(2, 2).permute(0, 2, 3, 1), v
    scores = torch.cat([scores * SCALE] * times, dim=-1)
    sink = logits.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    values = torch.cat([v] * times, dim=1).repeat_interleave(2, 2).transpose(1, 2)
    torch.testing.assert_close(out, (weights @ values).transpose(1, 2), rtol=0, atol=1e-6)
    plain = layer(q, k, v, sink_logits=torch.full((HEADS,), -torch.inf))
    torch.testing.assert_close(plain, layer(q, k, v), rtol=0, atol=1e-6)


def sparse_layer(backend, options, *, strict: bool = False) -> LocalAttention:
    tried = SparseMethod(backend=backend, given=options, heads=HEADS, head_size=SIZE)
    return tried.layer(index=None, kv_heads=KV_HEADS, strict=strict)


def test_the_report_says_what_ran_in_place_of_the_layers_backend(layer):
    cache = CausalCache(size_of(dtype=torch.float32))
    q, k, v = (x.float() for x in draw(TOKENS, seed=0))
    cache.begin(0, TOKENS)
    layer(q, k, v, cache=cache.layers[0])
    assert [(e.selection.label, e.calls) for e in layer.report().entries] == [("torch_sdpa", 1)]
    cache.commit()
    cache.begin(TOKENS, TOKENS)
    for _ in range(3):
        layer(q, k, v, cache=cache.layers[0].view(0, 1))
    cache.commit()
    assert layer.report().entries[0].calls == 4  # one chunk is always in one piece
    for number in range(2, 5):
        cache.begin(number * TOKENS, TOKENS)
        layer(q, k, v, cache=cache.layers[0].view(0, 2))
        cache.commit()
    (detour,) = layer.report().detours
    assert (detour.selection.label, detour.calls) == ("triton_attn (reference)", 1)
    assert detour.selection.reason == (
        "torch_sdpa takes no lists of blocks, and what a chunk sees lies in pieces of the cache"
    )


GRID, TILE = (5, 7), (2, 3)  # tiles of 2 x 3 tokens, cut short at both borders


def in_windows(frames: list[int], space: tuple[int, int]) -> torch.Tensor:
    """Return bool [queries of the last chunk, keys of all]: whether tiles lie in windows."""
    rows, columns = (torch.arange(n) // edge for n, edge in zip(GRID, TILE, strict=True))
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
    q, k = (places.repeat(n, 1) for n in (frames[-1], sum(frames)))
    keep = torch.ones(len(q), len(k), dtype=torch.bool)
    for axis, wide in enumerate(space):
        count = -(-GRID[axis] // TILE[axis])
        width = min(count, wide)
        first = (q[:, axis] - width // 2).clamp(0, count - width)[:, None]
        keep &= (k[:, axis] >= first) & (k[:, axis] < first + width)
    return keep


def tiled_cache(**fields) -> CausalCache:
    return CausalCache(size_of(chunk_tokens=2 * 35, grid=GRID, tile=TILE, **fields))


@pytest.mark.parametrize("space", [(3, 1), (1, 3), pytest.param((9, 9), marks=pytest.mark.slow)])
def test_windows_in_space_are_seen_of_every_chunk_of_the_window(layer, space):
    cache = tiled_cache()
    view, past = cache.layers[0].view(space=space), []
    logits = torch.linspace(-1, 1, HEADS)
    for number, frames in enumerate([1, *[2] * 6, 1]):
        tokens = 35 * frames
        q, k, v = draw(tokens, seed=number)
        cache.begin(sum(35 * f for f, *_ in past), tokens)
        past.append((frames, k, v))
        seen = seen_by(number, past, 3, 1)
        keys, values = (torch.cat([x[i] for x in seen], dim=1) for i in (1, 2))
        # Layers that see everything have the same cache: the order of its rows does not matter.
        want, _ = reference_attention(q, keys, values, scale=SCALE)
        torch.testing.assert_close(layer(q, k, v, cache=cache.layers[0]), want)
        keep = in_windows([x[0] for x in seen], space)
        want, lse = reference_attention(q, keys, values, scale=SCALE, mask=keep)
        out = layer(q, k, v, cache=view)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
        weighed = want * torch.sigmoid(lse - logits[:, None]).transpose(1, 2).unsqueeze(-1)
        out = layer(q, k, v, cache=view, sink_logits=logits)
        torch.testing.assert_close(out, weighed, rtol=0, atol=1e-6)
        cache.commit()


def test_sliding_tiles_see_their_window_in_space_of_a_cache_in_tiles():
    options = {"window": [1, 1, 1], "tile_size": [6, *TILE], "skip_time_steps": 1}
    layer = sparse_layer(AttentionBackendEnum.SLIDING_TILE_ATTN, options)
    cache, past = tiled_cache(dtype=torch.float32), []
    for number in range(6):
        q, k, v = (x.float() for x in draw(70, seed=number))
        cache.begin(70 * number, 70)
        for step in range(2):
            with set_forward_context(step, num_steps=2):
                out = layer(q, k, v, cache=cache.layers[0])
        cache.commit()
        past.append((k, v))
    keys, values = (torch.cat(x, dim=1) for x in zip(*seen_by(5, past, 3, 1), strict=True))
    keep = in_windows([2] * 4, (1, 1))
    want, _ = reference_attention(q, keys, values, scale=SCALE, mask=keep)
    torch.testing.assert_close(out, want.float(), rtol=0, atol=1e-5)
    dense, sparse = layer.report().entries
    assert (dense.selection.label, dense.calls) == ("torch_sdpa", 6)
    assert (sparse.selection.label, sparse.calls) == ("sliding_tile_attn (reference)", 6)
    assert sparse.density == pytest.approx(float(keep.float().mean()))
    assert layer.report().detours == ()


@pytest.mark.parametrize(("grid", "router"), [((8, 12), "mean"), ((6, 10), "subblock")])
def test_video_sparse_attention_chooses_among_all_tiles_of_a_cache(grid, router):
    options = {"sparsity": 0.7, "tile_size": [4, 4, 4], "dense_steps": "0", "router": router}
    cells = {"cells": 4 if router == "subblock" else 1}
    layer = sparse_layer(AttentionBackendEnum.VIDEO_SPARSE_ATTN, options)
    frame, past, start, shares = grid[0] * grid[1], [], 0, []
    cache = CausalCache(
        size_of(chunk_tokens=2 * frame, grid=grid, tile=(4, 4), dtype=torch.float32)
    )
    for number, frames in enumerate([1, *[2] * 5, 1]):
        q, k, v = (x.float() for x in draw(frames * frame, seed=number))
        cache.begin(start, frames * frame)
        for step in range(2):
            with set_forward_context(step, num_steps=2):
                out = layer(q, k, v, cache=cache.layers[0])
        past.append((frames, k, v))
        seen = seen_by(number, past, 3, 1)
        keys, values = (torch.cat([x[i] for x in seen], dim=1) for i in (1, 2))
        queries = token_tiles([frames], grid, (4, 4), **cells)
        tiles = token_tiles([x[0] for x in seen], grid, (4, 4), longest=2, **cells)
        kept = math.ceil(0.3 * tiles.num - 1e-9)
        mask = best_tiles(q, keys, queries, tiles, kept, scale=SCALE)
        shares.append(float(mask.double().mean()))
        want, _ = reference_attention(q, keys, values, scale=SCALE, mask=mask)
        torch.testing.assert_close(out, want.float(), rtol=0, atol=1e-5)
        start += frames * frame
        cache.commit()
    dense, sparse = layer.report().entries
    assert (sparse.selection.label, sparse.calls) == ("video_sparse_attn (reference)", 7)
    assert sparse.density == pytest.approx(sum(shares) / 7)
    # The dense step: behind a first chunk that is short, what is seen lies in pieces.
    assert (dense.selection.label, dense.calls) == ("torch_sdpa", 1)
    assert [detour.calls for detour in layer.report().detours] == [6]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        (AttentionBackendEnum.VIDEO_SPARSE_ATTN, {}),
        (AttentionBackendEnum.SLIDING_TILE_ATTN, {"window": [1, 1, 1], "tile_size": [6, 8, 8]}),
        (
            AttentionBackendEnum.SLIDING_TILE_ATTN,
            {"window": [1, 1, 1], "tile_size": [6, *TILE], "tail": "pooled"},
        ),
    ],
)
def test_sparse_methods_without_such_windows_run_dense_over_a_cache_and_say_so(backend, options):
    cache = tiled_cache(dtype=torch.float32)
    q, k, v = (x.float() for x in draw(70, seed=0))
    layer = sparse_layer(backend, options)
    cache.begin(0, 70)
    with set_forward_context(20, latent_grid=(2, *GRID)):
        out = layer(q, k, v, cache=cache.layers[0])
    want, _ = reference_attention(q, k, v, scale=SCALE)
    torch.testing.assert_close(out, want.float())
    (detour,) = layer.report().detours
    assert detour.selection.label == "torch_sdpa"
    assert "keys in a cache are those of several calls" in detour.selection.reason
    with (
        set_forward_context(20, latent_grid=(2, *GRID)),
        pytest.raises(UnsupportedBackendError, match="keys in a cache are those of several calls"),
    ):
        sparse_layer(backend, options, strict=True)(q, k, v, cache=cache.layers[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "window must be a whole number >= 1, got 0"),
        ({"sink": -1}, "sink must be a whole number >= 0, got -1"),
        ({"batch": True}, "batch must be a whole number >= 1, got True"),
        ({"bits": 3}, "bits must be 2, 4 or 8, or 16 as layers bring it, got 3"),
        ({"dtype": torch.int8}, "dtype must be that of what layers bring, one of .* torch.int8"),
        (
            {"dtype": torch.float8_e4m3fn},
            "one of torch.bfloat16, .*, got torch.float8_e4m3fn; take",
        ),
        ({"window": 1.5}, "window must be a whole number >= 1, got 1.5"),
        ({"bits": 8, "before_rope": True}, "before_rope must be False where bits are 8"),
        ({"bits": 4, "before_rope": True}, "before_rope must be False where bits are 4"),
        ({"bits": 4, "window": 2}, "window must be above 2, the running chunk and keep_re.* got 2"),
        ({"bits": 2, "head_size": 6}, "head_size must be a multiple of 4 where bits are 2.* got 6"),
        ({"bits": 4, "keep_recent_chunks": -1}, "keep_recent_chunks must be a whole number >= 0"),
        ({"bits": 8, "keep_recent_chunks": 2}, "keep_recent_chunks must be left out where bits"),
        (
            {"bits": 4, "grid": (2, 3), "tile": (1, 1)},
            "tile must be None where bits are 4: attention reads all codes of a chunk",
        ),
        ({"grid": (2, 3)}, "grid and tile must be given together"),
        ({"grid": [2, 3], "tile": (1, 1)}, "grid must be .height, width. or None, got .2, 3."),
        ({"grid": (2, 2), "tile": (1, 1)}, "chunk_tokens must be whole frames of the grid"),
        (
            {"grid": (2, 3), "tile": (1, 1), "before_rope": True},
            "before_rope must be False where chunks are kept in tiles",
        ),
    ],
)
def test_sizes_that_make_no_cache_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        size_of(**fields)


def test_misuse_gets_one_clear_error(layer):
    with pytest.raises(UsageError, match="rotate must be given exactly where"):
        CausalCache(size_of(before_rope=True))
    with pytest.raises(UsageError, match='positions must be "start" or "window", got \'end\''):
        CausalCache(size_of(before_rope=True), rotate=rotate, positions="end")
    cache = CausalCache(size_of())
    q, k, v = draw(TOKENS, seed=0)
    with pytest.raises(UsageError, match="a chunk must be running, got none; call begin"):
        layer(q, k, v, cache=cache.layers[0])
    with pytest.raises(UsageError, match=r"tokens must be in \[1, 6\], got 7"):
        cache.begin(0, 7)
    with pytest.raises(UsageError, match=r"start must be a whole number >= 0, got -6"):
        cache.begin(-6, 6)
    with pytest.raises(UsageError, match=r"start must be a whole number >= 0, got 1.5"):
        cache.reset(1.5)
    with pytest.raises(UsageError, match=r"a chunk must follow the last one, at token 0, .* none;"):
        cache.begin(5, 6)
    cache.begin(0, TOKENS)
    cache.begin(0, TOKENS)  # the next denoising step
    with pytest.raises(UsageError, match="the chunk at token 0 must be finished before another"):
        cache.begin(TOKENS, TOKENS)
    with pytest.raises(UsageError, match=r"key must be \[2, 6, 2, 8\] torch.float64 on cpu"):
        layer(q.float(), k.float(), v.float(), cache=cache.layers[0])
    with pytest.raises(UsageError, match="no chunk must be running, got the one at token 0"):
        next(cache.recache())
    with pytest.raises(
        UsageError, match="query must have the 6 tokens of the running chunk, got 5"
    ):
        layer(q[:, :5], k, v, cache=cache.layers[0])
    layer(q, k, v, cache=cache.layers[0])
    cache.commit()
    with pytest.raises(UsageError, match=r"with its length: 0 \(6\); got 3 tokens at 0"):
        cache.begin(0, 3)
    cache.begin(0, TOKENS)
    with pytest.raises(UsageError, match="must be committed again, because its slot was written"):
        cache.discard()


def test_windows_in_space_need_tiles():
    with pytest.raises(
        UsageError, match=r"space must be two ints of at least 1, in tiles of a cache"
    ):
        CausalCache(size_of()).layers[0].view(space=(1, 1))
    cache = tiled_cache()
    with pytest.raises(UsageError, match=r"tokens must be whole frames of \(5, 7\), got 40"):
        cache.begin(0, 40)
    cache.begin(0, 35)


def test_what_a_cache_cannot_be_combined_with_is_refused(layer):
    cache = CausalCache(size_of())
    cache.begin(0, TOKENS)
    q, k, v = draw(TOKENS, seed=0)
    part = cache.layers[0]
    with pytest.raises(UsageError, match="a call with a cache must come without attn_mask"):
        layer(q, k, v, torch.ones(BATCH, TOKENS, dtype=torch.bool), cache=part)
    with pytest.raises(UsageError, match="must come without gradients"):
        layer(q.requires_grad_(), k, v, cache=part)
    q = q.detach()
    with pytest.raises(UsageError, match="must come without causal=True"):
        LocalAttention(HEADS, SIZE, KV_HEADS, causal=True)(q, k, v, cache=part)
    across = LocalAttention(HEADS, SIZE, KV_HEADS, is_cross_attention=True)
    with pytest.raises(UsageError, match="must come without cross-attention"):
        across(q, k, v, cache=part)
    with pytest.raises(UsageError, match="must come without replicated tokens"):
        UlyssesAttention(HEADS, SIZE, KV_HEADS)(q, k, v, q, k, v, cache=part)
    with pytest.raises(UsageError, match=r"cache must be a layer's part .* got a CausalCache"):
        layer(q, k, v, cache=cache)
    with pytest.raises(
        UsageError, match=r"one logit per head, \[4\] on cpu, got \[2\] torch.float"
    ):
        layer(q, k, v, sink_logits=torch.zeros(2))
    site = LayerSite(name="", component=None, role=layer.site.role, layer=7)
    numbered = LocalAttention(HEADS, SIZE, KV_HEADS, site=site)
    with (
        set_forward_context(0, kv_cache=cache),
        pytest.raises(UsageError, match=r"a layer must have a number below 1 .* got 7"),
    ):
        numbered(q, k, v)


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="torch 2.9 cannot leave a graph inside of a layer"
)
def test_a_compiled_model_writes_its_cache():
    torch._dynamo.reset()  # functions that it gave up on in models of other tests
    cache = CausalCache(size_of())
    layer = LocalAttention(HEADS, SIZE, KV_HEADS)

    def model(q, k, v):
        return layer(2 * q, k, v, cache=cache.layers[0]) + 1

    compiled = torch.compile(model, backend="eager")
    past = []
    for number in range(3):
        cache.begin(number * TOKENS, TOKENS)
        q, k, v = draw(TOKENS, seed=number)
        out = compiled(q, k, v)
        past.append((k, v))
        keys, values = (torch.cat(x, dim=1) for x in zip(*past, strict=True))
        want, _ = reference_attention(2 * q, keys, values, scale=SCALE)
        torch.testing.assert_close(out, want + 1, rtol=0, atol=1e-13)
        cache.commit()


def test_a_whole_graph_around_such_a_call_is_refused_with_the_reason():
    compiled = torch.compile(LocalAttention(HEADS, SIZE, KV_HEADS), fullgraph=True, backend="eager")
    q, k, v = draw(TOKENS, seed=0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph"):
        compiled(q, k, v, sink_logits=torch.zeros(HEADS))


def test_a_view_of_a_view_and_a_part_of_a_part_keep_what_is_not_said_anew():
    size = size_of()
    layer = CausalCache(size).layers[0]
    narrow = layer.view(sink=0).view(window=2)
    assert (narrow.sink, narrow.window) == (0, 2)
    assert (layer.sink, layer.window) == (size.sink, size.window)
    part = layer.part(samples=(0, 1)).part(heads=(0, 1))
    assert (part.samples, part.heads) == ((0, 1), (0, 1))
    with pytest.raises(UsageError, match="space must be two ints of at least 1"):
        layer.view(space=3)
