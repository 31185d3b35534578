"""What Sparse-Linear Attention gathers where keys and values travel round a ring.

Blocks are tiles of a video that is one row: every rank holds a stretch of it, which may cut blocks.
Ranks exchange the means of their blocks and, for the linear branch, the state of their keys.

Shapes: B batch, S tokens of a rank's shard, H heads, D head size, N blocks; q/k suffix =
query/key side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from multimodal_gen.kernels.block_sparse.plan import Blocks
from multimodal_gen.kernels.linear_attention.api import KeyState, key_state
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.kernels.tile_pool.api import select_tiles
from multimodal_gen.runtime.distributed.collectives import all_gather_tokens
from multimodal_gen.runtime.distributed.ring import RingInputs
from multimodal_gen.runtime.layers.attention.masks import zero_masked_rows
from multimodal_gen.runtime.layers.attention.sparse.methods.sla.blocks import centred
from multimodal_gen.runtime.layers.attention.sparse.ring_tiles import (
    Shard,
    own_queries,
    pool_over_ring,
    shards_of,
    text_shard,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, kept_first

__all__ = ["RingBlocks", "ring_state"]

_TEXT_BLOCK = 64  # one that the kernel of the state takes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingBlocks:
    """The blocks that the ranks of a ring hold.

    Attributes:
        queries: the queries of every rank.
        keys: the keys of every rank.
        mine: position of this rank.
    """

    queries: tuple[Shard | None, ...]
    keys: tuple[Shard | None, ...]
    mine: int

    @classmethod
    def of(
        cls, inputs: RingInputs, layout: SequenceLayout, q_size: int, kv_size: int
    ) -> "RingBlocks":
        """Cut a layout into blocks; see `raster_blocks`."""
        row = replace(layout, grid=(1, 1, layout.num_video))
        call, device = inputs.call, inputs.query.device
        queries, keys = (shards_of(row, call, (1, 1, n), device) for n in (q_size, kv_size))
        return cls(queries=queries, keys=keys, mine=call.group.index)

    def rows(self, inputs: RingInputs, layout: SequenceLayout) -> slice:
        """Return which of this rank's queries are of the video."""
        call, own = inputs.call, self.queries[self.mine]
        first = max(layout.start - sum(call.lengths[: self.mine]), call.prefix)
        return slice(first, first + (0 if own is None else own.num_video))

    def lists_of(self, inputs: RingInputs, kept: int, num_blocks: int) -> torch.Tensor | None:
        """Return the video blocks that this rank's query blocks keep, int32 [B|1, H|1, n|1, kept].

        None where it has no queries of the video. Every rank calls it: means are exchanged where
        there is something to select.

        Args:
            inputs: what this rank holds.
            kept: video blocks that a query block keeps.
            num_blocks: video blocks of keys.
        """
        # Every rank does, in the same order: it exchanges.
        scored = None if kept == num_blocks else self._scored(inputs)

        mine = self.queries[self.mine]
        if mine is None or mine.queries is None:
            return None
        if scored is None:
            every = torch.arange(num_blocks, dtype=torch.int32, device=mine.tiles.device)
            return every.view(1, 1, 1, -1)
        query, keys, real = scored
        return select_tiles(query[:, :, mine.tiles], keys, kept, real=real)

    def _scored(self, inputs: RingInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the means that blocks are selected by, and bool [B, N], blocks with keys."""
        call = inputs.call
        query = own_queries(inputs)
        keep = call.keep_of(self.mine)
        if keep is not None:  # padding may hold anything, NaN too
            query = zero_masked_rows(query, keep)
        (pooled,), _ = pool_over_ring((query,), self.queries, replace(call, keep=None))
        (means,), counts = pool_over_ring((inputs.key,), self.keys, call)
        keys = centred(means, counts, query.dtype)
        return pooled.to(query.dtype), keys, None if keep is None else counts > 0


def ring_state(inputs: RingInputs, shards: Sequence[Shard | None], feature_map: str) -> KeyState:
    """Return the state over the keys of all ranks, those that all hold counted once.

    Args:
        inputs: what this rank holds.
        shards: the keys of every rank.
        feature_map: of the linear branch.
    """
    call, key = inputs.call, inputs.key
    batch, _, heads, size = key.shape
    mine = shards[call.group.index]
    precise = torch.promote_types(key.dtype, torch.float32)
    own = key.new_zeros((batch, heads, size + 1, size), dtype=precise)
    if mine is not None:
        own = _state(key, inputs.value, mine, call.keep_of(call.group.index), feature_map)
    sizes = [own.numel()] * call.group.size
    total = all_gather_tokens(own.flatten(), sizes, call.group).view(-1, *own.shape).sum(0)
    if inputs.shared_key is not None and inputs.shared_value is not None:
        text = text_shard(inputs.shared_key.shape[1], key.device, _TEXT_BLOCK)
        keep = call.shared_keep
        total = total + _state(inputs.shared_key, inputs.shared_value, text, keep, feature_map)
    return KeyState(moments=total[:, :, :-1], sums=total[:, :, -1])


def _state(
    key: torch.Tensor,
    value: torch.Tensor,
    shard: Shard,
    keep: torch.Tensor | None,
    feature_map: str,
) -> torch.Tensor:
    """Return moments and sums of a shard as one tensor, [B, H, D + 1, D]."""
    blocks = Blocks.regular(key.shape[1], shard.keys.order.largest)
    if keep is not None:
        index, blocks = kept_first(shard.keys.index, shard.keys.blocks, keep)
        key, value = gather_tokens((key, value), index)
    _, state = key_state(key, value, blocks, feature_map=feature_map)
    return torch.cat((state.moments, state.sums.unsqueeze(2)), dim=2)
