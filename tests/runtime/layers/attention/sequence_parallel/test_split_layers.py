"""Sequence-parallel layers on two and four processes against one process."""

import itertools

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.runtime.distributed.groups import parallel_groups, use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import (
    UlyssesAttention,
    UlyssesAttention_VSA,
    USPAttention,
)
from multimodal_gen.runtime.layers.attention.scope import SelectionScope
from tests.helpers.inputs import make_qkv
from tests.helpers.processes import own

BATCH, SIZE = 2, 8
MESHES_OF_TWO = [Mesh(ulysses=2), Mesh(ring=2)]
MESHES_OF_FOUR = [Mesh(ulysses=4), Mesh(ring=4), Mesh(ulysses=2, ring=2)]
TEXTS = {
    "none": {},
    "prefix": {"num_replicated_prefix": 3},
    "suffix": {"num_replicated_suffix": 2},
    "kv-prefix": {"num_replicated_kv_prefix": 4},
}
# What USPAttention refuses before it looks at shapes.
ARGUMENTS = {
    "none": {},
    "count": {"num_replicated_prefix": 9},
    "lengths": {"seq_lens": [4, 4], "num_replicated_prefix": 1},
    "part": {"q_prefix": torch.zeros(BATCH, 1, 4, SIZE)},
    "exchanged": {"qkv_pre_all_to_all": True},
    "meta": {"attn_mask_meta": object()},
}


def stretches(text):
    """Return (rows in front of q, of k, rows after both) that all ranks hold."""
    front, after = text.get("num_replicated_prefix", 0), text.get("num_replicated_suffix", 0)
    return front, front + text.get("num_replicated_kv_prefix", 0), after


def key_mask(num_keys):
    keep = torch.arange(BATCH * num_keys).view(BATCH, -1) % 3 != 1
    keep[1, num_keys // 2 :] = False
    return keep


def check_usp(lengths, heads, kv_heads, text, masked, causal=False):
    """Compare outputs and gradients of this rank with those of one process."""
    front, key_front, after = stretches(text)
    total = sum(lengths)
    sizes = {"num_keys": key_front + total + after, "num_kv_heads": kv_heads}
    whole = make_qkv(BATCH, front + total + after, heads, SIZE, requires_grad=True, **sizes)
    layer = USPAttention(heads, SIZE, kv_heads, causal=causal, prefix="blocks.0.attn")
    mask = key_mask(sizes["num_keys"]) if masked else None
    with use_parallel_groups(None):
        want = layer(*whole, mask, **text)
    fronts = (front, key_front, key_front)
    local = [own(x, lengths, f, after).detach() for x, f in zip(whole, fronts, strict=True)]
    local = [x.requires_grad_() for x in local]
    local_mask = own(mask, lengths, key_front, after) if masked else None
    out = layer(*local, local_mask, **text)
    torch.testing.assert_close(out, own(want, lengths, front, after))
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(5))
    expected = torch.autograd.grad(want, whole, weight)
    # Copies of a text row share its weight, so that their gradients add up to the whole.
    share = torch.full((1, out.shape[1], 1, 1), 1.0 / len(lengths))
    share[:, front : out.shape[1] - after] = 1.0
    grads = torch.autograd.grad(out, local, own(weight, lengths, front, after) * share)
    for got, theirs, f in zip(grads, expected, fronts, strict=True):
        stop = got.shape[1] - after
        torch.testing.assert_close(got[:, f:stop], own(theirs, lengths, f, after)[:, f:stop])
        texts = [torch.cat((x[:, :f], x[:, x.shape[1] - after :]), dim=1) for x in (got, theirs)]
        torch.distributed.all_reduce(texts[0], group=parallel_groups().sequence.handle)
        torch.testing.assert_close(*texts)
    with torch.inference_mode():
        torch.testing.assert_close(layer(*local, local_mask, **text), out)


def check_ulysses(lengths, heads, kv_heads, with_text):
    whole = make_qkv(BATCH, sum(lengths), heads, SIZE, num_kv_heads=kv_heads)
    text = make_qkv(BATCH, 3, heads, SIZE, num_kv_heads=kv_heads, seed=1) if with_text else ()
    layer = UlyssesAttention(heads, SIZE, kv_heads)
    options = {} if with_text else {"seq_lens": list(lengths)}
    with use_parallel_groups(None):
        want, want_text = layer(*whole, *text)
    out, out_text = layer(*(own(x, lengths) for x in whole), *text, **options)
    torch.testing.assert_close(out, own(want, lengths))
    assert (out_text is None) == (not with_text)
    if with_text:
        torch.testing.assert_close(out_text, want_text)


