"""Sparse-Linear Attention through the layer, against its definition written down with loops."""

import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.runtime.layers.attention import warn_once
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.sparse import tiles
from multimodal_gen.runtime.layers.attention.sparse.executors import linear as linear_executor
from multimodal_gen.runtime.layers.attention.sparse.methods.sla import (
    SLABackend,
    centred,
)
from multimodal_gen.runtime.layers.attention.sparse.raster import shares_of
from multimodal_gen.runtime.layers.attention.sparse.router import Budget
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform
from multimodal_gen.settings import read_mapping
from tests.helpers.inputs import QKV
from tests.helpers.methods import DEFINED, pieces
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    SparseMethod,
    assert_same_gradients,
    best_blocks,
    block_inputs,
    joint_mask,
    pair_mask,
    projection,
    run_sparse,
    text_places,
    video_tokens,
)
from tests.helpers.tolerance import (
    assert_within_error_budget,
)
from tests.kernels.linear_attention.naive import assert_added, naive_linear

METHOD = SparseMethod(backend=AttentionBackendEnum.SLA_ATTN)
SLA = DEFINED["sla"]
HEADS, HEAD_SIZE, SCALE = METHOD.heads, METHOD.head_size, METHOD.scale
WHOLE, RAGGED = (4, 8, 16), (5, 7, 13)  # 512 = 4 * 128 tokens; 455 = 7 * 64 + 7
TEXTS = text_places(RAGGED, 70)
run = run_sparse


def layer(*, projection=None, scale=None, **options):
    attention = METHOD.layer(geometry={"softmax_scale": scale}, **options)
    attention.set_projection(projection)
    return attention


def inputs(grid, *, dtype=torch.float32, **options):
    """Return inputs whose blocks have means of their own, so that scores differ by much."""
    qkv = METHOD.inputs(grid, **options)
    blocks = [range(i, i + 16) for i in range(0, qkv.key.shape[1] - 15, 16)]
    return QKV(*(x.to(dtype) for x in block_inputs(qkv, blocks)))


class Definition:
    """Which token the branches attend to: by the means of blocks of raster order."""

    def __init__(self, qkv, grid, q_size, kv_size, ratio, text=None, token_mask=None):
        self.video = video_tokens(grid, text)
        shape = qkv.query.shape[1], qkv.key.shape[1]
        self.text = [t for t in range(shape[0]) if t not in set(self.video)]
        cuts = [
            [self.video[i : i + n] for i in range(0, len(self.video), n)] for n in (q_size, kv_size)
        ]
        kept = max(1, math.floor(ratio * len(cuts[1]) + 1e-9))
        best = best_blocks(*qkv[:2], *cuts, kept, token_mask=token_mask, centred=True)
        self.mask = joint_mask(pair_mask(best, *cuts, *shape), self.video, token_mask)
        self.unselected = pair_mask(~best, *cuts, *shape)
        self.everything = torch.zeros_like(self.mask)
        self.everything[:, :, self.video] = True
        if token_mask is not None:
            self.unselected &= token_mask[:, None, None, :]
            self.everything &= token_mask[:, None, None, :]


def check(qkv, out, naive, linear=None, *, feature_map="softmax", unselected=False, sparse=None):
    """Assert that `out` errs within the budget of its sparse branch, plus that of the linear one.

    Args:
        qkv: the inputs.
        out: what the layer returned.
        naive: the definition.
        linear: the projection, or None for zero.
        feature_map: of the linear branch.
        unselected: whether that covers unselected blocks only.
        sparse: what the layer returned without a projection, which is checked first.
    """
    plain = out if sparse is None else sparse
    assert_within_error_budget(plain, *qkv, scale=SCALE, mask=naive.mask)
    if linear is None:
        return
    seen = naive.unselected if unselected else naive.everything
    branch, size = naive_linear(*qkv, seen, feature_map, linear.weight, linear.bias)
    rows = naive.video
    assert_added(out[:, rows], plain[:, rows], branch[:, rows], size[:, rows])
    assert torch.equal(out[:, naive.text], plain[:, naive.text])


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("grid", [WHOLE, RAGGED])
@pytest.mark.parametrize("sizes", [(128, 64), (64, 64), (64, 128)])
def test_blocks_of_every_size_are_attended_to(grid, sizes, ratio):
    kept = max(1, int(ratio * math.ceil(math.prod(grid) / sizes[1])))
    given = {"topk_ratio": ratio, "BLKQ": sizes[0], "BLKK": sizes[1]}
    replace(SLA, grid=grid, cut=pieces(*sizes)).check(rule={"kept": kept}, **given)


