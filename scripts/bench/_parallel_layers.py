"""One self-attention layer on several GPUs: its exchanges, their chunks, and how it all grows."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from _harness import DEVICE, Bench
from _ranks import ONE, Contender, Ranks, own_tokens, sent_bytes

from multimodal_gen.runtime.distributed.collectives import (
    gather_heads,
    partition_heads,
    scatter_heads,
)
from multimodal_gen.runtime.distributed.groups import Group, parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.distributed.ring import Transfer
from multimodal_gen.runtime.layers.attention import USPAttention
from multimodal_gen.runtime.layers.attention.scope import scope_from_args
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.server_args import ServerArgs

HEADS, SIZE = 40, 128
GRID = (21, 45, 80)
SMALL_HEADS, SMALL_GRID = 4, (4, 6, 8)
CHUNKS = (1, 2, 4)
GROWTH = tuple(2**n for n in range(15, 19))
# Outputs in bf16 of kernels that sum in another order, and of parts that are rounded once more.
LARGEST_ERROR = 1e-2

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Exchange = Callable[[Group], object]
Exchanges = dict[str, tuple[int, Exchange]]
"""Name -> how many tensors of the size of q are exchanged, less its own share of them, and how."""


def make_qkv(tokens: int, heads: int) -> QKV:
    """Return random q, k and v [1, S, H, D] that are the same on every rank."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    shape = (1, tokens, heads, SIZE if DEVICE == "cuda" else 32)
    q, k, v = (torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype) for _ in "qkv")
    return q, k, v


def layer_contender(
    name: str,
    qkv: QKV,
    mesh: Mesh,
    *,
    backend: str | None = None,
    config: dict[str, object] | None = None,
    grid: tuple[int, int, int] | None = None,
    **more: object,
) -> Contender:
    """Return a layer that attends to this rank's tokens of q, k and v."""
    args = ServerArgs(model_path="none", attention_backend=backend, attention_backend_config=config)
    heads, size = qkv[0].shape[2:]
    layer = USPAttention(heads, size, prefix="blocks.0.attn1", scope=scope_from_args(args))

    @contextmanager
    def around() -> Iterator[USPAttention]:
        with torch.inference_mode(), set_forward_context(0, latent_grid=grid, num_steps=2):
            yield layer

    def run() -> torch.Tensor:
        return layer(*(own_tokens(x) for x in qkv))

    sent = sent_bytes(
        mesh, tokens=qkv[0].shape[1], heads=heads, size=size, itemsize=qkv[0].element_size()
    )
    if backend == "sliding_tile_attn" and mesh.ring > 1:
        sent = math.nan  # what the windows of other ranks reach, which is less than a ring's
    return Contender(name=name, run=run, mesh=mesh, around=around, sent=sent, split=True, **more)


def layer_contenders(ranks: Ranks, qkv: QKV, name: str, **options: object) -> list[Contender]:
    """Return a method on one GPU, then over all of them in every layout and number of chunks."""
    one = f"{name}, 1 GPU"
    found = [layer_contender(one, qkv, ONE, **options)]
    for layout, mesh in ranks.meshes().items():
        for chunks in CHUNKS if mesh.ring == 1 else (1,):
            suffix = f", {chunks} chunks" if chunks > 1 else ""
            made = layer_contender(
                f"{name}, {layout}{suffix}", qkv, mesh, one_gpu=one, chunks=chunks, **options
            )
            found.append(made)
    return found


def layer_case(ranks: Ranks, bench: Bench, method: str, config: dict[str, object] | None) -> None:
    """One layer of Wan2.1-14B at 720p, in every layout."""
    heads, grid = (SMALL_HEADS, SMALL_GRID) if bench.options.smoke else (HEADS, GRID)
    grid = (bench.options.frames or grid[0], *grid[1:])
    tokens = math.prod(grid)
    qkv = make_qkv(tokens, heads)
    backend = None if method == "dense" else method
    contenders = layer_contenders(ranks, qkv, method, backend=backend, config=config, grid=grid)
    _measure(ranks, bench, contenders, f"layer {method}", tokens, heads)