def check_nan_in_padding(lengths, wants_gradient):
    """What masked tokens hold reaches no other token, not even through gradients."""
    whole = make_qkv(BATCH, sum(lengths), 4, SIZE)
    mask = key_mask(sum(lengths))
    poisoned = [x.masked_fill(~mask[..., None, None], torch.nan) for x in whole]
    layer = USPAttention(4, SIZE)
    with use_parallel_groups(None):
        want = layer(*whole, mask)
    local = [own(x, lengths).clone().requires_grad_(wants_gradient) for x in poisoned]
    out = layer(*local, own(mask, lengths))
    torch.testing.assert_close(out, own(want, lengths))
    if wants_gradient:
        for grad in torch.autograd.grad(out.sum(), local):
            assert grad.isfinite().all()


def check_causal_ring_under_a_mask(lengths):
    """What the kernels of a ring cannot do is a detour of the report, and refused under strict."""
    whole, mask = make_qkv(BATCH, sum(lengths), 4, SIZE), key_mask(sum(lengths))
    local, local_mask = [own(x, lengths) for x in whole], own(mask, lengths)
    layer = USPAttention(4, SIZE, causal=True)
    with use_parallel_groups(None):
        want = layer(*whole, mask)
    torch.testing.assert_close(layer(*local, local_mask), own(want, lengths))
    report = layer.report()
    detours = {x.selection.label: x for x in report.detours}
    found = detours["torch_sdpa (definition)"]
    assert (found.calls, report.calls) == (1, 2)  # one of them alone
    assert found.selection.reason.startswith("torch_sdpa takes no key mask in a causal ring")
    strict = USPAttention(4, SIZE, causal=True, scope=SelectionScope(strict=True))
    with pytest.raises(UnsupportedBackendError, match=r"no key mask in a causal ring.*strict"):
        strict(*local, local_mask)
    assert strict.report().calls == 0


def check_additive_mask(lengths):
    whole = make_qkv(BATCH, sum(lengths), 4, SIZE)
    bias = torch.randn(BATCH, sum(lengths), generator=torch.Generator().manual_seed(2))
    layer = USPAttention(4, SIZE)
    with use_parallel_groups(None):
        want = layer(*whole, bias)
    local = own(bias, lengths)[:, None, None]
    out = layer(*(own(x, lengths) for x in whole), local)
    torch.testing.assert_close(out, own(want, lengths))


def check_cross(lengths, key_lengths):
    q, k, v = make_qkv(BATCH, sum(lengths), 4, SIZE, num_keys=sum(key_lengths))
    layer = USPAttention(4, SIZE, is_cross_attention=True)
    with use_parallel_groups(None):
        want = layer(q, k, v)
    out = layer(own(q, lengths), own(k, key_lengths), own(v, key_lengths))
    torch.testing.assert_close(out, own(want, lengths))


def check_skip(lengths):
    whole = make_qkv(BATCH, sum(lengths), 4, SIZE)
    local = [own(x, lengths) for x in whole]
    layer, never = USPAttention(4, SIZE), USPAttention(4, SIZE, skip_sequence_parallel=True)
    with use_parallel_groups(None):
        want = layer(*local)
    assert torch.equal(layer(*local, skip_sequence_parallel_override=True), want)
    assert torch.equal(never(*local), want)


def check_dtype(lengths, dtype):
    whole = make_qkv(BATCH, sum(lengths), 4, SIZE, dtype=dtype)
    layer = USPAttention(4, SIZE)
    with use_parallel_groups(None):
        want = layer(*whole)
    out = layer(*(own(x, lengths) for x in whole))
    assert out.dtype is dtype
    limit = 2 * torch.finfo(dtype).eps * whole.value.abs().max()
    assert (out.float() - own(want, lengths).float()).abs().max() <= limit


def check_compiled(lengths):
    whole = make_qkv(BATCH, sum(lengths), 4, SIZE)
    layer = USPAttention(4, SIZE)
    text = {"num_replicated_prefix": 1}

    @torch.compile(fullgraph=True, backend="eager")
    def block(q, k, v):
        return 2 * layer(q, k, v, **text)

    local = [own(x, lengths, 1) for x in make_qkv(BATCH, sum(lengths) + 1, 4, SIZE)]
    with torch.no_grad():
        torch.testing.assert_close(block(*local), 2 * layer(*local, **text))
    assert whole.query.shape[1] == sum(lengths)


