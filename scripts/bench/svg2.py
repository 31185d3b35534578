"""Sparse VideoGen 2: attention of clusters, k-means, the whole layer, beside dense attention.

The inputs vary over the video as a model's do; independent normal ones would flatten what is
selected. TFLOP/s count the pairs that are kept, for dense attention all pairs. Contenders of
attention work on a part of the heads, in cluster order; the layer does everything.

    python3 scripts/bench/run.py svg2 --commit HASH [--only 300/1000] [--rounds 9]
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from _attention import Case, fa3, layer_on, next_step_of
from _harness import Bench, Run, relative_error, version_of

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.cluster_attention.api import query_pieces
from multimodal_gen.kernels.cluster_attention.plan import (
    Groups,
    cluster_plan,
    cluster_weights,
    kept_clusters,
    kept_pairs,
)
from multimodal_gen.kernels.kmeans.api import Clusters, by_similarity, initial_centroids, kmeans
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention.sparse.tiles import run_on_two_streams

GRID, HEADS, HEAD_SIZE = (21, 52, 68), 32, 128
TOKENS = math.prod(GRID)
SCALE = HEAD_SIZE**-0.5
HEADS_OF_PART = 8
TOP_P, MIN_RATIO = 0.9, 0.1
ITERATIONS = 6
BOUND = 4e-3
DENSE = "fa3, dense"
FLASHINFER, FLASHINFER_PLANNED = "flashinfer variable blocks", "flashinfer, plan too"


@dataclass(frozen=True, kw_only=True)
class ClusterCase(Case):
    """Numbers of clusters."""

    queries: int
    keys: int


CASES = tuple(
    ClusterCase(name=f"{queries}/{keys}", grid=GRID, heads=HEADS, queries=queries, keys=keys)
    for queries, keys in ((100, 500), (300, 1000))
)


def groups(clusters: Clusters) -> Groups:
    """Return clusters as one side of the attention."""
    return Groups(order=clusters.order, starts=clusters.starts, counts=clusters.counts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Clustered:
    """Clustered inputs, as they are in the middle of a generation."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    queries: Clusters
    keys: Clusters
    token_mask: torch.Tensor


def cluster(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: ClusterCase) -> Clustered:
    """Cluster as the backend does from one step to the next."""
    queries = kmeans(q, initial_centroids(q, case.queries), iterations=ITERATIONS)
    first = kmeans(k, initial_centroids(k, case.keys), iterations=ITERATIONS)
    keys = kmeans(k, by_similarity(first.centroids), iterations=2)
    weights = cluster_weights(queries.centroids, keys.centroids, keys.counts, scale=SCALE)
    token_mask = kept_clusters(weights, top_p=TOP_P, min_count=int(MIN_RATIO * case.keys))
    return Clustered(q=q, k=k, v=v, queries=queries, keys=keys, token_mask=token_mask)


def attention_runs(data: Clustered) -> tuple[dict[str, Run], float, Callable[[object], float]]:
    """Return the contenders on part of the heads, their FLOP, and what tells their error."""
    # Needs Triton, which the tests of this script do without.
    from multimodal_gen.kernels.cluster_attention import cluster_attention_kernel as kernel

    part = slice(HEADS_OF_PART)
    queries, keys = groups(data.queries).heads(part), groups(data.keys).heads(part)
    token_mask = data.mask[:, part]
    (q,) = gather_tokens((data.q[:, :, part],), queries.order)
    k, v = gather_tokens((data.k[:, :, part], data.v[:, :, part]), keys.order)
    pieces, plan = query_pieces(queries), cluster_plan(queries, keys, token_mask)
    wanted, rows = sampled_reference(q, k, v, queries, keys, token_mask)
    attend = partial(kernel.attend, q, k, v, pieces, keys, token_mask, scale=SCALE)
    runs: dict[str, Run] = {
        "clusters, fast": lambda: attend(tile=kernel.FAST)[0],
        "clusters, exact": lambda: attend(tile=kernel.EXACT)[0],
        "engine, gluon": lambda: block_sparse_attention(q, k, v, plan, kernel="gluon"),
        "engine, triton": lambda: block_sparse_attention(q, k, v, plan, kernel="triton"),
    }
    if importlib.util.find_spec("flashinfer") is not None:
        plan_again, run = flashinfer_calls(q, k, v, queries, keys, token_mask)
        runs |= {FLASHINFER: run, FLASHINFER_PLANNED: lambda: (plan_again(), run())[1]}

    def error(out: object) -> float:
        assert isinstance(out, torch.Tensor)
        return relative_error(out[0, rows, 0], wanted)

    flop = 4 * HEAD_SIZE * float(kept_pairs(token_mask, queries.counts, keys.counts))
    return runs, flop, error


