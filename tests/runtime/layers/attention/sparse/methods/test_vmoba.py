"""V-MoBA through the layer, against its definition written down with loops."""

import math
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.kernels.select.row_reference import Rule
from multimodal_gen.kernels.select.rows import chunk_groups
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.scope import (
    LayerSite,
)
from multimodal_gen.runtime.layers.attention.sparse.executors import rows as by_rows
from multimodal_gen.runtime.layers.attention.sparse.executors.rows import row_chunks
from multimodal_gen.runtime.layers.attention.sparse.methods.vmoba import (
    VMoBABackend,
    VMoBAConfig,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, SparseCall
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.settings import read_mapping
from tests.helpers.inputs import QKV
from tests.helpers.methods import CHUNKS, DEFINED, rows_and_chunks
from tests.helpers.sparse import (
    SparseMethod,
    run_sparse,
    text_places,
)
from tests.helpers.tolerance import assert_within_error_budget
from tests.kernels.select.naive_chunks import naive_choice, naive_means

SIZES = {"temporal_chunk_size": 2, "spatial_chunk_size": [3, 4], "st_chunk_size": [2, 3, 4]}
TOPK = {"moba_select_mode": "topk", "temporal_topk": 2, "spatial_topk": 2, "st_topk": 3}
METHOD = SparseMethod(
    backend=AttentionBackendEnum.VMOBA_ATTN,
    given={**SIZES, "first_full_step": 0},
)
HEADS, HEAD_SIZE, SCALE = METHOD.heads, METHOD.head_size, METHOD.scale
WHOLE, RAGGED = (4, 6, 8), (5, 5, 9)
KINDS = ("temporal", "spatial", "st")
TEXTS = text_places(RAGGED, 30)
config, run = METHOD.config, run_sparse
VMoBAImpl = VMoBABackend.get_impl_cls()


def layer(index=0, **options):
    return METHOD.layer(index=index, **options)


def inputs(grid, **options):
    return METHOD.inputs(grid, **options)


def moba(kind, grid=RAGGED):
    """Return one kind of chunks by its definition."""
    return replace(DEFINED[f"vmoba, {kind}"], grid=grid)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("text", ["no text", "text first"])
def test_heads_that_are_served_one_by_one_get_what_all_at_once_get(
    kind, kv_heads, text, monkeypatch
):
    qkv = inputs(RAGGED, text=TEXTS[text], kv_heads=kv_heads)
    attention = layer(KINDS.index(kind), kv_heads=kv_heads, **TOPK)
    expected = run(attention, qkv, RAGGED, text=TEXTS[text])
    monkeypatch.setattr(by_rows, "_MOST_COPIES", 0.0)
    monkeypatch.setattr(by_rows, "_PAIRS_AT_ONCE", 1)
    assert torch.equal(run(attention, qkv, RAGGED, text=TEXTS[text]), expected)


@pytest.mark.parametrize(
    ("grid", "chunk", "heads", "kv_heads", "overwritten", "at_once"),
    [
        ((21, 30, 52), (3, 30, 52), 12, 12, True, 12),
        ((21, 30, 52), (21, 5, 13), 12, 12, True, 4),
        ((21, 30, 52), (7, 5, 13), 12, 12, True, 2),
        ((21, 30, 52), (7, 5, 13), 12, 12, False, 2),  # the fewest that keep a GPU busy
        ((21, 45, 80), (21, 9, 10), 40, 40, True, 10),
        ((21, 45, 80), (21, 9, 10), 40, 8, True, 1),
        ((10, 25, 56), (1, 5, 14), 12, 12, True, 1),
        ((2, 25, 56), (1, 5, 14), 12, 12, True, 4),  # little work: twice as much
        ((5, 25, 40), (1, 1, 5), 40, 40, True, 1),
    ],
)
def test_copies_of_a_share_of_heads_are_bounded(grid, chunk, heads, kv_heads, overwritten, at_once):
    tokens = math.prod(grid)
    query, key = (torch.empty(1, tokens, n, 128, dtype=torch.bfloat16) for n in (heads, kv_heads))
    layout = SequenceLayout(grid=grid, start=0, num_queries=tokens, num_keys=tokens)
    keys = row_chunks(layout, chunk, query.device).keys
    call = SparseCall(query=query, key=key, value=key, layout=layout, scale=1.0)
    groups = chunk_groups(keys.num_tiles, tokens)
    copied = not keys.in_order
    passes = by_rows._passes(call, groups, overwritten=overwritten, copied=copied)
    assert [p.stop - p.start for p in passes] == [at_once] * (kv_heads // at_once)
    parts = (1 if overwritten else 2) * groups.num * heads // kv_heads
    copies = at_once * (parts + 2 * copied)
    most = by_rows._MOST_COPIES * 2 * (heads + kv_heads)
    assert at_once == 1 or copies <= 2 * most


@pytest.mark.slow_cases("block-0.5-st", "head_global-0.5-st", "overall-0.1-st", "query_head-0.1-st")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("scope", "threshold"),
    [
        pytest.param(scope, threshold, marks=[] if (i + j) % 2 == 0 else [pytest.mark.slow])
        for i, scope in enumerate(("query_head", "block", "overall", "head_global"))
        for j, threshold in enumerate((0.1, 0.5))
    ],
)
def test_a_threshold_takes_its_share_of_each_scope(kind, scope, threshold):
    given = {"moba_threshold": threshold, "moba_threshold_type": scope}
    rule = {"rule": Rule(threshold=threshold, scope=scope)}
    moba(kind).check(moba_select_mode="threshold", **given, rule=rule)


@pytest.mark.slow_cases("overall")
@pytest.mark.parametrize("scope", ["overall", "head_global"])
def test_topk_over_wider_scopes_is_a_mean(scope):
    moba("st").check(moba_threshold_type=scope, rule={"rule": Rule(topk=3, scope=scope)})


def test_a_call_that_selects_only_own_chunks_keeps_to_them_where_that_is_asked_for():
    rule = {"rule": Rule(topk=1)}
    checked = moba("temporal").check(temporal_topk=1, only_own_chunk="keep", rule=rule)
    assert not checked.mask.all()


def test_samples_of_a_batch_do_not_compete():
    first, second = inputs(RAGGED, batch=1), inputs(RAGGED, batch=1, seed=1)
    together = QKV(*(torch.cat((a, 50 * b)) for a, b in zip(first, second, strict=True)))
    attention = layer(1, moba_threshold_type="overall", moba_threshold=0.4)
    out = run(attention, together, RAGGED)
    alone = run(attention, first, RAGGED)
    torch.testing.assert_close(out[:1], alone)


@pytest.mark.parametrize(
    ("cycle", "first", "kinds"),
    [
        ((1, 1, 1), 0, "temporal spatial st temporal spatial st"),
        ((1, 1, 1), 2, "spatial st temporal spatial st temporal"),
        ((2, 0, 1), 0, "temporal temporal st temporal temporal st"),
        ((0, 1, 0), 1, "spatial spatial spatial spatial spatial spatial"),
    ],
)
def test_kinds_take_turns_from_the_first_sparse_layer_on(cycle, first, kinds):
    names = ("temporal_layer", "spatial_layer", "st_layer")
    chosen = config(first_full_layer=first, **dict(zip(names, cycle, strict=True)))
    assert [chosen.kind(layer) for layer in range(6)] == kinds.split()


def test_the_first_steps_and_layers_run_on_the_dense_backend():
    qkv = inputs(RAGGED)
    attention = layer(3, first_full_step=2, dense_steps="4", first_full_layer=3, **TOPK)
    for step in range(5):
        out = run(attention, qkv, RAGGED, step=step)
        mask = moba("temporal").mask(qkv) if step in (2, 3) else None
        assert_within_error_budget(out, *qkv, scale=SCALE, mask=mask)
    calls = {e.selection.backend.is_sparse: 0 for e in attention.report().entries}
    for entry in attention.report().entries:
        calls[entry.selection.backend.is_sparse] += entry.calls
    assert calls == {False: 3, True: 2}
    below = layer(2, first_full_layer=3, dense_layers="7", **TOPK)
    assert_within_error_budget(run(below, qkv, RAGGED), *qkv, scale=SCALE)
    assert not any(e.selection.backend.is_sparse for e in below.report().entries)


def test_settings_for_another_resolution_are_refused():
    qkv = inputs(RAGGED)
    right = {**TOPK, "patch_resolution": list(RAGGED)}
    assert torch.equal(run(layer(**right), qkv, RAGGED), run(layer(**TOPK), qkv, RAGGED))
    message = r"`patch_resolution` of vmoba_attn must be the run's, \[5, 5, 9\] .*got \[4, 6, 8\]"
    wrong = {**TOPK, "patch_resolution": list(WHOLE)}
    with pytest.raises(ConfigError, match=message):
        run(layer(**wrong), qkv, RAGGED)
    with pytest.raises(ConfigError, match=message):  # in the first of its dense steps already
        run(layer(first_full_step=2, **wrong), qkv, RAGGED)
    with pytest.raises(ConfigError, match="`patch_resolution` of vmoba_attn must be a list of 3"):
        config(**TOPK, patch_resolution=[5, 5])


def test_the_documented_defaults_keep_twelve_steps_dense():
    config = VMoBAConfig(temporal_chunk_size=1, spatial_chunk_size=(1, 1), st_chunk_size=(1, 1, 1))
    (part,) = config.dense_parts("steps")
    assert (part.given, str(part.indices)) == ("first_full_step=12", "0-11")
    assert config.dense_parts("layers") == ()


def test_a_layer_without_an_index_must_not_take_turns():
    impl = VMoBAImpl(HEADS, HEAD_SIZE, SCALE, config=config(**TOPK))
    qkv = inputs(RAGGED)
    with set_forward_context(0, latent_grid=RAGGED) as context:
        with pytest.raises(UsageError, match="vmoba_attn must know the layer's index"):
            impl.forward(*qkv, context)
        one = config(spatial_layer=0, st_layer=0, **TOPK)
        out = VMoBAImpl(HEADS, HEAD_SIZE, SCALE, config=one).forward(*qkv, context)
    mask = moba("temporal").mask(qkv)
    assert_within_error_budget(out, *qkv, scale=SCALE, mask=mask)


def test_without_a_configuration_the_missing_sizes_are_named():
    with pytest.raises(ConfigError, match="`temporal_chunk_size` of vmoba_attn must be given"):
        VMoBAImpl(HEADS, HEAD_SIZE, SCALE)


@pytest.mark.parametrize(
    ("parameters", "scope"),
    [
        *(({"moba_threshold": 0.4}, s) for s in ("query_head", "block", "overall", "head_global")),
        *((TOPK, s) for s in ("query_head", "overall", "head_global")),
    ],
    ids=str,
)
def test_padded_tokens_of_the_video_have_no_influence(parameters, scope):
    qkv = inputs(RAGGED)
    token_mask = torch.ones(2, qkv.query.shape[1], dtype=torch.bool)
    token_mask[0, -60:] = False
    token_mask[1, 7::9] = False
    attention = layer(1, moba_threshold_type=scope, **parameters)
    found = []
    for value in (0.0, 100.0, torch.nan):
        dirty = [x.masked_fill(~token_mask[..., None, None], value) for x in qkv]
        with set_forward_context(0, latent_grid=RAGGED):
            found.append(attention(*dirty, attn_mask=token_mask))
    assert found[0].isfinite().all()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("scope", ["query_head", "overall", "head_global"])
def test_padding_leaves_what_the_tokens_alone_would_choose(scope):
    # The padding is the last frame, which is a chunk of its own, as it would be left out.
    grid, padded = (4, 6, 8), (5, 6, 8)
    qkv = inputs(padded)
    alone = QKV(*(x[:, : math.prod(grid)] for x in qkv))
    token_mask = (torch.arange(math.prod(padded)) < math.prod(grid)).expand(2, -1)
    attention = layer(0, moba_threshold=0.4, moba_threshold_type=scope)
    with set_forward_context(0, latent_grid=padded):
        out = attention(*qkv, attn_mask=token_mask)
    wanted = run(attention, alone, grid)
    torch.testing.assert_close(out[:, : math.prod(grid)], wanted)


@pytest.mark.parametrize("scope", ["query_head", "head_global", "block", "overall"])
def test_what_ranks_over_tokens_or_heads_says_where_these_must_be(scope):
    settings = config(moba_threshold_type=scope)
    impl = VMoBAImpl(HEADS, HEAD_SIZE, SCALE, config=settings, site=LayerSite(layer=0))
    ring, ulysses = impl.limits.ring, impl.limits.ulysses
    if scope == "query_head":
        assert ring is None
    else:
        assert ring.startswith(f"`moba_threshold_type` {scope} ranks the chunks of all queries")
    if scope in ("query_head", "head_global"):
        assert ulysses is None

    else:
        assert ulysses.startswith(f"`moba_threshold_type` {scope} ranks the chunks of all heads")


def test_settings_for_one_resolution_can_be_part_of_a_ring():
    settings = config(patch_resolution=(5, 5, 9))
    impl = VMoBAImpl(HEADS, HEAD_SIZE, SCALE, config=settings, site=LayerSite(layer=0))
    assert impl.limits.ring is None


class FakePackage(types.ModuleType):
    """Stands in for fastvideo_kernel: the method by its definition, one sample of whole chunks."""

    def __init__(self):
        super().__init__("fastvideo_kernel")
        self.calls = []

    def moba_attn_varlen(self, q, k, v, ends, longest, chunk, topk, **options):
        self.calls.append((ends.tolist(), longest, chunk, topk, options))
        own = [i // chunk for i in range(longest)]
        members = [range(i, min(i + chunk, longest)) for i in range(0, longest, chunk)]
        share, scope = options["simsum_threshold"], options["threshold_type"]
        rule = Rule(topk=topk if options["select_mode"] == "topk" else None,
                    threshold=share, scope=scope)  # fmt: skip
        means = naive_means(k.unsqueeze(0), [list(m) for m in members])
        chosen = naive_choice(q.unsqueeze(0), means, own, rule)[0]
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~chosen[..., own], -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.fixture
def package(monkeypatch):
    fake = FakePackage()
    monkeypatch.setitem(sys.modules, "fastvideo_kernel", fake)
    return fake


def upstream(index=0, **parameters):
    settings = config(kernel="fastvideo_kernel", **parameters)
    site = LayerSite(name="blocks.0.attn1", layer=index)
    return VMoBAImpl(HEADS, HEAD_SIZE, SCALE, config=settings, site=site)


@pytest.mark.slow_cases("threshold-st", "topk-st")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parameters", [TOPK, {"moba_threshold": 0.4}], ids=["topk", "threshold"])
def test_the_authors_kernel_gets_chunks_one_after_the_other(package, kind, parameters):
    qkv = inputs(WHOLE)
    impl = upstream(KINDS.index(kind), **parameters)
    with set_forward_context(0, latent_grid=WHOLE) as context:
        out = impl.forward(*qkv, context)
    rule = impl.config.rule(kind)
    mask = moba(kind, WHOLE).mask(qkv, rule=rule)
    assert_within_error_budget(out, *qkv, scale=SCALE, mask=mask)
    assert len(package.calls) == 2
    assert package.calls[0][:3] == ([0, 192], 192, math.prod(CHUNKS[kind](WHOLE)))
    assert impl.facts().densities[0] == pytest.approx(float(mask.double().mean()))


@pytest.mark.parametrize(
    ("index", "grid", "parameters", "reason"),
    [
        (1, RAGGED, TOPK, r"needs chunks that divide the grid, got \[5, 3, 4\] in \[5, 5, 9\]"),
        (2, RAGGED, TOPK, r"needs chunks that divide the grid, got \[2, 3, 4\] in \[5, 5, 9\]"),
        (
            0,
            WHOLE,
            {**TOPK, "temporal_topk": 1, "only_own_chunk": "keep"},
            "attends to everything where only own chunks are selected, got keep",
        ),
    ],
)
def test_calls_that_do_not_fit_the_authors_kernel_are_refused(
    package, index, grid, parameters, reason
):
    with (
        set_forward_context(0, latent_grid=grid) as context,
        pytest.raises(UnsupportedBackendError, match=reason),
    ):
        upstream(index, **parameters).forward(*inputs(grid), context)
    assert package.calls == []


def test_every_reason_against_the_authors_kernel_is_given(package):
    text = TEXTS["text last"]
    query, key, value = inputs(RAGGED, text=text, kv_heads=2)
    token_mask = torch.ones(2, 1, 1, query.shape[1], dtype=torch.bool)
    impl = upstream(**TOPK)
    impl.softmax_scale = 1.0
    with (
        set_forward_context(0, latent_grid=RAGGED, text_span=text) as context,
        pytest.raises(
            UnsupportedBackendError,
            match=r"without text, got 30 text tokens; has no key mask.*as scale, got 1 for 32; "
            r"needs as many key heads as the 4, got 2",
        ),
    ):
        impl.forward(query, key, value, context, attn_mask=token_mask)


def test_the_last_temporal_chunk_may_be_short_for_the_authors_kernel(package):
    qkv = inputs(RAGGED)
    with set_forward_context(0, latent_grid=RAGGED) as context:
        out = upstream(**TOPK).forward(*qkv, context)
    mask = moba("temporal").mask(qkv)
    assert_within_error_budget(out, *qkv, scale=SCALE, mask=mask)


CONFIGS = Path(__file__).parents[6] / "configs" / "attention"
# The authors' settings: latent grid, and how many chunks of each kind they cut it in.
PAPER = {
    "vmoba_attn.yaml": ((21, 30, 52), (7, 24, 72)),
    "vmoba_attn/480p.yaml": ((21, 30, 52), (7, 24, 72)),
    "vmoba_attn/720p.yaml": ((21, 45, 80), (7, 40, 36)),
    "vmoba_attn/576p_trained.yaml": ((24, 36, 64), (8, 48, 72)),
    "vmoba_attn/480p_long_trained.yaml": ((36, 30, 52), (12, 24, 36)),
}


def test_every_example_of_the_authors_settings_is_tested():
    found = {str(path.relative_to(CONFIGS)) for path in (CONFIGS / "vmoba_attn").iterdir()}
    assert found == set(PAPER) - {"vmoba_attn.yaml"}


@pytest.mark.slow_cases(
    "vmoba_attn/480p.yaml", "vmoba_attn/576p_trained.yaml", "vmoba_attn/720p.yaml"
)
@pytest.mark.parametrize("name", PAPER)
def test_the_authors_settings_load_and_run(name):
    raw = read_mapping(CONFIGS / name)
    settings = build_config(VMoBAConfig, raw, backend="vmoba_attn")
    paper_grid, chunks = PAPER[name]
    for kind, count in zip(KINDS, chunks, strict=True):
        size = settings.chunk(kind, paper_grid)
        assert math.prod(-(-n // edge) for n, edge in zip(paper_grid, size, strict=True)) == count
    grid = (8, 6, 14)
    attention = layer(**{**raw, "first_full_step": 0, "temporal_topk": 2})
    qkv = inputs(grid, batch=1)
    out = run(attention, qkv, grid)
    thirds = replace(moba("temporal", grid), cut=rows_and_chunks(lambda grid: (3, *grid[1:])))
    mask = thirds.mask(qkv, rule=settings.rule("temporal"))
    assert_within_error_budget(out, *qkv, scale=SCALE, mask=mask)
