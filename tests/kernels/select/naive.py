"""Pooling, selection and the gated sum by their definitions, one tile and one pair at a time."""

import torch


def ragged_tiles(
    lengths: list[int], *, seed: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return starts and lengths of tiles lying back to back, and a random order of the tokens."""
    sizes = torch.tensor(lengths, dtype=torch.int32)
    starts = (sizes.cumsum(0) - sizes).int()
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(int(sizes.sum()), generator=generator).int()
    return starts.to(device), sizes.to(device), index.to(device)


def naive_mean(
    x: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, index: torch.Tensor | None
) -> torch.Tensor:
    """Return float64 means [B, H, N, D] of tokens of [B, S, H, D]."""
    tiles = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        total = torch.zeros_like(x[:, 0], dtype=torch.float64)
        for t in range(start, start + length):
            total += x[:, t if index is None else int(index[t])].double()
        tiles.append(total / length)
    return torch.stack(tiles, dim=2)


def naive_best(query: torch.Tensor, key: torch.Tensor, count: int, always: int) -> torch.Tensor:
    """Return int32 [B, H, Nq, count + always] by sorting pairs of score and index."""
    batch, heads, num_q, _ = query.shape
    num_kv = key.shape[2]
    group = heads // key.shape[1]
    out = torch.empty(batch, heads, num_q, count + always, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            scores = query[b, h].double() @ key[b, h // group].double().T
            for i, row in enumerate(scores.tolist()):
                ranked = sorted(range(num_kv), key=lambda j, row=row: (-row[j], j))[:count]
                out[b, h, i] = torch.tensor([*sorted(ranked), *range(num_kv, num_kv + always)])
    return out


def naive_gated(
    out: torch.Tensor,
    gate: torch.Tensor,
    coarse: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    index: torch.Tensor | None,
) -> torch.Tensor:
    """Return float64 [B, S, H, D]."""
    result = out.double()
    for n, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        for t in range(start, start + length):
            token = t if index is None else int(index[t])
            result[:, token] += gate[:, token].double() * coarse[:, :, n].double()
    return result


def whole_numbers(*shape: int, seed: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Return small whole numbers, whose products any order of summation adds up exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(device=device, dtype=dtype)


def assert_best(
    indices: torch.Tensor, query: torch.Tensor, key: torch.Tensor, count: int, always: int
) -> None:
    """Assert that rows list distinct best keys, up to what fp32 cannot tell apart."""
    num_kv = key.shape[2]
    assert indices.dtype == torch.int32
    assert (indices.diff(dim=-1) > 0).all()
    assert indices[..., 0].min() >= 0
    assert (indices[..., count:] == torch.arange(num_kv, num_kv + always).to(indices)).all()
    chosen = indices[..., :count].long()
    assert chosen.max() < num_kv
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.double() @ key.mT
    rounding = torch.finfo(torch.float32).eps * query.shape[-1]
    slack = rounding * (query.double().abs() @ key.abs().mT).amax(-1, keepdim=True)
    worst_chosen = scores.gather(-1, chosen).amin(-1, keepdim=True)
    best = scores.topk(count, dim=-1).values[..., -1:]
    assert (worst_chosen >= best - 2 * slack).all()