# Every place of the text with every feature map and with both branches.
LINEAR = [
    pytest.param(
        *(where, feature_map, ("all", "unselected")[(i + j) % 2]),
        marks=[] if (i - j) % 3 != 1 else [pytest.mark.slow],
    )
    for i, where in enumerate(TEXTS)
    for j, feature_map in enumerate(("softmax", "elu", "relu"))
]


@pytest.mark.slow_cases(
    "text first-elu-all",
    "text first-relu-unselected",
    "text last-relu-all",
    "text last-softmax-all",
)
@pytest.mark.parametrize(("where", "feature_map", "branch"), LINEAR)
def test_the_linear_branch_is_projected_and_added_to_the_video(where, feature_map, branch):
    text = TEXTS[where]
    qkv = inputs(RAGGED, text=text, kv_heads=2)
    options = {"topk_ratio": 0.3, "feature_map": feature_map, "linear_branch": branch}
    linear = projection()
    out = run(layer(kv_heads=2, projection=linear, **options), qkv, RAGGED, text=text)
    sparse = run(layer(kv_heads=2, **options), qkv, RAGGED, text=text)
    naive = Definition(qkv, RAGGED, 128, 64, 0.3, text)
    unselected = branch == "unselected"
    check(qkv, out, naive, linear, feature_map=feature_map, unselected=unselected, sparse=sparse)


def test_at_ratio_one_nothing_is_unselected_and_the_bias_is_left():
    qkv = inputs(RAGGED)
    linear = projection()
    options = {"topk_ratio": 1.0, "linear_branch": "unselected"}
    plain = run(layer(**options), qkv, RAGGED)
    out = run(layer(projection=linear, **options), qkv, RAGGED)
    torch.testing.assert_close(out, plain + linear.bias)


@pytest.mark.parametrize(
    ("ratio", "blocks", "expected"),
    # Rounded down: 0.29 * 100 is 28.999... in binary.
    [(0.1, 512, 51), (0.05, 512, 25), (0.29, 100, 29), (0.0, 9, 1), (1.0, 9, 9), (0.5, 1, 1)],
)
def test_the_number_of_kept_blocks(ratio, blocks, expected):
    assert Budget.of_share(ratio, blocks).kept == expected


@given(
    offset=st.floats(-1e3, 1e3),
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=6),
)
@settings(deadline=None, max_examples=50)
def test_what_all_keys_have_in_common_does_not_matter(offset, lengths):
    means = torch.randn(1, 1, len(lengths), 8, generator=torch.Generator().manual_seed(1)).double()
    shares = shares_of(torch.tensor([lengths]), torch.float64)
    plain, moved = (centred(x, shares, torch.float64) for x in (means, means + offset))
    torch.testing.assert_close(plain, moved, rtol=0, atol=1e-11 * (1 + abs(offset)))


def test_an_offset_of_all_keys_does_not_cost_precision():
    """In bfloat16 it would: the offset is 200 times what tells the blocks apart."""
    qkv = inputs(WHOLE, batch=1)
    far = QKV(qkv.query.bfloat16(), (qkv.key + 200).bfloat16(), qkv.value.bfloat16())
    sla = replace(SLA, grid=WHOLE, method=replace(SLA.method, heads=HEADS))
    sla.check(qkv=far, rule={"kept": 2}, topk_ratio=0.25)


@pytest.mark.slow_cases("all-dtype0", "all-dtype1")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("branch", ["all", "unselected"])
def test_half_precision_is_right(dtype, branch):
    qkv = inputs(RAGGED, dtype=dtype)
    linear = projection()
    options = {
        "topk_ratio": 0.3,
        "dtype": dtype,
        "use_bf16": dtype is torch.bfloat16,
        "linear_branch": branch,
    }
    out = run(layer(projection=linear, **options), qkv, RAGGED)
    sparse = run(layer(**options), qkv, RAGGED)
    naive = Definition(qkv, RAGGED, 128, 64, 0.3)
    check(qkv, out, naive, linear, unselected=branch == "unselected", sparse=sparse)


