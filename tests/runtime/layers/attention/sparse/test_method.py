"""What every sparse method does, against its definition: text, masks, tails, gradients, reports."""

from dataclasses import replace

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.sparse import tiles
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import recorded_pairs
from multimodal_gen.runtime.managers.forward_context import TextSpan
from tests.helpers.inputs import QKV
from tests.helpers.methods import DEFINED, Defined
from tests.helpers.sparse import kept_pairs, run_sparse, text_places
from tests.helpers.tolerance import assert_within_error_budget

LENGTH = 35
SCALED = ("vsa by cells", "sol", "sol, exact", "sol by cells", "nabla", "draft", "bsa", "subblock")


def text_of(defined: Defined, where: str) -> TextSpan | None:
    return text_places(defined.grid, LENGTH)[where]


def some_masked(defined: Defined, where: str) -> torch.Tensor:
    """Return tokens that count, bool [2, S]: not some all over, and not many of the second."""
    text = text_of(defined, where)
    tokens = defined.inputs(text).key.shape[1]
    token_mask = torch.arange(2 * tokens).view(2, -1) % 7 != 3
    token_mask[1, 100:140] = False
    return token_mask


@pytest.mark.parametrize("where", ["no text", "text first", "text last"])
@pytest.mark.parametrize("name", DEFINED)
def test_what_is_kept_is_attended_to_and_told(name: str, where: str) -> None:
    defined = replace(DEFINED[name], method=replace(DEFINED[name].method, heads=4))
    text = text_of(defined, where)
    with recorded_pairs() as told:
        layer, _, mask = defined.check(text, qkv=defined.inputs(text, kv_heads=2))
    assert 0.1 < mask.double().mean() < 0.95
    (entry,) = layer.report().entries
    (density,) = dict(entry.densities).values()
    # Blocks of lists that are cut short count as ones of mean size.
    far = 0.02 if name == "sla" else 1e-6
    assert density == pytest.approx(float(mask.double().mean()), abs=far)
    rows = torch.arange(0, mask.shape[2], 3)
    assert torch.equal(kept_pairs(told, rows, mask), mask[:, :, rows])


@pytest.mark.parametrize("where", ["no text", "text last"])
@pytest.mark.parametrize("name", DEFINED)
def test_masked_tokens_have_no_influence_whatever_they_hold(name: str, where: str) -> None:
    defined = DEFINED[name]
    token_mask = some_masked(defined, where)
    with recorded_pairs() as told:
        _, _, mask = defined.check(text_of(defined, where), token_mask=token_mask)
    rows = torch.arange(0, mask.shape[2], 3)
    real = token_mask[:, None, rows, None]
    # Masked pairs have no weight, whether they are kept or not.
    kept = kept_pairs(told, rows, mask) & token_mask[:, None, None]
    assert torch.equal(kept & real, mask[:, :, rows] & real)


@pytest.mark.parametrize("where", ["no text", "text first", "masked"])
@pytest.mark.parametrize("name", DEFINED)
def test_with_a_tail_the_rest_counts_by_its_means(name: str, where: str) -> None:
    defined, token_mask = DEFINED[name], None
    if where == "masked":
        where = "text last"
        token_mask = some_masked(defined, where)
    defined.check(text_of(defined, where), token_mask=token_mask, tail="pooled")


@pytest.mark.parametrize("tail", ["none", "pooled"])
@pytest.mark.parametrize("name", DEFINED)
def test_gradients_are_those_of_the_definition(name: str, tail: str) -> None:
    defined = DEFINED[name]
    defined.check_gradients(text_of(defined, "text last"), tail=tail)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DEFINED)
def test_half_precision_errs_within_its_budget(name: str, dtype: torch.dtype) -> None:
    defined = DEFINED[name]
    more = {"use_bf16": dtype is torch.bfloat16} if name == "sla" else {}
    defined.check(qkv=defined.inputs(dtype=dtype), **more)


@pytest.mark.parametrize("name", DEFINED)
def test_samples_do_not_mix(name: str) -> None:
    defined = DEFINED[name]
    layer, qkv = defined.method.layer(kv_heads=1), defined.inputs(batch=2)
    loud = QKV(*(torch.cat((x[:1], 50 * x[1:])) for x in qkv))
    together = run_sparse(layer, loud, defined.grid)
    alone = run_sparse(layer, QKV(*(x[:1] for x in qkv)), defined.grid)
    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DEFINED)
def test_dropped_text_keys_leave_longer_queries(name: str) -> None:
    defined = DEFINED[name]
    text = text_of(defined, "text last")
    query, key, value = defined.inputs(text)
    some = slice(0, text.start + 9)
    defined.check(text, qkv=QKV(query, key[:, some], value[:, some]))


@pytest.mark.parametrize("name", DEFINED)
def test_every_step_has_its_density_and_dense_steps_run_dense(name: str) -> None:
    defined = DEFINED[name]
    layer, qkv = defined.method.layer(kv_heads=1, dense_steps="1"), defined.inputs()
    _, dense_out, _ = (run_sparse(layer, qkv, defined.grid, step=step) for step in (0, 1, 4))
    assert_within_error_budget(dense_out, *qkv, scale=defined.scale)
    dense, sparse = layer.report().entries
    assert (dense.calls, sparse.calls) == (1, 2)
    assert not dense.selection.backend.is_sparse
    (first_step, first), (second_step, second) = sparse.densities
    assert (first_step, second_step) == (0, 4)
    assert 0 < first < 1
    assert first == second


