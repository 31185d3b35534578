"""Sparse-Linear Attention: exact attention over the best blocks plus linear attention.

Tokens stay in raster order. Every block of queries attends exactly to the key blocks whose means
match its own best, and to all text; text attends to everything. To that is added what a linear
attention finds, projected by the layer's trained `proj_l`; without one that branch is zero. In
`sage_sla_attn` the exact branch multiplies queries and keys in 8 bits, and text attends in 16.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from typing_extensions import override

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.engine import QUANTIZED, TRITON
from multimodal_gen.kernels.requirements import Capability
from multimodal_gen.kernels.tensors import place_of
from multimodal_gen.runtime.layers.attention.backends.common import refuse_grad
from multimodal_gen.runtime.layers.attention.backends.declaration import HALF_DTYPES
from multimodal_gen.runtime.layers.attention.backends.engine import (
    QuantizedBackend,
    engine_variants,
    refuse_foreign_values,
    upstream_variant,
    values_option,
)
from multimodal_gen.runtime.layers.attention.backends.packages import SLA
from multimodal_gen.runtime.layers.attention.backends.sage_attn import (
    SPAS_SAGE,
    SPAS_SAGE_VARIANT,
    attend_spas_sage,
    mask_blocks,
)
from multimodal_gen.runtime.layers.attention.config import (
    EngineKernel,
    Ratio,
    SparseConfig,
    Tail,
    option,
    ratio_now,
    refuse_foreign_tail,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SPARSE_FEATURES, SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.methods.sla_upstream import (
    UPSTREAM,
    attend_upstream,
)
from multimodal_gen.runtime.layers.attention.sparse.raster import shares_of
from multimodal_gen.runtime.layers.attention.sparse.router import (
    BlockStats,
    Budget,
    Cut,
    Limits,
    LinearBranch,
    Router,
    SparseEngine,
    engine_in_8_bits,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall, lists_as_map
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.platforms import AttentionBackendEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class SLAParameters(SparseConfig):
    """Parameters that both forms of the method have.

    Attributes:
        topk_ratio: share of key blocks in the sparse branch; at least one block always is. It may
            change over the steps: {0: 0.5, 0.4: 0.1}.
        feature_map: feature map of the linear branch.
        BLKQ: tokens per query block.
        BLKK: tokens per key block.
        use_bf16: compute in bfloat16, else in float16, where inputs have 16 bits.
        linear_branch: linear attention over `all` tokens, text included, or over `unselected`
            blocks only. Queries of text have none: they attend exactly to everything.
    """

    topk_ratio: Ratio = option(0.1, "share of key blocks with exact attention", ge=0, le=1)
    feature_map: Literal["softmax", "elu", "relu"] = option(
        "softmax", "feature map of the linear branch"
    )
    BLKQ: Literal[64, 128] = option(128, "tokens per query block")
    BLKK: Literal[64, 128] = option(64, "tokens per key block")
    use_bf16: bool = option(True, "compute in bfloat16, else float16, on 16-bit inputs")
    linear_branch: Literal["all", "unselected"] = option(
        "all", "tokens of the linear branch: all, or those of unselected blocks"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SLAConfig(SLAParameters):
    """Parameters of `sla_attn`; see `SLAParameters` for the others.

    Attributes:
        tail: what becomes of video blocks that a query block does not keep, where a checkpoint has
            no trained `proj_l`: `none` drops them; `pooled` counts each by the mean of its keys
            and values. With a `proj_l`, which stands for them, it must be `none`.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: Literal[EngineKernel, "sparse_linear_attention"] = option("auto", "kernel that runs")

    def check(self) -> None:
        """The authors' package has no tail."""
        refuse_foreign_tail("sla_attn", self.tail, self.kernel, UPSTREAM)


