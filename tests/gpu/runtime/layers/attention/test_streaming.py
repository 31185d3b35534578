"""A cache of chunks and masks of blocks on a GPU: against float64, in graphs, what they copy."""

import gc

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.profiler import ProfilerActivity, profile

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.generator import DiffGenerator
from multimodal_gen.kernels.block_sparse.layouts import chunk_causal_plan, teacher_forcing_plan
from multimodal_gen.kernels.coded_attention.codes import OF_KEYS, OF_VALUES, dequantise, quantise
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.causal_cache import CacheSize, CausalCache
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    SelectionScope,
    Source,
    scope_from,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from multimodal_gen.testing.tiny_models.streaming import ANYFLOW_FAR, HELIOS
from tests.helpers.block_plans import dense_mask
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tile_choice import (
    TokenTiles,
    attention_with_tail,
    best_tiles,
    near_tiles,
    selected_tiles,
    token_tiles,
)
from tests.helpers.tolerance import assert_within_error_budget

BATCH, HEADS, KV_HEADS, SIZE, TOKENS = 2, 4, 2, 128, 420
SCALE = SIZE**-0.5
# Sink and window of a layer in a cache with a sink of 2 and a window of 4: in one piece, and not.
VIEWS = {"in one piece": (2, 4), "in pieces": (1, 3), "no sink": (0, 2), "itself": (0, 1)}


def cache_of(**fields) -> CausalCache:
    given = {
        "num_layers": 1,
        "batch": BATCH,
        "num_kv_heads": KV_HEADS,
        "head_size": SIZE,
        "chunk_tokens": TOKENS,
        "window": 4,
        "sink": 2,
    }
    return CausalCache(CacheSize(**{**given, **fields}), "cuda")


def draw(tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16):
    return make_qkv(
        BATCH, tokens, HEADS, SIZE, num_kv_heads=KV_HEADS, dtype=dtype, device="cuda", seed=seed
    )


