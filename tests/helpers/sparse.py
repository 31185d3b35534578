"""Sparse methods on small layers, and what they attend to by definition, as dense masks.

Everything here goes block by block and token by token in float64, without a thought for speed.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import nn

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.layers.attention.scope import BackendPreference, SelectionScope, Source
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import KeptPairs
from multimodal_gen.runtime.layers.attention.sparse.windows import Window, kept_indices
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.inputs import QKV, make_qkv

_Grid = tuple[int, int, int]
_Blocks = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class SparseMethod:
    """A sparse method, and the small layers it is tested on.

    Attributes:
        backend: the method.
        given: parameters that layers get unless a test gives others.
        heads: H.
        head_size: D.
        layer_cls: what a layer is.
    """

    backend: AttentionBackendEnum
    given: Mapping[str, object] = field(default_factory=dict)
    heads: int = 4
    head_size: int = 32
    layer_cls: type[AttentionLayer] = LocalAttention

    @property
    def scale(self) -> float:
        """Factor of the scores of `layer`."""
        return self.head_size**-0.5

    def config(self, **parameters: object) -> Any:
        """Return its configuration; what is `...` is not given."""
        config_cls = find_backend(self.backend, PlatformEnum.CPU).config_cls
        given = {n: x for n, x in {**self.given, **parameters}.items() if x is not ...}
        return build_config(config_cls, given, backend=str(self.backend))

    def asked(self, **parameters: object) -> BackendPreference:
        """Return what a user asks for on the command line."""
        config = self.config(**parameters)
        return BackendPreference(source=Source.SETTINGS, backend=self.backend, config=config)

    def layer(
        self,
        *,
        index: int | None = 0,
        kv_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        site: LayerSite | None = None,
        strict: bool = False,
        geometry: Mapping[str, Any] | None = None,
        **parameters: object,
    ) -> Any:
        """Return a layer that a user asked to run the method.

        Args:
            index: of the layer in its model.
            kv_heads: Hkv; H when None.
            dtype: the dtype it computes in.
            site: where it sits, instead of `index`.
            strict: whether fallbacks are errors.
            geometry: further arguments of the layer.
            **parameters: of the method.
        """
        arguments: dict[str, Any] = {"num_heads": self.heads, **(geometry or {})}
        return self.layer_cls(
            head_size=self.head_size,
            num_kv_heads=kv_heads,
            compute_dtype=dtype,
            site=site or LayerSite(name=f"blocks.{index}.attn1", layer=index),
            scope=SelectionScope(default=self.asked(**parameters), strict=strict),
            **arguments,
        )

    def inputs(
        self, grid: _Grid, *, text: TextSpan | None = None, batch: int = 2, **options: Any
    ) -> QKV:
        """Return inputs of a layer over a latent grid and text; see `make_qkv`."""
        tokens = math.prod(grid) + (text.length if text else 0)
        options = {"num_kv_heads": options.pop("kv_heads", None), **options}
        return make_qkv(batch, tokens, self.heads, self.head_size, **options)


def run_sparse(
    attention: Callable[..., torch.Tensor],
    qkv: QKV,
    grid: _Grid | None,
    *,
    text: TextSpan | None = None,
    step: int = 0,
    known: Mapping[str, Any] | None = None,
    **call: Any,
) -> torch.Tensor:
    """Call a layer inside a denoiser call.

    Args:
        attention: the layer.
        qkv: its inputs.
        grid: the latent grid.
        text: where text lies.
        step: denoising step.
        known: further fields of the context.
        **call: further arguments of the layer.
    """
    with set_forward_context(step, latent_grid=grid, text_span=text, **(known or {})):
        return attention(*qkv, **call)


def text_places(grid: _Grid, length: int) -> dict[str, TextSpan | None]:
    """Return where text may lie beside a video, by what tests call it."""
    return {
        "no text": None,
        "text first": TextSpan(start=0, length=length),
        "text last": TextSpan(start=math.prod(grid), length=length),
    }


def video_tokens(grid: _Grid, text: TextSpan | None = None) -> list[int]:
    """Return the positions of the video in a joint sequence."""
    start = text.stop if text and text.start == 0 else 0
    return list(range(start, start + math.prod(grid)))


def tokens_of_tiles(grid: _Grid, tile: Sequence[int], text: TextSpan | None = None) -> _Blocks:
    """Return the positions of the tokens of each tile, tiles in raster order."""
    found: dict[tuple[int, ...], list[int]] = {}
    places = product(*map(range, grid))
    for position, place in zip(video_tokens(grid, text), places, strict=True):
        at = tuple(p // edge for p, edge in zip(place, tile, strict=True))
        found.setdefault(at, []).append(position)
    return [found[at] for at in sorted(found)]


def block_inputs(qkv: QKV, blocks: _Blocks, *, values: bool = False, seed: int = 1) -> QKV:
    """Return inputs whose blocks have means of their own, so that scores differ by much.

    Args:
        qkv: the inputs, which are changed.
        blocks: positions of the tokens of each block.
        values: whether values have them, too.
        seed: of what is added.
    """
    generator = torch.Generator().manual_seed(seed)
    for tokens in blocks:
        for x in qkv if values else qkv[:2]:
            offset = torch.randn(len(x), 1, *x.shape[2:], generator=generator)
            x[:, list(tokens)] += offset.to(x.dtype)
    return qkv


def best_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    q_blocks: _Blocks,
    k_blocks: _Blocks,
    kept: int,
    *,
    token_mask: torch.Tensor | None = None,
    centred: bool = False,
) -> torch.Tensor:
    """Return the `kept` blocks of keys whose means match best the mean of each block of queries.

    Means are rounded to the inputs' dtype before they are compared; of equal scores the first wins.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        q_blocks: positions of the tokens of each block of queries.
        k_blocks: the same for keys.
        kept: blocks that each block of queries keeps.
        token_mask: bool [B, S], tokens that count; None for all. Blocks without any come last.
        centred: whether the mean of all keys is taken off, in fp32, before the rounding.

    Returns:
        bool [B, H, Nq, Nk].
    """
    batch, _, heads, _ = query.shape
    group = heads // key.shape[2]
    chosen = torch.zeros(batch, heads, len(q_blocks), len(k_blocks), dtype=torch.bool)
    for b, h in product(range(batch), range(heads)):
        kept_of = set(range(key.shape[1])) if token_mask is None else set(_where(token_mask[b]))
        q_tokens, k_tokens = ([[t for t in x if t in kept_of] for x in y]
                              for y in (q_blocks, k_blocks))  # fmt: skip
        queries, keys = query[b, :, h], key[b, :, h // group]
        means_q = [queries[tokens].double().mean(0).to(query.dtype) for tokens in q_tokens]
        common = keys[[t for tokens in k_tokens for t in tokens]].float().mean(0)
        means_k = [
            (
                keys[tokens].float().mean(0) - common if centred else keys[tokens].double().mean(0)
            ).to(key.dtype)
            for tokens in k_tokens
        ]
        # One product at a time, so that blocks of equal means have equal scores.
        products = torch.stack(means_q)[:, None].double() * torch.stack(means_k).double()
        scores = products.sum(-1)
        scores[:, [not tokens for tokens in k_tokens]] = -math.inf
        # A stable sort: of equal scores the first wins.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        chosen[b, h].scatter_(1, order[:, :kept], True)
    return chosen


def _where(token_mask: torch.Tensor) -> list[int]:
    found: list[int] = token_mask.nonzero()[:, 0].tolist()
    return found


def pair_mask(
    chosen: torch.Tensor, q_blocks: _Blocks, k_blocks: _Blocks, num_queries: int, num_keys: int
) -> torch.Tensor:
    """Return which token attends to which, bool [..., Sq, Sk], from which block does to which.

    Args:
        chosen: bool [..., Nq, Nk].
        q_blocks: positions of the tokens of each block of queries.
        k_blocks: the same for keys.
        num_queries: Sq.
        num_keys: Sk.
    """
    mask = torch.zeros(*chosen.shape[:-2], num_queries, num_keys, dtype=torch.bool)
    columns = torch.tensor([t for block in k_blocks for t in block])
    block_of = torch.tensor([j for j, block in enumerate(k_blocks) for _ in block])
    for i, block in enumerate(q_blocks):
        mask[..., torch.tensor(list(block))[:, None], columns] = chosen[..., i, None, block_of]
    return mask


def joint_mask(
    mask: torch.Tensor, video: Sequence[int], token_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a mask in which text attends to everything and everything attends to text.

    Args:
        mask: bool [..., Sq, Sk], what the video's tokens attend to among themselves.
        video: positions of the video, on both sides; what is left is text.
        token_mask: bool [B, Sk], keys that anybody attends to; None for all.
    """
    mask = mask.clone()
    inside = set(video)
    queries, keys = ([t for t in range(size) if t not in inside] for size in mask.shape[-2:])
    mask[..., queries, :] = True
    mask[..., keys] = True
    return mask if token_mask is None else mask & token_mask[:, None, None, :]


