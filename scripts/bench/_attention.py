"""What benchmarks of attention share: cases, layers on a backend, dense attention, random lists."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from _harness import DEVICE, Run, relative_error, version_of
from torch.nn import functional as F

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.config import BackendConfig
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.layers.attention.sparse.kept_pairs import KeptPairs
from tests.helpers.inputs import QKV, make_video_qkv

Grid = tuple[int, int, int]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
FA3 = "fa3 dense"
DATA = ("video", "random", "outliers", "offsets", "constant")


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One self-attention of a model.

    Attributes:
        name: what the results call it.
        grid: time, height and width of the video's tokens.
        heads: H.
        batch: B.
        head_size: D.
        text: text tokens behind the video.
        data: `video`, which varies over the video as a model's tensors do; `random`, independent
            and normal; `outliers`, the same with one in 32 channels of queries and keys four times
            as large; `offsets`, the same as `random` with a vector that the tokens of a head have
            in common, normal with deviation 2 in queries and 3 in keys; `constant`, all tokens the
            same.
        config: parameters that methods have on it.

    Raises:
        ValueError: there is no such data.
    """

    name: str
    grid: Grid
    heads: int
    batch: int = 1
    head_size: int = 128
    text: int = 0
    data: str = "random"
    config: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse data that nothing would be drawn for."""
        if self.data not in DATA:
            raise ValueError(f"`data` of {self.name} must be one of {DATA}, got {self.data!r}")

    @property
    def tokens(self) -> int:
        """S."""
        return math.prod(self.grid) + self.text

    @property
    def shape(self) -> str:
        """What the results file calls it."""
        return f"B{self.batch} H{self.heads} S{self.tokens} D{self.head_size} bf16"

    @property
    def flop(self) -> float:
        """FLOP of dense attention."""
        return 4.0 * self.batch * self.heads * self.head_size * self.tokens**2

    def draw(self, dtype: torch.dtype = DTYPE) -> QKV:
        """Return its q, k and v."""
        if self.data == "video":
            size = {"batch": self.batch, "dtype": dtype, "device": DEVICE}
            return make_video_qkv(self.grid, self.heads, self.head_size, **size)
        shape = (self.batch, self.tokens, self.heads, self.head_size)
        generator = torch.Generator(DEVICE).manual_seed(0)
        drawn = (torch.randn(shape, generator=generator, device=DEVICE) for _ in range(3))
        q, k, v = drawn
        if self.data == "offsets":
            for x, deviation in ((q, 2.0), (k, 3.0)):
                size = (self.batch, 1, self.heads, self.head_size)
                x += deviation * torch.randn(size, generator=generator, device=DEVICE)
        qkv = QKV(*(x.to(dtype) for x in (q, k, v)))
        if self.data == "outliers":
            for x in qkv[:2]:
                x[..., ::32] *= 4
        return QKV(*(x.fill_(0.5) for x in qkv)) if self.data == "constant" else qkv


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


class Sample:
    """Some rows of some heads of dense attention in float64, spread evenly.

    Args:
        qkv: its inputs.
        num_rows: how many rows.
        num_heads: of how many heads.
    """

    def __init__(
        self, qkv: tuple[torch.Tensor, ...], num_rows: int = 128, num_heads: int = 4
    ) -> None:
        q, k, v = (x[0] for x in qkv)
        total, heads = q.shape[:2]
        self.rows = torch.arange(0, total, max(1, total // num_rows), device=q.device)
        self.heads = torch.arange(0, heads, max(1, heads // num_heads), device=q.device)
        rows = q[self.rows][:, self.heads].double()
        scores = torch.einsum("rhd,shd->hrs", rows, k[:, self.heads].double())
        self._weights = (scores * q.shape[2] ** -0.5).softmax(-1)
        self._values = v[:, self.heads].double()
        self.wanted = torch.einsum("hrs,shd->rhd", self._weights, self._values)

    def take(self, out: torch.Tensor) -> torch.Tensor:
        """Return these rows of an output, [B, S, H, D]."""
        return out[0, self.rows][:, self.heads]

    def error(self, out: torch.Tensor) -> float:
        """Return the relative L2 distance of an output at these rows."""
        return relative_error(self.take(out), self.wanted)

    def error_of_pairs(self, out: torch.Tensor, told: Sequence[KeptPairs]) -> float | None:
        """Return the distance from attention to the pairs that a method told it keeps.

        None where it did not tell of all of these heads.
        """
        weights = torch.zeros_like(self._weights)
        for place, head in enumerate(self.heads.tolist()):
            found = next((x for x in told if x.heads.start <= head < x.heads.stop), None)
            if found is None:
                return None
            within = slice(head - found.heads.start, head - found.heads.start + 1)
            weights[place] = self._weights[place] * found.of_rows(self.rows, within)[0, 0]
        share = weights.sum(-1, keepdim=True)
        wanted = torch.einsum("hrs,shd->rhd", weights / share.clamp_min(1e-300), self._values)
        return relative_error(self.take(out), wanted)
