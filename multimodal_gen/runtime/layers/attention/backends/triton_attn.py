"""Dense attention on this package's own block-sparse engine, with every block kept.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from functools import lru_cache
from typing import ClassVar

import torch

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.engine import BLOCK_SPARSE, loadable
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import ALL_ROLES, Variant
from multimodal_gen.runtime.layers.attention.backends.engine import (
    DensePlanImpl,
    dense_plan,
    engine_variants,
)
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_FEATURES = frozenset({Feature.GQA, Feature.CAUSAL, Feature.KEY_MASK, Feature.LSE, Feature.RING})
_KEY_BLOCK = 384
_CAUSAL_BLOCK = 128
# A row of a program of 128 rows over one of a program of 192: H200, 2026-11, 256 to 8,192 tokens.
_NARROW_COST = 1.15
_FASTEST_HEAD_SIZES = (64, 128)


class TritonAttentionImpl(DensePlanImpl):
    """Dense attention on the block-sparse engine."""

    label = "triton_attn"
    masks_lse: ClassVar[bool] = True

    def plan(self, query: torch.Tensor, key: torch.Tensor, *, causal: bool) -> BlockPlan:
        """See `DensePlanImpl.plan`."""
        batch, num_queries, heads, _ = query.shape
        q_size = kv_size = _CAUSAL_BLOCK
        if not causal:
            q_size = query_block(num_queries, batch * heads, query.device)
            kv_size = _KEY_BLOCK
        return dense_plan(num_queries, key.shape[1], q_size, kv_size, causal, query.device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: BlockPlan,
        *,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `DensePlanImpl.attend`."""
        if not loadable(query, key, value):
            query, key, value = (x if loadable(x) else x.contiguous() for x in (query, key, value))
        found = block_sparse_attention(
            query,
            key,
            value,
            plan,
            scale=self.softmax_scale,
            kernel=self.kernel,
            return_lse=return_lse,
        )
        return (found, None) if isinstance(found, torch.Tensor) else found


@lru_cache(maxsize=1024)
def query_block(num_queries: int, heads: int, device: torch.device) -> int:
    """Return the rows of a query block that `heads` heads of all batches together take least with.

    Programs of 192 rows are the fastest per row, but a GPU runs as many at once as it has
    processors, and the last round costs as much as a full one.
    """
    if num_queries <= 64:
        return 64
    if num_queries <= 128 or device.type != "cuda":
        return 128 if num_queries <= 128 else 384
    at_once = torch.cuda.get_device_properties(device).multi_processor_count

    def rows_in_turn(rows: int) -> int:
        return rows * -(-heads * -(-num_queries // rows) // at_once)

    return 128 if _NARROW_COST * rows_in_turn(128) < rows_in_turn(192) else 384


class TritonAttentionBackend(AttentionBackend):
    """Dense attention that needs nothing but torch and its Triton."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.TRITON_ATTN
    summary: ClassVar[str] = "dense attention on the package's own kernels"
    variants: ClassVar[tuple[Variant, ...]] = engine_variants(
        BLOCK_SPARSE, _FEATURES, roles=ALL_ROLES, kernels=("gluon", "triton")
    )

    @classmethod
    def reasons_against_auto(cls, request: AttentionRequest) -> tuple[str, ...]:
        """It is the fastest where it was measured to be: see scripts/bench/results/dense.csv."""
        variant = cls.choose_variant(request)
        if variant is None:
            return ()
        reasons = []
        if Feature.BACKWARD in request.needs:
            reasons.append("its backward pass is not the fastest")
        if variant.name != "gluon":
            reasons.append("its kernel for compute capability 9.0 cannot serve this layer")
        if request.role is not AttentionRole.SELF:
            reasons.append(
                f"is the fastest in self attention only, this is {request.role} attention"
            )
        if request.dtype != torch.bfloat16:
            dtype = str(request.dtype).removeprefix("torch.")
            reasons.append(f"is the fastest in bfloat16 only, got {dtype}")
        if request.head_size not in _FASTEST_HEAD_SIZES:
            sizes = " and ".join(map(str, _FASTEST_HEAD_SIZES))
            reasons.append(f"is the fastest at head sizes {sizes} only, got {request.head_size}")
        return tuple(reasons)

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the implementation."""
        return TritonAttentionImpl
