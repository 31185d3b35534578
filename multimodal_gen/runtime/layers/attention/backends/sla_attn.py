"""Sparse-Linear Attention: exact attention over the best blocks plus linear attention."""

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
    TRITON,
    engine_variants,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.config import SparseConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature, PackageProbe
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_SLA = PackageProbe(
    module="sparse_linear_attention",
    distribution="sparse_linear_attention",
    install="pip install git+https://github.com/thu-ml/SLA.git",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SLAConfig(SparseConfig):
    """Parameters of `sla_attn`.

    Attributes:
        topk_ratio: share of key blocks that get exact attention; at least one block always does.
        feature_map: feature map of the linear branch.
        BLKQ: tokens per query block.
        BLKK: tokens per key block.
        use_bf16: run the exact branch in bfloat16, else in float16.
        linear_branch: linear attention over `all` tokens, or over `unselected` blocks only.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    topk_ratio: float = option(0.1, "share of key blocks with exact attention", ge=0, le=1)
    feature_map: Literal["softmax", "elu", "relu"] = option(
        "softmax", "feature map of the linear branch"
    )
    BLKQ: Literal[64, 128] = option(128, "tokens per query block")
    BLKK: Literal[64, 128] = option(64, "tokens per key block")
    use_bf16: bool = option(True, "exact branch in bfloat16, else float16")
    linear_branch: Literal["all", "unselected"] = option(
        "all", "tokens of the linear branch: all, or those of unselected blocks"
    )
    kernel: Literal["auto", "gluon", "fa4", "triton", "reference", "sparse_linear_attention"] = (
        option("auto", "kernel that runs")
    )


class SLABackend(AttentionBackend):
    """Sparse-Linear Attention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SLA_ATTN
    summary: ClassVar[str] = "Sparse-Linear Attention: exact over the best blocks, linear beside it"
    config_cls: ClassVar[type[SLAConfig]] = SLAConfig
    not_in_this_build: ClassVar[str | None] = "Sparse-Linear Attention is not in this build yet"
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants((Feature.GQA,)),
        upstream_variant(
            "sparse_linear_attention", _SLA, TRITON, capability=Capability(minimum=(8, 0))
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Raise `NotInThisBuildError`."""
        raise NotInThisBuildError(cls.not_in_this_build)
