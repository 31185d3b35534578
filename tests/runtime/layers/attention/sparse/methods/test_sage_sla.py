"""8-bit Sparse-Linear Attention through the layer, against Sparse-Linear Attention in 16 bits."""

import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.reference import attention_reference
from multimodal_gen.runtime.layers.attention.backends import sage_attn as _spas_sage
from multimodal_gen.runtime.layers.attention.request import AttentionRequest
from multimodal_gen.runtime.layers.attention.sparse.methods.sla import (
    SageSLABackend,
    SageSLAConfig,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from multimodal_gen.settings import read_mapping
from tests.helpers.fakes import FakeDevice, simulated_environment
from tests.helpers.inputs import QKV
from tests.helpers.sparse import SparseMethod, block_inputs, projection, run_sparse, text_places
from tests.helpers.tolerance import (
    QUANTISED_MAX_RELATIVE_L1,
    QUANTISED_MIN_COSINE,
    assert_within_error_budget,
)

SAGE = SparseMethod(backend=AttentionBackendEnum.SAGE_SLA_ATTN, head_size=64)
EXACT = SparseMethod(backend=AttentionBackendEnum.SLA_ATTN, head_size=64)
HEADS, HEAD_SIZE = SAGE.heads, SAGE.head_size
WHOLE, RAGGED = (4, 8, 16), (5, 7, 13)
TEXTS = text_places(RAGGED, 70)
run = run_sparse


def layer(method=SAGE, *, projection=None, **options):
    attention = method.layer(**options)
    attention.set_projection(projection)
    return attention


def inputs(grid, *, dtype=torch.float32, **options):
    """Return inputs whose blocks have means of their own, so that scores differ by much."""
    qkv = SAGE.inputs(grid, **options)
    blocks = [range(i, i + 16) for i in range(0, qkv.key.shape[1] - 15, 16)]
    return QKV(*(x.to(dtype) for x in block_inputs(qkv, blocks)))


def reasons_on(capability, *, head_size=64, **parameters):
    """Return what a GPU with Triton lacks."""
    packages = frozenset({("triton", "triton", "3.6.0")})
    device = FakeDevice(platform=PlatformEnum.CUDA, capability=capability, packages=packages)
    request = AttentionRequest(
        environment=simulated_environment(device),
        head_size=head_size,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        dtype=torch.bfloat16,
    )
    return SageSLABackend.unsupported_reasons(request, SAGE.config(**parameters))


def assert_close(out, exact):
    out, exact = out.double(), exact.double()
    cosine = torch.nn.functional.cosine_similarity(out.flatten(), exact.flatten(), dim=0)
    assert cosine >= QUANTISED_MIN_COSINE
    assert (out - exact).abs().sum() <= QUANTISED_MAX_RELATIVE_L1 * exact.abs().sum()
    assert not torch.equal(out, exact), "nothing was quantised"


@pytest.mark.parametrize("where", TEXTS)
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_the_same_blocks_are_attended_to_in_8_bits(where, ratio):
    text = TEXTS[where]
    qkv = inputs(RAGGED, text=text, kv_heads=2)
    options = {"kv_heads": 2, "topk_ratio": ratio}
    attention = layer(**options)
    exact = layer(EXACT, **options)
    assert_close(run(attention, qkv, RAGGED, text=text), run(exact, qkv, RAGGED, text=text))
    assert attention.attn_impl.facts().densities == exact.attn_impl.facts().densities


@pytest.mark.parametrize("sizes", [(64, 64), (64, 128), (128, 128)], ids=str)
def test_every_block_size_is_served(sizes):
    qkv = inputs(WHOLE)
    options = {"topk_ratio": 0.5, "BLKQ": sizes[0], "BLKK": sizes[1]}
    assert_close(run(layer(**options), qkv, WHOLE), run(layer(EXACT, **options), qkv, WHOLE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_keep_their_dtype(dtype):
    qkv = inputs(WHOLE, dtype=dtype)
    options = {"dtype": dtype, "topk_ratio": 0.5, "use_bf16": dtype is torch.bfloat16}
    out = run(layer(**options), qkv, WHOLE)
    assert out.dtype == dtype
    assert_close(out, run(layer(EXACT, **options), qkv, WHOLE))


@pytest.mark.parametrize("branch", ["all", "unselected"])
def test_the_linear_branch_is_that_of_sla(branch):
    qkv = inputs(RAGGED)
    options = {"topk_ratio": 0.3, "linear_branch": branch}
    with_branch = {**options, "projection": projection(HEAD_SIZE)}
    added = run(layer(**with_branch), qkv, RAGGED) - run(layer(**options), qkv, RAGGED)
    exact = run(layer(EXACT, **with_branch), qkv, RAGGED) - run(
        layer(EXACT, **options), qkv, RAGGED
    )
    torch.testing.assert_close(added, exact, rtol=1e-4, atol=1e-5)
    assert exact.abs().max() > 0.1


def test_masked_keys_have_no_influence_and_may_hold_anything():
    text = TEXTS["text last"]
    query, key, value = inputs(RAGGED, text=text)
    keep = torch.ones(2, key.shape[1], dtype=torch.bool)
    keep[0, -40:] = False
    keep[1, 100:110] = False
    rows = keep[..., None, None]
    dirty = QKV(*(x.masked_fill(~rows, torch.nan) for x in (query, key, value)))
    options = {"topk_ratio": 0.3}
    out = run(layer(**options), dirty, RAGGED, text=text, attn_mask=keep)
    assert_close(out, run(layer(EXACT, **options), dirty, RAGGED, text=text, attn_mask=keep))


def test_samples_do_not_mix():
    qkv = inputs(WHOLE)
    both = run(layer(topk_ratio=0.3), qkv, WHOLE)
    for i in range(2):
        alone = run(layer(topk_ratio=0.3), QKV(*(x[i : i + 1] for x in qkv)), WHOLE)
        torch.testing.assert_close(both[i : i + 1], alone)


def test_gradients_are_refused():
    qkv = QKV(*(x.requires_grad_() for x in inputs(WHOLE)))
    with pytest.raises(UsageError, match=r"sage_sla_attn .* must not get inputs that require grad"):
        run(layer(topk_ratio=0.3), qkv, WHOLE)


@pytest.mark.parametrize(
    ("head_size", "reason"),
    [(64, None), (128, None), (256, "needs head size <= 128, multiple of 8, got 256")],
)
def test_head_sizes_it_does_not_support_are_refused(head_size, reason):
    found = reasons_on((9, 0), head_size=head_size, kernel="gluon")
    assert found == ((reason,) if reason else ())


def test_gpus_before_sm80_take_none_of_its_kernels():
    wanted = ("needs compute capability >= 8.0, this GPU has 7.5",)
    assert reasons_on((7, 5), kernel="triton") == wanted


def test_e4m3_values_are_asked_for_by_name():
    qkv = inputs(WHOLE)
    finer = run(layer(topk_ratio=0.5), qkv, WHOLE)
    out = run(layer(topk_ratio=0.5, values="e4m3"), qkv, WHOLE)
    error = (out - finer).norm() / finer.norm()
    assert 0.01 < error < 0.06, "an e4m3 number errs by 2 % on average, up to 6 %"


@pytest.mark.parametrize("kernel", ["auto", "triton", "reference"])
def test_gpus_without_e4m3_leave_the_reference_to_those_who_name_it(kernel):
    reason = "needs compute capability >= 8.9 for e4m3 values, this GPU has 8.0; use values=16-bit"
    found = reasons_on((8, 0), kernel=kernel, values="e4m3")
    assert found == (() if kernel == "reference" else (reason,))


def test_spargeattn_takes_no_e4m3_values():
    wanted = "`values` of sage_sla_attn must be 16-bit with `kernel` spas_sage_attn"
    with pytest.raises(ConfigError, match=wanted):
        by_spas(values="e4m3")
    left = SageSLABackend.variants_for(SageSLAConfig(values="e4m3"))
    assert [variant.name for variant in left] == ["gluon", "triton", "reference"]


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ConfigError, match=r"kernel.*must be one of"):
        SAGE.config(kernel="cutlass")


@pytest.fixture
def spas(monkeypatch):
    """Stand in for SpargeAttn: exact attention over its mask, in the blocks of a GPU but SM90."""
    calls = []

    def block_sparse_sage2_attn_cuda(q, k, v, mask_id, scale, pvthreshd, tensor_layout):
        assert tensor_layout == "HND"
        assert pvthreshd >= 1e6, "products would be skipped"
        assert mask_id.dtype == torch.int8
        assert all(x.is_contiguous() for x in (q, k, v, mask_id))
        rows, keys = (-(-q.shape[2] // 128), -(-k.shape[2] // 64))
        assert tuple(mask_id.shape) == (*q.shape[:2], rows, keys)
        calls.append(mask_id)
        mask = mask_id.bool().repeat_interleave(128, 2).repeat_interleave(64, 3)
        scores = (q.double() @ k.double().mT) * scale
        scores = scores.masked_fill(~mask[:, :, : q.shape[2], : k.shape[2]], -math.inf)
        return (scores.softmax(-1) @ v.double()).to(q.dtype)

    module = ModuleType("spas_sage_attn")
    module.block_sparse_sage2_attn_cuda = block_sparse_sage2_attn_cuda
    monkeypatch.setitem(sys.modules, "spas_sage_attn", module)
    return calls


def by_spas(kv_heads=None, **parameters):
    config = SAGE.config(kernel="spas_sage_attn", **parameters)
    cls = SageSLABackend.get_impl_cls()
    return cls(
        HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, False, kv_heads, config=config, variant="spas_sage_attn"
    )


def run_impl(impl, qkv, grid, text=None):
    with set_forward_context(0, latent_grid=grid, text_span=text) as context:
        return impl.forward(*qkv, context)


def test_the_authors_kernel_gets_the_selected_blocks(spas):
    qkv = inputs(RAGGED, dtype=torch.bfloat16)
    out = run_impl(by_spas(topk_ratio=0.3), qkv, RAGGED)
    exact = run(layer(EXACT, dtype=torch.bfloat16, topk_ratio=0.3), qkv, RAGGED)
    torch.testing.assert_close(out, exact, rtol=2e-2, atol=2e-2)
    assert spas[0].sum(-1).unique().tolist() == [2]  # int(0.3 * 8) of 8 blocks


@pytest.mark.parametrize(
    ("parameters", "kv_heads", "grid", "text", "reason"),
    [
        ({}, None, RAGGED, TEXTS["text last"], "needs sequences of video alone"),
        ({}, 2, WHOLE, None, "needs as many key heads as the 4, got 2"),
        ({}, None, (2, 4, 8), None, "needs at least 128 tokens, got 64"),
        ({"BLKQ": 64}, None, WHOLE, None, "needs BLKQ=128 and BLKK=64 on this GPU, got 64 and 64"),
    ],
    ids=["text", "grouped heads", "short", "block sizes"],
)
def test_what_the_authors_kernel_cannot_do_is_refused_in_one_line(
    spas, parameters, kv_heads, grid, text, reason
):
    qkv = inputs(grid, text=text, kv_heads=kv_heads or HEADS)
    with pytest.raises(UnsupportedBackendError, match=reason) as caught:
        run_impl(by_spas(kv_heads, **parameters), qkv, grid, text)
    assert "\n" not in str(caught.value)
    assert spas == []


def test_the_masks_of_sm90_have_blocks_of_their_own():
    assert _spas_sage.mask_blocks((9, 0)) == (64, 128)
    assert _spas_sage.mask_blocks((8, 9)) == (128, 64)


def test_at_ratio_one_it_is_dense_attention():
    qkv = inputs(WHOLE)
    out = run(layer(topk_ratio=1.0), qkv, WHOLE)
    assert_within_error_budget(out, *qkv, scale=HEAD_SIZE**-0.5, quantised=True)


def test_the_plan_that_is_attended_to_is_that_of_sla(monkeypatch):
    """With the engine swapped for exact attention over the same plan, the two agree."""

    def exactly(query, key, value, plan, *, scale, return_lse, kernel, values, mean):
        assert values == "16-bit"
        assert not return_lse
        assert isinstance(plan, BlockPlan)
        assert mean.shape == (key.shape[0], key.shape[2], key.shape[3])
        return attention_reference(query, key, value, plan, scale=scale)[0]

    module = "multimodal_gen.runtime.layers.attention.sparse.router.quantized_attention"
    monkeypatch.setattr(module, exactly)
    qkv = inputs(RAGGED)
    options = {"topk_ratio": 0.3, "projection": projection(HEAD_SIZE)}
    out, exact = run(layer(**options), qkv, RAGGED), run(layer(EXACT, **options), qkv, RAGGED)
    torch.testing.assert_close(out, exact)


CONFIGS = Path(__file__).parents[6] / "configs" / "attention"


def test_the_settings_of_the_checkpoints_load_and_run():
    (file,) = (CONFIGS / "sage_sla_attn").iterdir()
    raw = read_mapping(file)
    assert (file.name, raw["topk_ratio"]) == ("turbodiffusion.yaml", 0.1)
    grid = (5, 16, 16)  # 20 blocks of 64 keys
    qkv = inputs(grid, batch=1)
    attention = layer(**raw)
    assert_close(run(attention, qkv, grid), run(layer(EXACT, **raw), qkv, grid))
    assert attention.attn_impl.facts().densities == {0: 2 / 20}
