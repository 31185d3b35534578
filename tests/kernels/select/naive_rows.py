"""Attention of rows over the chunks they chose, as parts, by its definition."""

import torch

from multimodal_gen.kernels.select.row_reference import ChunkGroups, SortedRows


def random_bits(rows: tuple[int, int, int], num_chunks: int, *, seed: int = 0) -> torch.Tensor:
    """Return int32 [B, H, S, words] where each chunk is chosen by about a third of the rows."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(*rows, num_chunks, generator=generator) < 0.3
    words = torch.zeros(*rows, -(-num_chunks // 32), dtype=torch.int64)
    for n in range(num_chunks):
        words[..., n // 32] += chosen[..., n].long() << (n % 32)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def chosen_of(bits: torch.Tensor, groups: ChunkGroups) -> torch.Tensor:
    """Return whether each row chose each chunk, by group: bool [B, H, G, S, size]."""
    columns = []
    for n in range(groups.num * groups.size):
        if n < groups.num_chunks:
            columns.append((bits[..., n // 32] >> (n % 32) & 1).bool())
        else:
            columns.append(torch.zeros(bits.shape[:3], dtype=torch.bool))
    by_chunk = torch.stack(columns, -1)
    return by_chunk.unflatten(-1, (groups.num, groups.size)).permute(0, 1, 3, 2, 4)


def assert_sorted(
    rows: SortedRows,
    moved: torch.Tensor,
    query: torch.Tensor,
    bits: torch.Tensor,
    groups: ChunkGroups,
    *,
    extra: bool,
) -> None:
    """Assert that every part holds the rows that chose something, blocks tell what they chose."""
    chosen = chosen_of(bits, groups)
    batch, heads, num, tokens, size = chosen.shape
    for b in range(batch):
        for hg in range(heads * num):
            h, g = divmod(hg, num)
            everyone = extra and g == 0
            used = int(rows.used[b, h, g])
            position = rows.position[b, h, g].long()
            assert sorted(position.tolist()) == list(range(tokens))
            in_use = position < used
            wanted = chosen[b, h, g].any(-1) | everyone
            assert torch.equal(in_use, wanted)
            patterns = (chosen[b, h, g].long() << torch.arange(size)).sum(-1)
            patterns = patterns | ((1 << size) if everyone else 0)
            found = rows.bits[b, hg][position]
            assert torch.equal(found[in_use].long(), patterns[in_use])
            assert torch.equal(moved[b, :, hg][position][in_use], query[b, :, h][in_use])
            _assert_blocks(rows, b, hg, used)


def _assert_blocks(rows: SortedRows, b: int, hg: int, used: int) -> None:
    lengths = rows.lengths[b, hg].tolist()
    block = rows.bits.shape[2] // len(lengths)
    assert lengths == [max(0, min(block, used - i * block)) for i in range(len(lengths))]
    for i, length in enumerate(lengths):
        any_row = 0
        for pattern in rows.bits[b, hg, i * block : i * block + length].tolist():
            any_row |= pattern
        listed = rows.indices[b, hg, i, : rows.counts[b, hg, i]].tolist()
        assert listed == [j for j in range(32) if any_row >> j & 1]
