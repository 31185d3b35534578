"""The lists of steps and boxes against what is kept, under the interpreter.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own:
test_children.py starts it.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multimodal_gen.kernels.cluster_attention.plan import Groups

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)


def groups(counts: torch.Tensor, gap: int) -> Groups:
    """Return clusters one behind the other, with `gap` keys of no cluster before the last."""
    starts = counts.cumsum(2) - counts
    starts[..., -1] += gap
    total = int(counts.sum(2).max()) + gap
    order = torch.arange(total, dtype=torch.int32).expand(*counts.shape[:2], -1)
    return Groups(order=order, starts=starts.int(), counts=counts.int())


@given(
    num=st.integers(1, 40),
    most=st.sampled_from([3, 30, 200]),
    share=st.floats(0, 1),
    gap=st.sampled_from([0, 5]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_lists_hold_every_kept_key_once(
    num: int, most: int, share: float, gap: int, seed: int
) -> None:
    from multimodal_gen.kernels.cluster_attention.boxes_kernel import BOX_KEYS, STEP, make_boxes

    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most, (2, 2, num), generator=generator)
    keys = groups(counts, gap)
    keep = torch.rand(2, 4, 2, num, generator=generator) < share
    boxes = make_boxes(keys, keep)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(2)).tolist():
        kept = keep[b, h, i].nonzero().flatten().tolist()
        wanted = [
            key
            for j in kept
            for key in range(
                int(keys.starts[b, h // 2, j]),
                int(keys.starts[b, h // 2, j] + counts[b, h // 2, j]),
            )
        ]
        whole, full, partial = boxes.counts[b, h, i].tolist()
        starts = boxes.starts[b, h, i].tolist()
        lengths = boxes.lengths[b, h, i].tolist()
        found = [s + t for s in boxes.whole[b, h, i, :whole].tolist() for t in range(STEP)]
        assert lengths[:full] == [BOX_KEYS] * full
        assert all(0 < length < BOX_KEYS for length in lengths[full : full + partial])
        used = -(-(full + partial) // 8) * 8
        assert lengths[full + partial : used] == [0] * (used - full - partial)
        assert all(s == 0 for s in starts[full + partial : used])
        found += [
            s + t for s, n in zip(starts[:used], lengths[:used], strict=True) for t in range(n)
        ]
        assert sorted(found) == wanted
        assert full + partial <= 8 * len(kept)