@pytest.mark.parametrize("name", [name for name in DEFINED if not name.startswith("vmoba")])
def test_blocks_that_are_all_padding_take_no_others_place(name: str) -> None:
    defined = DEFINED[name]
    text = text_of(defined, "text last")
    query, key, value = defined.inputs(text)
    token_mask = torch.ones(query.shape[:2], dtype=torch.bool)
    for lost in defined.cut(defined.grid, text)[1][1:4:2]:
        token_mask[:, list(lost)] = False
    # What a mean of zero scores, centred or not, is above all real scores.
    defined.check(text, qkv=QKV(query.abs(), -key.abs(), value), token_mask=token_mask)


@pytest.mark.parametrize("name", DEFINED)
def test_a_grid_that_does_not_fit_is_refused_with_numbers(name: str) -> None:
    defined = DEFINED[name]
    qkv, layer = defined.inputs(), defined.method.layer(kv_heads=1)
    tokens, (frames, *space) = qkv.query.shape[1], defined.grid
    for grid, wanted in (
        ((frames + 1, *space), rf"must get sequences .* {tokens} queries and {tokens} keys"),
        (None, "must know the latent grid of the video, got no"),
    ):
        with pytest.raises(UsageError, match=f"{defined.method.backend} {wanted}"):
            run_sparse(layer, qkv, grid)


@pytest.mark.parametrize("name", DEFINED)
def test_text_inside_the_video_is_refused(name: str) -> None:
    defined, text = DEFINED[name], TextSpan(start=7, length=LENGTH)
    qkv = defined.inputs(text_of(defined, "text last"))
    with pytest.raises(UsageError, match=r"text in front of the video or behind it, got .* 7"):
        run_sparse(defined.method.layer(kv_heads=1), qkv, defined.grid, text=text)


@pytest.mark.parametrize("name", DEFINED)
def test_heads_of_any_size_and_tensors_of_any_strides_are_served(name: str) -> None:
    defined = DEFINED[name]
    defined = replace(defined, method=replace(defined.method, head_size=48))
    qkv = QKV(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in defined.inputs()))
    assert not qkv.query.is_contiguous()
    defined.check(qkv=qkv)


@pytest.mark.parametrize("name", DEFINED)
def test_another_scale_is_used(name: str) -> None:
    defined = DEFINED[name]
    layer = defined.method.layer(kv_heads=1, geometry={"softmax_scale": 0.05})
    qkv = defined.inputs()
    out = run_sparse(layer, qkv, defined.grid)
    if name not in SCALED:  # what is kept depends on it
        mask = defined.mask(qkv)
        assert_within_error_budget(out, *qkv, scale=0.05, mask=mask)
    else:
        plain = run_sparse(defined.method.layer(kv_heads=1), qkv, defined.grid)
        assert not torch.allclose(out, plain, atol=1e-3)


# Parameters by which a method leaves nothing out.
EVERYTHING = (
    ("vsa", {"topk": ...}),
    ("vsa", {"topk": 12}),
    ("vsa", {"topk": ..., "sparsity": 0.0}),
    ("vsa h3", {"sparsity": 0.0}),
    ("vsa h3", {"vsa_dense_layers": "0"}),
    ("vsa h3", {"sparsity": 0.0, "vsa_mode": "compete"}),
    ("sla", {"topk_ratio": 1.0}),
    ("sol", {"tau": -1000.0}),
    ("nabla", {"P": 1.0}),
    ("nabla", {"add_sta": True, "wT": 99, "wH": 99, "wW": 99}),
    ("draft", {"sparsity_ratio": 0.0}),
    ("bsa", {"query_keep_ratio": 1.0, "kv_cumulative_threshold": 1.0}),
    ("bsa", {"query_keep_ratio": 1.0, "min_kv_blocks": 99}),
    ("pisa", {"density": 1.0}),
    ("vmoba, temporal", {"temporal_topk": 3}),
    ("vmoba, temporal", {"temporal_topk": 99}),
    ("vmoba, temporal", {"temporal_topk": 1}),  # own chunks alone, which means all of them
    ("vmoba, temporal", {"moba_select_mode": "threshold", "moba_threshold": 1.0}),
    (
        "vmoba, temporal",
        {
            "moba_select_mode": "threshold",
            "moba_threshold": 1.0,
            "moba_threshold_type": "overall",
        },
    ),
    ("vmoba, temporal", {"temporal_chunk_size": 5}),
)


@pytest.mark.parametrize("where", ["no text", "text first", "text last"])
@pytest.mark.parametrize(("name", "given"), EVERYTHING, ids=str)
def test_a_method_that_leaves_nothing_out_is_dense_attention(name, given, where) -> None:
    defined, text = DEFINED[name], text_of(DEFINED[name], where)
    qkv, layer = defined.inputs(text), defined.method.layer(kv_heads=1, **given)
    out = run_sparse(layer, qkv, defined.grid, text=text)
    assert_within_error_budget(out, *qkv, scale=defined.scale)
    assert layer.attn_impl.facts().densities == {0: 1.0}


@pytest.mark.parametrize("name", ["nabla", "draft", "bsa"])
def test_some_heads_at_a_time_choose_as_all_do(name, monkeypatch) -> None:
    defined, text = DEFINED[name], text_of(DEFINED[name], "text last")
    layer, qkv = defined.method.layer(kv_heads=1), defined.inputs(text)
    whole = run_sparse(layer, qkv, defined.grid, text=text)
    monkeypatch.setattr(tiles, "_NUMBERS_AT_ONCE", 1)
    assert torch.equal(run_sparse(layer, qkv, defined.grid, text=text), whole)