@pytest.mark.parametrize(
    ("dtype", "use_bf16", "computed"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float16),
        (torch.float16, True, torch.bfloat16),
        (torch.float32, True, torch.float32),
    ],
)
def test_use_bf16_names_the_dtype_of_16_bit_calls(dtype, use_bf16, computed, monkeypatch):
    seen = []
    attend = tiles.block_sparse_attention

    def spy(query, key, value, *rest, **options):
        seen.extend(x.dtype for x in (query, key, value))
        return attend(query, key, value, *rest, **options)

    monkeypatch.setattr(tiles, "block_sparse_attention", spy)
    qkv = inputs(WHOLE, dtype=dtype)
    out = run(layer(dtype=dtype, use_bf16=use_bf16), qkv, WHOLE)
    assert seen == [computed] * 3
    assert out.dtype == dtype


@pytest.mark.slow_cases("all")
@pytest.mark.parametrize("branch", ["all", "unselected"])
def test_masked_text_is_in_neither_branch_and_may_hold_anything(branch):
    text = TEXTS["text last"]
    query, key, value = inputs(RAGGED, text=text)
    token_mask = torch.ones(2, query.shape[1], dtype=torch.bool)
    token_mask[0, -40:] = False
    token_mask[1, text.start + 3 : text.start + 20] = False
    token_mask[1, 100:110] = False
    rows = token_mask[..., None, None]
    naive = Definition(QKV(query, key, value), RAGGED, 128, 64, 0.3, text, token_mask)
    naive.mask &= token_mask[:, None, :, None]
    dirty = QKV(*(x.masked_fill(~rows, torch.nan) for x in (query, key, value)))
    options = {"topk_ratio": 0.3, "linear_branch": branch}
    sparse = run(layer(**options), dirty, RAGGED, text=text, attn_mask=token_mask)
    assert_within_error_budget(sparse, query, key, value, scale=SCALE, mask=naive.mask)
    linear = projection()
    out = run(layer(projection=linear, **options), dirty, RAGGED, text=text, attn_mask=token_mask)
    seen = naive.unselected if branch == "unselected" else naive.everything
    branch_out, size = naive_linear(query, key, value, seen, "softmax", linear.weight, linear.bias)
    branch_out, size = (torch.where(rows, x, 0.0)[:, naive.video] for x in (branch_out, size))
    assert_added(out[:, naive.video], sparse[:, naive.video], branch_out, size)


def test_masked_video_may_hold_anything_where_queries_are_longer():
    text = TEXTS["text last"]
    query, key, value = inputs(RAGGED, text=text)
    some = slice(0, text.start + 9)
    token_mask = torch.ones(2, text.start + 9, dtype=torch.bool)
    token_mask[1, 100:110] = False
    qkv = QKV(query, key[:, some], value[:, some])
    dirty = QKV(*(x.index_fill(1, torch.arange(100, 110), torch.nan) for x in qkv))
    attention = layer(topk_ratio=0.3)
    for x, d in zip(qkv, dirty, strict=True):
        d[0] = x[0]
    clean, out = (run(attention, x, RAGGED, text=text, attn_mask=token_mask) for x in (qkv, dirty))
    rows = torch.ones(2, query.shape[1], dtype=torch.bool)
    rows[1, 100:110] = False
    assert torch.equal(out[rows], clean[rows])