def error_of(case):
    """Return kind and text of the error of a call that is wrong on rank 1 only."""
    wrong = parallel_groups().rank == 1
    q, k, v = make_qkv(BATCH, 4, 4, SIZE)
    layer, options = USPAttention(4, SIZE), {}
    if case == "mask":
        options = {"attn_mask": None if wrong else torch.ones(BATCH, 4, dtype=torch.bool)}
    elif case == "text":
        options = {"num_replicated_prefix": 1 + wrong}
    elif case == "batch" and wrong:
        q, k, v = (x[:1] for x in (q, k, v))
    elif case == "dtype" and wrong:
        q, k, v = (x.half() for x in (q, k, v))
    elif case == "shape" and wrong:
        v = v[:, :-1]
    elif case == "mask shape":
        shape = (BATCH, 3 if wrong else 4)
        options = {"attn_mask": torch.ones(shape, dtype=torch.bool)}
    elif case == "seq_lens":
        options = {"seq_lens": [4, 5]}
    elif wrong:
        options = ARGUMENTS[case]
    try:
        layer(q, k, v, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def error_and_next(case):
    """Return the errors of a call that is wrong on rank 1 only, and of the right one after it."""
    return error_of(case), error_of("none")


def error_in_ulysses(vsa):
    wrong = parallel_groups().rank == 1
    q, k, v = make_qkv(BATCH, 4, 4, SIZE)
    layer = (UlyssesAttention_VSA if vsa else UlyssesAttention)(4, SIZE)
    try:
        layer(q, k, v, q if wrong else None)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def refused(case):
    """Return the text of the error of a call that no rank may make."""
    q, k, v = make_qkv(BATCH, 4, 4, SIZE)
    layer = USPAttention(4, SIZE)
    calls = {
        "prefix tokens": lambda: layer(q, k, v, q_prefix=q, k_prefix=k, v_prefix=v),
        "dense mask": lambda: layer(q, k, v, torch.ones(BATCH, 4, 4)),
        "few heads": lambda: USPAttention(1, SIZE)(*(x[:, :, :1] for x in (q, k, v))),
        "added mask": lambda: layer(q, k, v, torch.zeros(BATCH, 4)),
        "before": lambda: layer(q, k, v, qkv_pre_all_to_all=True),
        "gate": lambda: UlyssesAttention_VSA(4, SIZE)(q, k[:, 1:], v[:, 1:], gate_compress=q),
    }
    try:
        calls[case]()
    except Exception as error:
        return str(error)
    return None


LENGTHS = {2: [(4, 4), (5, 2)], 4: [(2, 2, 2, 2), (3, 0, 4, 1)]}
HEADS = [(4, 4), (5, 5), (6, 2), (7, 1)]


def in_turns(meshes, offset=0):
    """Return every mesh with every text, and with all heads, which take turns."""
    return [
        (mesh, *HEADS[(i + j + offset) % len(HEADS)], text)
        for i, mesh in enumerate(meshes)
        for j, text in enumerate(TEXTS)
    ]


MOST_SLOW = pytest.mark.slow_cases(
    "1 CFG x 1 ring x 4 Ulysses = 4 GPUs-suffix",
    "1 CFG x 2 ring x 2 Ulysses = 4 GPUs-suffix",
    "1 CFG x 4 ring x 1 Ulysses = 4 GPUs-kv-prefix",
    "1 CFG x 4 ring x 1 Ulysses = 4 GPUs-prefix",
)
# Every mesh with two texts, and every text with some mesh.
EVERY_TEXT = pytest.mark.parametrize(
    ("mesh", "text"),
    [
        pytest.param(mesh, text, marks=[] if (i + j) % 2 == 0 else [pytest.mark.slow])
        for i, mesh in enumerate(MESHES_OF_FOUR)
        for j, text in enumerate(TEXTS)
    ],
    ids=str,
)


@pytest.mark.parametrize(
    ("mesh", "heads", "kv_heads", "text", "masked"),
    [
        (*case, masked)
        for masked in (False, True)
        for case in in_turns(MESHES_OF_TWO, offset=2 * masked)
    ],
    ids=str,
)
def test_two_ranks_compute_what_one_does(two_ranks, mesh, heads, kv_heads, text, masked):
    for lengths in LENGTHS[2]:
        two_ranks.run(mesh, check_usp, lengths, heads, kv_heads, TEXTS[text], masked)


@pytest.mark.slow_cases(
    "1 CFG x 1 ring x 4 Ulysses = 4 GPUs-5-5-prefix",
    "1 CFG x 1 ring x 4 Ulysses = 4 GPUs-7-1-kv-prefix",
    "1 CFG x 2 ring x 2 Ulysses = 4 GPUs-4-4-suffix",
    "1 CFG x 2 ring x 2 Ulysses = 4 GPUs-5-5-kv-prefix",
    "1 CFG x 2 ring x 2 Ulysses = 4 GPUs-7-1-prefix",
    "1 CFG x 4 ring x 1 Ulysses = 4 GPUs-4-4-kv-prefix",
    "1 CFG x 4 ring x 1 Ulysses = 4 GPUs-6-2-prefix",
    "1 CFG x 4 ring x 1 Ulysses = 4 GPUs-7-1-suffix",
)
@pytest.mark.parametrize(("mesh", "heads", "kv_heads", "text"), in_turns(MESHES_OF_FOUR), ids=str)
def test_four_ranks_compute_what_one_does(four_ranks, mesh, heads, kv_heads, text):
    for lengths, masked in zip(LENGTHS[4], (True, False), strict=True):
        four_ranks.run(mesh, check_usp, lengths, heads, kv_heads, TEXTS[text], masked)
    four_ranks.run(mesh, check_usp, LENGTHS[4][1], heads, kv_heads, TEXTS[text], True)


@MOST_SLOW
@EVERY_TEXT
def test_a_group_of_ranks_may_have_no_tokens(four_ranks, mesh, text):
    for lengths, masked in itertools.product([(0, 0, 3, 1), (3, 1, 0, 0)], (False, True)):
        four_ranks.run(mesh, check_usp, lengths, 6, 2, TEXTS[text], masked)


@pytest.mark.parametrize("mesh", MESHES_OF_TWO, ids=str)
@pytest.mark.parametrize(
    ("lengths", "key_lengths"), [((0, 0), (3, 1)), ((3, 1), (0, 0)), ((0, 0), (0, 0))]
)
def test_there_may_be_no_queries_or_no_keys(two_ranks, mesh, lengths, key_lengths):
    two_ranks.run(mesh, check_cross, lengths, key_lengths)


@MOST_SLOW
@EVERY_TEXT
def test_causality_holds_over_all_ranks(four_ranks, mesh, text):
    for lengths, masked in itertools.product(LENGTHS[4], (False, True)):
        four_ranks.run(mesh, check_usp, lengths, 6, 2, TEXTS[text], masked, True)


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize("mesh", MESHES_OF_FOUR, ids=str)
def test_ulysses_attention_joins_text_at_the_end(four_ranks, mesh, with_text):
    for lengths, (heads, kv_heads) in itertools.product(LENGTHS[4], HEADS[1:3]):
        four_ranks.run(mesh, check_ulysses, lengths, heads, kv_heads, with_text)


@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("mesh", MESHES_OF_TWO, ids=str)
def test_what_padding_holds_has_no_influence(two_ranks, mesh, wants_gradient):
    two_ranks.run(mesh, check_nan_in_padding, (5, 3), wants_gradient)


def test_a_causal_ring_under_a_mask_is_reported(two_ranks):
    two_ranks.run(Mesh(ring=2), check_causal_ring_under_a_mask, (4, 4))


def test_masks_that_are_added_are_gathered_too(two_ranks):
    two_ranks.run(Mesh(ulysses=2), check_additive_mask, (5, 3))


@pytest.mark.parametrize("mesh", MESHES_OF_TWO, ids=str)
def test_keys_of_another_sequence_may_be_split_otherwise(two_ranks, mesh):
    two_ranks.run(mesh, check_cross, (5, 3), (2, 4))


@pytest.mark.parametrize("mesh", MESHES_OF_TWO, ids=str)
def test_a_layer_that_skips_attends_to_its_own_tokens(two_ranks, mesh):
    two_ranks.run(mesh, check_skip, (5, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mesh", MESHES_OF_TWO, ids=str)
def test_half_precision_stays_half_precision(two_ranks, mesh, dtype):
    two_ranks.run(mesh, check_dtype, (5, 3), dtype)


@pytest.mark.slow_cases("1 CFG x 1 ring x 2 Ulysses = 2 GPUs")
@pytest.mark.parametrize("mesh", MESHES_OF_TWO, ids=str)
def test_a_compiled_block_is_one_graph(two_ranks, mesh):
    two_ranks.run(mesh, check_compiled, (3, 3))


@pytest.mark.parametrize("mesh", MESHES_OF_TWO, ids=str)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("mask", "attn_mask must be the same on all ranks in USPAttention, got 2-D torch.bool on"),
        ("text", "replicated tokens must be the same on all ranks in USPAttention, got (1, 0, 0)"),
        ("batch", "batch size must be the same on all ranks in USPAttention, got 2 on rank 0, 1"),
        ("dtype", "dtype must be the same on all ranks in USPAttention, got torch.float32, "),
        ("seq_lens", "seq_lens must hold the tokens of each rank, [4, 4], got [4, 5]"),
    ],
)
def test_ranks_that_disagree_all_raise(two_ranks, mesh, case, message):
    for kind, text in two_ranks.run(mesh, error_of, case):
        assert kind == "UsageError"
        assert text.startswith(message)


def check_told(told, own_error, message, layer="USPAttention"):
    """Raise AssertionError unless rank 1 refuses a call, and tells the other."""
    assert own_error[0] == "UsageError"
    assert own_error[1].startswith(message)
    assert told[0] == "RankError"
    assert told[1].startswith(f"rank 1 cannot run {layer}: {message}")


@pytest.mark.parametrize("mesh", MESHES_OF_TWO, ids=str)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("shape", "q, k and v must be [B, Sq, H, D], [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv]"),
        ("mask shape", "attn_mask must be [B, Sk] = [2, 4] or [B, 1, 1, Sk], the part of this"),
    ],
)
def test_a_call_that_one_rank_refuses_fails_everywhere(two_ranks, mesh, case, message):
    check_told(*two_ranks.run(mesh, error_of, case), message)