@dataclass(frozen=True, slots=True, kw_only=True)
class SageSLAConfig(SLAParameters):
    """Parameters of `sage_sla_attn`; see `SLAParameters` for the others.

    Attributes:
        topk_ratio: share of key blocks that get 8-bit attention; at least one block always does.
        kernel: which kernel runs; `auto` takes the fastest one supported.
        values: what the package's own kernels round weights and values to: "16-bit", or "e4m3",
            which is a third to half as exact, needs compute capability 8.9 on a GPU, and is the
            slower one on 9.0.

    Raises:
        ConfigError: `values` is e4m3 and `kernel` is spas_sage_attn.
    """

    topk_ratio: Ratio = option(0.5, "share of key blocks with 8-bit attention", ge=0, le=1)
    kernel: Literal["auto", "gluon", "triton", "reference", "spas_sage_attn"] = option(
        "auto", "kernel that runs"
    )
    values: Literal["16-bit", "e4m3"] = values_option()

    def check(self) -> None:
        """SpargeAttn takes no `values`."""
        refuse_foreign_values(self.kernel, self.values, "sage_sla_attn", *QUANTIZED.names)


def centred(means: torch.Tensor, shares: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return block means less the mean of all tokens in them, rounded to `dtype`.

    That moves all scores of a query block alike, so it leaves their order as it is; but what the
    keys have in common would otherwise take up the precision that tells them apart.

    Args:
        means: fp32 or fp64 [B, H, N, D].
        shares: of all tokens, those of every block, [B|1, 1, N, 1].
        dtype: dtype of the result.
    """
    return (means - (means * shares).sum(2, keepdim=True)).to(dtype)


_SettingsT = TypeVar("_SettingsT", bound=SLAParameters)


class _BothRouter(Router[_SettingsT]):
    """The blocks of keys whose means match those of the queries' block best."""

    takes_projection = True

    def cut(self, settings: _SettingsT, grid: Window) -> Cut:
        """Return blocks of raster order."""
        return Cut.rows(settings.BLKQ, settings.BLKK)

    def budget(self, settings: _SettingsT, blocks: int, tokens: int) -> Budget:
        """Return how many of the blocks are kept."""
        return Budget.of_share(settings.topk_ratio, blocks)

    def choose(
        self, settings: _SettingsT, stats: BlockStats, budget: Budget | None
    ) -> torch.Tensor:
        """Return the best blocks."""
        assert budget is not None, "it is always known"
        shares = stats.shares
        if shares is None:
            assert stats.counts is not None, "blocks have one mean"
            shares = shares_of(stats.counts, stats.key.dtype)
        keys = centred(stats.key, shares, stats.query.dtype)
        return replace(stats, key=keys).best(budget.kept)

    def linear(self, settings: _SettingsT) -> LinearBranch:
        """Return the branch that the projection weighs."""
        return LinearBranch(settings.feature_map, settings.linear_branch == "unselected")

    def compute_dtype(self, settings: _SettingsT, dtype: torch.dtype) -> torch.dtype:
        """Return what both branches compute in; `use_bf16` is about 16 bits only."""
        if dtype not in HALF_DTYPES:
            return dtype
        return torch.bfloat16 if settings.use_bf16 else torch.float16

    def check_call(self, settings: _SettingsT, budget: Budget | None, *, projected: bool) -> None:
        """Refuse a tail with a trained branch; say what the lack of both means."""
        layer = self.layer
        where = layer.component
        if projected and layer.pools_tail:
            raise UsageError(
                f"`tail` of {layer.label} must be none where a checkpoint has a trained proj_l, as "
                f"{where or 'this layer'} has: its linear branch stands for the blocks that "
                f"are not kept; remove it, got pooled"
            )
        assert budget is not None, "it is always known"
        if projected or layer.pools_tail or budget.kept == budget.blocks:
            return
        can_pool = hasattr(settings, "tail")
        remedy = "; `tail: pooled` counts the other blocks by their means" if can_pool else ""
        share = f"{100 * ratio_now(settings.topk_ratio):g} % of the key blocks"
        blocks = "key block" if budget.kept == 1 else share
        layer.warnings.warn(
            f"{layer.label} of {where or 'a layer'} was given no trained proj_l: its linear branch "
            f"is zero, so every query attends to the best {blocks} alone and the rest is lost; "
            f"without a checkpoint that was fine-tuned for Sparse-Linear Attention expect visibly "
            f"worse results{remedy}"
        )

    def limits(self, settings: _SettingsT) -> Limits:
        """Return what a sum over the keys of one call cannot do."""
        ring = "linear_branch unselected needs a state per query block of keys it never joins"
        return Limits(
            ring=ring if settings.linear_branch == "unselected" else None,
            ring_gradients="ranks add up the state of its linear branch without gradients",
            cache="its linear branch sums over all keys of one call",
        )


class SLARouter(_BothRouter[SLAConfig]):
    """Sparse-Linear Attention in the precision of the inputs."""

    @override
    def attend_upstream(
        self, settings: SLAConfig, call: SparseCall, keys: Any, select: Any
    ) -> torch.Tensor | None:
        return attend_upstream(
            call,
            self.layer.label,
            linear_branch=settings.linear_branch,
            topk=ratio_now(settings.topk_ratio),
            feature_map=settings.feature_map,
            BLKQ=settings.BLKQ,
            block=settings.BLKK,
            use_bf16=settings.use_bf16,
        )


class SageSLARouter(_BothRouter[SageSLAConfig]):
    """The same choice, attended to in 8 bits."""

    def engine(self, settings: SageSLAConfig) -> SparseEngine:
        """Return 8-bit attention by plans."""
        if self.layer.kernel.name == SPAS_SAGE:
            return self._attend_spas_sage
        return engine_in_8_bits(self.layer, settings.values)

    def _attend_spas_sage(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: BlockPlan,
        **more: Any,  # it takes no mean, and gives no log-sum-exp: no ring asks it for one
    ) -> torch.Tensor:
        refuse_grad(self.layer.label, query, key, value)
        wanted = mask_blocks(place_of(query.device)[1])
        if (plan.q.size, plan.kv.size) != wanted:
            raise UnsupportedBackendError(
                f"kernel {SPAS_SAGE} of {self.layer.label} needs BLKQ={wanted[0]} and "
                f"BLKK={wanted[1]} on this GPU, got {plan.q.size} and {plan.kv.size}"
            )
        # Every row keeps as many.
        indices = plan.indices.expand(query.shape[0], query.shape[2], -1, -1)
        block_mask = lists_as_map(indices, plan.kv.num)
        masked = not (plan.q.is_regular and plan.kv.is_regular)
        scale, label = self.layer.scale, self.layer.label
        return attend_spas_sage(
            query, key, value, block_mask, scale=scale, label=label, masked=masked
        )


class SLABackend(SparseBackend):
    """Sparse-Linear Attention."""

    backend = AttentionBackendEnum.SLA_ATTN
    summary = "Sparse-Linear Attention: exact over the best blocks, linear beside it"
    config_cls = SLAConfig
    router = SLARouter
    # sla.csv at 694f3b1, 21x45x80, no projection: 0.0998 in 17.7 ms; blocks of 64 queries by
    # engine.csv at 56740c3, r64: 505.4 of 754.7 TFLOP/s; triton 434.3 of 675.0 and, in blocks of
    # 128, 505.4 of 688.2 TFLOP/s of FA3.
    dense_above = MappingProxyType(
        {"gluon": ((0, 0.67), (128, 0.91)), "triton": ((0, 0.64), (128, 0.73))}
    )
    variants = (
        *SparseBackend.variants,
        upstream_variant(UPSTREAM, SLA, TRITON, capability=Capability(minimum=(8, 0))),
    )


class SageSLABackend(QuantizedBackend, SparseBackend):
    """Sparse-Linear Attention with 8-bit scores."""

    backend = AttentionBackendEnum.SAGE_SLA_ATTN
    summary = "Sparse-Linear Attention: 8-bit scores, and 16-bit values by default"
    config_cls = SageSLAConfig
    router = SageSLARouter
    trained_by = "sla_attn, whose block map and projection it shares"
    variants = (
        *engine_variants(QUANTIZED, SPARSE_FEATURES),
        SPAS_SAGE_VARIANT,
    )
