"""The choice of chunks by its definition in the paper, one score at a time, in float64."""

from collections import defaultdict
from itertools import product

import torch

from multimodal_gen.kernels.select.row_reference import Rule


def naive_means(key: torch.Tensor, chunks: list[list[int]]) -> torch.Tensor:
    """Return float64 means [B, H, N, D] of keys [B, S, H, D] at the positions of each chunk."""
    return torch.stack([key[:, chunk].double().mean(1) for chunk in chunks], dim=2)


def naive_choice(
    query: torch.Tensor, means: torch.Tensor, own: list[int], rule: Rule
) -> torch.Tensor:
    """Return what queries [B, S, H, D] choose, sample by sample: bool [B, H, S, N]."""
    batch, _, heads, _ = query.shape
    group = heads // means.shape[1]
    chosen = []
    for b in range(batch):
        scores = [
            (query[b, :, h].double() @ means[b, h // group].double().T).tolist()
            for h in range(heads)
        ]
        chosen.append(_sample(scores, own, rule))
    return torch.stack(chosen)


def _sample(scores: list[list[list[float]]], own: list[int], rule: Rule) -> torch.Tensor:
    heads, queries, chunks = len(scores), len(own), len(scores[0][0])
    chosen = torch.zeros(heads, queries, chunks, dtype=torch.bool)
    scopes = defaultdict(list)
    for h, s, n in product(range(heads), range(queries), range(chunks)):
        name = {"query_head": (h, s), "block": n, "head_global": h, "overall": None}[rule.scope]
        scopes[name].append((scores[h][s][n], n, h, s))
        chosen[h, s, own[s]] = True
    for entries in scopes.values():
        for _, n, h, s in _taken(entries, own, rule):
            chosen[h, s, n] = True
    return chosen


def _taken(
    entries: list[tuple[float, int, int, int]], own: list[int], rule: Rule
) -> list[tuple[float, int, int, int]]:
    """Return what is taken from a scope besides own chunks."""
    others = sorted((-x, n, h, s) for x, n, h, s in entries if n != own[s])
    others = [(-x, n, h, s) for x, n, h, s in others]
    if rule.topk is not None:
        queries = {(h, s) for _, _, h, s in entries}
        return others[: (rule.topk - 1) * len(queries)]
    least, largest = min(x for x, *_ in entries), max(x for x, *_ in entries)
    spread = largest - least if largest - least > 1e-6 else 1.0
    total = sum((x - least) / spread for x, *_ in entries) + 1e-6
    reached = sum((x - least) / spread for x, n, _, s in entries if n == own[s]) / total
    need, share, taken = max(rule.threshold - reached, 0.0), 0.0, []
    for entry in others:
        taken.append(entry)
        share += (entry[0] - least) / spread / total
        if share >= need:
            break
    return taken


def unpacked(bits: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Return int32 [..., words] as bool [..., N]."""
    return torch.stack([bits[..., n // 32] >> (n % 32) & 1 for n in range(num_chunks)], -1).bool()


def layout(lengths: list[int], *, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return starts and lengths of chunks, a random place for every position, and their tokens."""
    sizes = torch.tensor(lengths, dtype=torch.int32)
    starts = (sizes.cumsum(0) - sizes).int()
    generator = torch.Generator().manual_seed(seed)
    return starts, sizes, torch.randperm(sum(lengths), generator=generator).int()


def tokens_of(lengths: list[int], index: torch.Tensor | None) -> list[list[int]]:
    """Return the tokens of each chunk."""
    places = iter(range(sum(lengths)) if index is None else index.tolist())
    return [[next(places) for _ in range(length)] for length in lengths]