def test_equal_scores_keep_the_first_blocks():
    query, key, value = inputs(WHOLE)
    out = run(layer(topk_ratio=0.25), QKV(torch.zeros_like(query), key, value), WHOLE)
    expected = value[:, :128].mean(dim=1, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("branch", ["all", "unselected"])
def test_gradients_flow_through_both_branches(branch):
    grid = (2, 8, 12)
    qkv, weight = inputs(grid, batch=1), projection().weight
    options = {"topk_ratio": 0.4, "BLKQ": 64, "linear_branch": branch, "kernel": "reference"}
    naive = Definition(qkv, grid, 64, 64, 0.4)
    seen = naive.unselected if branch == "unselected" else naive.everything

    def attend(q, k, v, weight):
        attention = layer(projection=SimpleNamespace(weight=weight, bias=None), **options)
        return run(attention, QKV(q, k, v), grid)

    def definition(q, k, v, weight):
        exact, _ = reference_attention(q, k, v, scale=SCALE, mask=naive.mask)
        pairs = torch.einsum("bqhd,bkhd->bhqk", q.softmax(-1), k.softmax(-1)) * seen
        total = torch.einsum("bhqk,bkhd->bqhd", pairs, v)
        total = total / (1e-5 + pairs.sum(-1)).transpose(1, 2).unsqueeze(-1)
        return exact + total @ weight.mT

    assert_same_gradients(attend, definition, *qkv, weight)


def test_a_projection_that_is_trained_alone_gets_its_gradient_under_compile():
    qkv, linear = inputs(WHOLE, batch=1), projection().requires_grad_()
    attention = layer(projection=linear, topk_ratio=0.4)
    found = []
    for call in (attention, torch.compile(attention, backend="eager")):
        out = run(call, qkv, WHOLE).square().sum()
        found.append(torch.autograd.grad(out, list(linear.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_has_the_same_gradients_under_autocast(reentrant):
    qkv, linear = inputs(WHOLE, batch=1), projection().requires_grad_()
    attention = layer(projection=linear, topk_ratio=0.4)
    leaves = [x.requires_grad_() for x in qkv]
    found = []

    def attend(*qkv):
        return run(attention, qkv, WHOLE)

    for call in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=reentrant)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(*leaves)
        assert out.dtype == torch.bfloat16
        weights = [*leaves, *linear.parameters()]
        for x in weights:
            x.grad = None
        out.float().square().sum().backward()
        found.append([x.grad for x in weights])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_missing_projection_is_warned_of_once_and_named(caplog):
    warn_once.PROCESS._given.clear()
    qkv = inputs(WHOLE)
    with caplog.at_level(logging.WARNING):
        run(layer(topk_ratio=0.25), qkv, WHOLE)
        run(layer(topk_ratio=0.25), qkv, WHOLE)
    (record,) = caplog.records
    assert "no trained proj_l: its linear branch is zero" in record.getMessage()
    assert "the best 25 % of the key blocks alone" in record.getMessage()


def test_one_block_that_is_kept_anyway_is_called_that(caplog):
    warn_once.PROCESS._given.clear()
    run(layer(topk_ratio=0.0), inputs(WHOLE), WHOLE)
    (record,) = [r for r in caplog.records if "proj_l" in r.getMessage()]
    assert "every query attends to the best key block alone" in record.getMessage()


@pytest.mark.parametrize("options", [{"topk_ratio": 1.0}, {"projection": projection()}], ids=str)
def test_nothing_is_lost_and_nothing_warned_of(options, caplog):
    warn_once.PROCESS._given.clear()
    with caplog.at_level(logging.WARNING):
        run(layer(**options), inputs(WHOLE), WHOLE)
    assert all("leaves nothing out" in record.getMessage() for record in caplog.records)


def test_without_a_projection_no_state_is_computed(monkeypatch):
    monkeypatch.setattr(
        linear_executor, "key_state", lambda *_, **__: pytest.fail("computed a state")
    )
    qkv = inputs(WHOLE)
    out = run(layer(topk_ratio=0.25), qkv, WHOLE)
    check(qkv, out, Definition(qkv, WHOLE, 128, 64, 0.25))


def test_a_projection_may_be_set_after_the_first_call():
    qkv = inputs(WHOLE)
    attention = layer(topk_ratio=0.25)
    before = run(attention, qkv, WHOLE)
    attention.set_projection(projection())
    after = run(attention, qkv, WHOLE)
    attention.set_projection(None)
    assert (after - before).abs().max() > 0.1
    assert torch.equal(run(attention, qkv, WHOLE), before)


def test_a_projection_of_another_size_is_refused():
    with pytest.raises(UsageError, match=r"`linear` must map 32 channels to 32, .* \[16, 16\]"):
        layer(projection=nn.Linear(16, 16))


def test_only_methods_with_a_projection_take_one():
    platform = current_platform().name
    for name in (AttentionBackendEnum.SLA_ATTN, AttentionBackendEnum.SAGE_SLA_ATTN):
        assert "projection" in find_backend(name, platform).get_impl_cls().takes
    dense = find_backend(AttentionBackendEnum.TORCH_SDPA, platform)
    assert "projection" not in dense.get_impl_cls().takes


@pytest.mark.parametrize(
    "parameters", [{"topk_ratio": 1.5}, {"BLKQ": 32}, {"feature_map": "gelu"}], ids=str
)
def test_parameters_out_of_range_are_refused(parameters):
    (name,) = parameters
    with pytest.raises(ConfigError, match=name):
        METHOD.config(**parameters)


class Upstream(nn.Module):
    """Stands in for the authors' operator: shares its interface, returns the values' mean."""

    def __init__(self, head_dim, **options):
        super().__init__()
        self.asked = (head_dim, options)
        self.proj_l = nn.Linear(head_dim, head_dim)
        nn.init.zeros_(self.proj_l.weight)
        nn.init.zeros_(self.proj_l.bias)
        self.calls = []
        Upstream.last = self

    def forward(self, q, k, v):
        assert all(x.is_contiguous() for x in (q, k, v))
        self.calls.append(tuple(q.shape))
        return v.mean(2, keepdim=True).expand_as(v) + self.proj_l(v)


@pytest.fixture
def upstream(monkeypatch):
    """The authors' package, importable, on a layer built without asking for a GPU."""
    module = ModuleType("sparse_linear_attention")
    module.SparseLinearAttention = Upstream
    monkeypatch.setitem(sys.modules, "sparse_linear_attention", module)

    def make(**parameters):
        settings = METHOD.config(kernel="sparse_linear_attention", **parameters)
        return SLABackend.get_impl_cls()(
            HEADS, HEAD_SIZE, SCALE, config=settings, variant="sparse_linear_attention"
        )

    return make


def test_upstream_gets_the_parameters_and_the_projection(upstream):
    linear = projection()
    qkv = inputs(WHOLE)
    impl = upstream(topk_ratio=0.25, feature_map="elu", use_bf16=False)
    with set_forward_context(0, latent_grid=WHOLE) as _, torch.no_grad():
        from multimodal_gen.runtime.managers.forward_context import current_forward_context

        out = impl.forward(*qkv, current_forward_context(), projection=linear)
    options = {"topk": 0.25, "feature_map": "elu", "BLKQ": 128, "BLKK": 64, "use_bf16": False}
    assert Upstream.last.asked == (HEAD_SIZE, options)
    assert Upstream.last.calls == [(2, HEADS, 512, HEAD_SIZE)]
    value = qkv.value
    torch.testing.assert_close(out, value.mean(1, keepdim=True) + linear(value))


@pytest.mark.parametrize(
    ("parameters", "text", "kv_heads", "reason"),
    [
        ({"linear_branch": "unselected"}, None, HEADS, "needs linear_branch=all, got unselected"),
        ({}, TEXTS["text last"], HEADS, "needs sequences without text, got 70 text tokens"),
        ({}, None, 2, "needs as many key heads as the 4, got 2"),
        ({"topk_ratio": 0.01}, None, HEADS, "needs a topk_ratio that keeps a block of 8"),
    ],
)
def test_what_upstream_cannot_do_is_refused_with_the_reason(
    upstream, parameters, text, kv_heads, reason
):
    from multimodal_gen.runtime.managers.forward_context import current_forward_context

    qkv = inputs(RAGGED, text=text, kv_heads=kv_heads)
    impl = upstream(**{"topk_ratio": 0.3, **parameters})
    with (
        set_forward_context(0, latent_grid=RAGGED, text_span=text),
        pytest.raises(UnsupportedBackendError, match=f"sparse_linear_attention.*{reason}"),
    ):
        impl.forward(*qkv, current_forward_context())


CONFIGS = Path(__file__).parents[6] / "configs" / "attention"


def test_the_settings_of_the_paper_load_and_run():
    (file,) = (CONFIGS / "sla_attn").iterdir()
    raw = read_mapping(file)
    assert (file.name, raw["linear_branch"]) == ("paper.yaml", "unselected")
    qkv = inputs(WHOLE, batch=1)
    check(qkv, run(layer(**raw), qkv, WHOLE), Definition(qkv, WHOLE, 64, 64, 0.05))
    attention, large = layer(**raw), (10, 16, 16)  # 40 blocks of 64 tokens
    run(attention, inputs(large, batch=1), large)
    assert attention.attn_impl.facts().densities == {0: 2 / 40}
