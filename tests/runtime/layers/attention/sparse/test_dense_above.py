"""`dense_above`: calls that would keep too many pairs are dense, and are counted."""

import math

import pytest
import torch
from torch import nn

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.layer import UlyssesAttention_VSA
from multimodal_gen.runtime.layers.attention.scope import (
    LayerSite,
)
from multimodal_gen.runtime.layers.attention.sparse.dense_above import KeptTooMuch
from multimodal_gen.runtime.managers.forward_context import (
    ForwardContext,
    TextSpan,
    set_forward_context,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.sparse import SparseMethod
from tests.helpers.tolerance import assert_within_error_budget

GRID = (4, 6, 8)
HEADS, HEAD_SIZE = 2, 32
TEXT = TextSpan(start=math.prod(GRID), length=7)

# Each would keep 0.4 to 0.8 of the pairs.
VMOBA = {
    "temporal_chunk_size": 1,
    "temporal_topk": 2,
    "spatial_layer": 0,
    "st_layer": 0,
    "first_full_step": 0,
}
KNOWN = {
    "sliding_tile_attn": {"window": [1, 3, 3], "tile_size": [2, 2, 4], "skip_time_steps": 0},
    "video_sparse_attn": {"sparsity": 0.5},
    "sla_attn": {"topk_ratio": 0.67},
    "vmoba_attn": {**VMOBA, "moba_select_mode": "topk"},
    "cube_sparse_attn": {"topk_ratio": 0.5, "local_cube_size": [2, 2, 4]},
    "sparge_attn": {"topk": 0.67},
}
UNMEASURED = ("cube_sparse_attn", "sparge_attn")  # which stay sparse unless `dense_above` is given
BY_DATA = {
    "vmoba_attn": {**VMOBA, "moba_select_mode": "threshold", "moba_threshold": 0.3},
    "sparse_video_gen_2_attn": {
        "svg2_num_q_centroids": 4,
        "svg2_num_k_centroids": 8,
        "svg2_first_layers_fp": 0,
        "svg2_first_times_fp": 0,
    },
    "nabla_attn": {"P": 0.5, "add_sta": False, "tile_size": [2, 2, 4]},
    "draft_attn": {"sparsity_ratio": 0.5, "pool_h": 2, "pool_w": 4},
    "bsa_attn": {"kv_cumulative_threshold": 0.9, "tile_size": [2, 2, 4]},
    "video_sparse_attn_h3": {"sparsity": 0.5, "vsa_mode": "compete"},
}


def make_layer(
    method: str, given: dict[str, object], *, cls: type = LocalAttention, **more: object
) -> LocalAttention:
    backend = AttentionBackendEnum(method)
    tried = SparseMethod(backend=backend, given=given, heads=HEADS, layer_cls=cls)
    site = LayerSite(name="blocks.0.attn1", component="transformer", layer=0, num_layers=1)
    return tried.layer(site=site, strict=True, **more)


def inputs(text: TextSpan | None = None) -> tuple[torch.Tensor, ...]:
    tokens = math.prod(GRID) + (text.length if text else 0)
    return make_qkv(1, tokens, HEADS, HEAD_SIZE, dtype=torch.float32)


def attend(layer, qkv, text: TextSpan | None = None, **call: object) -> torch.Tensor:
    with torch.no_grad(), set_forward_context(0, latent_grid=GRID, text_span=text, num_steps=1):
        return layer(*qkv, **call)


def assert_dense(out: torch.Tensor, qkv, mask: torch.Tensor | None = None) -> None:
    assert_within_error_budget(out, *qkv, scale=HEAD_SIZE**-0.5, mask=mask)


def is_dense(out: torch.Tensor, qkv) -> bool:
    try:
        assert_dense(out, qkv)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("text", [None, TEXT], ids=["video", "joint"])
@pytest.mark.parametrize("method", KNOWN)
def test_a_call_that_is_known_to_keep_too_much_takes_the_dense_backend(method, text):
    layer, qkv = make_layer(method, KNOWN[method], dense_above=0.3), inputs(text)
    for _ in range(2):
        assert_dense(attend(layer, qkv, text), qkv)
    report = layer.report()
    (detour,) = report.detours
    assert (detour.selection.label, detour.calls) == ("torch_sdpa", 2)
    reason = f"{method} would keep more than 0.3 of the pairs (`dense_above`)"
    assert detour.selection.reason.startswith(reason)
    assert [entry.calls for entry in report.entries] == [0]
    summary = AttentionReport(layers=(report,)).summary()
    assert f"detour to torch_sdpa [settings], 2 calls each; {reason}" in summary


@pytest.mark.parametrize("above", [0.9, 1.0, None])
@pytest.mark.parametrize("method", KNOWN)
def test_a_call_that_keeps_less_runs_the_method(method, above):
    layer, qkv = make_layer(method, KNOWN[method], dense_above=above), inputs()
    assert not is_dense(attend(layer, qkv), qkv)
    report = layer.report()
    assert report.detours == ()
    (entry,) = report.entries
    assert entry.calls == 1
    assert 0.35 < entry.density < 0.85


def generate(layer, qkv, steps: range, request: str = "a", **call: object) -> list[torch.Tensor]:
    """Return the outputs of some steps of a generation of 100."""
    outs = []
    for step in steps:
        with (
            torch.no_grad(),
            set_forward_context(step, latent_grid=GRID, num_steps=100, request_id=request),
        ):
            outs.append(layer(*qkv, **call))
    return outs


def steps_that_are_dense(layer, qkv, steps: range, request: str = "a") -> list[int]:
    """Return those of some steps whose calls were handed to the dense backend."""
    found = []
    for step in steps:
        before = sum(part.calls for part in layer.report().detours)
        generate(layer, qkv, range(step, step + 1), request)
        if sum(part.calls for part in layer.report().detours) > before:
            found.append(step)
    return found


@pytest.mark.parametrize("method", BY_DATA)
def test_where_the_data_keep_too_much_the_steps_that_follow_are_dense(method):
    layer, qkv = make_layer(method, BY_DATA[method], dense_above=0.2), inputs()
    first, second = generate(layer, qkv, range(2))
    assert not is_dense(first, qkv), "the method decides by what it kept itself"
    assert_dense(second, qkv)
    report = layer.report()
    (detour,) = report.detours
    assert detour.calls == 1
    reason = "kept more than 0.2 of the pairs when last tried (`dense_above`)"
    assert reason in detour.selection.reason
    assert reason in AttentionReport(layers=(report,)).summary()


def test_the_method_is_tried_again_ever_more_seldom_and_in_every_generation():
    method = "sparse_video_gen_2_attn"
    layer, qkv = make_layer(method, BY_DATA[method], dense_above=0.2), inputs()
    dense = steps_that_are_dense(layer, qkv, range(60))
    assert sorted({*range(60)} - {*dense}) == [0, 17, 50]
    assert steps_that_are_dense(layer, qkv, range(2), "b") == [1]
    assert steps_that_are_dense(layer, qkv, range(2, 19), "b") == [*range(2, 17), 18]


@pytest.mark.parametrize("method", BY_DATA)
def test_a_rank_learns_of_its_own_heads(method):
    impl, (q, k, v) = make_layer(method, BY_DATA[method], dense_above=0.2).attn_impl, inputs()
    mine = slice(1, HEADS)
    for step in range(2):
        context = ForwardContext(current_timestep=step, num_steps=9, latent_grid=GRID)
        reason = impl.dense_reason(*(x[:, :, mine] for x in (q, k, v)), context, first_head=1)
        if step == 0:
            impl.forward(q[:, :, mine], k[:, :, mine], v[:, :, mine], context, first_head=1)
    assert "kept more than 0.2 of the pairs when last tried" in str(reason)


@pytest.mark.parametrize(
    ("above", "dense"),
    [((True, True), True), ((True, False), False), ((False, True, True), False)],
)
def test_all_calls_of_a_step_must_have_kept_too_much(above, dense):
    kept = KeptTooMuch()
    for answer in above:  # both guidance branches, say
        context = ForwardContext(current_timestep=3, request_id="a")
        assert kept.limit_passed(context) is None
        kept.learn(torch.tensor(answer), 0.5, context)
    found = kept.limit_passed(ForwardContext(current_timestep=4, request_id="a"))
    assert found == (0.5 if dense else None)
    assert kept.limit_passed(ForwardContext(current_timestep=4, request_id="b")) is None


def test_calls_of_one_step_hold_no_more_and_more_memory():
    kept, context = KeptTooMuch(), ForwardContext(current_timestep=0)  # a training loop, say
    for _ in range(20):
        kept.learn(torch.tensor(True), 0.5, context)
    assert len(kept._answers) == 1
    assert kept.limit_passed(ForwardContext(current_timestep=1)) == 0.5


def test_a_call_that_kept_less_settles_its_step():
    kept, context = KeptTooMuch(), ForwardContext(current_timestep=0)
    for share in (0.1, 0.9, 0.9):
        kept.learn(torch.tensor(share), 0.5, context)
    assert not kept._answers  # nothing is asked of the others
    assert kept.limit_passed(ForwardContext(current_timestep=1)) is None


@pytest.mark.parametrize("above", [0.999, 1.0, None])
@pytest.mark.parametrize("method", BY_DATA)
def test_a_call_whose_data_keep_less_runs_the_method(method, above):
    layer, qkv = make_layer(method, BY_DATA[method], dense_above=above), inputs()
    assert not any(is_dense(out, qkv) for out in generate(layer, qkv, range(3)))
    (entry,) = layer.report().entries
    assert entry.calls == 3
    assert entry.density < 0.999


@pytest.mark.parametrize("method", ["video_sparse_attn", "sparse_video_gen_2_attn"])
def test_masked_keys_stay_out(method):
    given = {**KNOWN, **BY_DATA}[method]
    layer, qkv = make_layer(method, given, dense_above=0.2), inputs(TEXT)
    keep = torch.ones(1, qkv[0].shape[1], dtype=torch.bool)
    keep[:, -3:] = False
    mask = keep[:, None, None, :]
    for step in range(2):
        with (
            torch.no_grad(),
            set_forward_context(step, latent_grid=GRID, text_span=TEXT, num_steps=9),
        ):
            out = layer(*qkv, attn_mask=mask)
    assert_dense(out, qkv, mask=mask)
    assert layer.report().detours[-1].calls == (2 if method in KNOWN else 1)


def test_a_gate_weighs_the_coarse_branch_of_dense_calls_too():
    qkv = inputs()
    gate = make_qkv(1, qkv[0].shape[1], HEADS, HEAD_SIZE, dtype=torch.float32, seed=7).query

    def gated(**config: object) -> torch.Tensor:
        layer = make_layer("video_sparse_attn", config, cls=UlyssesAttention_VSA)
        return attend(layer, qkv, gate_compress=gate)

    dense = gated(sparsity=0.5, dense_above=0.3)
    torch.testing.assert_close(dense, gated(sparsity=0.0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("late", [False, True])
def test_a_trained_linear_branch_keeps_its_layer_sparse(late):
    layer, qkv = make_layer("sla_attn", KNOWN["sla_attn"], dense_above=0.3), inputs()
    torch.manual_seed(1)
    if late:
        assert is_dense(attend(layer, qkv), qkv)
    layer.set_projection(nn.Linear(HEAD_SIZE, HEAD_SIZE).requires_grad_(False))
    attend(layer, qkv)
    assert sum(detour.calls for detour in layer.report().detours) == late
    assert layer.report().entries[0].calls == 1


@pytest.mark.parametrize("method", ["video_sparse_attn", "sparse_video_gen_2_attn"])
def test_under_deterministic_algorithms_nothing_is_exchanged(method):
    layer, qkv = make_layer(method, {**KNOWN, **BY_DATA}[method], dense_above=0.2), inputs()
    torch.use_deterministic_algorithms(True)
    try:
        assert not any(is_dense(out, qkv) for out in generate(layer, qkv, range(2)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert layer.report().detours == ()


@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_calls_that_need_gradients_run_the_method(which: int):
    layer, qkv = (
        make_layer("video_sparse_attn", KNOWN["video_sparse_attn"], dense_above=0.3),
        inputs(),
    )
    qkv[which].requires_grad_()
    with set_forward_context(0, latent_grid=GRID):
        layer(*qkv).sum().backward()
    assert layer.report().entries[0].calls == 1


def test_under_compile_calls_are_exchanged_too():
    layer, qkv = (
        make_layer("video_sparse_attn", KNOWN["video_sparse_attn"], dense_above=0.3),
        inputs(),
    )
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert_dense(attend(compiled, qkv), qkv)
    assert [part.calls for part in layer.report().detours] == [1]


def test_what_is_known_of_a_run_is_asked_once(monkeypatch):
    layer, qkv = (
        make_layer("video_sparse_attn", KNOWN["video_sparse_attn"], dense_above=0.3),
        inputs(),
    )
    asked = []
    router = layer.attn_impl.router
    density = router.density

    def counted(*sizes):
        asked.append(sizes)
        return density(*sizes)

    monkeypatch.setattr(router, "density", counted)
    attend(layer, qkv)
    first = len(asked)
    for _ in range(2):
        attend(layer, qkv)
    assert len(asked) == first


@pytest.mark.parametrize("value", [-0.1, 1.1, "most"])
def test_dense_above_is_a_share(value):
    with pytest.raises(ConfigError, match="`dense_above` of video_sparse_attn must be a number in"):
        make_layer("video_sparse_attn", {}, dense_above=value)


def limit_of(method: str, variant: str, block: int = 0, **config: object) -> float | None:
    cls = find_backend(AttentionBackendEnum(method), PlatformEnum.CUDA)
    given = {**KNOWN, **BY_DATA}.get(method, {})
    built = build_config(cls.config_cls, {**given, **config}, backend=method)
    site = LayerSite(layer=0, num_layers=1)
    impl = cls.get_impl_cls()(2, 32, 1.0, config=built, variant=variant, site=site)
    above = impl.layer.dense_above.limit if hasattr(impl, "layer") else impl.dense_limit
    return above(block)


@pytest.mark.parametrize("kernel", ["gluon", "triton"])
@pytest.mark.parametrize(
    "method", [name for name in (*KNOWN, "sparse_video_gen_2_attn") if name not in UNMEASURED]
)
def test_what_was_measured_holds_for_the_kernels_it_was_measured_with(method, kernel):
    limit = limit_of(method, kernel)
    if (method, kernel) == ("vmoba_attn", "triton"):
        assert limit is None
    else:
        assert limit is not None
        assert 0.3 < limit < 1
    assert limit_of(method, "reference") is None
    assert limit_of(method, kernel, dense_above=1.0) is None
    assert limit_of(method, kernel, dense_above=0.25) == 0.25


def test_a_kernel_that_was_named_is_not_exchanged_unless_told_so():
    assert limit_of("video_sparse_attn", "triton", kernel="triton") is None
    assert limit_of("video_sparse_attn", "triton", kernel="triton", dense_above=0.5) == 0.5


def test_large_blocks_have_limits_of_their_own():
    limits = [limit_of("vmoba_attn", "gluon", block) for block in (1, 455, 1365, 2100, 10800)]
    assert limits == [0.43, 0.43, 0.62, 0.71, 0.79]
    assert limit_of("sla_attn", "gluon", 64) < limit_of("sla_attn", "gluon", 128)
    assert limit_of("sage_sla_attn", "gluon", 128) is None
