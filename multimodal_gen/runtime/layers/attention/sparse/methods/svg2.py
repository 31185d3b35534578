"""Sparse VideoGen 2: queries and keys are clustered; clusters attend to their best clusters.

k-means clusters the video's queries and keys of every head apart. A cluster of queries attends to
the clusters of keys that carry most of the attention its centroid would give them. Text is
attended to by everything, and attends to everything.

A layer keeps centroids from step to step, per request and guidance branch, so that neither two
interleaved requests nor the two branches of one ever start from each other's. Of calls without a
request's name nothing is kept: nothing tells whose it is.

Shapes: B batch, S tokens, H query heads, Hkv key heads, D head size, Cq and Ck clusters.
"""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from typing_extensions import override

from multimodal_gen.errors import ConfigError, UnsupportedBackendError
from multimodal_gen.kernels.cluster_attention.plan import cluster_weights, kept_clusters
from multimodal_gen.kernels.engine import AUTO, BLOCK_SPARSE, FLASH_KMEANS, KMEANS
from multimodal_gen.kernels.kmeans.api import Clusters, by_similarity, initial_centroids, kmeans
from multimodal_gen.kernels.requirements import Capability, platform_reason
from multimodal_gen.kernels.static_cache import being_captured
from multimodal_gen.runtime.layers.attention.backends.engine import (
    engine_variants,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.backends.packages import SVG
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    Ratio,
    SparseConfig,
    Tail,
    first_of,
    option,
    ratio_now,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, Feature
from multimodal_gen.runtime.layers.attention.sparse.kept_steps import KeptSteps
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.methods.svg2_upstream import (
    UPSTREAM,
    attend_upstream,
    refuse_layer,
)
from multimodal_gen.runtime.layers.attention.sparse.router import (
    BlockStats,
    Budget,
    Cut,
    Limits,
    Router,
    SparseLayer,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SparseCall,
    record_on_current_stream,
    run_on_two_streams,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

# A cluster of fewer is hardly one: its queries, or keys, would rather be looked at singly.
_TOKENS_PER_CLUSTER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SVG2Config(SparseConfig):
    """Parameters of `sparse_video_gen_2_attn`.

    Steps start from the centroids of the step before where calls have a `request_id`, as those of
    pipelines do; without one, each starts from random centroids. After steps in which a layer did
    not run, as under a cache, it does the iterations of those steps too, but no more than from
    random centroids.

    Attributes:
        svg2_num_q_centroids: clusters of queries per head, at most one for four tokens.
        svg2_num_k_centroids: clusters of keys per head, the same.
        svg2_top_p_kmeans: attention mass to keep per query cluster, as estimated from centroids; 1
            equals dense attention. It may change over the steps: {0: 0.98, 0.4: 0.9}.
        svg2_min_kc_ratio: least share of key clusters to keep; the same.
        svg2_kmeans_iter_init: k-means iterations from random centroids.
        svg2_kmeans_iter_step: k-means iterations from the previous step's centroids.
        svg2_zero_step_kmeans_init: cluster in the dense steps too, so that the first sparse step
            starts warm.
        svg2_first_layers_fp: first layers that stay dense: a share up to 1, a number above.
        svg2_first_times_fp: first steps that stay dense: a share up to 1, a number above.
        tail: what becomes of clusters of keys that a cluster of queries does not keep: `none` drops
            them, as the paper does; `pooled` counts each by the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
        kmeans_kernel: which k-means runs. `flash_kmeans` waits for the device in every iteration.

    Raises:
        ConfigError: `svg2_first_layers_fp` or `svg2_first_times_fp` is above 1 and no whole number.
    """

    first_dense_steps = "svg2_first_times_fp"
    first_dense_layers = "svg2_first_layers_fp"

    svg2_num_q_centroids: int = option(
        300, "clusters of queries per head, at most one for four tokens", ge=1
    )
    svg2_num_k_centroids: int = option(
        1000, "clusters of keys per head, at most one for four tokens", ge=1
    )
    svg2_top_p_kmeans: Ratio = option(0.9, "attention mass to keep", ge=0, le=1)
    svg2_min_kc_ratio: Ratio = option(0.1, "least share of key clusters to keep", ge=0, le=1)
    svg2_kmeans_iter_init: int = option(50, "k-means iterations from random centroids", ge=1)
    svg2_kmeans_iter_step: int = option(2, "k-means iterations from the last centroids", ge=0)
    svg2_zero_step_kmeans_init: bool = option(False, "cluster in the dense steps too")
    svg2_first_layers_fp: float = option(
        0.03, "first layers that stay dense: a share up to 1, a number above", ge=0
    )
    svg2_first_times_fp: float = option(
        0.2, "first steps that stay dense: a share up to 1, a number above", ge=0
    )
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal["auto", "gluon", "triton", "reference", "svg"] = option(
        "auto", "kernel that runs"
    )
    kmeans_kernel: Literal["auto", "triton", "flash_kmeans", "reference"] = option(
        "auto", "k-means that runs"
    )

    def check(self) -> None:
        """Steps and layers above 1 are counted."""
        refuse_foreign_tail("sparse_video_gen_2_attn", self.tail, self.kernel, UPSTREAM)
        for name in (self.first_dense_steps, self.first_dense_layers):
            value: float = getattr(self, name)
            if value > 1 and not value.is_integer():
                raise ConfigError(
                    f"`{name}` of sparse_video_gen_2_attn must be a share from 0 to 1 or a whole "
                    f"number above, got {value:g}"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Centroids:
    """Where the clusters of one layer ended.

    Attributes:
        step: denoising step they are of.
        query: [B, H, Cq, D].
        key: [B, Hkv, Ck, D].
    """

    step: int
    query: torch.Tensor
    key: torch.Tensor


class CentroidCache(KeptSteps[Centroids]):
    """The centroids of one layer, by request and guidance branch."""


class SVG2Router(Router[SVG2Config]):
    """The clusters of keys that carry most of what the centroid of queries would attend to."""

    chooses = "map"
    keeps_state = True

    def __init__(self, layer: SparseLayer | None = None) -> None:
        super().__init__(layer)
        self.centroids = CentroidCache()

    @override
    def prepare(self, settings: SVG2Config) -> None:
        refuse_layer(self.layer, "layer")

    @override
    def check_run(self, settings: SVG2Config, context: ForwardContext) -> None:
        span = context.text_span
        refuse_layer(self.layer, "run", 0 if span is None else span.length)

    @override
    def limits(self, settings: SVG2Config) -> Limits:
        return Limits(
            ring="k-means runs over all tokens of a head, and ranks that hold a part of them would "
            "have to exchange every centroid in each of its iterations",
            cache="it clusters the keys of one call",
        )

    @override
    def cut(self, settings: SVG2Config, grid: Window) -> Cut:
        return Cut.groups()

    @override
    def group(
        self,
        settings: SVG2Config,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        context: ForwardContext,
    ) -> tuple[Clusters, Clusters]:
        """Return the clusters of both sides, from where the step before left them."""
        step = context.current_timestep
        branch = self.centroids.branch(context)
        if branch is not None and being_captured():
            raise UnsupportedBackendError(
                f"{self.layer.label} cannot be captured in a CUDA graph, which would start every "
                "step from the clusters of the one that was captured; leave it out of the graph, "
                'as torch.compile(mode="reduce-overhead") does'
            )
        before = self.centroids.find(branch, step)
        # A layer that did not run in the steps between, under a cache, catches up on them.
        age = 1 if before is None else max(step - before.step, 1)
        found: dict[str, Clusters] = {}

        def cluster(side: str, x: torch.Tensor, num: int) -> None:
            known: torch.Tensor | None = getattr(before, side, None)
            found[side] = self.cluster_side(settings, x, num, known, mask, age)

        sides = (
            ("query", query, settings.svg2_num_q_centroids),
            ("key", key, settings.svg2_num_k_centroids),
        )
        run_on_two_streams([partial(cluster, *side) for side in sides], query.device)
        for clusters in found.values():
            record_on_current_stream(
                clusters.centroids, clusters.order, clusters.starts, clusters.counts
            )
        # In the dtype of the tokens: two branches of a model of 40 layers hold much already.
        left = {side: clusters.centroids.to(query.dtype) for side, clusters in found.items()}
        if before is None:  # keys that are kept together then lie together
            left["key"] = by_similarity(left["key"])
        self.centroids.store(branch, Centroids(step=step, **left), context.num_steps)
        return found["query"], found["key"]

    def cluster_side(
        self,
        settings: SVG2Config,
        x: torch.Tensor,
        num: int,
        known: torch.Tensor | None,
        mask: torch.Tensor | None,
        age: int,
    ) -> Clusters:
        """Cluster the tokens of one side, [B, S, H, D]; centroids are `age` steps old."""
        num = self._clusters_of(x.shape[1], num)
        shape = (x.shape[0], x.shape[2], num, x.shape[3])
        step, first = settings.svg2_kmeans_iter_step, settings.svg2_kmeans_iter_init
        iterations = min(step * age, max(step, first))
        if known is None or known.shape != shape:
            known = by_similarity(initial_centroids(x, num, mask=mask))
            iterations = first
        return kmeans(x, known, iterations=iterations, mask=mask, kernel=settings.kmeans_kernel)

    def _clusters_of(self, num_tokens: int, num: int) -> int:
        """Return how many clusters so many tokens get where `num` are asked for."""
        most = max(1, num_tokens // _TOKENS_PER_CLUSTER)
        if num <= most:
            return num
        self.layer.warnings.warn(
            f"{self.layer.label} makes {most} clusters of {num_tokens} tokens, not the {num} that "
            f"were asked for: of {_TOKENS_PER_CLUSTER} tokens each on average, at least"
        )
        return most

    @override
    def choose(
        self, settings: SVG2Config, stats: BlockStats, budget: Budget | None
    ) -> torch.Tensor:
        assert stats.counts is not None, "groups are counted"
        return kept_clusters(
            cluster_weights(stats.query, stats.key, stats.counts, scale=stats.scale),
            top_p=ratio_now(settings.svg2_top_p_kmeans),
            min_count=first_of(ratio_now(settings.svg2_min_kc_ratio), stats.num),
        )

    @override
    def attend_upstream(
        self, settings: SVG2Config, call: SparseCall, keys: Any, select: Any
    ) -> torch.Tensor | None:
        return attend_upstream(call, select(), self.layer.label)

    @override
    def observes(self, settings: SVG2Config) -> bool:
        return settings.svg2_zero_step_kmeans_init

    @override
    def end_request(self, request_id: str) -> None:
        self.centroids.end(request_id)


class SVG2Backend(SparseBackend):
    """Sparse VideoGen 2."""

    backend = AttentionBackendEnum.SPARSE_VIDEO_GEN_2_ATTN
    summary = "Sparse VideoGen 2: clusters of queries attend to clusters of keys"
    config_cls = SVG2Config
    # svg2.csv at d3e5331, the layer: 470.2 of the 753.0 TFLOP/s of "ragged dense" in engine.csv;
    # triton 198.3 of 460.4.
    dense_above = MappingProxyType({"gluon": ((0, 0.62),), "triton": ((0, 0.43),)})
    router = SVG2Router
    trained_by = "a dense backend: it is made for models as they were trained"
    packages = (FLASH_KMEANS,)
    variants = (
        # Clusters of tokens that training moves are of no use a step later.
        *engine_variants(
            BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK), plans=("ragged",), trains=False
        ),
        upstream_variant(
            UPSTREAM, SVG, head_sizes=(64, 128, 256), capability=Capability(minimum=(8, 0))
        ),
    )

    @classmethod
    def config_reasons(
        cls, request: AttentionRequest, config: BackendConfig | None
    ) -> tuple[str, ...]:
        """Return why the k-means that `config` asks for cannot run where `request` does."""
        name = getattr(config, "kmeans_kernel", AUTO)
        if name == AUTO:
            return ()
        kernel, environment = KMEANS.kernel(name), request.environment
        reasons = [environment.lacks(probe) for probe in kernel.packages]
        if kernel.platforms is not None:
            reasons.append(platform_reason(kernel.platforms, str(environment.platform)))
        return tuple(f"kmeans_kernel {name} {reason}" for reason in reasons if reason)
