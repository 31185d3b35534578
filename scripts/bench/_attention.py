"""What benchmarks of attention share: cases, layers on a backend, dense attention, random lists."""

import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from _harness import DEVICE, Run, version_of
from torch.nn import functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.tuning import TritonTile
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.config import BackendConfig
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.inputs import QKV, make_video_qkv

Grid = tuple[int, int, int]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Method = tuple[str, Mapping[str, object]]
"""A backend, and the parameters it is run with."""

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
FA3 = "fa3 dense"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One self-attention of a model; `grid` is that of its tokens: time, height and width."""

    name: str
    grid: Grid
    heads: int
    batch: int = 1
    head_size: int = 128

    @property
    def tokens(self) -> int:
        """S."""
        return math.prod(self.grid)

    @property
    def shape(self) -> str:
        """What the results file calls it."""
        return f"B{self.batch} H{self.heads} S{self.tokens} D{self.head_size} bf16"

    @property
    def flop(self) -> float:
        """FLOP of dense attention."""
        return 4.0 * self.batch * self.heads * self.head_size * self.tokens**2

    def normal(self, dtype: torch.dtype = DTYPE) -> QKV:
        """Return independent normal q, k and v."""
        shape = (self.batch, self.tokens, self.heads, self.head_size)
        generator = torch.Generator(DEVICE).manual_seed(0)
        drawn = (torch.randn(shape, generator=generator, device=DEVICE) for _ in range(3))
        return QKV(*(x.to(dtype) for x in drawn))

    def video(self, dtype: torch.dtype = torch.bfloat16) -> QKV:
        """Return q, k and v that vary over the video as a model's do."""
        return make_video_qkv(self.grid, self.heads, self.head_size, dtype=dtype, device=DEVICE)


def layer_on(
    case: Case,
    backend: str | None = None,
    config: BackendConfig | Mapping[str, object] | None = None,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    strict: bool = True,
    num_layers: int | None = None,
    kind: type[AttentionLayer] = LocalAttention,
) -> AttentionLayer:
    """Return a layer of a case on a backend with its parameters, or on the automatic choice.

    Args:
        case: what gives it heads and their size.
        backend: None for the automatic choice.
        config: of the backend.
        dtype: what it computes in.
        strict: whether fallbacks of a backend are refused.
        num_layers: layers of the model, where the schedule of a method asks for them.
        kind: the class of the layer.
    """
    return kind(
        case.heads,
        case.head_size,
        compute_dtype=dtype,
        site=LayerSite(name="blocks.0.attn1", layer=0, num_layers=num_layers),
        scope=scope_from(
            attention_backend=backend,
            attention_backend_config=config,
            strict=strict and backend is not None,
        ),
    )


def next_step_of(
    case: Case, layer: AttentionLayer, qkv: tuple[torch.Tensor, ...]
) -> Callable[[], torch.Tensor]:
    """Return a call of a layer, each at the next step of one generation."""
    step = itertools.count()

    def run() -> torch.Tensor:
        known = {"latent_grid": case.grid, "request_id": "bench", "cfg_branch": "cond"}
        with torch.inference_mode(), set_forward_context(next(step), **known):
            return layer(*qkv)

    return run


def fa3() -> Attend | None:
    """Return FlashAttention 3, or None where it cannot run, which is said."""
    if DEVICE != "cuda" or importlib.util.find_spec("fa3_fwd_interface") is None:
        print("left out: FlashAttention 3, needs fa3-fwd and a GPU", flush=True)
        return None
    function = importlib.import_module("fa3_fwd_interface").flash_attn_func

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return first_of(function(q, k, v))

    return run


def first_of(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the output of a function that may return more behind it."""
    return out[0] if isinstance(out, tuple) else out


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's own, of [B, S, H, D]."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def fa3_run(qkv: tuple[torch.Tensor, ...]) -> dict[str, Run]:
    """Return a call of FlashAttention 3 by its name, nothing where it cannot run."""
    attend = fa3()
    return {} if attend is None else {FA3: lambda: attend(*qkv)}


def dense_run(qkv: tuple[torch.Tensor, ...]) -> tuple[str, Run, str]:
    """Return name, call and version of FlashAttention 3, or of PyTorch's where it cannot run."""
    for name, run in fa3_run(qkv).items():
        return name, run, version_of("fa3-fwd")
    return "sdpa dense", lambda: sdpa(*qkv), version_of("torch")


def random_lists(tokens: int, heads: int, size: int, *, share: float) -> BlockPlan:
    """Return lists of random blocks of `size`, of which each row keeps its share."""
    blocks = Blocks.regular(tokens, size)
    kept = max(1, round(share * blocks.num))
    generator = torch.Generator(DEVICE).manual_seed(0)
    draws = torch.rand(1, heads, blocks.num, blocks.num, device=DEVICE, generator=generator)
    indices = draws.topk(kept, dim=-1).indices.sort(-1).values.int()
    counts = indices.new_full(indices.shape[:3], kept)
    return BlockPlan(indices=indices, counts=counts, q=blocks, kv=blocks, uniform=True)


def attention_rows(qkv: tuple[torch.Tensor, ...], rows: torch.Tensor) -> torch.Tensor:
    """Return fp32 attention of some query rows: [B, len(rows), H, D]."""
    q, k, v = qkv
    scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows].float(), k.float())
    weights = (scores * q.shape[3] ** -0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.float())


def triton_tiles(prefix: str, *shapes: tuple[int, int, int, int]) -> dict[str, TritonTile]:
    """Return tiles of (rows, keys, warps, stages) by name, behind a prefix."""
    return {
        f"{prefix}{rows}x{keys} w{warps} s{stages}": TritonTile(
            rows=rows, keys=keys, warps=warps, stages=stages
        )
        for rows, keys, warps, stages in shapes
    }
