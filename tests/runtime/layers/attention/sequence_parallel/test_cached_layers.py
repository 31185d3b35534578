"""Layers with a cache, lists of blocks or sink logits on two and four ranks against one process."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.layouts import chunk_causal_plan
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import UlyssesAttention, USPAttention
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.causal_cache import (
    CacheSize,
    CausalCache,
    key_heads_of_rank,
)
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.processes import own

BATCH, SIZE = 2, 8


def cache_of(num_kv_heads: int, chunk_tokens: int, **fields) -> CausalCache:
    return CausalCache(
        CacheSize(
            num_layers=1,
            batch=BATCH,
            num_kv_heads=num_kv_heads,
            head_size=SIZE,
            chunk_tokens=chunk_tokens,
            window=3,
            sink=1,
            dtype=torch.float32,
            **fields,
        )
    )


def check_chunks(lengths, heads, kv_heads, kind, bits=16):
    """Compare every chunk of a video on these ranks with one process, whose cache is whole."""
    total = sum(lengths)
    layer = {"ulysses": UlyssesAttention, "usp": USPAttention}[kind](heads, SIZE, kv_heads)
    own_heads = key_heads_of_rank(heads, kv_heads)
    mine, whole = (cache_of(n, total, bits=bits) for n in (own_heads, kv_heads))
    assert mine.size.num_bytes <= whole.size.num_bytes
    logits = torch.linspace(-1, 1, heads)
    for number in range(8):
        qkv = make_qkv(BATCH, total, heads, SIZE, num_kv_heads=kv_heads, seed=number)
        for cache in (mine, whole):
            cache.begin(number * total, total)
        view = (1, 1) if number % 2 else (1, 3)
        with use_parallel_groups(None):
            part = whole.layers[0].view(*view)
            want = layer(*qkv, cache=part, sink_logits=logits)
        part = mine.layers[0].view(*view)
        local = [own(x, lengths) for x in qkv]
        out = layer(*local, cache=part, sink_logits=logits)
        if kind == "ulysses":
            (want, _), (out, _) = want, out
        torch.testing.assert_close(out, own(want, lengths))
        mine.commit()
        whole.commit()


def check_chosen(lengths, heads, kv_heads, backend, options):
    """Compare what a sparse method chooses of a cache on these ranks with one process."""
    name, total = AttentionBackendEnum(backend), sum(lengths)
    cls = find_backend(name, PlatformEnum.CPU).config_cls
    config = build_config(cls, options, backend=backend)
    asked = BackendPreference(source=Source.SETTINGS, backend=name, config=config)
    scope = SelectionScope(default=asked, strict=True)
    layer = USPAttention(heads, SIZE, kv_heads, scope=scope, compute_dtype=torch.float32)
    kept = {"grid": (4, 6), "tile": (2, 3)}
    own_heads = key_heads_of_rank(heads, kv_heads)
    mine, whole = (cache_of(n, total, **kept) for n in (own_heads, kv_heads))
    for number in range(6):
        qkv = make_qkv(BATCH, total, heads, SIZE, num_kv_heads=kv_heads, seed=number)
        for cache in (mine, whole):
            cache.begin(number * total, total)
        with set_forward_context(0, num_steps=1):
            with use_parallel_groups(None):
                want = layer(*qkv, cache=whole.layers[0])
            out = layer(*(own(x, lengths) for x in qkv), cache=mine.layers[0])
        torch.testing.assert_close(out, own(want, lengths))
        mine.commit()
        whole.commit()
    assert layer.report().detours == ()


def check_plan(lengths, heads):
    total = sum(lengths)
    plan = chunk_causal_plan([total // 2, total - total // 2])
    qkv = make_qkv(BATCH, total, heads, SIZE)
    layer = USPAttention(heads, SIZE)
    with use_parallel_groups(None):
        want = layer(*qkv, plan)
    out = layer(*(own(x, lengths) for x in qkv), plan)
    torch.testing.assert_close(out, own(want, lengths))


def check_refusal(lengths):
    total = sum(lengths)
    cache = cache_of(4, total)
    cache.begin(0, total)
    q, k, v = (own(x, lengths) for x in make_qkv(BATCH, total, 4, SIZE))
    with pytest.raises(UsageError, match="must be split by heads alone, got a ring of 2"):
        USPAttention(4, SIZE)(q, k, v, cache=cache.layers[0])


def test_two_ranks_keep_their_heads_of_the_past(two_ranks):
    two_ranks.run(Mesh(ulysses=2), check_chunks, (3, 3), 4, 4, "ulysses")
    two_ranks.run(Mesh(ulysses=2), check_chunks, (3, 2), 6, 3, "usp")
    two_ranks.run(Mesh(ulysses=2), check_chunks, (3, 2), 6, 3, "usp", 4)


CUBE = ("cube_sparse_attn", {"local_cube_size": [2, 2, 3], "topk_ratio": 0.4})
SOL = (
    "sol_attn",
    {"tile_size": [2, 2, 3], "tau": 0.3, "dense_steps": 0, "dense_layers": None},
)


def test_ranks_choose_among_the_past_of_their_heads(two_ranks):
    two_ranks.run(Mesh(ulysses=2), check_chosen, (30, 18), 4, 2, *CUBE)


@pytest.mark.slow
@pytest.mark.parametrize("method", [CUBE, SOL], ids=["cube", "sol"])
def test_four_ranks_choose_among_the_past_of_their_heads(four_ranks, method):
    four_ranks.run(Mesh(ulysses=4), check_chosen, (20, 12, 9, 7), 8, 4, *method)


def test_lists_of_blocks_are_those_of_the_whole_sequence(two_ranks):
    two_ranks.run(Mesh(ulysses=2), check_plan, (5, 4), 4)


def test_a_ring_refuses_caches(two_ranks):
    two_ranks.run(Mesh(ring=2), check_refusal, (3, 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ulysses", "usp"])
def test_four_ranks_keep_their_heads_of_the_past(four_ranks, kind):
    four_ranks.run(Mesh(ulysses=4), check_chunks, (3, 2, 2, 1), 8, 4, kind)
    four_ranks.run(Mesh(ulysses=4), check_chunks, (2, 2, 2, 2), 5, 5, kind)
