"""Odd calls and what layers make of them: tokens in front, masks in other forms, errors."""

import logging
from dataclasses import replace

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.runtime.layers.attention import (
    LocalAttention,
    UlyssesAttention,
    USPAttention,
)
from multimodal_gen.runtime.layers.attention.call import AttentionCall, watching
from multimodal_gen.runtime.layers.attention.kinds.masks import as_key_mask
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    SelectionScope,
    Source,
    scope_from,
)
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.methods import SMALL, method

HEADS, SIZE, GRID, TEXT = 2, 32, (4, 8, 8), 5
VIDEO = 4 * 8 * 8

# Each leaves out enough that a video one token further on is another one.
METHODS = {
    each.backend: each
    for each in (
        method("sla_attn", topk_ratio=0.25, BLKQ=64),
        *(
            method(name, **SMALL[name])
            for name in ("video_sparse_attn", "sliding_tile_attn", "vmoba_attn")
        ),
    )
}


def layer(backend, cls=USPAttention, **options):
    return replace(METHODS[backend], layer_cls=cls).layer(**options)


def tokens(count, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, count, HEADS, SIZE, generator=generator) for _ in range(3)]


def split(x):
    return x[:, :TEXT], x[:, TEXT:]


@pytest.mark.parametrize("backend", METHODS, ids=str)
def test_a_layer_knows_its_replicated_tokens_without_a_text_span(backend):
    q, k, v = tokens(TEXT + VIDEO)
    with set_forward_context(0, latent_grid=GRID, text_span=TextSpan(start=0, length=TEXT)):
        expected = layer(backend)(q, k, v)
    prefixes, own = zip(*(split(x) for x in (q, k, v)), strict=True)
    named = dict(zip(("q_prefix", "k_prefix", "v_prefix"), prefixes, strict=True))
    with set_forward_context(0, latent_grid=GRID):
        counted = layer(backend)(q, k, v, num_replicated_prefix=TEXT)
        joined = layer(backend)(*own, **named)
        shifted = layer(backend)(q, k, v)
    assert torch.equal(counted, expected)
    assert torch.equal(joined, expected)
    assert not torch.allclose(shifted, expected, atol=1e-2)  # what it was taken for before


@pytest.mark.parametrize("backend", METHODS, ids=str)
def test_keys_with_a_prefix_of_their_own_do_not_shift_the_video(backend):
    q, k, v = tokens(TEXT + VIDEO)
    with set_forward_context(0, latent_grid=GRID, text_span=TextSpan(start=0, length=TEXT)):
        expected = layer(backend)(q, k, v)[:, TEXT:]
    (_, video), keys, values = split(q), split(k), split(v)
    pairs = (keys[0], values[0], keys[1], values[1])
    with set_forward_context(0, latent_grid=GRID):
        out = layer(backend).forward_with_replicated_kv_prefix(video, *pairs)
        keep = torch.ones(1, TEXT + VIDEO, dtype=torch.bool)
        masked = layer(backend)(video, k, v, keep, num_replicated_kv_prefix=TEXT)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(masked, expected)


@pytest.mark.parametrize("backend", METHODS, ids=str)
def test_keys_with_a_prefix_of_their_own_take_a_mask_with_a_row_for_each_query(backend):
    q, k, v = tokens(TEXT + VIDEO)
    video = q[:, TEXT:]
    keep = torch.ones(1, TEXT + VIDEO, dtype=torch.bool)
    keep[:, 2:TEXT] = False
    rows = keep[:, None, None].expand(1, 1, VIDEO, -1)
    added = torch.zeros(rows.shape).masked_fill(~rows, -torch.inf)
    attention = layer(backend, strict=True)
    with set_forward_context(0, latent_grid=GRID):
        expected = attention(video, k, v, keep, num_replicated_kv_prefix=TEXT)
        for mask in (rows, rows[:, 0], added):
            out = attention(video, k, v, mask, num_replicated_kv_prefix=TEXT)
            assert torch.equal(out, expected)


