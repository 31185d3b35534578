"""Sparse VideoGen 2 through the layer, against its definition written down with loops."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.kernels.kmeans.api import initial_centroids
from multimodal_gen.runtime.layers.attention import LocalAttention, warn_once
from multimodal_gen.runtime.layers.attention.backends import registry
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.request import AttentionRequest
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.selector import resolve
from multimodal_gen.runtime.layers.attention.sparse.methods.svg2 import (
    CentroidCache,
    SVG2Backend,
    SVG2Config,
    SVG2Router,
)
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from multimodal_gen.settings import read_mapping
from tests.helpers.fakes import FakeDevice, simulated_environment
from tests.helpers.inputs import QKV
from tests.helpers.sparse import (
    SparseMethod,
    joint_mask,
    run_sparse,
    text_places,
    video_tokens,
)
from tests.helpers.tolerance import assert_within_error_budget

GRID = (3, 5, 7)  # 105 tokens
Q_CLUSTERS, K_CLUSTERS = 6, 11
METHOD = SparseMethod(
    backend=AttentionBackendEnum.SPARSE_VIDEO_GEN_2_ATTN,
    given={
        "svg2_num_q_centroids": Q_CLUSTERS,
        "svg2_num_k_centroids": K_CLUSTERS,
        "svg2_top_p_kmeans": 0.5,
        "svg2_first_layers_fp": 0,
        "svg2_first_times_fp": 0,
        "svg2_kmeans_iter_init": 4,
    },
)
HEAD_SIZE, HEADS, SCALE = METHOD.head_size, METHOD.heads, METHOD.scale
TEXTS = text_places(GRID, 20)
layer = METHOD.layer

CPU = FakeDevice(platform=PlatformEnum.CPU)
TRITON = ("triton", "triton", "3.6.0")
CUDA = FakeDevice(platform=PlatformEnum.CUDA, capability=(9, 0), packages=frozenset({TRITON}))
CUDA_WITH_FLASH_KMEANS = replace(
    CUDA, packages=frozenset({TRITON, ("flash_kmeans", "flash-kmeans", "0.1")})
)


def inputs(*, grid=GRID, text=None, dtype=torch.float32, seed=0, **options):
    """Return inputs that vary smoothly over the video, so that there are clusters to find."""
    qkv, video = METHOD.inputs(grid, text=text, seed=seed, **options), video_tokens(grid, text)
    generator = torch.Generator().manual_seed(seed + 1)
    places = torch.tensor(list(product(*map(range, grid)))).float() / torch.tensor(grid)
    for x in qkv[:2]:
        waves = torch.randn(3, x.shape[2] * HEAD_SIZE, generator=generator) * 4
        smooth = (places @ waves + torch.randn(waves.shape[1], generator=generator)).sin()
        x[:, video] += 2 * smooth.unflatten(1, (x.shape[2], HEAD_SIZE))
    return QKV(*(x.to(dtype) for x in qkv))


def run(attention, qkv, *, grid=GRID, text=None, step=0, mask=None, **known):
    return run_sparse(attention, qkv, grid, text=text, step=step, known=known, attn_mask=mask)


class Definition:
    """The method by its definition, one head at a time, in float64.

    `warm` is another `Definition` whose centroids are started from.
    """

    def __init__(
        self, qkv, *, iterations=4, top_p=0.5, min_share=0.1, text=None, token_mask=None, warm=None
    ):
        query, key, _ = qkv
        batch, tokens, heads, _ = query.shape
        video = video_tokens((tokens - (text.length if text else 0), 1, 1), text)
        kept = torch.ones(batch, tokens, dtype=torch.bool) if token_mask is None else token_mask
        self.mask = torch.zeros(batch, heads, tokens, tokens, dtype=torch.bool)
        self.centroids, self.probabilities = {}, []
        group = heads // key.shape[2]
        for b, h in product(range(batch), range(heads)):
            valid = [t for t in video if kept[b, t]]
            sides = []
            for name, x, head, num in (
                ("q", query, h, Q_CLUSTERS),
                ("k", key, h // group, K_CLUSTERS),
            ):
                before = warm and warm.centroids[name, b, head]
                if before is None:
                    begin = initial_centroids(x[:, video], num, mask=kept[:, video])[b, head]
                    before = list(begin.double())
                found, clusters = lloyd(x[b, :, head], valid, before, iterations)
                self.centroids[name, b, head] = found
                sides.append((found, clusters))
            (q_centroids, q_clusters), (k_centroids, k_clusters) = sides
            for q_centroid, rows in zip(q_centroids, q_clusters, strict=True):
                scores = [float(q_centroid @ k) * SCALE for k in k_centroids]
                weights = [len(c) * math.exp(s) for s, c in zip(scores, k_clusters, strict=True)]
                shares = [weight / sum(weights) for weight in weights]
                ranked = sorted(range(len(shares)), key=lambda j, s=shares: (-s[j], j))
                chosen, before = [], 0.0
                for place, j in enumerate(ranked):
                    if before <= top_p or place < int(min_share * len(shares)):
                        chosen.append(j)
                    before += shares[j]
                self.probabilities.append(sum(shares[j] for j in chosen))
                keys = [t for j in chosen for t in k_clusters[j]]
                for row in rows:
                    self.mask[b, h, row, keys] = True
            self.mask[b, h, ~kept[b]] = True
        self.mask = joint_mask(self.mask, video, token_mask)


def lloyd(x, tokens, centroids, iterations):
    """Return the centroids after the last update, and the tokens of each before it."""
    clusters = []
    for i in range(max(iterations, 1)):
        rounded = torch.stack([c.to(x.dtype).double() for c in centroids])
        clusters = [[] for _ in centroids]
        distances = (x[tokens].double()[:, None] - rounded).square().sum(2).tolist()
        for t, own in zip(tokens, distances, strict=True):
            clusters[own.index(min(own))].append(t)
        if i < iterations:
            centroids = [
                x[members].double().mean(0) if members else c
                for members, c in zip(clusters, centroids, strict=True)
            ]
    return centroids, clusters


def check(qkv, out, naive):
    assert_within_error_budget(out, *qkv, scale=SCALE, mask=naive.mask)


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_clusters_attend_to_the_clusters_that_matter(kv_heads):
    qkv = inputs(kv_heads=kv_heads)
    naive = Definition(qkv)
    assert 0.1 < naive.mask.float().mean() < 0.8
    check(qkv, run(layer(kv_heads=kv_heads), qkv), naive)


@pytest.mark.parametrize("where", TEXTS)
@pytest.mark.parametrize("masked", [False, True])
def test_text_attends_to_everything_and_everything_attends_to_text(where, masked):
    text = TEXTS[where]
    qkv = inputs(text=text)
    token_mask = None
    if masked:
        token_mask = torch.ones(qkv.key.shape[:2], dtype=torch.bool)
        if text:
            token_mask[0, text.start + 5 : text.stop] = False
        token_mask[1, 50:55] = False
    out = run(
        layer(), qkv, text=text, mask=None if token_mask is None else token_mask[:, None, None, :]
    )
    check(qkv, out, Definition(qkv, text=text, token_mask=token_mask))


def test_half_precision_errs_within_its_budget():
    qkv = inputs(dtype=torch.bfloat16)
    check(qkv, run(layer(dtype=torch.bfloat16), qkv), Definition(qkv))


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_all_the_mass_is_dense_attention(text):
    qkv = inputs(text=text)
    out = run(layer(svg2_top_p_kmeans=1), qkv, text=text)
    assert_within_error_budget(out, *qkv, scale=SCALE)


@pytest.mark.slow_cases("0.9")
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9])
def test_the_kept_clusters_carry_the_mass(top_p):
    qkv = inputs()
    naive = Definition(qkv, top_p=top_p)
    assert min(naive.probabilities) >= top_p
    check(qkv, run(layer(svg2_top_p_kmeans=top_p), qkv), naive)


def test_a_least_share_of_the_clusters_is_kept():
    qkv = inputs()
    naive = Definition(qkv, top_p=0.0, min_share=0.5)
    check(qkv, run(layer(svg2_top_p_kmeans=0, svg2_min_kc_ratio=0.5), qkv), naive)


def test_the_order_of_tokens_within_clusters_changes_nothing():
    qkv = inputs()
    attention = layer(svg2_kmeans_iter_step=1)
    known = {"num_steps": 4, "request_id": "a", "cfg_branch": "cond"}
    run(attention, qkv, step=1, **known)
    shuffled = torch.randperm(math.prod(GRID), generator=torch.Generator().manual_seed(0))
    straight = run(attention, qkv, step=2, **known)
    attention = layer(svg2_kmeans_iter_step=1)
    run(attention, qkv, step=1, **known)
    mixed = run(attention, QKV(*(x[:, shuffled] for x in qkv)), step=2, **known)
    assert torch.allclose(mixed, straight[:, shuffled], atol=1e-5)


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 2, 2), (2, 3, 3)])
def test_there_may_be_fewer_tokens_than_clusters(grid):
    qkv = inputs(grid=grid)
    out = run(layer(svg2_top_p_kmeans=1), qkv, grid=grid)
    assert_within_error_budget(out, *qkv, scale=SCALE)


def test_a_cluster_has_four_tokens_on_average_at_least(caplog):
    attention = layer(svg2_num_q_centroids=300, svg2_num_k_centroids=26)
    run(attention, inputs())
    assert "makes 26 clusters of 105 tokens, not the 300 that were asked for" in caplog.text
    assert caplog.text.count("clusters of 105 tokens") == 1  # of keys there are as many as asked


def test_the_next_step_starts_from_the_centroids_of_the_last():
    first, second = inputs(seed=0), inputs(seed=5)
    attention = layer()
    known = {"num_steps": 9, "request_id": "a", "cfg_branch": "cond"}
    run(attention, first, step=3, **known)
    out = run(attention, second, step=4, **known)
    check(second, out, Definition(second, iterations=2, warm=Definition(first)))


@pytest.mark.slow_cases("branches1")
@pytest.mark.parametrize("branches", [("cond", "uncond"), (None, None)])
def test_requests_and_guidance_branches_never_share_centroids(branches):
    """Interleaved, every stream of calls gives what it gives alone."""
    streams = [(request, i) for request in ("a", "b") for i in (0, 1)]
    steps = {
        stream: [inputs(seed=10 * n + s) for s in range(3)] for n, stream in enumerate(streams)
    }

    def known(stream):
        return {"num_steps": 9, "request_id": stream[0], "cfg_branch": branches[stream[1]]}

    together = layer()
    mixed = {
        (stream, s): run(together, steps[stream][s], step=s + 2, **known(stream))
        for s in range(3)
        for stream in streams
    }
    for stream in streams:
        alone = layer()
        for s in range(3):
            out = run(alone, steps[stream][s], step=s + 2, **known(stream))
            assert torch.equal(out, mixed[stream, s])


def test_a_batch_of_both_branches_keeps_them_apart():
    first, second = inputs(seed=0), inputs(seed=5)
    known = {"num_steps": 9, "request_id": "a"}
    both = layer()
    run(both, first, step=3, cfg_branch="both", **known)
    out = run(both, second, step=4, cfg_branch="both", **known)
    for i in range(2):
        alone = layer()
        for step, qkv in ((3, first), (4, second)):
            one = QKV(*(x[i : i + 1] for x in qkv))
            found = run(alone, one, step=step, cfg_branch="cond", **known)
        assert torch.allclose(found, out[i : i + 1], atol=1e-6)


def centroids_of(attention) -> CentroidCache:
    router = attention.attn_impl.router
    assert isinstance(router, SVG2Router)
    return router.centroids


def test_centroids_are_dropped_with_the_last_step_of_a_request():
    attention, qkv = layer(), inputs()
    for step in range(3):
        run(attention, qkv, step=step, num_steps=3, request_id="a", cfg_branch="cond")
        assert len(centroids_of(attention)) == (step < 2)


@pytest.mark.slow
def test_requests_that_never_end_are_forgotten_in_time():
    attention, qkv = layer(svg2_kmeans_iter_init=1), inputs(batch=1)
    for i in range(20):
        run(attention, qkv, step=1, num_steps=3, request_id=str(i), cfg_branch="cond")
    assert len(centroids_of(attention)) == 8


@pytest.mark.slow_cases("1", "4")
@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_run_without_a_name_starts_anew_at_every_step(step):
    attention, qkv, other = layer(), inputs(seed=0), inputs(seed=5)
    run(attention, other, step=3)
    assert torch.equal(run(attention, qkv, step=step), run(layer(), qkv, step=step))
    assert len(centroids_of(attention)) == 0


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("branches", [("cond", "uncond"), (None, None)])
def test_centroids_are_dropped_when_the_last_step_is_dense(branches, early):
    attention = layer(dense_steps="2-", svg2_zero_step_kmeans_init=early)
    qkv, kept = inputs(batch=1), []
    for step in range(4):
        for branch in branches:
            known = {"num_steps": 4, "request_id": "a", "cfg_branch": branch}
            run(attention, qkv, step=step, **known)
        kept.append(len(centroids_of(attention)))
    assert kept == [2, 2, 2, 0]


def test_a_request_that_stops_early_is_ended_by_its_caller():
    steps = [inputs(batch=1, seed=seed) for seed in range(3)]
    together, alone = layer(), layer()
    for request in ("a", "b"):
        for step in range(2):
            known = {"num_steps": 9, "request_id": request, "cfg_branch": "cond"}
            run(together, steps[step], step=step, **known)
    for step in range(2):
        run(alone, steps[step], step=step, num_steps=9, request_id="b", cfg_branch="cond")
    together.end_request("a")
    assert len(centroids_of(together)) == 1
    outs = [
        run(attention, steps[2], step=2, num_steps=9, request_id="b", cfg_branch="cond")
        for attention in (together, alone)
    ]
    assert torch.equal(*outs)
    together.end_request("b")
    assert len(centroids_of(together)) == 0


def test_the_dense_last_step_of_a_request_leaves_others_alone():
    attention, qkv = layer(dense_steps="3"), inputs(batch=1)
    for step, request in ((2, "a"), (1, "b"), (3, "a")):
        run(attention, qkv, step=step, num_steps=4, request_id=request, cfg_branch="cond")
    assert len(centroids_of(attention)) == 1


@pytest.mark.parametrize(
    ("device", "kernel", "reason"),
    [
        (CUDA, "flash_kmeans", "kmeans_kernel flash_kmeans needs the package flash_kmeans, which"),
        (CUDA_WITH_FLASH_KMEANS, "flash_kmeans", None),
        (CUDA, "triton", None),
        (CUDA, "auto", None),
        (
            CPU,
            "flash_kmeans",
            "kmeans_kernel flash_kmeans needs platform cuda or rocm, this is cpu",
        ),
        (CPU, "triton", "kmeans_kernel triton needs platform cuda or rocm, this is cpu"),
        (CPU, "reference", None),
    ],
)
def test_a_kmeans_that_cannot_run_is_refused_before_anything_runs(device, kernel, reason):
    request = AttentionRequest(
        environment=simulated_environment(device),
        head_size=64,
        num_heads=2,
        num_kv_heads=2,
        dtype=torch.bfloat16,
    )
    asked = METHOD.asked(kmeans_kernel=kernel)
    if reason is None:
        assert resolve(request, asked).backend is AttentionBackendEnum.SPARSE_VIDEO_GEN_2_ATTN
        return
    with pytest.raises(UnsupportedBackendError, match=reason):
        resolve(request, asked)


def test_the_package_of_a_kmeans_is_looked_for():
    assert "flash_kmeans" in {probe.module for probe in registry._probes()}


def test_a_layer_whose_kmeans_is_missing_is_not_built():
    with pytest.raises(
        UnsupportedBackendError, match="kmeans_kernel flash_kmeans needs platform cuda"
    ):
        layer(kmeans_kernel="flash_kmeans")


def on_the_authors_kernel(*, heads=2, kv_heads=2, scale=SCALE):
    """Return an implementation as selection makes it on a GPU."""
    config = SVG2Config(kernel="svg", svg2_first_times_fp=0.5)
    return SVG2Backend.get_impl_cls()(
        heads, HEAD_SIZE, scale, False, kv_heads, config=config, variant="svg"
    )


@pytest.mark.parametrize(
    ("geometry", "reason"),
    [
        ({"kv_heads": 1}, "needs as many key heads as the 2, got 1"),
        ({"scale": 1.0}, "needs the inverse root of the head size as scale, got 1 for 32"),
    ],
)
def test_layers_that_the_authors_kernel_cannot_serve_are_not_built(geometry, reason):
    with pytest.raises(UnsupportedBackendError, match=f"cannot serve this layer: {reason}"):
        on_the_authors_kernel(**geometry)


@pytest.mark.parametrize("length", [0, 20])
def test_the_authors_kernel_refuses_text_before_its_first_step(length):
    impl = on_the_authors_kernel()
    text = TextSpan(start=0, length=length)
    with set_forward_context(0, latent_grid=GRID, text_span=text, num_steps=4) as context:
        if not length:
            impl.check_run(context)
            assert impl.facts().densities == {}
            return
        message = "cannot serve this run: needs sequences without text, got 20 text tokens"
        with pytest.raises(UnsupportedBackendError, match=message):
            impl.check_run(context)


@pytest.mark.parametrize("name", ["svg2_first_layers_fp", "svg2_first_times_fp"])
def test_a_number_of_first_steps_or_layers_is_whole(name):
    with pytest.raises(ConfigError, match=f"`{name}` of sparse_video_gen_2_attn must be .* 2.5"):
        SVG2Config(**{name: 2.5})
    parts = [SVG2Config(**{name: 2.0}).dense_parts(axis) for axis in ("steps", "layers")]
    assert [str(p.indices) for (p,) in parts if p.given == f"{name}=2.0"] == ["0-1"]


def test_dense_layers_alone_are_told_of_once(caplog):
    warn_once.PROCESS._given.clear()
    for index in (0, 1):
        layer(site=LayerSite(name=str(index), layer=index, num_layers=2), svg2_first_layers_fp=1)
    (record,) = caplog.records
    assert "sparse in no layer: svg2_first_layers_fp=1.0 keep all 2" in record.getMessage()


def test_dense_steps_and_layers_run_on_a_dense_backend():
    parameters = {"svg2_first_times_fp": 0.2, "svg2_first_layers_fp": 0.5}
    qkv = inputs()
    attention = layer(site=LayerSite(name="2", layer=2, num_layers=4), **parameters)
    for step in range(10):
        run(attention, qkv, step=step, num_steps=10, request_id="a")
    dense, sparse = attention.report().entries
    assert (dense.steps, dense.calls, str(dense.selection.backend)) == (
        "first 0.2 of all",
        2,
        "torch_sdpa",
    )
    assert [step for step, _ in sparse.densities] == list(range(2, 10))
    first = layer(site=LayerSite(name="1", layer=1, num_layers=4), **parameters)
    assert str(first.backend) == "torch_sdpa"
    assert layer(svg2_first_layers_fp=2).attn_impl is not None
    assert str(layer(svg2_first_layers_fp=2).backend) == "torch_sdpa"


def test_a_number_of_dense_steps_needs_no_number_of_steps():
    attention, qkv = layer(svg2_first_times_fp=2), inputs()
    for step in range(4):
        run(attention, qkv, step=step)
    dense, sparse = attention.report().entries
    assert (dense.steps, dense.calls) == ("0-1", 2)
    assert [step for step, _ in sparse.densities] == [2, 3]


def test_a_share_of_steps_needs_their_number():
    with pytest.raises(UsageError, match=r"steps first 0.2 of all must be .* pass num_steps to"):
        run(layer(svg2_first_times_fp=0.2), inputs())


def test_a_share_of_layers_needs_their_number():
    with pytest.raises(ConfigError, match=r"must know how many layers .* got layer 0 of an"):
        layer(svg2_first_layers_fp=0.5)


@pytest.mark.slow_cases("True-False")
@pytest.mark.parametrize(("early", "masked"), [(False, False), (True, False), (True, True)])
def test_dense_steps_may_warm_the_centroids_up(early, masked):
    parameters = {"dense_steps": "0-1", "svg2_zero_step_kmeans_init": early}
    steps = [inputs(seed=seed) for seed in range(3)]
    mask = torch.ones(steps[0].key.shape[:2], dtype=torch.bool) if masked else None
    attention = layer(**parameters)
    for step, qkv in enumerate(steps):
        known = {"num_steps": 9, "request_id": "a", "cfg_branch": "cond"}
        out = run(attention, qkv, step=step, mask=mask, **known)
    naive = Definition(steps[2])
    if early:
        warm = Definition(steps[1], iterations=2, warm=Definition(steps[0]))
        naive = Definition(steps[2], iterations=2, warm=warm)
    check(steps[2], out, naive)


def test_dense_steps_whose_tokens_are_not_those_of_the_grid_warm_nothing_up():
    attention = layer(dense_steps="0-1", svg2_zero_step_kmeans_init=True)
    query, key, value = inputs()
    call = AttentionCall(query[:, :5], key[:, :5], value[:, :5], no_grid="they are five")
    with set_forward_context(0, latent_grid=GRID, num_steps=9, request_id="a"), torch.no_grad():
        assert attention.attend(call).shape == call.query.shape
    assert len(attention.attn_impl.router.centroids) == 0


def test_the_report_has_the_share_of_pairs():
    text = TEXTS["text last"]
    qkv, attention = inputs(text=text), layer()
    run(attention, qkv, text=text, step=3)
    (entry,) = attention.report().entries
    assert entry.densities[0][0] == 3
    wanted = Definition(qkv, text=text).mask.double().mean()
    assert abs(entry.densities[0][1] - wanted) < 1e-6


def test_inputs_that_require_grad_are_refused():
    qkv, attention = QKV(*(x.requires_grad_() for x in inputs())), layer()
    with pytest.raises(
        UnsupportedBackendError, match=r"no backward; .* train with a dense backend"
    ):
        run(attention, qkv)
    with torch.no_grad():
        assert run(attention, qkv).shape == qkv.query.shape


def test_causal_layers_are_refused():
    asked = BackendPreference(
        source=Source.SETTINGS, backend=AttentionBackendEnum.SPARSE_VIDEO_GEN_2_ATTN
    )
    with pytest.raises(UnsupportedBackendError, match="does not support causal"):
        LocalAttention(
            HEADS,
            HEAD_SIZE,
            causal=True,
            compute_dtype=torch.float32,
            scope=SelectionScope(default=asked, strict=True),
        )


CONFIGS = Path(__file__).parents[6] / "configs" / "attention"
# The settings of the authors' scripts and of the paper: clusters of queries and keys, dense steps
# of 50 and dense layers of 40.
SETTINGS = {
    "sparse_video_gen_2_attn.yaml": (300, 1000, 10, 1),
    "sparse_video_gen_2_attn/wan_i2v_720p.yaml": (300, 1000, 17, 1),
    "sparse_video_gen_2_attn/hunyuan_video_720p.yaml": (400, 1000, 5, 1),
    "sparse_video_gen_2_attn/hunyuan_video_480p.yaml": (200, 1000, 2, 0),
    "sparse_video_gen_2_attn/cosmos.yaml": (300, 1000, 15, 1),
    "sparse_video_gen_2_attn/paper.yaml": (100, 500, 15, 0),
}


def test_every_worked_example_has_a_test():
    folder = CONFIGS / "sparse_video_gen_2_attn"
    files = {str(path.relative_to(CONFIGS)) for path in folder.iterdir()}
    assert files | {"sparse_video_gen_2_attn.yaml"} == set(SETTINGS)


# The others differ from these in numbers of steps and layers.
QUICK = ("sparse_video_gen_2_attn.yaml", "sparse_video_gen_2_attn/cosmos.yaml")


@pytest.mark.slow_cases("sparse_video_gen_2_attn.yaml")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in SETTINGS]
)
def test_published_settings_run(name):
    num_q, num_k, steps, layers = SETTINGS[name]
    raw = read_mapping(CONFIGS / name)
    assert (raw["svg2_num_q_centroids"], raw["svg2_num_k_centroids"]) == (num_q, num_k)
    assert (raw["svg2_top_p_kmeans"], raw["svg2_min_kc_ratio"]) == (0.9, 0.1)
    raw["svg2_kmeans_iter_init"] = 3
    for i in range(3):
        site = LayerSite(name=str(i), layer=i, num_layers=40)
        is_dense = str(layer(**raw, site=site).backend) == "torch_sdpa"
        assert is_dense == (i < layers)
    attention, qkv = layer(**raw, site=site), inputs(batch=1)
    for step in (steps - 1, steps):
        out = run(attention, qkv, step=step, num_steps=50, request_id="a", cfg_branch="cond")
    assert out.isfinite().all()
    dense, sparse = attention.report().entries
    assert (dense.calls, sparse.calls) == (1, 1)
    assert all(0 < density <= 1 for _, density in sparse.densities)
