"""A causal video transformer in the shape of Wan's, with random weights, for streaming.py."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _attention import Case as Attention
from _harness import DEVICE
from torch import nn

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attends: the layer, q, k and v."""


@dataclass(frozen=True, kw_only=True)
class Case(Attention):
    """A model and its chunks.

    Attributes:
        grid: (frames, height, width) of a chunk, after patching.
        window: chunks that one sees, itself included, and the sink.
        sink: first chunks that are always seen.
        tile: (height, width) of the tiles in which chunks are kept.
        space: (height, width) of a window in space, in tiles.
        tall_tile: tiles that leave little of the kernel's steps empty, here of half the height.
        tall: a window of them.
    """

    layers: int
    ffn: int
    window: int
    sink: int
    prompt: int = 512
    tile: tuple[int, int] = (8, 8)
    space: tuple[int, int] = (3, 3)
    tall_tile: tuple[int, int] = (16, 8)
    tall: tuple[int, int] = (2, 3)

    @property
    def width(self) -> int:
        """Channels."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Keys that a chunk sees."""
        return (self.window + self.sink) * self.tokens

    def flop_of(self, keys: int) -> float:
        """FLOP of one layer's self-attention."""
        return 4.0 * self.width * self.tokens * keys


WAN = Case(name="1.3B 480p", layers=30, heads=12, ffn=8960, grid=(3, 30, 52), window=6, sink=1)
SMOKE = Case(
    name="smoke",
    layers=2,
    heads=2,
    ffn=64,
    grid=(1, 3, 5),
    window=3,
    sink=1,
    head_size=16,
    prompt=4,
    tile=(1, 2),
    space=(1, 3),
    tall_tile=(2, 2),
    tall=(2, 2),
)


class Block(nn.Module):
    """A transformer block: self-attention, attention to text, feed-forward, all modulated."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        width = case.width
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.text_q, self.text_kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.text_out = nn.Linear(width, width)
        self.ffn = nn.Sequential(
            nn.Linear(width, case.ffn), nn.GELU(approximate="tanh"), nn.Linear(case.ffn, width)
        )
        self.modulation = nn.Parameter(torch.zeros(6, width))

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor, attend: Callable[..., object]
    ) -> torch.Tensor:
        """Return [1, S, C]; `attend` is given q, k and v [1, S, H, D]."""
        heads, width = (self.case.heads, self.case.head_size), self.case.width
        shift, scale, gate, shift_2, scale_2, gate_2 = (self.modulation + time).unbind(0)
        y = F.layer_norm(x, (width,)) * (1 + scale) + shift
        q, k, v = self.qkv(y).chunk(3, dim=-1)
        q, k = (F.rms_norm(z, (width,)).unflatten(-1, heads) for z in (q, k))
        x = x + gate * self.out(attend(q, k, v.unflatten(-1, heads)).flatten(2))
        q = F.rms_norm(self.text_q(x), (width,)).unflatten(-1, heads)
        k, v = (z.unflatten(-1, heads) for z in self.text_kv(text).chunk(2, dim=-1))
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)))
        x = x + self.text_out(y.transpose(1, 2).flatten(2))
        y = F.layer_norm(x, (width,)) * (1 + scale_2) + shift_2
        return x + gate_2 * self.ffn(y)


class CausalModel(nn.Module):
    """Blocks, with rotary embeddings at the place of the running chunk in the video."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        # Static, so that a captured graph reads what the next chunk writes.
        self.turns = [
            torch.zeros(1, case.tokens, 1, case.head_size, device=DEVICE) for _ in range(2)
        ]

    def place(self, number: int) -> None:
        """Write the rotary factors of a chunk."""
        half = self.case.head_size // 2
        parts = (half - 2 * (half // 3), half // 3, half // 3)
        starts = (number * self.case.grid[0], 0, 0)
        axes = []
        for start, size, count in zip(starts, self.case.grid, parts, strict=True):
            rates = 1e4 ** -torch.linspace(0, 1, count, device=DEVICE, dtype=torch.float64)
            axes.append((start + torch.arange(size, device=DEVICE)).double()[:, None] * rates)
        t, h, w = axes
        shape = (*self.case.grid, -1)
        angles = torch.cat(
            (
                t[:, None, None].expand(shape),
                h[None, :, None].expand(shape),
                w[None, None].expand(shape),
            ),
            dim=-1,
        ).flatten(0, 2)
        for turn, of in zip(self.turns, (angles.cos(), angles.sin()), strict=True):
            turn.copy_(torch.cat((of, of), dim=-1)[None, :, None])

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, S, H, D] with its rotary embedding."""
        cos, sin = (turn.to(x.dtype) for turn in self.turns)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return [1, S, C]; `attend` is given the layer, q, k and v."""
        for i, block in enumerate(self.blocks):

            def past_too(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int = i
            ) -> torch.Tensor:
                return attend(layer, self.rotated(q), self.rotated(k), v)

            x = block(x, time, text, past_too)
        return x