def test_a_mask_that_says_more_is_honoured_behind_keys_of_their_own():
    q, k, v = tokens(TEXT + VIDEO)
    video = q[:, TEXT:]
    mask = torch.ones(VIDEO, TEXT + VIDEO, dtype=torch.bool).tril(TEXT)[None, None]
    with set_forward_context(0, latent_grid=GRID):
        out = layer(AttentionBackendEnum.SLA_ATTN)(video, k, v, mask, num_replicated_kv_prefix=TEXT)
    torch.testing.assert_close(out, LocalAttention(HEADS, SIZE)(video, k, v, mask))


def test_a_text_span_that_is_not_that_of_the_tokens_in_front_is_refused():
    q, k, v = tokens(TEXT + VIDEO)
    sla = layer(AttentionBackendEnum.SLA_ATTN)
    span = TextSpan(start=0, length=TEXT - 1)
    refused = pytest.raises(UsageError, match="text_span must hold the 5 tokens in front")
    with set_forward_context(0, latent_grid=GRID, text_span=span), refused:
        sla(q, k, v, num_replicated_prefix=TEXT)


def key_masks(keep):
    """Return a mask of keys, bool [B, S], in the forms that dense masks have."""
    batch, size = keep.shape
    additive = torch.zeros(batch, size).masked_fill(~keep, -torch.inf)
    lowest = torch.zeros(batch, size).masked_fill(~keep, torch.finfo(torch.float32).min)
    return {
        "additive 2-D": additive,
        "additive, lowest number": lowest[:, None, None],
        "additive, -10000": torch.zeros(batch, size).masked_fill(~keep, -10000.0),
        "additive, lowest of bfloat16": lowest.bfloat16().clamp(
            min=torch.finfo(torch.bfloat16).min
        ),
        "additive, every row": additive[:, None, None].expand(batch, 1, size, size),
        "every row": keep[:, None].expand(batch, size, size),
        "every head": keep[:, None, None].expand(batch, HEADS, size, size),
    }


FORMS = list(key_masks(torch.ones(1, 2, dtype=torch.bool)))


@pytest.mark.parametrize("form", FORMS)
def test_a_key_mask_in_another_form_stays_sparse(form):
    q, k, v = tokens(VIDEO)
    keep = torch.ones(1, VIDEO, dtype=torch.bool)
    keep[:, -9:] = False
    attention = layer(AttentionBackendEnum.SLA_ATTN, strict=True)
    with set_forward_context(0, latent_grid=GRID):
        expected = attention(q, k, v, keep[:, None, None])
        assert torch.equal(attention(q, k, v, key_masks(keep)[form]), expected)
    assert not attention.report().detours


def test_pairs_of_kept_tokens_are_a_mask_of_keys_and_queries():
    q, k, v = tokens(VIDEO)
    keep = torch.ones(1, VIDEO, dtype=torch.bool)
    keep[:, -9:] = False
    attention = layer(AttentionBackendEnum.SLA_ATTN, strict=True)
    with set_forward_context(0, latent_grid=GRID):
        expected = attention(q, k, v, keep)
        out = attention(q, k, v, (keep[:, None] & keep[:, :, None])[:, None])
    assert torch.equal(out, expected)
    assert not out[:, -9:].any()


def lower_triangle():
    return torch.ones(VIDEO, VIDEO, dtype=torch.bool).tril()[None, None]


def test_any_other_mask_runs_dense_with_one_warning_and_is_refused_under_strict(caplog):
    q, k, v = tokens(VIDEO)
    attention = layer(AttentionBackendEnum.SLA_ATTN)
    strict = layer(AttentionBackendEnum.SLA_ATTN, strict=True)
    with caplog.at_level(logging.WARNING), set_forward_context(0, latent_grid=GRID):
        outs = [attention(q, k, v, lower_triangle()) for _ in range(2)]
        with pytest.raises(UnsupportedBackendError, match="has no dense_mask, and a layer makes"):
            strict(q, k, v, lower_triangle())
    dense = LocalAttention(HEADS, SIZE)(q, k, v, lower_triangle())
    torch.testing.assert_close(outs[0], dense)
    said = [r.getMessage() for r in caplog.records if "they run dense" in r.getMessage()]
    assert len(said) <= 1  # once per process, for layers outside of any pipeline
    assert [detour.calls for detour in attention.report().detours] == [2]


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[0.0, -1.0, -torch.inf]])[:, None, None],
        lower_triangle(),
        torch.zeros(4, 4).fill_diagonal_(-torch.inf)[None, None],
        torch.full((1, 1, 3, 3), torch.finfo(torch.float32).min),
        torch.full((1, 1, 3, 3), -10000.0),
    ],
    ids=["weights", "causal", "not itself", "nothing but the lowest number", "nothing but -10000"],
)
def test_what_says_more_than_which_keys_is_no_key_mask(mask):
    assert as_key_mask(mask, self_attention=True) is None


