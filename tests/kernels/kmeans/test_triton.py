"""The Triton kernels against the definition, under the interpreter.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own:
test_children.py starts it.
"""

import itertools

import pytest
import torch

from multimodal_gen.kernels.kmeans.api import initial_centroids, kmeans
from multimodal_gen.kernels.kmeans.reference import sort_reference
from tests.helpers.inputs import LAYOUTS, with_layout
from tests.kernels.cases import with_slow

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def whole_numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return numbers whose products are exact, so that equally near is equally near."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


# Every dtype, layout and mask; they do not meet in the kernels.
CASES = [
    *((dtype, "token-major", masked) for dtype in DTYPES for masked in (False, True)),
    *((torch.bfloat16, layout, False) for layout in LAYOUTS if layout != "token-major"),
]
QUICK = [
    (torch.float32, "token-major", True),
    (torch.float16, "token-major", False),
    (torch.bfloat16, "a slice of the heads, head-major", False),
    (torch.bfloat16, "heads innermost", False),
]


@pytest.mark.slow_cases(
    "torch.bfloat16-a slice of the heads, head-major-False",
    "torch.bfloat16-heads innermost-False",
    "torch.float16-token-major-False",
)
@pytest.mark.parametrize(("dtype", "layout", "masked"), with_slow(CASES, QUICK), ids=str)
def test_one_iteration_is_the_definition(dtype: torch.dtype, layout: str, masked: bool) -> None:
    x = with_layout(whole_numbers(2, 140, 2, 24, dtype=dtype), layout)
    token_mask = torch.rand(2, 140, generator=torch.Generator().manual_seed(1)) > 0.2
    kept = token_mask if masked else None
    start = initial_centroids(x, 6)
    for iterations in (0, 1) if masked else (1,):
        wanted = kmeans(x, start, iterations=iterations, mask=kept, kernel="reference")
        found = kmeans(x, start, iterations=iterations, mask=kept, kernel="triton")
        assert torch.equal(found.order, wanted.order)
        assert torch.equal(found.starts, wanted.starts)
        assert torch.equal(found.counts, wanted.counts)
        # Sums of whole numbers are exact, their quotients rounded once.
        assert torch.equal(found.centroids, wanted.centroids)


@pytest.mark.slow_cases("260-2", "5-5")
@pytest.mark.parametrize(("tokens", "clusters"), [(1, 1), (5, 5), (260, 2), (70, 35)])
def test_several_iterations_never_move_away(tokens: int, clusters: int) -> None:
    """Of real numbers roundings decide what is nearest; the distance must shrink all the same."""
    x = torch.randn(1, tokens, 2, 16, generator=torch.Generator().manual_seed(2))
    centroids = initial_centroids(x, clusters)
    before = float("inf")
    for _ in range(3):
        found = kmeans(x, centroids, iterations=1, kernel="triton")
        distance = 0.0
        for h in range(2):
            label = torch.repeat_interleave(torch.arange(clusters), found.counts[0, h])
            tokens_of = x[0, found.order[0, h].long(), h]
            distance += float((tokens_of - centroids[0, h, label]).square().sum())
        assert distance <= before * (1 + 1e-6)
        before, centroids = distance, found.centroids


def test_heads_that_stopped_keep_what_they_have() -> None:
    x = torch.zeros(1, 40, 2, 16)
    x[0, ::2, 0] = 100.0
    x[:, :, 1] = torch.randn(40, 16, generator=torch.Generator().manual_seed(3))
    start = x[:, :2].transpose(1, 2).float()
    many = kmeans(x, start, iterations=20, kernel="triton")
    wanted = kmeans(x, start, iterations=20, kernel="reference")
    assert torch.equal(many.order, wanted.order)
    assert torch.equal(many.counts, wanted.counts)
    assert torch.allclose(many.centroids, wanted.centroids, atol=1e-5)


@pytest.mark.slow_cases("31-1300", "31-1")
@pytest.mark.parametrize(
    ("num", "tokens"),
    with_slow(
        list(itertools.product((1, 31, 300), (1, 512, 1300))),
        [(1, 512), (31, 1), (31, 1300), (300, 512)],
    ),
)
def test_the_sort_is_stable(num: int, tokens: int) -> None:
    from multimodal_gen.kernels.kmeans.kmeans_kernel import sort_labels

    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, num + 1, (3, tokens), generator=generator, dtype=torch.int32)
    for found, wanted in zip(sort_labels(labels, num), sort_reference(labels, num), strict=True):
        assert torch.equal(found, wanted)
