"""Dense attention on this package's own block-sparse engine, with every block kept.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from functools import lru_cache
from typing import Any

import torch
from typing_extensions import override

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.engine import AUTO, BLOCK_SPARSE, SelectedKernel
from multimodal_gen.kernels.tensors import loadable
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    DenseBackend,
    DenseImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import attend_to_nothing, refuse_mask
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    ALL_ROLES,
    BASIC,
    MERGEABLE,
)
from multimodal_gen.runtime.layers.attention.backends.engine import (
    DENSE_BLOCK,
    dense_plan,
    drop_masked,
    engine_variants,
)
from multimodal_gen.runtime.layers.attention.masks import zero_masked_rows
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_FEATURES = BASIC | MERGEABLE | {Feature.KEY_MASK}
_CAUSAL_BLOCK = 128
# A row of a program of 128 rows over one of a program of 192: H200, 2026-11, 256 to 8,192 tokens.
_NARROW_COST = 1.15
_FASTEST_HEAD_SIZES = (64, 128)


class TritonAttentionImpl(DenseImpl):
    """Dense attention on the block-sparse engine."""

    label = "triton_attn"
    kernel: SelectedKernel
    masks_lse = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kernel = SelectedKernel(self.variant or AUTO, named=bool(self.variant))

    @override
    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)
        batch, num_queries, heads, _ = query.shape
        causal = self.causal and mask is None
        sizes = _CAUSAL_BLOCK, _CAUSAL_BLOCK
        if not causal:
            sizes = query_block(num_queries, batch * heads, query.device), DENSE_BLOCK
        plan = dense_plan(num_queries, key.shape[1], *sizes, causal, query.device)
        if mask is not None:
            key, value, plan = drop_masked(key, value, plan, mask)
        if not loadable(query, key, value):
            query, key, value = (x if loadable(x) else x.contiguous() for x in (query, key, value))
        scale, kernel = self.softmax_scale, self.kernel
        found = block_sparse_attention(
            query, key, value, plan, scale=scale, kernel=kernel, return_lse=lse
        )
        return (found, None) if isinstance(found, torch.Tensor) else found

    @override
    def _attend_masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        if self.causal:
            refuse_mask(mask, f"causal {self.label}")
        return self._attend(query, key, value, mask[:, 0, 0, :], lse=False)[0]

    @override
    def forward_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if mask is None:
            return super().forward_lse(query, key, value)
        # Kernels read masked rows with the others, and a weight of zero times NaN is NaN.
        key, value = (zero_masked_rows(x, mask) for x in (key, value))
        out, lse = self._attend(query, key, value, mask, lse=True)
        assert lse is not None, "it was asked for"
        return out, lse


@lru_cache(maxsize=1024)
def query_block(num_queries: int, heads: int, device: torch.device) -> int:
    """Return the rows of a query block that `heads` heads of all batches together take least with.

    Programs of 192 rows are the fastest per row, but a GPU runs as many at once as it has
    processors, and the last round costs as much as a full one.
    """
    if num_queries <= 64:
        return 64
    if num_queries <= 128 or device.type != "cuda":
        return 128 if num_queries <= 128 else DENSE_BLOCK
    at_once = torch.cuda.get_device_properties(device).multi_processor_count

    def rows_in_turn(rows: int) -> int:
        return rows * -(-heads * -(-num_queries // rows) // at_once)

    return 128 if _NARROW_COST * rows_in_turn(128) < rows_in_turn(192) else DENSE_BLOCK


class TritonAttentionBackend(DenseBackend):
    """Dense attention that needs nothing but torch and its Triton."""

    backend = AttentionBackendEnum.TRITON_ATTN
    summary = "dense attention on the package's own kernels"
    impl = TritonAttentionImpl
    variants = engine_variants(
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
