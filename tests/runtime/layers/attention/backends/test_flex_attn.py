import math
from itertools import cycle

import pytest
import torch

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.flex_attn import (
    FlexAttentionBackend,
    FlexAttentionImpl,
    _causal_blocks,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selector import (
    global_force_attn_backend_context_manager,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.tolerance import assert_within_error_budget

SCALE = 0.2


# The unfused form traces every new shape, about a second each: one call per property.
FEW = ["24x24-kv4-full", "24x24-kv2-causal", "16x40-kv1-causal", "40x16-kv2-causal"]


@pytest.mark.slow_cases("16x40-kv1-causal-torch.float32", "40x16-kv2-causal-torch.bfloat16")
@pytest.mark.parametrize(
    ("call", "dtype"),
    list(zip(FEW, cycle((torch.float32, torch.bfloat16)), strict=False)),
    indirect=["call"],
    ids=str,
)
def test_it_honours_calls(call, assert_honours, dtype):
    assert_honours(FlexAttentionBackend, "unfused", call, dtype=dtype)


@pytest.mark.slow_cases("17-16x40-kv2-full")
@pytest.mark.parametrize("call", ["16x40-kv2-full"], indirect=True)
@pytest.mark.parametrize("head_size", [17, 40, 80])
def test_it_takes_any_head_size(call, assert_honours, head_size):
    assert_honours(FlexAttentionBackend, "unfused", call, head_size=head_size)


@pytest.mark.slow_cases(
    "(1, 1, 20, 28)-False-False",
    "(2, 1, 1, 28)-False-True",
    "(2, 1, 1, 28)-True-False",
    "(2, 4, 20, 28)-False-False",
)
@pytest.mark.parametrize(
    ("shape", "causal", "additive"),
    [
        pytest.param(
            *(shape, causal, additive),
            marks=[] if (i + causal + additive) % 2 == 0 else [pytest.mark.slow],
        )
        for i, shape in enumerate([(2, 4, 20, 28), (2, 1, 1, 28), (1, 1, 20, 28)])
        for causal in (False, True)
        for additive in (False, True)
    ],
    ids=str,
)
def test_masks_add_to_scale_and_causality(shape, causal, additive):
    q, k, v = make_qkv(2, 20, 4, 32, num_keys=28, num_kv_heads=2)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[-1, -1, -1] = False
    if additive:
        mask = torch.zeros(shape).masked_fill(~mask, -math.inf)
    out = FlexAttentionImpl(4, 32, SCALE, causal, 2).forward(q, k, v, attn_mask=mask)
    assert_within_error_budget(out, q, k, v, scale=SCALE, causal=causal, mask=mask)


@pytest.mark.parametrize("lengths", [(300, 300), (130, 400), (1, 129), (256, 256)], ids=str)
def test_the_causal_block_mask_covers_exactly_what_causality_allows(lengths):
    num_queries, num_keys = lengths
    blocks = _causal_blocks(num_queries, num_keys, torch.device("cpu"))
    covered = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    rows = torch.arange(num_queries)[:, None]
    columns = torch.arange(num_keys)[None, :]
    allowed = columns <= rows + num_keys - num_queries
    for counts, indices, full in (
        (blocks.kv_num_blocks, blocks.kv_indices, False),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, True),
    ):
        for row in range(counts.shape[-1]):
            for column in indices[0, 0, row, : int(counts[0, 0, row])].tolist():
                here = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
                assert not covered[here].any(), "no block may be listed twice"
                assert not full or allowed[here].all(), "a full block must be allowed entirely"
                covered[here] = allowed[here]
    assert torch.equal(covered, allowed)


def test_the_unfused_form_warns_nobody():
    q, k, v = make_qkv(1, 12, 2, 32)
    out = FlexAttentionImpl(2, 32, SCALE).forward(q, k, v)  # warnings are errors here
    assert out.shape == q.shape


def test_it_joins_a_graph_that_is_being_compiled():
    impl = FlexAttentionImpl(4, 32, SCALE, num_kv_heads=2)
    q, k, v = make_qkv(1, 12, 4, 32, num_kv_heads=2)
    compiled = torch.compile(impl.forward, backend="eager", fullgraph=True)
    assert_within_error_budget(compiled(q, k, v), q, k, v, scale=SCALE)


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("causal", [False, True])
def test_the_first_call_of_a_compiled_model_runs_as_the_next_ones_do(causal):
    torch._dynamo.reset()
    _causal_blocks.cache_clear()
    layer = LocalAttention(4, 32, num_kv_heads=2, causal=causal)
    q, k, v = make_qkv(1, 12, 4, 32, num_kv_heads=2)
    compiled = torch.compile(lambda *x: layer(*x) * 2, backend="aot_eager", fullgraph=True)
    with global_force_attn_backend_context_manager(AttentionBackendEnum.FLEX_ATTN):
        first = compiled(q, k, v)
        assert torch.equal(first, compiled(q, k, v))
        assert layer.backend is AttentionBackendEnum.FLEX_ATTN
    assert_within_error_budget(first / 2, q, k, v, scale=32**-0.5, causal=causal)


def test_the_cpu_form_declares_no_backward_and_refuses_it(request_on):
    assert FlexAttentionBackend.unsupported_reasons(
        request_on(PlatformEnum.CPU, needs=(Feature.BACKWARD,))
    ) == ("does not support backward",)
    q, k, v = make_qkv(1, 12, 2, 32, requires_grad=True)
    if not torch.__version__.startswith("2.9."):  # which takes such tensors
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            FlexAttentionImpl(2, 32, SCALE).forward(q, k, v)