def projection(size: int = 32, *, seed: int = 0, bias: bool = True) -> nn.Linear:
    """Return a projection of a linear branch as a checkpoint has it."""
    linear = nn.Linear(size, size, bias=bias)
    generator = torch.Generator().manual_seed(seed)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * size**-0.5
    return linear.requires_grad_(False)


def kept_pairs(told: Sequence[KeptPairs], rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return what calls told that some rows keep, bool [B, H, R, S], asked head by head.

    Args:
        told: what `recorded_pairs` gave.
        rows: some of the positions of queries.
        like: [B, H, S, S], for the sizes.
    """
    found, seen = torch.zeros_like(like[:, :, rows]), []
    for pairs in told:
        for head, place in enumerate(range(pairs.heads.start, pairs.heads.stop)):
            found[:, place] = pairs.of_rows(rows, slice(head, head + 1))[:, 0]
            seen.append(place)
    assert sorted(seen) == [*range(like.shape[1])]
    return found


def assert_same_gradients(
    attend: Callable[..., torch.Tensor],
    definition: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
) -> None:
    """Raise AssertionError unless a function has the gradients of its definition in float64."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    out = attend(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    found = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
    wanted = torch.autograd.grad(definition(*doubles), doubles, upstream.double())
    for mine, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-3, atol=1e-4)


def kept_map(window: Window, tiles: Window) -> torch.Tensor:
    """Return whether query tile i attends to key tile j by a window's lists: bool [N, N]."""
    num = math.prod(tiles)
    listed = kept_indices(window, tiles).long()
    return torch.zeros(num, num, dtype=torch.bool).scatter_(1, listed, True)