Q = torch.zeros(1, 4, HEADS, SIZE)
NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@NESTED
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": Q.half()}, "must have one dtype, got torch.float32, torch.float16"),
        ({"v": Q.bfloat16()}, "must have one dtype"),
        ({"k": Q.to("meta")}, "must be on one device, got cpu, meta and cpu"),
        ({"q": Q.to_sparse()}, "query must be a dense tensor, got a sparse_coo one"),
        ({"mask": torch.ones(1, 4).to_sparse()}, "attn_mask must be a dense tensor"),
        ({"mask": torch.ones(1, 4, dtype=torch.complex64)}, "attn_mask must be real, got"),
        ({"mask": torch.ones(1, 4, device="meta")}, "attn_mask must be on the device of q"),
        ({"q": Q[:, :, :1], "k": Q[:, :, :1], "v": Q[:, :, :1]}, "2 query heads and 2 key"),
        ({"q": Q[:, :, :0], "k": Q[:, :, :0], "v": Q[:, :, :0]}, "2 query heads and 2 key"),
        ({name: Q.transpose(1, 2) for name in "qkv"}, "2 query heads and 2 key"),
    ],
)
def test_tensors_that_no_kernel_takes_together_are_refused(change, message):
    given = {"q": Q, "k": Q, "v": Q, "mask": None} | change
    with pytest.raises(UsageError, match=message):
        LocalAttention(HEADS, SIZE)(given["q"], given["k"], given["v"], given["mask"])


@NESTED
def test_nested_tensors_are_refused_in_both_layouts():
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([Q[0], Q[0]], layout=layout)
        with pytest.raises(UsageError, match="must be a dense tensor, got a nested one"):
            LocalAttention(HEADS, SIZE)(nested, Q, Q)


def test_heads_that_were_exchanged_before_may_be_some_of_the_layers():
    some = Q[:, :, :1]
    assert USPAttention(HEADS, SIZE)(some, some, some, qkv_pre_all_to_all=True).shape == some.shape
    with pytest.raises(UsageError, match="2 query heads and 2 key"):
        USPAttention(HEADS, SIZE)(some, some, some)


def test_mixed_dtypes_are_taken_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = LocalAttention(HEADS, SIZE)(Q, Q.bfloat16(), Q)
    assert out.dtype is torch.bfloat16


@pytest.mark.parametrize("backend", METHODS, ids=str)
def test_tensors_without_data_give_the_shape_of_the_output(backend):
    q, k, v = (x.to("meta") for x in tokens(VIDEO))
    with set_forward_context(0, latent_grid=GRID):
        out = layer(backend)(q, k, v)
    assert out.is_meta
    assert out.shape == q.shape


@pytest.mark.parametrize("backend", METHODS, ids=str)
def test_an_empty_batch_gives_an_empty_output(backend):
    q, k, v = tokens(VIDEO, batch=0)
    with set_forward_context(0, latent_grid=GRID):
        assert layer(backend)(q, k, v).shape == q.shape
    assert LocalAttention(HEADS, SIZE)(q, k, v).shape == q.shape


