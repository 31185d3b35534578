"""Sparse VideoGen 2: queries and keys are clustered; clusters attend to their best clusters."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from multimodal_gen.errors import NotInThisBuildError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    Capability,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine_variants import (
    engine_variants,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.config import SparseConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_SVG = PackageProbe(
    module="svg",
    distribution="svg",
    install="see https://github.com/svg-project/Sparse-VideoGen",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SVG2Config(SparseConfig):
    """Parameters of `sparse_video_gen_2_attn`.

    Attributes:
        svg2_num_q_centroids: clusters of queries per head.
        svg2_num_k_centroids: clusters of keys per head.
        svg2_top_p_kmeans: attention mass to keep per query cluster, as estimated from centroids.
        svg2_min_kc_ratio: least share of key clusters to keep.
        svg2_kmeans_iter_init: k-means iterations from random centroids.
        svg2_kmeans_iter_step: k-means iterations from the previous step's centroids.
        svg2_zero_step_kmeans_init: cluster in the dense steps too, so that the first sparse step
            starts warm.
        svg2_first_layers_fp: first layers that stay dense: a share up to 1, a number above.
        svg2_first_times_fp: first steps that stay dense: a share up to 1, a number above.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    svg2_num_q_centroids: int = option(300, "clusters of queries per head", ge=1)
    svg2_num_k_centroids: int = option(1000, "clusters of keys per head", ge=1)
    svg2_top_p_kmeans: float = option(0.9, "attention mass to keep", ge=0, le=1)
    svg2_min_kc_ratio: float = option(0.1, "least share of key clusters to keep", ge=0, le=1)
    svg2_kmeans_iter_init: int = option(50, "k-means iterations from random centroids", ge=1)
    svg2_kmeans_iter_step: int = option(2, "k-means iterations from the last centroids", ge=0)
    svg2_zero_step_kmeans_init: bool = option(False, "cluster in the dense steps too")
    svg2_first_layers_fp: float = option(
        0.03, "first layers that stay dense: a share up to 1, a number above", ge=0
    )
    svg2_first_times_fp: float = option(
        0.2, "first steps that stay dense: a share up to 1, a number above", ge=0
    )
    kernel: Literal["auto", "gluon", "triton", "reference", "svg"] = option(
        "auto", "kernel that runs"
    )


class SVG2Backend(AttentionBackend):
    """Sparse VideoGen 2."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SPARSE_VIDEO_GEN_2_ATTN
    summary: ClassVar[str] = "Sparse VideoGen 2: clusters of queries attend to clusters of keys"
    config_cls: ClassVar[type[SVG2Config]] = SVG2Config
    not_in_this_build: ClassVar[str | None] = "Sparse VideoGen 2 is not in this build yet"
    variants: ClassVar[tuple[Variant, ...]] = (
        *(v for v in engine_variants((Feature.GQA,)) if v.name != "fa4"),
        upstream_variant(
            "svg", _SVG, head_sizes=(64, 128, 256), capability=Capability(minimum=(8, 0))
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Raise `NotInThisBuildError`."""
        raise NotInThisBuildError(cls.not_in_this_build)
