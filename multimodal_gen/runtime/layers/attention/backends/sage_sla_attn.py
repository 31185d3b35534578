"""Sparse-Linear Attention with 8-bit arithmetic in its sparse branch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from multimodal_gen.errors import NotInThisBuildError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    HALF_DTYPES,
    AttentionBackend,
    AttentionImpl,
    Capability,
    HeadSizes,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine_variants import (
    CUDA_ONLY,
    SELF_ONLY,
    SPAS_SAGE_ATTN,
    TRITON,
    upstream_variant,
)
from multimodal_gen.runtime.layers.attention.config import SparseConfig, option
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class SageSLAConfig(SparseConfig):
    """Parameters of `sage_sla_attn`: those of `sla_attn`, with 8-bit arithmetic.

    Attributes:
        topk_ratio: share of key blocks that get 8-bit attention; at least one block always does.
        feature_map: feature map of the linear branch.
        BLKQ: tokens per query block.
        BLKK: tokens per key block.
        use_bf16: bfloat16 inputs to the quantisation, else float16.
        linear_branch: linear attention over `all` tokens, or over `unselected` blocks only.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    topk_ratio: float = option(0.5, "share of key blocks with 8-bit attention", ge=0, le=1)
    feature_map: Literal["softmax", "elu", "relu"] = option(
        "softmax", "feature map of the linear branch"
    )
    BLKQ: Literal[64, 128] = option(128, "tokens per query block")
    BLKK: Literal[64, 128] = option(64, "tokens per key block")
    use_bf16: bool = option(True, "bfloat16 inputs to the quantisation, else float16")
    linear_branch: Literal["all", "unselected"] = option(
        "all", "tokens of the linear branch: all, or those of unselected blocks"
    )
    kernel: Literal["auto", "triton", "spas_sage_attn"] = option("auto", "kernel that runs")


class SageSLABackend(AttentionBackend):
    """Sparse-Linear Attention with 8-bit arithmetic."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SAGE_SLA_ATTN
    summary: ClassVar[str] = "Sparse-Linear Attention with 8-bit scores and values"
    config_cls: ClassVar[type[SageSLAConfig]] = SageSLAConfig
    not_in_this_build: ClassVar[str | None] = (
        "8-bit Sparse-Linear Attention is not in this build yet"
    )
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="triton",
            platforms=CUDA_ONLY,
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(listed=(64, 128)),
            features=frozenset({Feature.GQA}),
            packages=(TRITON,),
            capability=Capability(minimum=(8, 0)),
            roles=SELF_ONLY,
        ),
        upstream_variant(
            "spas_sage_attn",
            SPAS_SAGE_ATTN,
            capability=Capability(exact=((8, 0), (8, 6), (8, 7), (8, 9), (9, 0))),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Raise `NotInThisBuildError`."""
        raise NotInThisBuildError(cls.not_in_this_build)
