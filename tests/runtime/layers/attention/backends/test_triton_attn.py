"""The dense backend on the block-sparse engine, its logic on the engine's reference."""

from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    query_block,
)
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
)
from multimodal_gen.runtime.platforms import PlatformEnum
from tests.helpers.fakes import FakeDevice, simulated_environment
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention


def impl(*, causal: bool = False) -> TritonAttentionImpl:
    return TritonAttentionImpl(4, 32, 0.2, causal, 2, variant="reference")


def draw(num_queries: int, num_keys: int) -> tuple[torch.Tensor, ...]:
    return make_qkv(2, num_queries, 4, 32, num_keys=num_keys, num_kv_heads=2, dtype=torch.float64)


@pytest.mark.slow_cases("False-400-770", "True-400-770")
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (70, 400), (129, 77), (400, 770)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_length_is_dense_attention(queries: int, keys: int, causal: bool) -> None:
    q, k, v = draw(queries, keys)
    expected, expected_lse = reference_attention(q, k, v, scale=0.2, causal=causal)
    out, lse = impl(causal=causal).forward_lse(q, k, v)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse.double(), expected_lse)
    torch.testing.assert_close(impl(causal=causal).forward(q, k, v), expected)


def test_masked_keys_have_no_influence_whatever_the_masks_shape() -> None:
    q, k, v = draw(40, 500)
    keep = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)) < 0.4
    keep[1] = False
    for mask in (keep[:, None, None, :], keep[:1, None, None, :]):
        expected, _ = reference_attention(q, k, v, scale=0.2, mask=mask)
        torch.testing.assert_close(impl().forward(q, k, v, attn_mask=mask), expected)


def test_a_part_of_a_ring_leaves_padding_out_whatever_it_holds() -> None:
    q, k, v = draw(40, 500)
    keep = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)) < 0.4
    keep[1] = False
    expected, expected_lse = reference_attention(q, k, v, scale=0.2, mask=keep[:, None, None, :])
    k, v = (x.masked_fill(~keep[..., None, None], torch.nan) for x in (k, v))
    out, lse = impl().forward_lse(q, k, v, keep)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse.double(), expected_lse)


def test_only_the_portable_kernel_is_causal() -> None:
    causal = {v.name: Feature.CAUSAL in v.features for v in TritonAttentionBackend.variants}
    assert causal == {"gluon": False, "triton": True}


def test_a_mask_on_a_causal_implementation_is_refused_rather_than_dropped() -> None:
    q, k, v = draw(40, 50)
    with pytest.raises(UsageError, match="attn_mask must be None on causal triton_attn"):
        impl(causal=True).forward(q, k, v, attn_mask=torch.ones(2, 1, 1, 50, dtype=torch.bool))


GLUON = frozenset({("triton", "triton", "3.6.0")})


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({}, ()),
        ({"head_size": 64}, ()),
        ({"head_size": 96}, ("is the fastest at head sizes 64 and 128 only, got 96",)),
        ({"dtype": torch.float16}, ("is the fastest in bfloat16 only, got float16",)),
        (
            {"role": AttentionRole.CROSS},
            ("is the fastest in self attention only, this is cross attention",),
        ),
        (
            {"needs": frozenset({Feature.CAUSAL})},
            ("its kernel for compute capability 9.0 cannot serve this layer",),
        ),
    ],
    ids=["self attention", "head size 64", "head size 96", "fp16", "cross attention", "causal"],
)
def test_auto_takes_it_only_where_it_was_measured_to_be_fastest(
    fields: dict[str, object], reasons: tuple[str, ...]
) -> None:
    device = FakeDevice(platform=PlatformEnum.CUDA, capability=(9, 0), packages=GLUON)
    known = {"head_size": 128, "num_heads": 8, "num_kv_heads": 8, "dtype": torch.bfloat16}
    environment = simulated_environment(device)
    request = AttentionRequest(environment=environment, **(known | fields))
    assert TritonAttentionBackend.reasons_against_auto(request) == reasons


@pytest.mark.parametrize(
    ("queries", "heads", "rows"),
    [
        (64, 24, 64),
        (100, 24, 128),
        (256, 24, 128),
        (1024, 24, 128),
        (1024, 64, 384),
        (2048, 24, 384),
        (4608, 24, 384),
    ],
)
def test_blocks_of_queries_fill_the_gpu_evenly(
    queries: int, heads: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What took the least time of both on an H200, which has 132 multiprocessors."""
    found = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert query_block.__wrapped__(queries, heads, torch.device("cuda", 0)) == rows
    assert query_block(queries, heads, torch.device("cpu")) == (rows if queries <= 128 else 384)
