"""What `sparse.py` measures, and what its outputs are checked against.

The references are written from the definitions, token by token, and share no code with what they
check. They compute sampled rows of the output in float32.

Shapes: S tokens, of which V are video; H heads, D head size, N tiles, R sampled rows.
"""

import math
from dataclasses import dataclass

import torch
from _attention import Case as Attention
from _attention import Grid

ROWS = 48
# Tiles whose score is this close, in standard deviations, to the last one kept may be chosen
# either way, depending on the order of a sum.
MARGIN = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case(Attention):
    """One self-attention of a model, and what is measured on it.

    Attributes:
        text: text tokens behind the video.
        sta: whether Sliding Tile Attention is measured.
        vsa: whether Video Sparse Attention is measured.
        slow_peers: whether the peers that compile, or add nothing elsewhere, are measured too.
        sta_tile: tokens per tile of Sliding Tile Attention.
        vsa_tile: tokens per tile of Video Sparse Attention.
        window: tiles that a tile attends to.
        sparsity: share of tiles that Video Sparse Attention skips.
    """

    text: int = 0
    sta: bool = True
    vsa: bool = True
    slow_peers: bool = False
    sta_tile: Grid = (6, 8, 8)
    vsa_tile: Grid = (4, 4, 4)
    window: Grid = (3, 3, 3)
    sparsity: float = 0.9

    @property
    def video(self) -> int:
        """V."""
        return math.prod(self.grid)

    @property
    def tokens(self) -> int:
        """S."""
        return self.video + self.text

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.head_size**-0.5

    @property
    def shape(self) -> str:
        """What the results file calls it."""
        grid = "x".join(map(str, self.grid))
        text = f" + {self.text} text" if self.text else ""
        return f"B1 H{self.heads} {grid}{text} S{self.tokens} D{self.head_size} bf16"

    @property
    def kept(self) -> int:
        """Key tiles that every query tile of Video Sparse Attention keeps."""
        num = math.prod(tiles_of(self.grid, self.vsa_tile))
        return max(1, math.ceil(round((1 - self.sparsity) * num, 6)))

    def padded_pairs(self, tile: Grid, kept: int) -> float:
        """Return the pairs of tokens attended to if every tile were full.

        Args:
            tile: tokens per tile.
            kept: key tiles that every query tile keeps.
        """
        num, size = math.prod(tiles_of(self.grid, tile)), math.prod(tile)
        video, text = num * size, self.text
        return float(video * kept * size + 2 * video * text + text**2)


