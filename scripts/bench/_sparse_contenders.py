"""What `sparse.py` measures of ours: the layers, the operator and the engine.

Shapes: S tokens, H heads, D head size, N tiles, R sampled rows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from _attention import layer_on
from _harness import version_of
from _sparse_cases import Case, Grid, Inputs
from torch.nn import functional as F

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, kernel_for
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.select.api import add_gated, pool_tiles, select_tiles
from multimodal_gen.kernels.select.reference import Tiles
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention import UlyssesAttention_VSA
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.router import SlidingTileConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    TiledSequence,
    tiled_sequence,
)
from tests.helpers.block_plans import tile_lists

BOUND = 4e-3


class LeftOutError(Exception):
    """A contender cannot take part; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something to check and time.

    Attributes:
        name: what the results call it.
        kind: which output it computes: "dense", "sta", "vsa" or "vsa gate".
        run: computes the output, in whatever layout.
        take: takes the rows at positions of the sequence, int64 [R], from the output: [R, H, D].
        version: the distribution it comes from.
        tensors: how many tensors of the size of q it reads.
        layer: our layer, whose pieces and memory are measured too; None for everything else.
        bound: largest relative error.
    """

    name: str
    kind: str
    run: Callable[[], torch.Tensor]
    take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    version: str
    tensors: int = 3
    layer: AttentionLayer | None = None
    bound: float = BOUND


Maker = Callable[["Setting"], Contender]


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """A case with its tensors, and what several contenders need of them."""

    case: Case
    inputs: Inputs

    @cached_property
    def sta(self) -> "Tiled":
        """The tensors in tiles of Sliding Tile Attention."""
        return self._tiled(self.case.sta_tile)

    @cached_property
    def vsa(self) -> "Tiled":
        """The tensors in tiles of Video Sparse Attention."""
        return self._tiled(self.case.vsa_tile)

    @cached_property
    def sta_plan(self) -> BlockPlan:
        """The plan of Sliding Tile Attention."""
        sequence, case = self.sta.sequence, self.case
        text = sequence.num_text_blocks
        indices, counts, uniform = tile_lists(
            (case.window,) * case.heads,
            sequence.order.tiles,
            query_text=text,
            key_text=text,
            device=self.inputs.q.device,
        )
        plan = BlockPlan(
            indices=indices,
            counts=counts,
            q=sequence.blocks,
            kv=sequence.blocks,
            uniform=uniform,
        )
        return plan.longest_first()

    @cached_property
    def vsa_plan(self) -> BlockPlan:
        """The plan of the fine stage of Video Sparse Attention, for sequences without text."""
        q, k, _, _ = self.vsa.tensors
        return fine_plan(self.vsa.sequence, *self.vsa.pooled(q, k), self.case.kept)

    def _tiled(self, tile: Grid) -> "Tiled":
        case, x = self.case, self.inputs
        layout = SequenceLayout(
            grid=case.grid, start=0, num_queries=case.tokens, num_keys=case.tokens
        )
        sequence = tiled_sequence(layout, case.tokens, tile, x.q.device)
        tensors = gather_tokens((*x.qkv, x.gate), sequence.index)
        return Tiled(sequence=sequence, tensors=tensors)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiled:
    """Tensors in tile order.

    Attributes:
        sequence: the order.
        tensors: q, k, v and gate, each [1, S, H, D], with the memory of [1, H, S, D].
    """

    sequence: TiledSequence
    tensors: tuple[torch.Tensor, ...]

    def pooled(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the means of all tiles, [1, H, N, D] each."""
        order = self.sequence.order
        return pool_tiles(tensors, Tiles(order.starts, order.lengths, order.largest))

    @cached_property
    def positions(self) -> torch.Tensor:
        """Where the tokens of the sequence lie in tile order: int64 [S]."""
        index = self.sequence.index.long()
        return torch.empty_like(index).scatter_(0, index, torch.arange(len(index)).to(index))

    @cached_property
    def slots(self) -> torch.Tensor:
        """Where the tokens in tile order lie once every tile is filled up: int64 [S]."""
        order = self.sequence.order
        tile = torch.repeat_interleave(order.lengths.long(), output_size=order.num_tokens)
        return tile * order.largest + torch.arange(len(tile)).to(tile) - order.starts.long()[tile]

    @cached_property
    def padded(self) -> tuple[torch.Tensor, ...]:
        """The tensors with every tile filled up by zeros: [1, H, N * tile, D], contiguous."""
        if self.sequence.order.uniform:
            return self.heads_first
        length = len(self.sequence.order.starts) * self.sequence.order.largest
        out = []
        for x in self.heads_first:
            out.append(x.new_zeros((*x.shape[:2], length, x.shape[3])))
            out[-1][:, :, self.slots] = x
        return tuple(out)

    @property
    def heads_first(self) -> tuple[torch.Tensor, ...]:
        """The tensors as [1, H, S, D], contiguous."""
        return tuple(x.transpose(1, 2) for x in self.tensors)

    def take(self, out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Take rows from an output [1, S, H, D]."""
        return out[0, self.positions[rows]]

    def take_heads_first(self, out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Take rows from an output [1, H, S, D]."""
        return out[0, :, self.positions[rows]].transpose(0, 1)

    def take_padded(self, out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Take rows from an output laid out as `padded`."""
        return out[0, :, self.slots[self.positions[rows]]].transpose(0, 1)


def fine_plan(
    sequence: TiledSequence, query: torch.Tensor, key: torch.Tensor, kept: int
) -> BlockPlan:
    """Return the plan that the scores of pooled queries and keys select."""
    indices = select_tiles(query, key, kept)
    counts = indices.new_full((1, 1, 1), kept).expand(indices.shape[:3])
    blocks = sequence.blocks
    return BlockPlan(indices=indices, counts=counts, q=blocks, kv=blocks, uniform=True)


def in_place(out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Take rows from an output in the order of the sequence."""
    return out[0, rows]


def sta_layer(setting: Setting) -> Contender:
    """A layer on Sliding Tile Attention."""
    case = setting.case
    need(case.sta, "not measured here")
    config = SlidingTileConfig(window=case.window, tile_size=case.sta_tile, skip_time_steps=0)
    layer = layer_on(case, "sliding_tile_attn", config)
    return _layer_contender("sta layer", "sta", layer, partial(layer, *setting.inputs.qkv))


def vsa_layer(setting: Setting) -> Contender:
    """A layer on Video Sparse Attention, without a gate."""
    case = setting.case
    need(case.vsa, "not measured here")
    layer = layer_on(case, "video_sparse_attn", _vsa_config(case))
    return _layer_contender("vsa layer", "vsa", layer, partial(layer, *setting.inputs.qkv))


def vsa_gated_layer(setting: Setting) -> Contender:
    """A layer on Video Sparse Attention, with the gate of its coarse stage."""
    case, x = setting.case, setting.inputs
    need(case.vsa, "not measured here")
    need(not case.text, "takes no text")
    layer = layer_on(case, "video_sparse_attn", _vsa_config(case), kind=UlyssesAttention_VSA)
    run = partial(layer, *x.qkv, gate_compress=x.gate)
    return _layer_contender("vsa layer, gate", "vsa gate", layer, run, tensors=4)


def vsa_operator(setting: Setting) -> Contender:
    """Coarse stage, selection, fine stage and gate, on tensors in tile order."""
    need_tiles_alone(setting.case)
    tiled, case = setting.vsa, setting.case
    q, k, v, gate = tiled.tensors
    order = tiled.sequence.order

    def run() -> torch.Tensor:
        pooled = tiled.pooled(q, k, v)
        plan = fine_plan(tiled.sequence, pooled[0], pooled[1], case.kept)
        out = block_sparse_attention(q, k, v, plan, scale=case.scale)
        coarse = F.scaled_dot_product_attention(*pooled, scale=case.scale)
        tiles = Tiles(order.starts, order.lengths, order.largest)
        return add_gated(out, gate, coarse, tiles)

    return Contender(
        name="vsa operator",
        kind="vsa gate",
        run=run,
        take=tiled.take,
        version=version_of("triton"),
        tensors=4,
    )


def sta_engine(kernel: str) -> Maker:
    """Return a maker of the engine alone, on the tiles of Sliding Tile Attention."""

    def make(setting: Setting) -> Contender:
        need(setting.case.sta, "not measured here")
        return _engine("sta", kernel, setting, setting.sta, setting.sta_plan)

    return make


def vsa_engine(kernel: str) -> Maker:
    """Return a maker of the engine alone, on the fine stage of Video Sparse Attention."""

    def make(setting: Setting) -> Contender:
        need_tiles_alone(setting.case)
        return _engine("vsa", kernel, setting, setting.vsa, setting.vsa_plan)

    return make


def _engine(kind: str, kernel: str, setting: Setting, tiled: Tiled, plan: BlockPlan) -> Contender:
    q, k, v, _ = tiled.tensors
    scale = setting.case.scale
    runs = kernel_for(q, k, v, plan, kernel)  # raises where the kernel cannot

    def run() -> torch.Tensor:
        out = block_sparse_attention(q, k, v, plan, scale=scale, kernel=kernel)
        assert isinstance(out, torch.Tensor)
        return out

    name = f"{kind} engine, {kernel}" if runs == kernel else f"{kind} engine"
    version = {"fa4": version_of("flash-attn-4")}.get(runs, f"{runs}, {version_of('triton')}")
    return Contender(name=name, kind=kind, run=run, take=tiled.take, version=version)


def _layer_contender(
    name: str,
    kind: str,
    layer: AttentionLayer,
    run: Callable[[], torch.Tensor],
    tensors: int = 3,
) -> Contender:
    variant = layer.report().entries[-1].selection.variant
    return Contender(
        name=name,
        kind=kind,
        run=run,
        take=in_place,
        version=f"{variant}, {version_of('triton')}",
        tensors=tensors,
        layer=layer,
    )


def _vsa_config(case: Case) -> VideoSparseConfig:
    return VideoSparseConfig(sparsity=case.sparsity, tile_size=case.vsa_tile)


def need(fits: bool, reason: str) -> None:
    """Leave the contender out unless it fits."""
    if not fits:
        raise LeftOutError(reason)


def need_tiles_alone(case: Case) -> None:
    """Leave the contender out unless all tokens are video, in tiles of 64."""
    need(case.vsa, "not measured here")
    need(not case.text, "takes no text")
    need(math.prod(case.vsa_tile) == 64, "needs tiles of 64 tokens")


OURS: dict[str, Maker] = {
    "sta layer": sta_layer,
    "vsa layer": vsa_layer,
    "vsa layer, gate": vsa_gated_layer,
    "vsa operator": vsa_operator,
    "sta engine": sta_engine("auto"),
    "vsa engine": vsa_engine("auto"),
}


def make_contenders(
    setting: Setting, makers: dict[str, Maker]
) -> Iterator[tuple[str, Contender | LeftOutError]]:
    """Yield every maker's contender, or why it is left out; other errors are not caught."""
    from multimodal_gen.errors import UnsupportedBackendError

    for name, make in makers.items():
        try:
            yield name, make(setting)
        except LeftOutError as reason:
            yield name, reason
        except UnsupportedBackendError as error:
            yield name, LeftOutError(str(error))