def test_an_empty_batch_is_nothing_to_quantise_either():
    q, k, v = tokens(VIDEO, batch=0)
    backend = AttentionBackendEnum.SAGE_SLA_ATTN
    asked = BackendPreference(source=Source.SETTINGS, backend=backend)
    sage = LocalAttention(HEADS, SIZE, scope=SelectionScope(default=asked))
    with set_forward_context(0, latent_grid=GRID, num_steps=50):
        assert sage(q, k, v).shape == q.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_lens": 4}, "seq_lens must be a list of whole numbers"),
        ({"seq_lens": ["4"]}, "seq_lens must be a list of whole numbers"),
        ({"seq_lens": [4.0]}, "seq_lens must be a list of whole numbers"),
        ({"seq_lens": {4: 1}}, "seq_lens must be a list of whole numbers"),
        ({"num_replicated_prefix": 1.5}, "num_replicated_prefix must be a whole number, got 1.5"),
        ({"num_replicated_suffix": torch.ones(2)}, "num_replicated_suffix must be a whole number"),
        ({"num_replicated_prefix": "2"}, "num_replicated_prefix must be a whole number"),
        ({"num_replicated_suffix": True}, "num_replicated_suffix must be a whole number"),
        ({"num_replicated_kv_prefix": None}, "num_replicated_kv_prefix must be a whole number"),
        ({"skip_sequence_parallel_override": "no"}, "override must be True or False, got 'no'"),
        ({"qkv_pre_all_to_all": 1}, "qkv_pre_all_to_all must be True or False, got 1"),
        (
            {"q_prefix": Q[:, :, :1], "k_prefix": Q, "v_prefix": Q},
            r"q_prefix and q must be alike in all but the number of tokens, got \[1, 4, 1, 32\]",
        ),
        ({"q_prefix": Q[0], "k_prefix": Q, "v_prefix": Q}, r"q_prefix must be \[B, S, H, D\]"),
        ({"q_prefix": 3, "k_prefix": Q, "v_prefix": Q}, "q_prefix must be a torch.Tensor, got int"),
    ],
    ids=str,
)
def test_arguments_of_other_types_are_refused_clearly(options, message):
    with pytest.raises(UsageError, match=message):
        USPAttention(HEADS, SIZE)(Q, Q, Q, **options)


def test_replicated_parts_of_other_sizes_are_refused():
    wide = torch.zeros(1, 2, 3, SIZE)
    with pytest.raises(UsageError, match="q and replicated_q must be alike"):
        UlyssesAttention(HEADS, SIZE)(Q, Q, Q, wide, Q, Q)
    with pytest.raises(UsageError, match="k_prefix and k_suffix must be alike"):
        USPAttention(HEADS, SIZE).forward_with_replicated_kv_prefix(Q, wide, wide, Q, Q)
    with pytest.raises(UsageError, match=r"k_prefix must be a torch\.Tensor, got NoneType"):
        USPAttention(HEADS, SIZE).forward_with_replicated_kv_prefix(Q, None, None, Q, Q)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("scope", "fa", "scope must be a SelectionScope or None, got 'fa'"),
        ("site", "blocks.3", "site must be a LayerSite or None"),
        ("supported_attention_backends", "fa", "must be a collection of backends or None"),
        ("supported_attention_backends", 3, "must be a collection of backends or None"),
        ("supported_attention_backends", [3], "attention backend must be"),
        ("default_attention_backend", 3, "attention backend must be"),
    ],
)
def test_a_layer_says_which_of_its_arguments_has_the_wrong_type(option, value, message):
    with pytest.raises(ConfigError, match=message):
        LocalAttention(HEADS, SIZE, **{option: value})


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"latent_grid": (4, 4)}, r"latent_grid must be \(T, H, W\), three integers >= 1"),
        ({"latent_grid": (-1, -4, 4)}, "latent_grid must be"),
        ({"latent_grid": (10**30, 1, 1)}, "latent_grid must have at most 2147483647 tokens, got"),
        ({"latent_grid": (1.0, 4.0, 4.0)}, "latent_grid must be"),
        ({"latent_grid": "abc"}, "latent_grid must be"),
        ({"text_span": (0, 4)}, "text_span must be a TextSpan or None"),
        ({"current_timestep": -1}, "current_timestep must be the index of a denoising step"),
        ({"current_timestep": 999.5}, "current_timestep must be the index of a denoising step"),
        ({"num_steps": "9"}, "num_steps must be an integer"),
    ],
    ids=str,
)
def test_a_context_that_cannot_be_is_refused_where_it_is_made(known, message):
    context = set_forward_context(**{"current_timestep": 0} | known)
    with pytest.raises(UsageError, match=message), context:
        pass


