"""Draft attention: the largest entries of a head's low-resolution attention map.

The rule is that of the authors' package (DraftAttention, arXiv:2505.14708; `Draft_Attention` of
shawnricecake/draft-attention at 1d04554), whose names the parameters have. Every frame is pooled by
`pool_h` x `pool_w` tokens; with qbar_i and kbar_j the means of S patches and s the scale,

    p_ij   = softmax over j of s qbar_i.kbar_j            the draft map of a head
    t      = the k-th smallest of all S * S entries,      k = floor(sparsity_ratio * S * S)
    kept   = those (i, j) with p_ij >= t                  all where k = 0

So the share is one of the head and not of the row: patches of queries whose attention is spread
keep less than others. Tokens are reordered so that a patch is a block. Text is attended to by
everything, and attends to everything.

What differs from them, or is easily missed:

- The entry t is kept itself, and so are its equals: S * S - k + 1 entries, one more than asked for.
- A row may be left with nothing, and their kernel returns zeros for it. Here every row keeps its
  best patch; at a ratio of 1 that is all.
- They rank the entries, of which small ones become equal zeros. Here their logarithms are ranked.
- A frame of theirs is of whole patches, a batch of one sample. Here patches at the edges are cut
  short, and what a mask leaves out, of rows too, is in no map. Over a causal cache a map has the
  rows of the running chunk.
- Their Wan keeps the first layer and timesteps above 925 dense, with a ratio of 0.75: say so with
  `dense_layers: "0"` and `dense_sigma: ">0.925"`.
- LightX2V's `draft_attn` keeps the first frame and each frame for itself besides, and pools
  portraits by 16 x 8. Neither is here; `pool_h` and `pool_w` may be given.

Shapes: B batch, H heads, D head size, R and N patches of queries and of keys.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.runtime.layers.attention.config import (
    EngineKernel,
    Ratio,
    SparseConfig,
    Tail,
    in_decimals,
    option,
    ratio_now,
    tail_option,
)
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.router import BlockStats, Budget, Cut, Router
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.platforms import AttentionBackendEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(SparseConfig):
    """Parameters of `draft_attn`.

    Attributes:
        sparsity_ratio: share of the entries of a head's map that is left out. It may change over
            the steps: {0: 0.5, 0.4: 0.9}.
        pool_h: tokens of a patch along the height of a frame.
        pool_w: the same along its width.
        tail: what becomes of patches that are not kept: `none` drops them; `pooled` counts each by
            the mean of its keys and values.
        kernel: which kernel runs; `auto` takes the fastest one supported.
    """

    sparsity_ratio: Ratio = option(0.9, "share of a head's map that is left out", ge=0, le=1)
    pool_h: int = option(8, "tokens of a patch along the height", ge=1)
    pool_w: int = option(16, "tokens of a patch along the width", ge=1)
    tail: Tail = tail_option()  # noqa: RUF009 - it returns a field
    kernel: EngineKernel = option("auto", "kernel that runs")


class DraftRouter(Router[DraftConfig]):
    """The largest entries of the draft map, and the best one of every row."""

    chooses = "map"

    def cut(self, settings: DraftConfig, grid: Window) -> Cut:
        """Return the patches of every frame."""
        return Cut((1, settings.pool_h, settings.pool_w))

    def budget(self, settings: DraftConfig, blocks: int, tokens: int) -> Budget | None:
        """Return all patches where none can be left out; else the data decide for a row."""
        sparsity = ratio_now(settings.sparsity_ratio)
        return Budget(blocks, blocks, 1 - sparsity) if blocks == 1 or not sparsity else None

    def choose(
        self, settings: DraftConfig, stats: BlockStats, budget: Budget | None
    ) -> torch.Tensor:
        """Return the patches that are kept."""
        if budget is not None:
            return stats.mark_best(budget.kept)
        left_out = _left_out(ratio_now(settings.sparsity_ratio), stats)

        def largest(scores: torch.Tensor) -> torch.Tensor:
            draft = scores.log_softmax(-1)
            chosen = draft >= _bound(draft, left_out, stats)
            return chosen.scatter_(-1, scores.argmax(-1, keepdim=True), True)

        return stats.mark_by_scores(largest)


def _left_out(sparsity: float, stats: BlockStats) -> torch.Tensor | None:
    """Return how many entries of a head's map are left out, int64 [B|1]; None for all of them.

    Rows and patches without tokens that count are in no map. Does not wait for the device.
    """
    if sparsity == 1:
        return None
    share = in_decimals(sparsity).limit_denominator(10**6)
    sizes = (stats.query.shape[2], stats.num)
    number = torch.ones((1,), dtype=torch.int64, device=stats.key.device)
    for size, real in zip(sizes, stats.real, strict=True):
        number = number * (size if real is None else real.sum(1))
    return number * share.numerator // share.denominator


def _bound(
    draft: torch.Tensor, left_out: torch.Tensor | None, stats: BlockStats
) -> torch.Tensor | float:
    """Return from what value on entries of a draft map [B, h, R, N] are kept, [B, h, 1, 1]."""
    if left_out is None:
        return torch.inf
    rows, blocks = stats.real
    if blocks is not None:
        draft = draft.masked_fill(~blocks[:, None, None], torch.inf)
    if rows is not None:
        draft = draft.masked_fill(~rows[:, None, :, None], torch.inf)
    ordered = draft.flatten(2).sort(dim=-1).values
    last = (left_out - 1).clamp_min(0).view(-1, 1, 1).expand(*draft.shape[:2], 1)
    bound = ordered.gather(-1, last)
    return bound.masked_fill(left_out.view(-1, 1, 1) == 0, -torch.inf).unsqueeze(3)


class DraftBackend(SparseBackend):
    """Draft attention."""

    backend = AttentionBackendEnum.DRAFT_ATTN
    summary = "draft attention: the largest entries of a head's pooled map"
    config_cls = DraftConfig
    router = DraftRouter
