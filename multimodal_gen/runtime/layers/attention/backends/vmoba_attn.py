"""V-MoBA: each query picks temporal, spatial or spatio-temporal chunks of keys, layer by layer."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from multimodal_gen.errors import ConfigError, NotInThisBuildError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine_variants import (
    FASTVIDEO_KERNEL,
    engine_variants,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.config import SparseConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_FLASH_ATTN = PackageProbe(
    module="flash_attn.flash_attn_interface",
    distribution="flash-attn",
    install="pip install flash-attn --no-build-isolation",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VMoBAConfig(SparseConfig):
    """Parameters of `vmoba_attn`; they may also stand in a mapping under `moba_config`.

    From `first_full_layer` on, layers cycle through `temporal_layer` layers with temporal chunks,
    `spatial_layer` with spatial and `st_layer` with spatio-temporal ones. Sizes are in latent
    positions after patching; a kind with no layers needs no sizes.

    Attributes:
        temporal_chunk_size: frames per temporal chunk.
        temporal_topk: temporal chunks each query keeps in mode `topk`.
        spatial_chunk_size: (height, width) of a spatial chunk.
        spatial_topk: spatial chunks each query keeps in mode `topk`.
        st_chunk_size: (time, height, width) of a spatio-temporal chunk.
        st_topk: spatio-temporal chunks each query keeps in mode `topk`.
        moba_select_mode: keep a number of chunks, or a share of the summed scores.
        moba_threshold: share of the summed scores to keep in mode `threshold`.
        moba_threshold_type: over what scores compete: one query and head, a chunk, a head, or all.
        first_full_step: first denoising steps that stay dense.
        first_full_layer: first layers that stay dense.
        temporal_layer: layers with temporal chunks in each cycle.
        spatial_layer: layers with spatial chunks in each cycle.
        st_layer: layers with spatio-temporal chunks in each cycle.
        only_own_chunk: what a call does when no query selects more than its own chunk: `full`
            attention, or `keep` to the own chunks.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    groups: ClassVar[tuple[str, ...]] = ("moba_config",)

    temporal_chunk_size: int | None = option(None, "frames per temporal chunk", ge=1)
    temporal_topk: int | None = option(None, "temporal chunks each query keeps", ge=1)
    spatial_chunk_size: tuple[int, ...] | None = option(
        None, "height and width of a spatial chunk", ge=1, length=2
    )
    spatial_topk: int | None = option(None, "spatial chunks each query keeps", ge=1)
    st_chunk_size: tuple[int, ...] | None = option(
        None, "time, height and width of a spatio-temporal chunk", ge=1, length=3
    )
    st_topk: int | None = option(None, "spatio-temporal chunks each query keeps", ge=1)
    moba_select_mode: Literal["threshold", "topk"] = option(
        "threshold", "keep a share of the summed scores, or a number of chunks"
    )
    moba_threshold: float = option(0.25, "share of the summed scores to keep", ge=0, le=1)
    moba_threshold_type: Literal["query_head", "block", "overall", "head_global"] = option(
        "query_head", "over what scores compete"
    )
    first_full_step: int = option(12, "first denoising steps that stay dense", ge=0)
    first_full_layer: int = option(0, "first layers that stay dense", ge=0)
    temporal_layer: int = option(1, "layers with temporal chunks in each cycle", ge=0)
    spatial_layer: int = option(1, "layers with spatial chunks in each cycle", ge=0)
    st_layer: int = option(1, "layers with spatio-temporal chunks in each cycle", ge=0)
    only_own_chunk: Literal["full", "keep"] = option(
        "full", "what a call does when only own chunks are selected"
    )
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference", "fastvideo_kernel"] = option(
        "auto", "kernel that runs"
    )

    def check(self) -> None:
        """Every kind of chunk that some layer uses has its size, and its count in mode `topk`."""
        kinds = ("temporal", "spatial", "st")
        used = [kind for kind in kinds if getattr(self, f"{kind}_layer") > 0]
        if not used:
            raise ConfigError(
                "one of `temporal_layer`, `spatial_layer` and `st_layer` of vmoba_attn must be "
                ">= 1, got 0 for all"
            )
        topk = self.moba_select_mode == "topk"
        for kind in used:
            names = [f"{kind}_chunk_size", *([f"{kind}_topk"] if topk else [])]
            for name in names:
                if getattr(self, name) is None:
                    why = f"`{kind}_layer` is {getattr(self, f'{kind}_layer')}"
                    mode = " and `moba_select_mode` is topk" if name.endswith("topk") else ""
                    raise ConfigError(
                        f"`{name}` of vmoba_attn must be given because {why}{mode}; "
                        f"give it, or set `{kind}_layer` to 0"
                    )


class VMoBABackend(AttentionBackend):
    """V-MoBA."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.VMOBA_ATTN
    summary: ClassVar[str] = "V-MoBA: each query picks temporal, spatial or 3-D chunks of keys"
    config_cls: ClassVar[type[VMoBAConfig]] = VMoBAConfig
    not_in_this_build: ClassVar[str | None] = "V-MoBA is not in this build yet"
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants((Feature.GQA,)),
        upstream_variant("fastvideo_kernel", FASTVIDEO_KERNEL, _FLASH_ATTN),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Raise `NotInThisBuildError`."""
        raise NotInThisBuildError(cls.not_in_this_build)
