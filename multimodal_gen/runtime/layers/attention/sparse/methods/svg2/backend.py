"""Sparse VideoGen 2: queries and keys are clustered; clusters attend to their best clusters.

k-means clusters the video's queries and keys of every head apart. A cluster of queries attends to
the clusters of keys that carry most of the attention its centroid would give them. Text is
attended to by everything, and attends to everything.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Literal

import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError
from multimodal_gen.kernels.cluster_attention.plan import (
    cluster_weights,
    kept_clusters,
    kept_pairs,
)
from multimodal_gen.kernels.engine import AUTO, BLOCK_SPARSE, FLASH_KMEANS, KMEANS
from multimodal_gen.kernels.kmeans.api import Clusters, by_similarity, initial_centroids, kmeans
from multimodal_gen.kernels.requirements import Capability, PackageProbe, platform_reason
from multimodal_gen.kernels.static_cache import being_captured
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    DenseLimits,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.engine import (
    engine_variants,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    SparseConfig,
    first_of,
    option,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, Feature
from multimodal_gen.runtime.layers.attention.selectors import Ratio, ratio_now
from multimodal_gen.runtime.layers.attention.sparse.base import (
    SparseImpl,
    Tail,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.svg2.clusters import (
    UPSTREAM,
    CentroidCache,
    Centroids,
    ClusterMap,
    attend_clusters,
    attend_upstream,
    cluster_map,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    attend_text,
    layout_of,
    record_on_current_stream,
    run_on_two_streams,
)
from multimodal_gen.runtime.layers.attention.sparse.upstream import (
    refuse_upstream,
    shape_reasons,
    text_reasons,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

# A cluster of fewer is hardly one: its queries, or keys, would rather be looked at singly.
_TOKENS_PER_CLUSTER = 4

_SVG = PackageProbe(
    module=UPSTREAM,
    distribution="svg",
    install="see https://github.com/svg-project/Sparse-VideoGen",
)


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

    first_dense_steps: ClassVar[str] = "svg2_first_times_fp"
    first_dense_layers: ClassVar[str] = "svg2_first_layers_fp"

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


class SVG2Backend(AttentionBackend):
    """Sparse VideoGen 2."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SPARSE_VIDEO_GEN_2_ATTN
    summary: ClassVar[str] = "Sparse VideoGen 2: clusters of queries attend to clusters of keys"
    config_cls: ClassVar[type[SVG2Config]] = SVG2Config
    # svg2.csv at d3e5331, the layer: 470.2 of the 753.0 TFLOP/s of "ragged dense" in engine.csv;
    # triton 198.3 of 460.4.
    dense_above: ClassVar[DenseLimits] = MappingProxyType(
        {"gluon": ((0, 0.62),), "triton": ((0, 0.43),)}
    )
    trained_by: ClassVar[str] = "a dense backend: it is made for models as they were trained"
    packages: ClassVar[tuple[PackageProbe, ...]] = (FLASH_KMEANS,)
    variants: ClassVar[tuple[Variant, ...]] = (
        # Clusters of tokens that training moves are of no use a step later.
        *engine_variants(
            BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK), plans=("ragged",), trains=False
        ),
        upstream_variant(
            UPSTREAM, _SVG, head_sizes=(64, 128, 256), capability=Capability(minimum=(8, 0))
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

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return SVG2Impl


class SVG2Impl(SparseImpl[SVG2Config]):
    """Sparse VideoGen 2 of one layer; remembers the centroids of the step before.

    Raises:
        UnsupportedBackendError: the kernel that was asked for cannot serve the layer.
    """

    declaration = SVG2Backend
    cache_reason: ClassVar[str] = "it clusters the keys of one call"

    def prepare(self) -> None:
        """Refuse a kernel that cannot serve the layer; no step was seen yet."""
        self._centroids = CentroidCache()
        self._refuse_upstream("layer")

    def check_run(self, context: ForwardContext) -> None:
        """Refuse text that the kernel that was asked for cannot serve; warn if no step is sparse.

        Raises:
            UnsupportedBackendError: a sparse step would be refused.
        """
        super().check_run(context)
        span = context.text_span
        self._refuse_upstream("run", 0 if span is None else span.length)

    def end_request(self, request_id: str) -> None:
        """Drop the centroids of a request; see `AttentionImpl.end_request`."""
        self._centroids.end(request_id)

    def _refuse_upstream(self, what: str, text: int = 0) -> None:
        if self.kernel.name != UPSTREAM:
            return
        reasons = text_reasons(text) + shape_reasons(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.softmax_scale,
        )
        refuse_upstream(reasons, kernel=UPSTREAM, backend=self.label, what=what)

    def attend(self, call: SparseCall, context: ForwardContext) -> torch.Tensor:
        """Return attention of clusters to clusters; see `SparseImpl.attend`."""
        query, layout, keep = call.query, call.layout, call.keep
        with torch.no_grad():
            queries, keys = self._cluster(query, call.key, layout, context, keep)
            kept = self._select(queries, keys, self.settings(context))
            clusters = cluster_map(queries, keys, kept, layout, keep)
            share = _density(clusters, layout, keep)
            self.learn_share(share, 0, context, call.first_head)
            self.record(context, share, query.shape[2])
        out = query.new_empty((*query.shape[:3], call.value.shape[3]))
        attend_text(call, out)
        if call.kernel.name == UPSTREAM:
            attend_upstream(call, clusters, out, self.label)
        else:
            attend_clusters(call, clusters, out)
        return out

    def observe(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        context: ForwardContext | None,
        attn_mask: torch.Tensor | None,
    ) -> None:
        """Cluster in a dense step, if that was asked for; see `AttentionImpl.observe`."""
        if not self.config.svg2_zero_step_kmeans_init:
            return
        if context is not None and (context.request_id is None or context.is_last_step):
            return  # nobody will start from them
        layout = layout_of(query.shape[1], key.shape[1], context, self.label)
        assert context is not None, "a layout needs a context"
        keep = None
        if attn_mask is not None and tuple(attn_mask.shape) == (key.shape[0], key.shape[1]):
            # As in `normalise_mask`, the other kinds of mask promise finite tokens.
            floating = attn_mask.dtype.is_floating_point
            keep = attn_mask >= 0 if floating else attn_mask != 0
        with torch.no_grad():
            self._cluster(query, key, layout, context, keep)

    def _cluster(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        layout: SequenceLayout,
        context: ForwardContext,
        keep: torch.Tensor | None,
    ) -> tuple[Clusters, Clusters]:
        """Cluster the video, from where the step before left it."""
        config, step, video = self.config, context.current_timestep, layout.video
        branch = self._centroids.branch(context)
        if branch is not None and being_captured():
            raise UnsupportedBackendError(
                f"{self.label} cannot be captured in a CUDA graph, which would start every step "
                "from the clusters of the one that was captured; leave it out of the graph, as "
                'torch.compile(mode="reduce-overhead") does'
            )
        before = self._centroids.find(branch, step)
        known = (None, None) if before is None else (before.query, before.key)
        # A layer that did not run in the steps between, under a cache, catches up on them.
        age = 1 if before is None else max(step - before.step, 1)
        kept = None if keep is None else keep[:, video]
        sides: dict[str, Clusters] = {}

        def cluster(side: str, x: torch.Tensor, num: int, warm: torch.Tensor | None) -> None:
            sides[side] = self._cluster_side(x[:, video], num, warm, kept, age)

        run_on_two_streams(
            (
                partial(cluster, "query", query, config.svg2_num_q_centroids, known[0]),
                partial(cluster, "key", key, config.svg2_num_k_centroids, known[1]),
            ),
            query.device,
        )
        queries, keys = sides["query"], sides["key"]
        for clusters in sides.values():
            record_on_current_stream(
                clusters.centroids, clusters.order, clusters.starts, clusters.counts
            )
        # In the dtype of the tokens: two branches of a model of 40 layers hold much already.
        q_centroids, k_centroids = (x.centroids.to(query.dtype) for x in (queries, keys))
        if before is None:  # keys that are kept together then lie together
            k_centroids = by_similarity(k_centroids)
        found = Centroids(step=step, query=q_centroids, key=k_centroids)
        self._centroids.keep(branch, found, context.num_steps)
        return queries, keys

    def _cluster_side(
        self,
        x: torch.Tensor,
        num: int,
        known: torch.Tensor | None,
        keep: torch.Tensor | None,
        age: int,
    ) -> Clusters:
        config = self.config
        num = self._clusters_of(x.shape[1], num)
        shape = (x.shape[0], x.shape[2], num, x.shape[3])
        step, first = config.svg2_kmeans_iter_step, config.svg2_kmeans_iter_init
        iterations = min(step * age, max(step, first))
        if known is None or known.shape != shape:
            known = by_similarity(initial_centroids(x, num, keep=keep))
            iterations = first
        return kmeans(x, known, iterations=iterations, keep=keep, kernel=config.kmeans_kernel)

    def _clusters_of(self, num_tokens: int, num: int) -> int:
        """Return how many clusters so many tokens get where `num` are asked for."""
        most = max(1, num_tokens // _TOKENS_PER_CLUSTER)
        if num <= most:
            return num
        self.warnings.warn(
            f"{self.label} makes {most} clusters of {num_tokens} tokens, not the {num} that were "
            f"asked for: of {_TOKENS_PER_CLUSTER} tokens each on average, at least"
        )
        return most

    def _select(self, queries: Clusters, keys: Clusters, config: SVG2Config) -> torch.Tensor:
        """Return which clusters attend to which, bool [B, H, Cq, Ck]."""
        num = keys.counts.shape[2]
        weights = cluster_weights(
            queries.centroids, keys.centroids, keys.counts, scale=self.softmax_scale
        )
        return kept_clusters(
            weights,
            top_p=ratio_now(config.svg2_top_p_kmeans),
            min_count=first_of(ratio_now(config.svg2_min_kc_ratio), num),
        )


def _density(
    clusters: ClusterMap, layout: SequenceLayout, keep: torch.Tensor | None
) -> torch.Tensor:
    """Return the share of pairs attended to, a tensor [] that nobody waited for."""
    batch, heads = clusters.keep.shape[:2]
    kept = kept_pairs(clusters.keep, clusters.queries.counts, clusters.keys.counts)
    # Filled on the device: a copy would wait for it.
    keys = torch.full_like(kept, layout.num_keys * batch)
    if keep is not None:
        keys = keep.sum().double()
    others = layout.num_queries - layout.num_video
    pairs = kept / heads + others * keys
    return pairs / (layout.num_queries * keys).clamp_min(1.0)
