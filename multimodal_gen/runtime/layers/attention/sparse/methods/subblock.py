"""Sub-block sparse attention: blocks are chosen by the means of their cells.

A block of queries keeps the blocks of keys with the largest log-sum-exp over pairs of their cells,
which a mean of the whole block would blur. Text is attended to by everything, and attends to
everything. The rule is that of sglang's `subblock_sparse_attn`.

Shapes: B batch, S tokens, H heads, D head size, N blocks.
"""

from dataclasses import dataclass
from typing import Literal

from multimodal_gen.runtime.layers.attention.config import (
    ComputeMode,
    EngineKernel,
    Ratio,
    SparseConfig,
    Tail,
    compute_mode_option,
    first_of,
    option,
    ratio_now,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import VARIANTS_OF_BOTH, SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.router import Budget, Cut, Router
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_BLOCK = 64
_MULTIPLE = 8  # what the number of kept blocks is rounded up to


@dataclass(frozen=True, slots=True, kw_only=True)
class SubblockConfig(SparseConfig):
    """Parameters of `subblock_sparse_attn`.

    Attributes:
        sparsity: share of the blocks of keys that a block of queries skips; what is kept is rounded
            up to a multiple of eight blocks, eight at least, or all where there are fewer. It may
            change over the steps: {0: 0.5, 0.4: 0.75}.
        n_q: cells of a block of queries.
        n_k: cells of a block of keys.
        skip_first_steps: first denoising steps that stay dense.
        skip_first_layers: first layers that stay dense.
        min_seq_len: sequences of fewer tokens stay dense.
        compute_mode: `bf16` multiplies in the dtype of the inputs; `sage_bf16` queries and keys in
            8 bits, which has no gradients.
        tail: what becomes of blocks that are not kept: `none` drops them; `pooled` counts each by
            the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    first_dense_steps = "skip_first_steps"
    first_dense_layers = "skip_first_layers"

    sparsity: Ratio = option(0.75, "share of key blocks to skip", ge=0, le=1)
    n_q: Literal[1, 2, 4, 8] = option(4, "cells of a block of queries")
    n_k: Literal[1, 2, 4, 8] = option(4, "cells of a block of keys")
    skip_first_steps: int = option(10, "first denoising steps that stay dense", ge=0)
    skip_first_layers: int = option(0, "first layers that stay dense", ge=0)
    min_seq_len: int = option(4096, "sequences of fewer tokens stay dense", ge=0)
    compute_mode: ComputeMode = compute_mode_option()  # noqa: RUF009 - it returns a field
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: EngineKernel = option("auto", "kernel that runs")


class SubblockRouter(Router[SubblockConfig]):
    """The blocks whose cells match best."""

    def cut(self, settings: SubblockConfig, grid: Window) -> Cut:
        """Return blocks in the order of the sequence."""
        return Cut.rows(_BLOCK)

    def cells(self, settings: SubblockConfig) -> tuple[int, int]:
        """Return the cells of a block of queries and of keys."""
        return settings.n_q, settings.n_k

    def budget(self, settings: SubblockConfig, blocks: int, tokens: int) -> Budget:
        """Return how many of the blocks are kept."""
        sparsity = ratio_now(settings.sparsity)
        return Budget(kept_blocks(sparsity, blocks), blocks, 1 - sparsity)

    def dense_reason(self, settings: SubblockConfig, tokens: int, frames: int | None) -> str | None:
        """Short sequences are dense."""
        if tokens >= settings.min_seq_len:
            return None
        return (
            f"{self.layer.label} leaves sequences of fewer than {settings.min_seq_len} tokens "
            f"dense (`min_seq_len`)"
        )


def kept_blocks(sparsity: float, num_blocks: int) -> int:
    """Return how many key blocks a query block keeps: a multiple of eight, or all of fewer."""
    kept = max(num_blocks - first_of(sparsity, num_blocks), 1)
    return min(-(-kept // _MULTIPLE) * _MULTIPLE, num_blocks)


class SubblockBackend(SparseBackend):
    """Sub-block sparse attention."""

    backend = AttentionBackendEnum.SUBBLOCK_SPARSE_ATTN
    summary = "the best blocks by the means of their cells"
    config_cls = SubblockConfig
    router = SubblockRouter
    variants = VARIANTS_OF_BOTH