CASES = (
    Case(name="hunyuan 30x48x80", grid=(30, 48, 80), heads=24, slow_peers=True),
    Case(name="hunyuan 30x48x80 text", grid=(30, 48, 80), heads=24, text=256),
    # The same number of tokens in a grid that tiles of 4x4x4 divide: 1800 blocks of 64.
    Case(name="whole tiles 24x60x80", grid=(24, 60, 80), heads=24, sta=False, slow_peers=True),
    Case(name="wan 14B 21x45x80", grid=(21, 45, 80), heads=40),
    Case(name="wan 14B 21x30x52", grid=(21, 30, 52), heads=40),
    Case(name="wan 14B 18x48x80", grid=(18, 48, 80), heads=40),
    Case(name="wan 1.3B 21x45x80", grid=(21, 45, 80), heads=12),
    Case(name="wan 1.3B 21x30x52", grid=(21, 30, 52), heads=12),
    Case(name="wan 1.3B 18x48x80", grid=(18, 48, 80), heads=12),
)
_SMALL = {"heads": 2, "head_size": 32, "sta_tile": (2, 2, 2), "slow_peers": True}
SMOKE = (
    Case(name="smoke whole", grid=(8, 8, 12), sparsity=0.5, **_SMALL),
    Case(name="smoke ragged", grid=(7, 9, 10), sparsity=0.8, **_SMALL),
    Case(name="smoke text", grid=(7, 9, 10), text=5, sparsity=0.8, **_SMALL),
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of a case, each [1, S, H, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.q, self.k, self.v


def make_inputs(case: Case, device: str) -> Inputs:
    """Return N(0, 1) tensors."""
    torch.manual_seed(0)
    shape = (1, case.tokens, case.heads, case.head_size)
    q, k, v, gate = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    return Inputs(q=q, k=k, v=v, gate=gate)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Outputs at the sampled rows.

    Attributes:
        rows: int64 [R], positions in the sequence.
        values: fp32 [R, H, D], by what is computed: "dense", "sta", "vsa", "vsa gate".
        clear: bool [R, H], where the selection of Video Sparse Attention is beyond rounding.
    """

    rows: torch.Tensor
    values: dict[str, torch.Tensor]
    clear: torch.Tensor

    def error(self, kind: str, actual: torch.Tensor) -> float:
        """Return ||actual - expected|| / ||expected|| of the rows `actual`, [R, H, D]."""
        expected, actual = self.values[kind].double(), actual.double()
        if kind.startswith("vsa"):
            expected, actual = expected[self.clear], actual[self.clear]
        return float((actual - expected).norm() / expected.norm())


def expect(case: Case, inputs: Inputs) -> Expected:
    """Compute the sampled rows of everything that is measured on the case."""
    device = inputs.q.device
    generator = torch.Generator(device).manual_seed(1)
    rows = torch.randint(0, case.video, (ROWS,), device=device, generator=generator)
    if case.text:
        rows = torch.cat((rows, torch.arange(case.video, case.tokens, case.text // 3 + 1).to(rows)))
    every = torch.ones(len(rows), 1, case.tokens, dtype=torch.bool, device=device)
    values = {"dense": attend_rows(inputs, rows, every, case.scale)}
    clear = every.new_ones(len(rows), case.heads)
    if case.sta:
        values["sta"] = attend_rows(inputs, rows, sta_keep(case, rows), case.scale)
    if case.vsa:
        values["vsa"], coarse, clear = vsa_rows(case, inputs, rows)
        values["vsa gate"] = values["vsa"] + inputs.gate[0, rows].float() * coarse
    return Expected(rows=rows, values=values, clear=clear)


def attend_rows(
    inputs: Inputs, rows: torch.Tensor, token_mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return fp32 attention of query rows over keys, by a mask [R, H|1, S]: [R, H, D]."""
    out = []
    for head in range(inputs.q.shape[2]):
        q, k, v = (x[0, :, head].float() for x in (inputs.q[:, rows], inputs.k, inputs.v))
        scores = (q @ k.T) * scale
        kept = token_mask[:, head % token_mask.shape[1]]
        out.append(scores.masked_fill_(~kept, -math.inf).softmax(-1) @ v)
    return torch.stack(out, dim=1)


def tiles_of(grid: Grid, tile: Grid) -> Grid:
    """Return how many tiles cover a grid, ragged ones included."""
    t, h, w = (-(-size // edge) for size, edge in zip(grid, tile, strict=True))
    return t, h, w


def token_tiles(grid: Grid, tile: Grid, device: torch.device) -> torch.Tensor:
    """Return the tile of every video token along each axis: int64 [V, 3]."""
    axes = [torch.arange(n, device=device) // edge for n, edge in zip(grid, tile, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, 3)


def sta_keep(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """Return which tokens the rows attend to by Sliding Tile Attention: bool [R, 1, S]."""
    of_token = token_tiles(case.grid, case.sta_tile, rows.device)
    of_row = of_token[rows.clamp_max(case.video - 1)]
    token_mask = torch.ones(len(rows), case.tokens, dtype=torch.bool, device=rows.device)
    sizes = tiles_of(case.grid, case.sta_tile)
    for axis, (size, width) in enumerate(zip(sizes, case.window, strict=True)):
        if width < size:
            half = width // 2
            centre = of_row[:, axis].clamp(half, size - 1 - half)
            near = (centre[:, None] - of_token[None, :, axis]).abs() <= half
            token_mask[:, : case.video] &= near
    token_mask[rows >= case.video] = True
    return token_mask.unsqueeze(1)


def vsa_rows(
    case: Case, inputs: Inputs, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fine and the coarse stage of rows, [R, H, D], and where they are clear, [R, H]."""
    sizes = tiles_of(case.grid, case.vsa_tile)
    places = token_tiles(case.grid, case.vsa_tile, rows.device)
    tile = (places[:, 0] * sizes[1] + places[:, 1]) * sizes[2] + places[:, 2]
    num = math.prod(sizes)
    q, k, v = (_means(x[0, : case.video], tile, num) for x in inputs.qkv)
    is_text = rows >= case.video
    of_row = tile[rows.clamp_max(case.video - 1)]
    scores = torch.einsum("rhd,nhd->rhn", q[of_row], k)
    best = scores.topk(min(case.kept + 1, num), dim=-1)
    gap = best.values[..., case.kept - 1] - best.values[..., -1]
    clear = (gap > MARGIN * scores.std(-1)) | is_text[:, None] | (case.kept == num)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(-1, best.indices[..., : case.kept], True)
    token_mask = chosen[..., tile]
    if case.text:
        token_mask = torch.cat(
            (token_mask, token_mask.new_ones(*token_mask.shape[:2], case.text)), dim=-1
        )
        token_mask[is_text] = True
    fine = attend_rows(inputs, rows, token_mask, case.scale)
    coarse = torch.einsum("rhn,nhd->rhd", (scores * case.scale).softmax(-1), v)
    coarse[is_text] = 0.0
    return fine, coarse, clear


def _means(x: torch.Tensor, tile: torch.Tensor, num: int) -> torch.Tensor:
    """Return the mean of every tile, rounded to the dtype of x, as fp32: [N, H, D]."""
    total = torch.zeros(num, *x.shape[1:], device=x.device)
    total.index_add_(0, tile, x.float())
    lengths = torch.bincount(tile, minlength=num).view(-1, 1, 1)
    return (total / lengths).to(x.dtype).float()