def flashinfer_calls(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Groups,
    keys: Groups,
    token_mask: torch.Tensor,
) -> tuple[Run, Run]:
    """Return FlashInfer's kernel for blocks of any size: its planning, which waits, and its run.

    A plan holds for one choice of clusters, so a layer plans at every call. The first is made here.
    """
    import flashinfer

    workspace = torch.empty(1 << 27, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.sparse.VariableBlockSparseAttentionWrapper(workspace, backend="auto")
    plan = partial(
        wrapper.plan,
        block_mask_map=token_mask[0],
        block_row_sz=queries.counts[0],
        block_col_sz=keys.counts[0],
        num_qo_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        sm_scale=SCALE,
        q_data_type=q.dtype,
    )
    plan()
    heads_first = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    return plan, lambda: wrapper.run(*heads_first).transpose(0, 1).unsqueeze(0)


def sampled_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Groups,
    keys: Groups,
    token_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of some rows of the first head in fp32, and which rows."""
    rows = torch.arange(0, TOKENS, TOKENS // 256, device=q.device)
    sides = (queries.counts[0, 0], keys.counts[0, 0])
    of_q, of_k = (torch.repeat_interleave(torch.arange(len(n), device=q.device), n) for n in sides)
    mask = token_mask[0, 0][of_q[rows]][:, of_k]
    scores = q[0, rows, 0].float() @ k[0, :, 0].float().T * SCALE
    return scores.masked_fill(~mask, -torch.inf).softmax(1) @ v[0, :, 0].float(), rows


def kmeans_runs(data: Clustered) -> dict[str, Run]:
    """Return contenders for the two warm iterations of both sides."""
    sides = ((data.q, data.queries.centroids), (data.k, data.keys.centroids))
    kernels = ["triton"]
    if importlib.util.find_spec("flash_kmeans") is not None:
        kernels.append("flash_kmeans")

    def run(kernel: str) -> None:
        calls = [
            partial(kmeans, x, centroids, iterations=2, tolerance=0, kernel=kernel)
            for x, centroids in sides
        ]
        run_on_two_streams(calls, data.q.device)

    return {f"k-means, {kernel}": lambda kernel=kernel: run(kernel) for kernel in kernels}


def layer_run(data: Clustered, case: ClusterCase) -> Run:
    """Return a layer in the middle of a generation."""
    config = {
        "svg2_num_q_centroids": case.queries,
        "svg2_num_k_centroids": case.keys,
        "svg2_top_p_kmeans": TOP_P,
        "svg2_min_kc_ratio": MIN_RATIO,
        "svg2_kmeans_iter_init": ITERATIONS,
        "svg2_first_layers_fp": 0,
        "svg2_first_times_fp": 0,
    }
    layer = layer_on(case, "sparse_video_gen_2_attn", config, num_layers=1)
    run = next_step_of(case, layer, (data.q, data.k, data.v))
    run()  # from random centroids
    return run


@torch.inference_mode()
def measure(case: ClusterCase, bench: Bench) -> None:
    """Check, time and write a case."""
    data = cluster(*case.video(), case)
    attention, flop, error = attention_runs(data)
    errors = {name: error(run()) for name, run in attention.items()}
    wrong = [name for name, found in errors.items() if not found <= BOUND]
    if wrong:
        raise SystemExit(f"svg2 {case.name}: {', '.join(wrong)} exceed {BOUND}: {errors}")
    pairs = float(kept_pairs(data.mask, data.queries.counts, data.keys.counts))
    density = pairs / HEADS / TOKENS**2
    whole = {"layer": layer_run(data, case), **kmeans_runs(data)}
    attend = fa3()
    dense = {DENSE: partial(attend, data.q, data.k, data.v)} if attend else {}
    times = bench.time({**attention, **whole, **dense})
    kinds = (
        ("svg2 attention", attention, flop, f"B1 H{HEADS_OF_PART} S{TOKENS} D{HEAD_SIZE} bf16"),
        ("svg2 layer", whole, 4 * HEAD_SIZE * pairs, case.shape),
        ("svg2 dense", dense, case.flop, case.shape),
    )
    versions = {
        DENSE: version_of("fa3-fwd"),
        FLASHINFER: version_of("flashinfer-python"),
        FLASHINFER_PLANNED: version_of("flashinfer-python"),
        "k-means, flash_kmeans": version_of("flash-kmeans"),
    }
    for kind, names, work, described in kinds:
        bench.write(
            {name: times[name] for name in names},
            benchmark=kind,
            case=f"{case.name}, density {density:.3f}",
            shape=described,
            flop=work,
            flop_formula="4*D*kept pairs",
            errors=errors,
            versions=versions,
        )
