"""The authors' attention, played by one of our own, and the calls it is not given."""

import sys
from types import ModuleType

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.cluster_attention.api import cluster_attention
from multimodal_gen.kernels.cluster_attention.plan import Groups
from multimodal_gen.runtime.layers.attention.sparse.methods.svg2_upstream import attend_upstream
from multimodal_gen.runtime.layers.attention.sparse.router import GroupMap
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, SparseCall
from tests.helpers.inputs import random

TOKENS, HEADS, SIZE = 60, 2, 16
SCALE = SIZE**-0.5


def side(counts: list[int], seed: int) -> Groups:
    sizes = torch.tensor(counts, dtype=torch.int32).expand(1, HEADS, -1)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(TOKENS, generator=generator).int() for _ in range(HEADS)]
    starts = (sizes.cumsum(2) - sizes).int()
    return Groups(order=torch.stack(orders).unsqueeze(0), starts=starts, counts=sizes)


def make_clusters() -> GroupMap:
    cluster_mask = torch.tensor([[True, False, True], [False, True, True]]).expand(1, HEADS, 2, 3)
    return GroupMap(
        queries=side([25, 35], 1), keys=side([10, 30, 20], 2), cluster_mask=cluster_mask
    )


def make_call(query, key, value, *, scale: float = SCALE, **options) -> SparseCall:
    layout = SequenceLayout(
        grid=(1, 1, TOKENS), start=0, num_queries=query.shape[1], num_keys=key.shape[1]
    )
    return SparseCall(query=query, key=key, value=value, layout=layout, scale=scale, **options)


@pytest.fixture
def svg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a stand-in for the package that computes what the package is documented to."""

    def attend(q, k, v, block_mask_map, block_row_sz, block_col_sz, is_cpu=True):
        assert not is_cpu
        masks = [
            cluster_mask.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            for cluster_mask, rows, columns in zip(
                block_mask_map[0], block_row_sz[0], block_col_sz[0], strict=True
            )
        ]
        mask = torch.stack(masks).unsqueeze(0)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    module = ModuleType("svg.kmeans_utils")
    module.dynamic_block_sparse_fwd_flashinfer = attend
    monkeypatch.setitem(sys.modules, "svg", ModuleType("svg"))
    monkeypatch.setitem(sys.modules, "svg.kmeans_utils", module)


def test_the_package_gets_tokens_in_cluster_order_and_gives_them_back(svg: None) -> None:
    q, k, v = (random(1, TOKENS, HEADS, SIZE, seed=seed) for seed in range(3))
    call, clusters = make_call(q, k, v), make_clusters()
    wanted = torch.empty_like(q)
    found = attend_upstream(call, clusters, "a method")
    cluster_attention(
        q, k, v, clusters.queries, clusters.keys, clusters.cluster_mask, wanted, scale=SCALE
    )
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"text": 3}, "needs sequences without text, got 3 text tokens"),
        ({"kv_heads": 1}, "needs as many key heads as the 2, got 1"),
        ({"masked": True}, "has no key mask, and keys are masked"),
        ({"scale": 1.0}, "needs the inverse root of the head size as scale, got 1 for 16"),
    ],
)
def test_calls_that_do_not_fit_the_package_are_refused(
    changes: dict[str, object], reason: str
) -> None:
    tokens = TOKENS + int(changes.get("text", 0))
    q = random(1, TOKENS, HEADS, SIZE)
    k = random(1, tokens, int(changes.get("kv_heads", HEADS)), SIZE)
    cluster_mask = torch.ones(1, tokens, dtype=torch.bool) if changes.get("masked") else None
    scale = float(changes.get("scale", SCALE))
    call = make_call(q, k, k, mask=cluster_mask, scale=scale)
    message = f"kernel svg of a method cannot serve this call: {reason}; use"
    with pytest.raises(UnsupportedBackendError, match=message):
        attend_upstream(call, make_clusters(), "a method")