def exchange_case(ranks: Ranks, bench: Bench) -> None:
    """The exchanges of one layer alone: bare, and as the layer packs and unpacks them."""
    heads, grid = (SMALL_HEADS, SMALL_GRID) if bench.options.smoke else (HEADS, GRID)
    tokens = math.prod(grid) // ranks.size * ranks.size
    with ranks.sharing(Mesh(ulysses=ranks.size)):
        q, k, v = (own_tokens(x).contiguous() for x in make_qkv(tokens, heads))
    made = {**_bare_exchanges((q, k, v)), **_layer_exchanges(ranks, (q, k, v))}
    share = (ranks.size - 1) / ranks.size
    contenders = [
        _exchange(name, Mesh(ulysses=ranks.size), q, tensors * share, run)
        for name, (tensors, run) in made.items()
    ]
    contenders.append(
        _exchange(
            "ring step of K and V",
            Mesh(ring=ranks.size),
            q,
            2,
            lambda g: Transfer(g, (k, v), [k.shape, v.shape]).wait(),
        )
    )
    _measure(ranks, bench, contenders, "exchange", tokens, heads)


def _exchange(
    name: str, mesh: Mesh, query: torch.Tensor, tensors: float, run: Exchange
) -> Contender:
    """Return a contender that gets the group of a mesh of one dimension; `tensors` leave."""
    sent = tensors * query.nbytes

    def in_group() -> None:
        groups = parallel_groups()
        assert groups is not None, "contenders share a mesh"
        run(groups.ring if mesh.ring > 1 else groups.ulysses)

    @contextmanager
    def around() -> Iterator[None]:
        with torch.inference_mode():
            yield

    return Contender(name=name, run=in_group, mesh=mesh, sent=sent, around=around)


def _bare_exchanges(qkv: QKV) -> Exchanges:
    """Return exchanges of memory as it lies."""
    packed = torch.cat(qkv, dim=-1)
    landed, received = torch.empty_like(packed), torch.empty_like(qkv[0])
    exchange = dist.all_to_all_single
    return {
        "all_to_all, q k v in one": (3, lambda g: exchange(landed, packed, group=g.handle)),
        "all_to_all, 1 tensor": (1, lambda g: exchange(received, qkv[0], group=g.handle)),
    }


def _layer_exchanges(ranks: Ranks, qkv: QKV) -> Exchanges:
    """Return the exchanges that layers make."""
    n, (q, k, v) = ranks.size, qkv
    spans, lengths = partition_heads(q.shape[2], q.shape[2], n).queries, [q.shape[1]] * n

    def scatter(group: Group, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return scatter_heads(tensors, [spans] * len(tensors), lengths, group)

    with ranks.sharing(Mesh(ulysses=n)), torch.inference_mode():
        group = parallel_groups().ulysses
        out = scatter(group, q)[0].contiguous()
        assert torch.equal(gather_heads(out, spans, lengths, group), q), "there and back"

    def gather(group: Group) -> torch.Tensor:
        return gather_heads(out, spans, lengths, group)

    return {
        "scatter q k v": (3, lambda g: scatter(g, q, k, v)),
        "gather output": (1, gather),
        "scatter and gather": (4, lambda g: (scatter(g, q, k, v), gather(g))),
    }


def growth_case(ranks: Ranks, bench: Bench) -> None:
    """A dense layer from 32K to 256K tokens on 1, 2 and more GPUs."""
    heads = SMALL_HEADS if bench.options.smoke else HEADS
    for tokens in (64, 128) if bench.options.smoke else GROWTH:
        qkv = make_qkv(tokens, heads)
        meshes = {"ulysses 2": Mesh(ulysses=2), **ranks.meshes()}
        one = "dense, 1 GPU"
        contenders = [layer_contender(one, qkv, ONE)]
        contenders += [
            layer_contender(f"dense, {layout}", qkv, mesh, one_gpu=one)
            for layout, mesh in meshes.items()
        ]
        _measure(ranks, bench, contenders, f"growth {tokens // 1024}K", tokens, heads)


def _measure(
    ranks: Ranks, bench: Bench, contenders: list[Contender], case: str, tokens: int, heads: int
) -> None:
    ranks.measure(
        bench,
        contenders,
        bound=LARGEST_ERROR,
        rounds=bench.options.layer_rounds,
        block_ms=1 if bench.options.smoke else 60,
        case=case,
        shape=f"B1 H{heads} S{tokens} D{SIZE} bf16",
        flop=0.0 if case == "exchange" else 4.0 * heads * tokens**2 * SIZE,
        flop_formula="4*H*S*S*D of the whole sequence, as if dense",
    )
