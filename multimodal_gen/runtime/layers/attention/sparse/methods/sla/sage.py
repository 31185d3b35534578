"""Sparse-Linear Attention whose sparse branch multiplies queries and keys in 8 bits.

Block map, linear branch and projection are those of `sla_attn`. Text attends in 16 bits.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.engine import QUANTIZED
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.backends.common import refuse_grad
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.engine import (
    QuantizedBackend,
    engine_variants,
    refuse_foreign_values,
    values_option,
)
from multimodal_gen.runtime.layers.attention.backends.sage_attn import (
    SPAS_SAGE,
    SPAS_SAGE_VARIANT,
    SpasCall,
    attend_spas_sage,
    mask_blocks,
)
from multimodal_gen.runtime.layers.attention.config import option
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selectors import Ratio
from multimodal_gen.runtime.layers.attention.sparse.methods.sla.backend import (
    SLAImpl,
    SLAParameters,
)
from multimodal_gen.runtime.layers.attention.sparse.upstream import lists_as_map
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_FEATURES = frozenset({Feature.GQA, Feature.KEY_MASK, Feature.RING})


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


class SageSLABackend(QuantizedBackend):
    """Sparse-Linear Attention with 8-bit scores."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.SAGE_SLA_ATTN
    summary: ClassVar[str] = "Sparse-Linear Attention: 8-bit scores, and 16-bit values by default"
    config_cls: ClassVar[type[SageSLAConfig]] = SageSLAConfig
    trained_by: ClassVar[str] = "sla_attn, whose block map and projection it shares"
    variants: ClassVar[tuple[Variant, ...]] = (
        *engine_variants(QUANTIZED, _FEATURES),
        SPAS_SAGE_VARIANT,
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return SageSLAImpl


class SageSLAImpl(SLAImpl[SageSLAConfig]):
    """Sparse-Linear Attention of one layer, its sparse branch on 8 bits."""

    declaration = SageSLABackend

    def sparse_branch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: BlockPlan,
        *,
        means: torch.Tensor | None = None,
        num_pooled: int = 0,
        return_lse: bool = False,
    ) -> Any:
        """Return the sparse branch; see `SLAImpl.sparse_branch`.

        The mean of the block means stands for that of the keys: any will do that is close to what
        they have in common.
        """
        assert not num_pooled, "there is no parameter `tail`"
        refuse_grad(self.label, query, key, value)
        if self.kernel.name == SPAS_SAGE:
            return self._attend_spas_sage(query, key, value, plan)
        return quantized_attention(
            query,
            key,
            value,
            plan,
            scale=self.softmax_scale,
            return_lse=return_lse,
            kernel=self.kernel,
            values=self.config.values,
            mean=None if means is None else means.mean(2).float(),
        )

    def _attend_spas_sage(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: BlockPlan
    ) -> torch.Tensor:
        on_cuda = query.device.type == "cuda"
        wanted = mask_blocks(torch.cuda.get_device_capability(query.device) if on_cuda else None)
        if (plan.q.size, plan.kv.size) != wanted:
            raise UnsupportedBackendError(
                f"kernel {SPAS_SAGE} of {self.label} needs BLKQ={wanted[0]} and BLKK={wanted[1]} "
                f"on this GPU, got {plan.q.size} and {plan.kv.size}"
            )
        call = SpasCall(
            label=self.label,
            queries=query.shape[1],
            keys=key.shape[1],
            heads=query.shape[2],
            kv_heads=key.shape[2],
            masked=not (plan.q.is_regular and plan.kv.is_regular),
        )
        # Every row keeps as many.
        indices = plan.indices.expand(query.shape[0], query.shape[2], -1, -1)
        keep = lists_as_map(indices, plan.kv.num)
        return attend_spas_sage(query, key, value, keep, scale=self.softmax_scale, call=call)