@pytest.mark.parametrize("mesh", MESHES_OF_TWO, ids=str)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("count", "num_replicated_prefix must be in [0, 4], got 9"),
        ("lengths", "seq_lens must not be combined with masks or replicated tokens"),
        ("part", "q_prefix, k_prefix and v_prefix must be given together, missing"),
        ("exchanged", "qkv_pre_all_to_all must be False where tokens are"),
        ("meta", "attn_mask_meta must be what build_varlen_mask_meta returns"),
    ],
)
def test_arguments_that_one_rank_refuses_fail_everywhere(two_ranks, mesh, case, message):
    (told, first_next), (own_error, second_next) = two_ranks.run(mesh, error_and_next, case)
    check_told(told, own_error, message)
    assert (first_next, second_next) == (None, None)


@pytest.mark.parametrize(
    ("vsa", "message"),
    [
        (False, "replicated_q, replicated_k and replicated_v must be given together, missing"),
        (True, "replicated_q, replicated_k and replicated_v must be None in UlyssesAttention_VSA"),
    ],
)
def test_text_that_one_rank_of_ulysses_refuses_fails_everywhere(two_ranks, vsa, message):
    layer = f"UlyssesAttention{'_VSA' * vsa}"
    check_told(*two_ranks.run(Mesh(ulysses=2), error_in_ulysses, vsa), message, layer)


@pytest.mark.parametrize(
    ("mesh", "case", "message"),
    [
        (MESHES_OF_TWO[0], "prefix tokens", "q_prefix, k_prefix and v_prefix must be None where"),
        (MESHES_OF_TWO[0], "dense mask", "attn_mask must be [B, Sk] = [2, 4] or [B, 1, 1, Sk]"),
        (MESHES_OF_TWO[0], "few heads", "a layer must have a head for each of the 2 ranks"),
        (MESHES_OF_TWO[1], "added mask", "attn_mask must be bool or integer in a ring, got torch"),
        (MESHES_OF_TWO[0], "before", "qkv_pre_all_to_all must be False where tokens are split"),
        (MESHES_OF_TWO[0], "gate", "the gate must be None unless the backend is video_sparse_attn"),
    ],
)
def test_what_cannot_be_split_is_refused(two_ranks, mesh, case, message):
    for text in two_ranks.run(mesh, refused, case):
        assert text.startswith(message)


def test_a_wrong_result_is_noticed(two_ranks):
    with pytest.raises(AssertionError, match=r"rank 0: .*Traceback"):
        two_ranks.run(Mesh(ulysses=2), check_usp, (4, 4), 4, 3, {}, False)
    assert issubclass(UsageError, ValueError)