def test_a_grid_may_be_a_list_and_a_span_has_no_negative_numbers():
    with set_forward_context(0, latent_grid=[1, 2, 3]) as context:
        assert context.latent_grid == (1, 2, 3)
    with pytest.raises(UsageError, match="start of a TextSpan must be an integer >= 0, got -1"):
        TextSpan(start=-1, length=3)


@pytest.mark.parametrize("masked", [0, 40])
@pytest.mark.parametrize("grid", [(1, 5, 27), (2, 9, 11), (3, 8, 8)])
def test_the_density_of_short_and_ragged_sequences_is_that_of_the_pairs(grid, masked):
    count = grid[0] * grid[1] * grid[2]
    q, k, _ = tokens(count, seed=3)
    keep = torch.arange(count)[None] < count - masked
    attention = layer(AttentionBackendEnum.SLA_ATTN)
    # One-hot values show which keys every query attends to.
    pairs = 0
    with set_forward_context(0, latent_grid=grid):
        for first in range(0, count, SIZE):
            v = torch.zeros(1, count, HEADS, SIZE)
            width = min(SIZE, count - first)
            v[0, first : first + width, :, :width] = torch.eye(width)[:, None]
            out = attention(q, k, v, keep[:, None, None] if masked else None)
            pairs += int((out > 0).sum())
    (density,) = attention.report().entries[0].densities
    assert density[1] == pytest.approx(pairs / HEADS / (count * (count - masked)), abs=1e-6)


def test_a_density_far_from_what_was_asked_for_is_said_once_with_the_reason(caplog):
    q, k, v = tokens(4 * 4 * 7)
    attention = layer(AttentionBackendEnum.SLA_ATTN)
    with caplog.at_level(logging.WARNING), set_forward_context(0, latent_grid=(4, 4, 7)):
        for _ in range(2):
            attention(q, k, v)
    (said,) = [
        r.getMessage()
        for r in caplog.records
        if "attends to" in r.getMessage() and "asked for" in r.getMessage()
    ]
    assert "attends to 50% of the pairs, not to the 25% that were asked for" in said
    assert "the latent grid (4, 4, 7) has 2 blocks, of which 1 is kept" in said


@pytest.mark.parametrize(
    ("backend", "config", "said"),
    [
        (
            "sol_attn",
            {"topk_ratio": 0.1, "dense_steps": None, "dense_layers": None},
            "67%",
        ),
        ("cube_sparse_attn", {"topk_ratio": 0.1}, "33%"),
        ("sparge_attn", {"topk": 0.1}, "33%"),
    ],
)
def test_methods_with_a_share_of_blocks_say_where_it_cannot_be_had(backend, config, said, caplog):
    grid = (4, 4, 12)
    asked = scope_from(attention_backend=backend, attention_backend_config=config)
    attention = LocalAttention(2, 8, compute_dtype=torch.float32, scope=asked)
    q, k, v = (torch.randn(1, 192, 2, 8) for _ in range(3))
    with caplog.at_level(logging.WARNING), set_forward_context(5, num_steps=9, latent_grid=grid):
        attention(q, k, v)
    assert f"{said} of the pairs, not to the 10% that were asked for" in caplog.text


@pytest.mark.parametrize("replicated", [(0, 0, 0), (2, 0, 0)])
def test_tokens_in_front_change_neither_rows_behind_nor_who_watches(replicated):
    seen = []

    def watch(layer, call, serve):
        seen.append(call.replicated)
        return serve(call)

    q = torch.randn(1, 6, 2, 8)
    with watching(watch):
        out = LocalAttention(2, 8).attend(
            AttentionCall(q, q, q, replicated=replicated, zero_rows=3)
        )
    assert seen == [replicated]
    assert out.shape == (1, 9, 2, 8)
    assert not out[:, 6:].any()
