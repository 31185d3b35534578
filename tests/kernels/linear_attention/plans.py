"""Inputs and plans of the tests of linear attention."""

import dataclasses
from dataclasses import dataclass, field

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.linear_attention.reference import Projection
from tests.helpers.inputs import random
from tests.kernels.linear_attention.naive import tokens_of


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _text() -> tuple[Blocks, Blocks]:
    """Queries 10 to 77 in blocks of 32; keys the same tokens in blocks of 16, then the rest."""
    q = Blocks.ragged(_ints(10, 42, 74), _ints(32, 32, 4), total=80, size=32)
    starts = _ints(10, 26, 42, 58, 74, 0, 78)
    lengths = _ints(16, 16, 16, 16, 4, 10, 2)
    return q, Blocks.ragged(starts, lengths, total=80, size=16)


def _masked() -> tuple[Blocks, Blocks]:
    """Lengths differ between samples, one block is empty, and tokens are left out."""
    lengths = torch.stack((_ints(64, 7, 0), _ints(1, 64, 30))).unsqueeze(1)
    starts = _ints(0, 64, 128).expand(2, 1, 3)
    return Blocks.regular(70, 64), Blocks.ragged(starts, lengths, total=160, size=64)


BLOCKS = {
    "regular": lambda: (Blocks.regular(150, 64), Blocks.regular(150, 64)),
    "blocks of 128": lambda: (Blocks.regular(260, 128), Blocks.regular(260, 128)),
    "small": lambda: (Blocks.regular(40, 16), Blocks.regular(40, 16)),
    "text": _text,
    "masked": _masked,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: two samples, four query heads, two key heads."""

    layout: str
    dtype: torch.dtype
    feature_map: str = "softmax"
    head_size: int = 32
    bias: bool = True
    q: Blocks = field(init=False)
    kv: Blocks = field(init=False)
    query: torch.Tensor = field(init=False)
    key: torch.Tensor = field(init=False)
    value: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)
    projection: Projection = field(init=False)

    def __post_init__(self) -> None:
        q, kv = BLOCKS[self.layout]()
        d, dtype = self.head_size, self.dtype
        key, value = (random(2, kv.total, 2, d, seed=s, dtype=dtype) for s in (1, 2))
        for b in range(2):
            inside = torch.zeros(kv.total, dtype=torch.bool)
            for tokens in tokens_of(kv, b):
                inside[list(tokens)] = True
            # What lies in no block must not be read.
            key[b, ~inside] = value[b, ~inside] = torch.nan
        bias = random(d, seed=5) if self.bias else None
        values = {
            "q": q,
            "kv": kv,
            "query": random(2, q.total, 4, d, seed=0, dtype=dtype),
            "key": key,
            "value": value + torch.tensor(1.0, dtype=dtype),
            "out": random(2, q.total, 4, d, seed=3, dtype=dtype),
            "projection": Projection(weight=random(d, d, seed=4) * d**-0.5, bias=bias),
        }
        for name, x in values.items():
            object.__setattr__(self, name, x)

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values."""
        return self.query, self.key, self.value

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the projection."""
        return self.projection.weight, self.projection.bias

    def replaced(self, **tensors: object) -> "Case":
        """Return a copy with other inputs."""
        copy = dataclasses.replace(self)
        for name, x in tensors.items():
            object.__setattr__(copy, name, x)
        return copy

    def seen_by_all(self) -> torch.Tensor:
        """Return which tokens lie in a block, for every query: bool [B, H, S, Sk]."""
        seen = torch.zeros(2, 4, self.q.total, self.kv.total, dtype=torch.bool)
        for b in range(2):
            for tokens in tokens_of(self.kv, b):
                seen[b, :, :, list(tokens)] = True
        return seen

    def plan(self) -> tuple[BlockPlan, torch.Tensor]:
        """Return a selection that differs by row, and which tokens it leaves to each query."""
        generator = torch.Generator().manual_seed(7)
        keep = torch.rand(2, 4, self.q.num, self.kv.num, generator=generator) < 0.5
        keep[0, 0, 0] = False
        seen = torch.zeros(2, 4, self.q.total, self.kv.total, dtype=torch.bool)
        for b in range(2):
            for h in range(4):
                for i, rows in enumerate(tokens_of(self.q, b)):
                    for j, tokens in enumerate(tokens_of(self.kv, b)):
                        if not keep[b, h, i, j]:
                            for row in rows:
                                seen[b, h, row, list(tokens)] = True
        return BlockPlan.from_map(keep, self.q, self.kv), seen
