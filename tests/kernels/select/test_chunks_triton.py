"""The Triton kernels against the definition, under the interpreter.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own:
test_children.py starts it.
"""

import pytest
import torch

from multimodal_gen.kernels.select.reference import Tiles, pool_tiles_reference
from multimodal_gen.kernels.select.row_reference import (
    ChunkMeans,
    Rule,
    pack_bits,
    select_chunks_reference,
)
from tests.helpers.inputs import random
from tests.kernels.cases import with_slow
from tests.kernels.select.naive_chunks import layout, unpacked

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)

LENGTHS = [70, 513, 1, 64, 12]
RULES = [*(Rule(topk=k) for k in (1, 2, 6)), *(Rule(threshold=t) for t in (0.0, 0.25, 0.7, 0.99))]


@pytest.mark.slow_cases("dtype1-True-True", "dtype2-False-True")
@pytest.mark.parametrize(
    ("dtype", "indexed", "masked"),
    [
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, True),
        (torch.float16, False, True),
        (torch.float16, True, False),
    ],
)
def test_means_are_the_definition(dtype, indexed, masked):
    from multimodal_gen.kernels.select.pool_kernel import sum_chunks

    starts, lengths, order = layout(LENGTHS)
    index = order if indexed else None
    tokens = sum(LENGTHS)
    key = random(2, 3, tokens + 5, 24, dtype=dtype).transpose(1, 2)
    keep = random(2, tokens + 5, seed=1) > 0 if masked else None
    counts = lengths.unsqueeze(0)
    if keep is not None:
        kept = keep[:, :tokens] if index is None else keep[:, index.long()]
        counts = torch.stack([part.sum(1) for part in kept.split(LENGTHS, 1)], 1).int()
        key = key.masked_fill(~keep[..., None, None], torch.nan)
    tiles = Tiles(starts, lengths, 513, index)
    found = sum_chunks(key, tiles, keep) / counts.clamp_min(1)[:, None, :, None]
    wanted = pool_tiles_reference(key, tiles, keep, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


CHOICES = [
    *((7, torch.float16, rule) for rule in RULES),
    *((num, torch.bfloat16, rule) for num in (2, 72) for rule in (RULES[1], RULES[5])),
]


@pytest.mark.slow_cases(
    "2-torch.bfloat16-Rule(topk=2, threshold=0.0, scope='query_head')",
    "7-torch.float16-Rule(topk=6, threshold=0.0, scope='query_head')",
    "7-torch.float16-Rule(topk=None, threshold=0.0, scope='query_head')",
    "7-torch.float16-Rule(topk=None, threshold=0.99, scope='query_head')",
)
@pytest.mark.parametrize(
    ("num_chunks", "dtype", "rule"),
    with_slow(CHOICES, [CHOICES[i] for i in (0, 2, 3, 6, 7, 10)]),
    ids=str,
)
def test_the_choice_is_the_definition(dtype, num_chunks, rule):
    from multimodal_gen.kernels.select.chunk_kernel import select_chunks

    query = random(2, 70, 2, 24, dtype=dtype)
    means = random(2, 1, num_chunks, 24, seed=1)
    own = torch.randint(0, num_chunks, (70,), generator=torch.Generator().manual_seed(2)).int()
    counts = torch.arange(2 * num_chunks).view(2, num_chunks).int()
    for masked in (False, True):
        chunks = ChunkMeans(means=means, counts=counts, masked=masked)
        bits, pairs = select_chunks(query, chunks, own, rule)
        chosen = select_chunks_reference(query, chunks, own, rule)
        assert torch.equal(bits, pack_bits(chosen))
        assert int(pairs) == int((chosen.sum((1, 2)) * counts).sum())


@pytest.mark.slow_cases("Rule(topk=None, threshold=0.5, scope='query_head')")
@pytest.mark.parametrize("rule", [Rule(topk=4), Rule(threshold=0.5)], ids=str)
def test_equal_scores_go_to_the_lowest_chunk(rule):
    from multimodal_gen.kernels.select.chunk_kernel import select_chunks

    generator = torch.Generator().manual_seed(0)
    query = torch.randint(-2, 3, (1, 70, 2, 16), generator=generator).to(torch.bfloat16)
    means = torch.randint(-1, 2, (1, 2, 11, 16), generator=generator).float()
    own = torch.randint(0, 11, (70,), generator=generator).int()
    counts = torch.ones(1, 11, dtype=torch.int32)
    chunks = ChunkMeans(means=means, counts=counts, masked=False)
    bits, _ = select_chunks(query, chunks, own, rule)
    assert torch.equal(bits, pack_bits(select_chunks_reference(query, chunks, own, rule)))


@pytest.mark.slow_cases("Rule(topk=None, threshold=0.7, scope='query_head')")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("rule", [RULES[2], RULES[5]], ids=str)
def test_masked_queries_choose_their_own_chunk(rule):
    from multimodal_gen.kernels.select.chunk_kernel import select_chunks

    query, means = random(2, 70, 2, 16, dtype=torch.bfloat16), random(2, 2, 6, 16, seed=1)
    own = (torch.arange(70) % 6).int()
    counts = torch.ones(1, 6, dtype=torch.int32)
    keep = (random(2, 90, seed=2) > 0)[:, 20:]
    query = query.masked_fill(~keep[..., None, None], torch.nan)
    chunks = ChunkMeans(means=means, counts=counts, masked=False)
    bits, pairs = select_chunks(query, chunks, own, rule, keep)
    chosen = select_chunks_reference(query, chunks, own, rule, keep)
    assert torch.equal(bits, pack_bits(chosen))
    assert int(pairs) == int(chosen.sum())


def test_scores_that_are_no_numbers_leave_own_chunks_chosen():
    from multimodal_gen.kernels.select.chunk_kernel import select_chunks

    query, means = random(1, 64, 2, 16, dtype=torch.bfloat16), random(1, 2, 6, 16, seed=1)
    means[:, :, 3] = torch.nan
    own = (torch.arange(64) % 6).int()
    counts = torch.ones(1, 6, dtype=torch.int32)
    chunks = ChunkMeans(means=means, counts=counts, masked=False)
    bits, _ = select_chunks(query, chunks, own, Rule(topk=2))
    assert unpacked(bits, 6)[0, :, torch.arange(64), own.long()].all()