def past_of(chunks: list, sink: int, window: int):
    """Return keys and values of the chunks that the last one sees."""
    last = len(chunks) - 1
    seen = [x for i, x in enumerate(chunks) if i < sink or i > last - window]
    return tuple(torch.cat(x, dim=1) for x in zip(*seen, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_chunks_see_the_past_within_the_error_budget(view, dtype):
    cache, layer = cache_of(dtype=dtype), LocalAttention(HEADS, SIZE, KV_HEADS)
    chunks = []
    for number in range(14):
        tokens = TOKENS if number < 13 else 100
        q, k, v = draw(tokens, number, dtype)
        cache.begin(number * TOKENS, tokens)
        out = layer(q, k, v, cache=cache.layers[0].view(*VIEWS[view]))
        chunks.append((k, v))
        keys, values = past_of(chunks, *VIEWS[view])
        assert_within_error_budget(out, q, keys, values, scale=SCALE)
        cache.commit()


@pytest.mark.parametrize("view", ["in one piece", "in pieces"])
def test_a_graph_of_one_chunk_replays_on_those_that_follow(view):
    cache, layer = cache_of(), LocalAttention(HEADS, SIZE, KV_HEADS)
    part = cache.layers[0].view(*VIEWS[view])
    logits = torch.linspace(-1, 1, HEADS, device="cuda")
    qkv, chunks, kinds = draw(TOKENS, 0), [], set()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        for number in range(18):
            cache.begin(number * TOKENS, TOKENS)
            for x, new in zip(qkv, draw(TOKENS, number), strict=True):
                x.copy_(new)
            if number < 8:
                out = layer(*qkv, cache=part, sink_logits=logits)
            else:
                kinds.add(cache.kind)
                if number == 8:
                    with torch.cuda.graph(graph):
                        out = layer(*qkv, cache=part, sink_logits=logits)
                graph.replay()
            q, k, v = (x.clone() for x in qkv)
            chunks.append((k, v))
            keys, values = past_of(chunks, *VIEWS[view])
            want, lse = reference_attention(q, keys, values, scale=SCALE)
            want = want * torch.sigmoid(lse - logits[:, None]).transpose(1, 2).unsqueeze(-1)
            torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
            cache.commit()
    assert len(kinds) == 1


def in_codes(chunks: list, bits: int, sink: int) -> list:
    """Return chunks as they are kept while the last of them runs, the newest past one exact."""
    return [
        tuple(
            dequantise(quantise(x, bits, grouping), bits, grouping, x.dtype)
            if sink <= i < len(chunks) - 2
            else x
            for x, grouping in zip(chunk, (OF_KEYS, OF_VALUES), strict=True)
        )
        for i, chunk in enumerate(chunks)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [2, 4])
def test_codes_of_past_chunks_are_read_within_the_error_budget(bits, dtype):
    cache = cache_of(dtype=dtype, bits=bits, window=6, sink=1)
    layer, chunks = LocalAttention(HEADS, SIZE, KV_HEADS), []
    for number in range(14):
        tokens = TOKENS if number < 13 else 100
        q, k, v = draw(tokens, number, dtype)
        cache.begin(number * TOKENS, tokens)
        out = layer(q, k, v, cache=cache.layers[0])
        chunks.append((k, v))
        keys, values = past_of(in_codes(chunks, bits, 1), 1, 6)
        assert_within_error_budget(out, q, keys, values, scale=SCALE)
        cache.commit()
    (detour,) = layer.report().detours
    assert detour.selection.variant.endswith(f"triton on codes of {bits} bits")


@pytest.mark.parametrize("bits", [2, 4])
def test_a_graph_replays_over_codes_that_commit_makes(bits):
    cache, layer = cache_of(bits=bits, window=5, sink=1), LocalAttention(HEADS, SIZE, KV_HEADS)
    qkv, chunks, kinds = draw(TOKENS, 0), [], set()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        for number in range(18):
            cache.begin(number * TOKENS, TOKENS)
            for x, new in zip(qkv, draw(TOKENS, number), strict=True):
                x.copy_(new)
            if number < 8:
                out = layer(*qkv, cache=cache.layers[0])
            else:
                kinds.add(cache.kind)
                if number == 8:
                    with torch.cuda.graph(graph):
                        out = layer(*qkv, cache=cache.layers[0])
                out.fill_(torch.nan)
                graph.replay()
            q, k, v = (x.clone() for x in qkv)
            chunks.append((k, v))
            keys, values = past_of(in_codes(chunks, bits, 1), 1, 5)
            assert_within_error_budget(out, q, keys, values, scale=SCALE)
            cache.commit()
    assert len(kinds) == 1


def test_what_no_graph_and_no_call_wrote_is_not_committed():
    cache, layer = cache_of(num_layers=2), LocalAttention(HEADS, SIZE, KV_HEADS)
    qkv, graph = draw(TOKENS, 0), torch.cuda.CUDAGraph()
    first, second = cache.layers
    with torch.inference_mode():
        for number in range(9):
            cache.begin(number * TOKENS, TOKENS)
            for part in cache.layers:
                layer(*qkv, cache=part)
            cache.commit()
        cache.begin(9 * TOKENS, TOKENS)
        with torch.cuda.graph(graph):
            layer(*qkv, cache=first)
        graph.replay()
        with pytest.raises(UsageError, match="got nothing or a part of it from layers 1; run"):
            cache.commit()
        layer(*qkv, cache=second)
        cache.commit()
        cache.begin(10 * TOKENS, TOKENS)
        graph.replay()  # which tells nobody
        layer(*qkv, cache=second)
        cache.commit()


def test_windows_in_space_are_those_of_the_lists():
    cache, layer = cache_of(grid=(10, 14), tile=(4, 4)), LocalAttention(HEADS, SIZE, KV_HEADS)
    part, graph = cache.layers[0].view(2, 3, space=(1, 3)), torch.cuda.CUDAGraph()
    qkv = draw(TOKENS, 0)
    with torch.inference_mode():
        for number in range(12):
            cache.begin(number * TOKENS, TOKENS)
            for x, new in zip(qkv, draw(TOKENS, number), strict=True):
                x.copy_(new)
            if number < 8:
                out = layer(*qkv, cache=part)
            else:
                if number == 8:
                    with torch.cuda.graph(graph):
                        out = layer(*qkv, cache=part)
                graph.replay()
            seen = part.visible()
            assert seen.tiles is not None
            mask = dense_mask(seen.plan.to("cpu"), 1, 1).cuda()
            order = seen.tiles.order.order.long()
            assert_within_error_budget(
                out[:, order], qkv[0][:, order], seen.keys, seen.values, scale=SCALE, mask=mask
            )
            cache.commit()


# By name: a latent frame, the cache's tiles, the backend, its parameters, and the tiles it keeps of
# so many; two sizes of tiles, the last ones cut short.
LARGE, SMALL = ((12, 12), (8, 8)), ((10, 14), (4, 4))
CHOICES = {
    "vsa, 64 mean": (
        *SMALL,
        "video_sparse_attn",
        {"sparsity": 0.7, "tile_size": [4, 4, 4]},
        lambda num: -(-3 * num // 10),
    ),
    "vsa, 256 mean": (
        *LARGE,
        "video_sparse_attn",
        {"sparsity": 0.7, "tile_size": [4, 8, 8]},
        lambda num: -(-3 * num // 10),
    ),
    "vsa, 256 subblock": (
        *LARGE,
        "video_sparse_attn",
        {"sparsity": 0.7, "tile_size": [4, 8, 8], "router": "subblock"},
        lambda num: -(-3 * num // 10),
    ),
    "cube": (
        *SMALL,
        "cube_sparse_attn",
        {"local_cube_size": [3, 4, 4], "topk_ratio": 0.3},
        lambda num: max(1, int(0.3 * num)),
    ),
    "sol, with its tail": (
        *LARGE,
        "sol_attn",
        {
            "topk_ratio": 0.4,
            "tile_size": [3, 8, 8],
            "neighbours": 0,
            "dense_steps": 0,
            "dense_layers": None,
        },
        lambda num: max(1, min(round(0.4 * num), num - 1)),
    ),
    "vmoba": (
        *LARGE,
        "vmoba_attn",
        {
            "moba_select_mode": "topk",
            "st_topk": 3,
            "st_chunk_size": [3, 8, 8],
            "temporal_layer": 0,
            "spatial_layer": 0,
            "first_full_step": 0,
        },
        lambda num: min(num, 3),
    ),
}


def ranked_tiles(number: int, tiles: TokenTiles):
    """Return q, k and v of a chunk whose tiles differ so much that rounding ranks none anew.

    Scores differ by 0.5 from one tile of keys to the next, in an order that every kind of query
    tile has for itself.
    """
    q, k, v = draw(len(tiles.tile), number)
    q, k, of_token = 0.1 * q, 0.1 * k, tiles.tile.cuda()
    for channel in range(2):
        places = torch.randperm(16 * tiles.num, generator=torch.Generator().manual_seed(channel))
        places = places[number * tiles.num : (number + 1) * tiles.num].cuda()
        k[..., channel] = (places[of_token] / 8)[:, None]
        q[..., channel] = (((of_token + channel) % 2) * (4 - 8 * (of_token // 2 % 2)))[:, None]
    return q, k, v


def kept_tiles(name, q, keys, queries, seen):
    """Return what a method keeps by definition, in float64: bool [B, H, Sq, tiles of keys]."""
    kept = CHOICES[name][4](seen.num)
    own = near_tiles(queries, seen, 0)[queries.tile].to(q.device)
    if name == "vmoba":
        mine = queries.tile + seen.num - queries.num
        return selected_tiles(q.cpu(), keys.cpu(), mine, seen, topk=kept).to(q.device)
    mask = best_tiles(q, keys, queries, seen, kept, scale=SCALE)
    first = [int((seen.tile == n).nonzero()[0, 0]) for n in range(seen.num)]
    return mask[..., first] | own if name in ("cube", "sol, with its tail") else mask[..., first]


@pytest.mark.parametrize("how", ["called", "replayed"])
@pytest.mark.parametrize("name", CHOICES)
def test_sparse_methods_choose_among_the_tiles_of_a_cache(name, how):
    """Against the choice by definition, in float64, over the chunks that are seen."""
    grid, tile, backend_name, options, _ = CHOICES[name]
    backend, frames = AttentionBackendEnum(backend_name), 3
    config = build_config(
        find_backend(backend, PlatformEnum.CUDA).config_cls, options, backend=backend_name
    )
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    layer = LocalAttention(HEADS, SIZE, KV_HEADS, scope=SelectionScope(default=asked, strict=True))
    tokens, cells = frames * grid[0] * grid[1], 4 if "subblock" in name else 1
    cache = cache_of(chunk_tokens=tokens, grid=grid, tile=tile, window=3, sink=1)
    queries = token_tiles([frames], grid, tile, cells=cells)
    part, graph, past = cache.layers[0], torch.cuda.CUDAGraph(), []
    qkv = tuple(x.clone() for x in ranked_tiles(0, queries))
    with torch.no_grad(), set_forward_context(0, num_steps=1):
        for number in range(9):
            cache.begin(number * tokens, tokens)
            for x, new in zip(qkv, ranked_tiles(number, queries), strict=True):
                x.copy_(new)
            if how == "called" or number < 6:
                out = layer(*qkv, cache=part)
            else:
                if number == 6:
                    with torch.cuda.graph(graph):
                        out = layer(*qkv, cache=part)
                out.fill_(torch.nan)
                graph.replay()
            q, *kv = (x.clone() for x in qkv)
            past.append(kv)
            seen = token_tiles([frames] * min(number + 1, 4), grid, tile, cells=cells)
            keys, values = past_of(past, 1, 3)
            kept = kept_tiles(name, q, keys, queries, seen)
            if "tail" in name:
                want = attention_with_tail(q, keys, values, seen, kept, scale=SCALE)
                torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
            else:
                mask = kept[..., seen.tile]
                assert_within_error_budget(out, q, keys, values, scale=SCALE, mask=mask)
            cache.commit()
    (entry,) = layer.report().entries
    assert entry.selection.backend is backend
    assert layer.report().detours == ()


def test_the_density_of_cached_chunks_is_that_of_calls_without_a_graph():
    grid, tile, name, options, _ = CHOICES["vsa, 64 mean"]  # tiles cut short: data decide
    scope = scope_from(attention_backend=name, attention_backend_config=options)
    layer, tokens = LocalAttention(HEADS, SIZE, KV_HEADS, scope=scope), 3 * grid[0] * grid[1]
    cache = cache_of(chunk_tokens=tokens, grid=grid, tile=tile, window=3, sink=1)
    queries = token_tiles([3], grid, tile)
    qkv, graph = ranked_tiles(0, queries), torch.cuda.CUDAGraph()
    with torch.no_grad(), set_forward_context(0, num_steps=1):
        for number in range(9):
            cache.begin(number * tokens, tokens)
            for x, new in zip(qkv, ranked_tiles(number, queries), strict=True):
                x.copy_(new)
            if number < 6:
                layer(*qkv, cache=cache.layers[0])
                (entry,) = layer.report().entries
                wanted = entry.density
            elif number == 6:
                with torch.cuda.graph(graph):
                    layer(*qkv, cache=cache.layers[0])
            if number >= 6:
                graph.replay()
                torch.full((1 << 16,), torch.nan, device="cuda")  # where something was freed
                (entry,) = layer.report().entries
                assert entry.density == wanted
            cache.commit()
    assert 0.2 < wanted < 0.5


def kernels_of(cache: CausalCache, number: int) -> list[str]:
    """Return the kernels and copies on the device that placing a chunk takes."""
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as found:
        cache.begin(number * TOKENS, TOKENS)
        cache.discard()
        torch.cuda.synchronize()
    return sorted(
        event.name
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


def test_an_eviction_runs_the_same_few_kernels_whatever_is_kept():
    counts = {}
    for window, layers in ((2, 1), (12, 8)):
        cache, layer = cache_of(window=window, num_layers=layers), LocalAttention(HEADS, SIZE, 2)
        for number in range(window + 4):
            q, k, v = draw(TOKENS, 0)
            cache.begin(number * TOKENS, TOKENS)
            for part in cache.layers:
                layer(q, k, v, cache=part)
            cache.commit()
        names = kernels_of(cache, window + 4)
        counts[window] = len(names)
        assert not [name for name in names if "DtoD" in name or "Cat" in name], names
    assert 0 < counts[2] == counts[12] < 12


def test_a_thousand_chunks_take_no_memory():
    gc.collect()  # what an earlier test left would be freed in between
    cache, layer = cache_of(), LocalAttention(HEADS, SIZE, KV_HEADS)
    q, k, v = draw(TOKENS, 0)
    held = {}
    for number in range(1000):
        cache.begin(number * TOKENS, TOKENS)
        if number % 10 == 0 or number > 990:
            layer(q, k, v, cache=cache.layers[0])
        else:
            cache.layers[0].append(k, v)
        cache.commit()
        if number in (20, 999):
            torch.cuda.synchronize()
            held[number] = torch.cuda.memory_allocated()
    assert held[20] == held[999]


def test_what_does_not_fit_into_the_gpu_is_refused_before_it_is_allocated():
    before = torch.cuda.memory_allocated()
    with pytest.raises(UsageError, match=r"free on cuda, got .* GiB\), for 4000 layers"):
        cache_of(num_layers=4000, window=400)
    assert torch.cuda.memory_allocated() == before


def test_8_bits_stay_near():
    cache, layer = cache_of(bits=8), LocalAttention(HEADS, SIZE, KV_HEADS)
    chunks = []
    for number in range(9):
        q, k, v = draw(TOKENS, number)
        cache.begin(number * TOKENS, TOKENS)
        out = layer(q, k, v, cache=cache.layers[0])
        chunks.append((k, v))
        cache.commit()
    keys, values = past_of(chunks, 2, 4)
    assert_within_error_budget(out, q, keys, values, scale=SCALE, quantised=True)


MASKS = {
    "chunks": lambda b, h, q, k: q // 250 >= k // 250,
    "tokens": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k).abs() < 90,
    "heads": lambda b, h, q, k: q // (200 + 50 * h) >= k // (200 + 50 * h),
}


@pytest.mark.parametrize("name", MASKS)
def test_block_masks_are_what_flex_attention_takes_them_for(name):
    heads = HEADS if name == "heads" else None
    mask = create_block_mask(MASKS[name], None, heads, 1200, 1200, device="cuda")
    q, k, v = draw(1200, 0)
    layer = LocalAttention(HEADS, SIZE, KV_HEADS)
    out = layer(q, k, v, mask)
    dense = create_mask(MASKS[name], 1, HEADS, 1200, 1200, device="cuda")
    assert_within_error_budget(out, q, k, v, scale=SCALE, mask=dense)
    (detour,) = layer.report().detours
    assert detour.selection.variant in ("gluon", "triton")


def test_flex_attention_compiles_its_own_masks_where_it_is_asked_for():
    asked = BackendPreference(source=Source.SETTINGS, backend=AttentionBackendEnum.FLEX_ATTN)
    layer = LocalAttention(HEADS, SIZE, KV_HEADS, scope=SelectionScope(default=asked, strict=True))
    q, k, v = draw(1200, 0)
    with torch.no_grad():
        out = layer(q, k, v, create_block_mask(MASKS["chunks"], None, None, 1200, 1200, "cuda"))
    dense = create_mask(MASKS["chunks"], 1, 1, 1200, 1200, device="cuda")
    assert_within_error_budget(out, q, k, v, scale=SCALE, mask=dense)
    (entry,) = layer.report().entries
    assert (entry.selection.label, entry.calls) == ("flex_attn", 1)
    assert layer.report().detours == ()


@pytest.mark.parametrize("make", [chunk_causal_plan, teacher_forcing_plan])
def test_layouts_run_on_the_engine(make):
    plan = make([100, 300, 300, 250], window=2, sink=1, device="cuda")
    q, k, v = draw(plan.q.total, 0)
    out = LocalAttention(HEADS, SIZE, KV_HEADS)(q, k, v, plan)
    mask = dense_mask(plan.to("cpu"), 1, 1).cuda()
    assert_within_error_budget(out, q, k, v, scale=SCALE, mask=mask)


def test_a_stream_hands_on_the_frames_of_the_whole_video(tmp_path):
    for name in ("diffusers", "transformers", "ftfy"):  # without the last diffusers reads no prompt
        pytest.importorskip(name)
    HELIOS.build(0).save_pretrained(tmp_path / "model")
    call = {"prompt": "a fox", "height": 32, "width": 64, "num_frames": 18, "seed": 0}
    call |= {"num_inference_steps": 2, "pipeline_arg": dict(HELIOS.extra_kwargs)}
    chunks = []
    with DiffGenerator.from_pretrained(tmp_path / "model", dtype="float32") as generator:
        whole = generator.generate(**call)
        made = generator.generate(**call, stream=True, on_chunk=chunks.append)
    assert [chunk.num_frames for chunk in chunks] == [9, 8]
    frames = torch.cat([torch.as_tensor(chunk.frames) for chunk in chunks])
    torch.testing.assert_close(frames, torch.as_tensor(whole.pixels[0]), rtol=0, atol=1e-3)
    assert made.record["stream"]["frames_per_second"] > 0


def test_causal_blocks_of_skyreels_are_those_of_its_own_mask():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.SkyReelsV2Transformer3DModel(
        num_attention_heads=4,
        attention_head_dim=128,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=1,
        num_frame_per_block=3,
    )
    model = model.eval().to("cuda", torch.bfloat16)
    drawn = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = {
        "hidden_states": torch.randn(1, 16, 9, 30, 52, **drawn),
        "timestep": torch.tensor([500], device="cuda"),
        "encoder_hidden_states": torch.randn(1, 20, 32, **drawn),
    }
    with torch.no_grad():
        stock = model(**inputs, return_dict=False)[0]
        with apply(model) as handle:
            ours = model(**inputs, return_dict=False)[0]
            (layer,) = [x for x in handle.report().layers if x.name == "blocks.0.attn1"]
    assert [detour.selection.variant in ("gluon", "triton") for detour in layer.detours] == [True]
    error = (ours - stock).double().norm() / stock.double().norm()
    assert error < 2e-2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_the_past_of_anyflow_far_gives_the_stock_latents():
    for name in ("diffusers", "transformers", "ftfy"):
        pytest.importorskip(name)
    pipe = ANYFLOW_FAR.build(0).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    call = {**ANYFLOW_FAR.generate_kwargs, "output_type": "latent"}
    stock = pipe(**call, generator=torch.Generator().manual_seed(0)).frames
    with apply(pipe):
        ours = pipe(**call, generator=torch.Generator().manual_seed(0)).frames
    torch.testing.assert_close(ours, stock, rtol=0, atol=2e-2)
