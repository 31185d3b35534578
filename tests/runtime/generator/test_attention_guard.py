"""Layers that 8 bits, or a sparse method, cannot serve are found, and served exactly."""

import copy
import warnings
from itertools import count
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from multimodal_gen.errors import ConfigError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.generator import attention_guard
from multimodal_gen.runtime.generator.attention_check import sampled
from multimodal_gen.runtime.generator.attention_guard import (
    EVERY,
    AttentionGuard,
    again_unless,
    dense_unless,
)
from multimodal_gen.runtime.guard_bounds import GuardBounds, parse_guard_bounds
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.causal_cache import CacheSize, CausalCache
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.managers.forward_context import set_forward_context

HEADS, SIZE, GRID = 2, 64, (3, 8, 8)
TOKENS = 192
TILES = {"window": [1, 1, 1], "tile_size": [1, 4, 4], "skip_time_steps": 0}
TENSORS = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype: torch.dtype = torch.bfloat16) -> TENSORS:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, HEADS, SIZE, generator=generator).to(dtype) for _ in range(3))
    return q, k, v


def beyond_the_range() -> TENSORS:
    """Return inputs whose scores are in the thousands, so that their steps of 8 bits are many.

    Every other key differs from the one before it by about as much: many rows take the wrong one.
    """
    q, k, v = inputs()
    k[:, 1::2] = k[:, ::2] + 0.02 * k[:, 1::2]
    return 60 * q, 60 * k, v


def one_large_channel() -> TENSORS:
    """Return inputs one of whose channels is a thousand times the rest, in the queries alone.

    All of the others round to zero.
    """
    q, k, v = inputs()
    q[..., 0] *= 1000
    k[..., 0] = 0.001 * k[..., 0]
    return q, k, v


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def error(out: torch.Tensor, x: TENSORS) -> float:
    exact = truth(*x)
    return float((out.double() - exact).norm() / exact.norm())


def layers(count: int, guard: AttentionGuard, **asked: Any) -> list[LocalAttention]:
    found = []
    for index in range(count):
        site = LayerSite(
            name=f"blocks.{index}", component="transformer", layer=index, num_layers=count
        )
        layer = LocalAttention(
            HEADS, SIZE, compute_dtype=torch.bfloat16, site=site, scope=scope_from(**asked)
        )
        layer.guard = guard
        found.append(layer)
    return found


def step(
    guard: AttentionGuard,
    blocks: list[LocalAttention],
    index: int,
    given: list[TENSORS],
    **known: Any,
) -> list[torch.Tensor]:
    """Return what layers give in one step, as a denoiser call of it computes them."""
    guard.settle()
    with set_forward_context(index, latent_grid=GRID, request_id="one", **known):
        return [layer(*x) for layer, x in zip(blocks, given, strict=True)]


def summary(guard: AttentionGuard, blocks: list[LocalAttention]) -> str:
    layers = tuple(layer.report() for layer in blocks)
    return AttentionReport(layers=layers, guard=guard.report()).summary()


@pytest.mark.parametrize("hard", [beyond_the_range, one_large_channel])
def test_a_layer_that_8_bits_cannot_serve_is_saved(eight_bits: None, hard: Any) -> None:
    guard = AttentionGuard(GuardBounds())
    blocks = layers(2, guard, attention_backend="sage_attn")
    given = [inputs(), hard()]
    errors = [
        [error(out, x) for out, x in zip(step(guard, blocks, i, given), given, strict=True)]
        for i in range(5)
    ]
    easy, wrong = zip(*errors, strict=True)
    assert max(easy) < 0.05
    (miss,) = guard.report().missed
    assert (miss.layer, miss.dense) == (1, False)
    assert miss.error is not None
    assert miss.error > 0.05
    assert min(wrong[: miss.step + 1]) > 0.05
    assert max(wrong[miss.step + 1 :]) < 0.01
    assert miss.step < 2, "both layers had a turn by then"
    text = summary(guard, blocks)
    assert f"layer 1 (blocks.1) had an error of {miss.error:.3g}, above 0.05, in step" in text
    assert "in 16 bits from its next call on" in text
    assert "it missed the bound of the attention guard" in text


def test_the_second_call_of_a_step_is_exact_too(eight_bits: None) -> None:
    guard = AttentionGuard(GuardBounds())
    blocks, hard = layers(1, guard, attention_backend="sage_attn"), one_large_channel()
    outs = [step(guard, blocks, 0, [hard])[0] for _ in range(2)]
    assert error(outs[0], hard) > 0.05
    assert error(outs[1], hard) < 0.01


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Keep which layers are compared, in order."""
    found: list[int | None] = []

    def keep(layer: Any, *given: Any) -> Any:
        found.append(layer.site.layer)
        return sampled(layer, *given)

    monkeypatch.setattr(attention_guard, "sampled", keep)
    return found


@pytest.mark.parametrize("number", [1, 2, 6, 17, 40])
def test_layers_take_turns_in_both_branches_whatever_the_step_is(
    number: int, eight_bits: None, compared: list[int | None]
) -> None:
    guard = AttentionGuard(GuardBounds(quantized=10.0))
    blocks = layers(number, guard, attention_backend="sage_attn")
    given = [tuple(x[:, :32] for x in inputs())] * number
    every = min(number | 1, EVERY)
    of_branches: list[list[int | None]] = [[], []]
    for call in range(2 * every):  # at the same step, as a model outside of a pipeline may be
        compared.clear()
        step(guard, blocks, 0, given)
        assert len(compared) <= -(-number // every)
        of_branches[call % 2] += compared
    assert [sorted(found) for found in of_branches] == [list(range(number))] * 2


def test_layers_without_a_turn_are_told_and_have_theirs_in_the_next_generation(
    eight_bits: None, compared: list[int | None]
) -> None:
    first = AttentionGuard(GuardBounds())
    blocks = layers(4, first, attention_backend="sage_attn")
    for index in range(2):
        step(first, blocks, index, [inputs()] * 4)
    assert compared == [0, 1]
    assert first.report().waiting == (("transformer", "blocks.2"), ("transformer", "blocks.3"))
    text = "guard: 2 layers had no turn yet to be compared, the first is transformer (blocks.2)"
    assert text in summary(first, blocks)
    second = AttentionGuard(GuardBounds(), before=first)
    for layer in blocks:
        layer.guard = second
    for index in range(2):
        step(second, blocks, index, [inputs()] * 4)
    assert compared == [0, 1, 2, 3]
    assert second.report().waiting == ()
    assert (second.report().calls, second.report().tested) == (2, 8)


def test_what_missed_in_a_generation_is_exact_in_the_next_from_its_first_call_on(
    eight_bits: None,
) -> None:
    hard, guard = one_large_channel(), AttentionGuard(GuardBounds())
    (layer,) = blocks = layers(1, guard, attention_backend="sage_attn")
    step(guard, blocks, 0, [hard])  # whose error nobody has read
    layer.guard = guard = AttentionGuard(GuardBounds(), before=guard)
    (out,) = step(guard, blocks, 0, [hard])
    assert error(out, hard) < 0.01
    assert [miss.layer for miss in guard.report().missed] == [0]


@pytest.mark.parametrize("bad_call", [0, 1])
@pytest.mark.parametrize("bad", [0, 5])
def test_the_layer_that_overflows_is_saved_and_named_whosever_turn_it_is(
    bad: int, bad_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, numbers = AttentionGuard(GuardBounds()), count(0)
    asked = {"attention_backend": "sliding_tile_attn", "attention_backend_config": TILES}
    blocks = layers(6, guard, **asked)
    forward = blocks[bad].attn_impl.forward

    def overflows(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if next(numbers) >= bad_call:
            out[0, -1, 0, 0] = torch.inf
        return out

    monkeypatch.setattr(blocks[bad].attn_impl, "forward", overflows)
    x, k, v = inputs()
    for _ in range(2):  # the calls of two branches, of one step
        guard.settle()
        with set_forward_context(0, latent_grid=GRID, request_id="one"):
            for layer in blocks:
                x = layer(x, k, v)
        assert x.isfinite().all()
    report = guard.report()
    assert [(miss.layer, miss.step, miss.error) for miss in report.missed] == [(bad, 0, None)]
    assert report.senseless == ()


def test_sparse_methods_have_a_bound_of_their_own_and_none_unless_given() -> None:
    asked = {"attention_backend": "sliding_tile_attn", "attention_backend_config": TILES}
    x = inputs()
    for bounds, bad in ((GuardBounds(), False), (GuardBounds(sparse=0.1), True)):
        guard = AttentionGuard(bounds)
        blocks = layers(1, guard, **asked)
        first, second = (step(guard, blocks, i, [x])[0] for i in range(2))
        assert error(first, x) > 0.1
        assert (error(second, x) < 0.01) == bad
        assert [miss.dense for miss in guard.report().missed] == [True] * bad
        text, told = summary(guard, blocks), guard.report().as_dict()
        assert told["bounds"] == {"quantized": 0.05, "sparse": bounds.sparse}
        assert ("runs dense from its next call on" in text) == bad
        told = "2 calls only had to be finite: no bound for sparse methods was given (sparse=B)"
        assert (told in text) != bad


def test_backends_of_8_bits_are_not_compared_where_they_are_to_have_no_bound(
    eight_bits: None,
) -> None:
    guard = AttentionGuard(GuardBounds(quantized=None))
    blocks = layers(1, guard, attention_backend="sage_attn")
    step(guard, blocks, 0, [inputs()])
    report = guard.report()
    assert (report.tested, report.calls, report.missed) == (1, 0, ())
    told = "1 call only had to be finite: no bound for backends that round to 8 bits was given"
    assert told in summary(guard, blocks)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("backend", ["sage_attn", "sliding_tile_attn"])
def test_an_output_that_is_not_finite_is_computed_again_at_once(
    eight_bits: None, backend: str, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = AttentionGuard(GuardBounds(quantized=10.0))
    config = TILES if backend == "sliding_tile_attn" else None
    blocks = layers(1, guard, attention_backend=backend, attention_backend_config=config)
    cls: type[AttentionImpl] = type(blocks[0].attn_impl)
    forward = cls.forward

    def overflows(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out[0, -1, 0, 0] = bad  # in no sampled row, or in one
        return out

    monkeypatch.setattr(cls, "forward", overflows)
    x = inputs()
    outs = [step(guard, blocks, i, [x])[0] for i in range(2)]
    assert max(error(out, x) for out in outs) < 0.01
    (miss,) = guard.report().missed
    assert (miss.error, miss.step) == (None, 0)
    assert "was not finite in step 0" in str(miss)
    ran = blocks[0].report()
    reasons = [entry.selection.reason.partition(";")[0] for entry in ran.detours if entry.calls]
    assert reasons == [attention_guard.AGAIN, attention_guard.MISSED]
    assert [entry.calls for entry in (*ran.entries, *ran.detours)] == [0, 1, 1]


def test_an_output_that_should_be_zero_has_an_error_without_bound(
    eight_bits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = AttentionGuard(GuardBounds(quantized=1e6))
    blocks = layers(1, guard, attention_backend="sage_attn")
    q, k, v = inputs()
    monkeypatch.setattr(blocks[0].attn_impl, "forward", lambda *a, **kw: torch.ones_like(q))
    outs = [step(guard, blocks, i, [(q, k, torch.zeros_like(v))])[0] for i in range(2)]
    assert outs[0].all()
    assert not outs[1].any()
    assert [miss.error for miss in guard.report().missed] == [torch.inf]
    (miss,) = guard.report().as_dict()["missed"]
    assert miss["error"] == "inf"  # JSON has no such number


def test_a_layer_that_missed_before_its_turn_waits_for_none(
    eight_bits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = AttentionGuard(GuardBounds())
    blocks = layers(4, guard, attention_backend="sage_attn")
    forward = blocks[3].attn_impl.forward
    monkeypatch.setattr(
        blocks[3].attn_impl, "forward", lambda *a, **k: forward(*a, **k) * torch.inf
    )
    for index in range(2):
        step(guard, blocks, index, [inputs()] * 4)
        assert [miss.layer for miss in guard.report().missed] == [3]
    assert guard.report().waiting == (("transformer", "blocks.2"),)


@pytest.mark.parametrize("done", [False, True])
def test_what_the_device_decides_is_dense_attention_or_zeros(done: bool) -> None:
    q, k, v = (x.float() for x in inputs())
    out, lse = dense_unless(torch.tensor(done), q, k, v, scale=SIZE**-0.5)
    wanted = torch.zeros_like(out) if done else truth(q, k, v).float()
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * SIZE**-0.5
    sums = torch.full_like(lse, -torch.inf) if done else scores.logsumexp(-1).float()
    torch.testing.assert_close(lse, sums, rtol=1e-4, atol=1e-5)


def keys_kept(*shape: int) -> torch.Tensor:
    keep = torch.arange(shape[-1]) % 3 != 1
    return (keep & (torch.arange(shape[-1]) < 150)).expand(shape)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"causal": True},
        {"mask": keys_kept(1, TOKENS)},
        {"mask": keys_kept(1, 1, 1, TOKENS)},
        {"sink_logits": torch.tensor([4.0, 6.0])},
        {"replicated": (7, 0, 0)},
        {"kv_heads": 1},
    ],
    ids=str,
)
def test_calls_of_every_kind_are_computed_again_on_a_gpu(given: dict[str, Any], done: bool) -> None:
    given = dict(given)
    causal, kv_heads = given.pop("causal", False), given.pop("kv_heads", HEADS)
    q, k, v = (x.float() for x in inputs())
    call = AttentionCall(q, k[:, :, :kv_heads].clone(), v[:, :, :kv_heads].clone(), **given)
    layer = LocalAttention(HEADS, SIZE, kv_heads, causal=causal)
    wanted = torch.zeros_like(q) if done else layer.attend(call)
    if call.mask is not None:  # what masked keys hold has no influence
        call.key[:, 150:] = call.value[:, 150:] = torch.nan
        if call.mask.dim() == 2:
            call.query[:, 150:] = torch.nan
    found = again_unless(torch.tensor(done), layer, call)
    assert found is not None
    out, sound = found
    assert sound
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_chunks_on_a_cache_are_computed_again_over_all_that_they_see() -> None:
    q, k, v = (x.float() for x in inputs())
    layer, half = LocalAttention(HEADS, SIZE), TOKENS // 2
    size = CacheSize(
        num_layers=1, batch=1, num_kv_heads=HEADS, head_size=SIZE, chunk_tokens=half, window=2,
        dtype=torch.float32,
    )  # fmt: skip
    cache = CausalCache(size)
    for rows in (slice(0, half), slice(half, None)):
        cache.begin(rows.start, half)
        given = [x[:, rows] for x in (q, k, v)]
        wanted = layer(*given, cache=cache.layers[0])
        call = AttentionCall(*given, cache=cache.layers[0])
        found = again_unless(torch.tensor(False), layer, call)
        cache.commit()
    assert found is not None
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_exact_attention_cannot_serve_either_is_known(
    which: int, bad: float, causal: bool
) -> None:
    x = [each.float() for each in inputs()]
    x[which][0, 100, 1, 3] = bad
    layer = LocalAttention(HEADS, SIZE, causal=causal)
    for done in (False, True):
        found = again_unless(torch.tensor(done), layer, AttentionCall(*x))
        assert found is not None
        assert found[1] == found[0].isfinite().all() == done


@pytest.mark.parametrize(
    "given",
    [
        {"mask": torch.ones(1, TOKENS, TOKENS).bool()},
        {"mask": keys_kept(1, TOKENS), "causal": True},
        {"size": 256},
        {"width": SIZE // 2},
    ],
    ids=str,
)
def test_what_kernels_over_blocks_do_not_take_stays_as_it_was(given: dict[str, Any]) -> None:
    given = dict(given)
    q = torch.zeros(1, TOKENS, HEADS, given.pop("size", SIZE))
    v = q[..., : given.pop("width", None)]
    layer = LocalAttention(HEADS, q.shape[3], causal=given.pop("causal", False))
    assert again_unless(torch.tensor(False), layer, AttentionCall(q, q, v, **given)) is None


def test_under_autocast_calls_are_computed_again_as_without_it() -> None:
    x = tuple(each.float() for each in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        found = again_unless(torch.tensor(False), LocalAttention(HEADS, SIZE), AttentionCall(*x))
    assert found is not None
    torch.testing.assert_close(found[0], truth(*x).float(), rtol=1e-4, atol=1e-5)


def test_gated_calls_have_to_be_finite_and_keep_their_branch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = AttentionGuard(GuardBounds(sparse=1e-9))
    asked = {"attention_backend": "video_sparse_attn", "attention_backend_config": {"topk": 1}}
    (layer,) = layers(1, guard, **asked)
    q, k, v = inputs()
    call = AttentionCall(q, k, v, gate=torch.ones_like(q))

    def attend(index: int) -> torch.Tensor:
        guard.settle()
        with set_forward_context(index, latent_grid=GRID, request_id="one"):
            return layer.attend(call)

    attend(0)
    assert guard.report().missed == ()  # its output is more than attention
    assert (guard.report().tested, guard.report().calls) == (1, 0)
    assert "1 call only had to be finite: a gate or a trained" in summary(guard, [layer])
    with set_forward_context(1, latent_grid=GRID, request_id="one"):
        dense = layer._attend(call._replace(exact="a test asked for it"))
    assert error(dense, (q, k, v)) > 0.1, "the branch is added"
    cls: type[AttentionImpl] = type(layer.attn_impl)
    forward = cls.forward
    monkeypatch.setattr(cls, "forward", lambda *a, **k: forward(*a, **k) * torch.inf)
    assert torch.equal(attend(1), dense)
    assert [miss.error for miss in guard.report().missed] == [None]


def test_inputs_that_are_not_finite_are_not_the_fault_of_8_bits(eight_bits: None) -> None:
    guard = AttentionGuard(GuardBounds())
    blocks = layers(1, guard, attention_backend="sage_attn")
    q, k, v = inputs()
    v[0, 0] = torch.nan
    assert step(guard, blocks, 0, [(q, k, v)])[0].isnan().any()
    assert guard.report().missed == ()


def test_a_masked_call_is_checked_and_saved(eight_bits: None) -> None:
    guard = AttentionGuard(GuardBounds())
    (layer,) = layers(1, guard, attention_backend="sage_attn")
    q, k, v = one_large_channel()
    keep = torch.arange(TOKENS).expand(1, TOKENS) < TOKENS - 40
    kept = tuple(x[:, : TOKENS - 40] for x in (q, k, v))
    errors = []
    for index in range(2):
        guard.settle()
        with set_forward_context(index, request_id="one"):
            errors.append(error(layer(q, k, v, keep)[:, : TOKENS - 40], kept))
    assert errors[0] > 0.05 > 0.01 > errors[1]


def test_exact_layers_are_not_checked_and_copies_have_no_guard() -> None:
    guard = AttentionGuard(GuardBounds())
    blocks = layers(1, guard, attention_backend="torch_sdpa")
    step(guard, blocks, 0, [inputs()])
    assert guard.report().calls == 0
    assert "guard: tested to be finite: 0 approximate calls;" in summary(guard, blocks)
    assert copy.deepcopy(blocks[0]).guard is None


def test_calls_that_need_gradients_are_served_as_ever() -> None:
    guard = AttentionGuard(GuardBounds(sparse=1e-6))
    asked = {"attention_backend": "sliding_tile_attn", "attention_backend_config": TILES}
    blocks = layers(1, guard, **asked)
    q, k, v = inputs()
    step(guard, blocks, 0, [(q.requires_grad_(), k, v)])[0].sum().backward()
    assert q.grad is not None
    assert guard.report().calls == 0
    text = summary(guard, blocks)
    assert "not looked at: 1 approximate call, because they need gradients" in text
    assert guard.report().as_dict()["unchecked"] == {"they need gradients": 1}


@pytest.mark.parametrize("which", [0, 1])
def test_what_rounding_hides_of_queries_and_keys_is_told(
    which: int, eight_bits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = AttentionGuard(GuardBounds())
    blocks = layers(1, guard, attention_backend="sage_attn")
    cls: type[AttentionImpl] = type(blocks[0].attn_impl)
    forward = cls.forward
    # Kernels on a GPU take 0 for NaN, so that all keys count alike.
    monkeypatch.setattr(cls, "forward", lambda *a, **k: forward(*a, **k).nan_to_num())
    x = inputs()
    x[which][0, 187] = torch.nan  # which is none of the rows of the first steps
    for index in range(2):
        assert step(guard, blocks, index, [x])[0].isfinite().all()
    assert guard.report().missed == ()
    (found,) = guard.report().senseless
    assert (found.layer, found.step) == (0, 0)
    told = "layer 0 (blocks.0) was given in step 0 what makes exact attention not finite either"
    assert told in summary(guard, blocks)


def with_sinks(x: TENSORS, sinks: torch.Tensor) -> torch.Tensor:
    """Return exact attention with a key that has no value and a logit for each head."""
    q, k, v = (each.double() for each in x)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
    joined = torch.cat((scores, sinks.double().view(1, -1, 1, 1).expand(1, -1, TOKENS, 1)), -1)
    return torch.einsum("bhqk,bkhd->bqhd", joined.softmax(-1)[..., :-1], v)


@pytest.mark.parametrize("hard", [True, False])
def test_calls_with_sink_logits_are_checked_and_saved(eight_bits: None, hard: bool) -> None:
    guard = AttentionGuard(GuardBounds())
    (layer,) = layers(1, guard, attention_backend="sage_attn")
    x, sinks = one_large_channel() if hard else inputs(), torch.tensor([4.0, 6.0])
    exact, errors = with_sinks(x, sinks), []
    for index in range(2):
        guard.settle()
        with set_forward_context(index, request_id="one"):
            out = layer(*x, sink_logits=sinks)
        errors.append(float((out.double() - exact).norm() / exact.norm()))
    assert len(guard.report().missed) == hard
    assert guard.report().calls == (1 if hard else 2)
    if hard:
        assert errors[0] > 0.05 > 0.01 > errors[1]


@pytest.mark.parametrize("hard", [True, False])
def test_chunks_on_a_cache_are_checked_over_all_that_they_see(eight_bits: None, hard: bool) -> None:
    guard = AttentionGuard(GuardBounds())
    (layer,) = layers(1, guard, attention_backend="sage_attn")
    x, tokens = one_large_channel() if hard else inputs(), TOKENS // 3
    size = CacheSize(
        num_layers=1,
        batch=1,
        num_kv_heads=HEADS,
        head_size=SIZE,
        chunk_tokens=tokens,
        window=3,
    )
    cache, exact, errors = CausalCache(size), [], []
    for chunk in range(3):
        start, stop = chunk * tokens, (chunk + 1) * tokens
        q, k, v = (each[:, start:stop] for each in x)
        cache.begin(start, tokens)
        guard.settle()
        with set_forward_context(chunk, request_id="one"):
            out = layer(q, k, v, cache=cache.layers[0])
        cache.commit()
        errors.append(float((out.double() - truth(q, x[1][:, :stop], x[2][:, :stop])).norm()))
        exact.append(float(truth(q, x[1][:, :stop], x[2][:, :stop]).norm()))
    shares = [error / whole for error, whole in zip(errors, exact, strict=True)]
    assert len(guard.report().missed) == hard
    assert guard.report().calls == (1 if hard else 3)
    if hard:
        assert shares[0] > 0.05 > 0.01 > max(shares[1:])


def test_a_sparse_method_over_pieces_of_a_cache_is_told_as_unchecked() -> None:
    guard = AttentionGuard(GuardBounds(sparse=1e6))
    options = {"dense_steps": 0, "dense_layers": None}
    asked = {"attention_backend": "sol_attn", "attention_backend_config": options}
    (layer,) = layers(1, guard, **asked)
    size = CacheSize(
        num_layers=1, batch=1, num_kv_heads=HEADS, head_size=SIZE, chunk_tokens=64, window=2
    )
    cache, x = CausalCache(size), inputs()
    for chunk, tokens in enumerate((40, 64, 64)):
        cache.begin(sum((40, 64, 64)[:chunk]), tokens)
        guard.settle()
        with set_forward_context(chunk, latent_grid=(1, 8, tokens // 8), request_id="one"):
            layer(*(each[:, :tokens] for each in x), cache=cache.layers[0])
        cache.commit()
    assert guard.report().calls == 2, "the second one sees a shorter one besides"
    assert guard.report().unchecked == {"what they see lies in pieces of a cache": 1}


def served(layer: LocalAttention, guard: AttentionGuard, call: AttentionCall) -> torch.Tensor:
    """Return what a layer gives in the first step of a denoiser call."""
    layer.guard = guard
    guard.settle()
    with set_forward_context(0, latent_grid=GRID, request_id="one"):
        return layer.attend(call)


@pytest.mark.parametrize(
    "given",
    [
        {"no_grid": "a test says so"},
        {"block_mask": BlockPlan.dense(*[Blocks.regular(TOKENS, 64)] * 2, "cpu")},
    ],
    ids=["no grid", "mask of blocks"],
)
def test_calls_that_exact_kernels_serve_are_not_counted(
    eight_bits: None, given: dict[str, Any]
) -> None:
    sparse = "no_grid" in given
    backend = "sliding_tile_attn" if sparse else "sage_attn"
    config = TILES if sparse else None
    guard = AttentionGuard(GuardBounds())
    (layer,) = layers(1, guard, attention_backend=backend, attention_backend_config=config)
    x = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs dense
        out = served(layer, guard, AttentionCall(*x, **given))
    assert error(out, x) < 0.01
    assert (guard.report().tested, guard.report().unchecked) == (0, {})


def test_other_attention_than_that_of_the_tokens_is_left_alone(eight_bits: None) -> None:
    guard, x = AttentionGuard(GuardBounds()), inputs()
    site = LayerSite(name="a", component="transformer", role=AttentionRole.CROSS, layer=0)
    layer = LocalAttention(HEADS, SIZE, site=site, scope=scope_from(attention_backend="sage_attn"))
    served(layer, guard, AttentionCall(*x))
    (layer,) = layers(1, guard, attention_backend="sage_attn")
    layer(*x)  # outside of a denoiser call
    assert guard.report().tested == 0


@pytest.mark.parametrize(("bits", "unchecked"), [(16, 0), (8, 2)])
def test_a_cache_that_rounds_is_told_where_kernels_are_exact(bits: Any, unchecked: int) -> None:
    guard = AttentionGuard(GuardBounds())
    (layer,) = layers(1, guard, attention_backend="torch_sdpa")
    size = CacheSize(
        num_layers=1, batch=1, num_kv_heads=HEADS, head_size=SIZE, chunk_tokens=64, window=2,
        bits=bits,
    )  # fmt: skip
    cache = CausalCache(size)
    for start in (0, 64):
        cache.begin(start, 64)
        call = AttentionCall(*(x[:, start : start + 64] for x in inputs()), cache=cache.layers[0])
        served(layer, guard, call)
        cache.commit()
    assert guard.report().tested == 0
    reason = "their cache keeps keys and values in fewer than 16 bits"
    assert guard.report().unchecked == ({reason: unchecked} if unchecked else {})


def test_8_bits_over_pieces_of_a_cache_are_exact_kernels(eight_bits: None) -> None:
    guard = AttentionGuard(GuardBounds())
    (layer,) = layers(1, guard, attention_backend="sage_attn")
    size = CacheSize(
        num_layers=1, batch=1, num_kv_heads=HEADS, head_size=SIZE, chunk_tokens=64, window=2
    )
    cache, x = CausalCache(size), inputs()
    for start, tokens in ((0, 40), (40, 64), (104, 64)):
        cache.begin(start, tokens)
        call = AttentionCall(*(each[:, :tokens] for each in x), cache=cache.layers[0])
        served(layer, guard, call)
        cache.commit()
    assert (guard.report().tested, guard.report().unchecked) == (2, {})


@pytest.mark.parametrize(
    ("backend", "compared"), [("sliding_tile_attn", True), ("sla_attn", False)]
)
def test_a_trained_projection_counts_where_a_method_takes_it(backend: str, compared: bool) -> None:
    config = TILES if compared else {"topk_ratio": 0.3}
    guard = AttentionGuard(GuardBounds(sparse=1e-9))
    asked = {"attention_backend": backend, "attention_backend_config": config}
    (layer,) = layers(1, guard, **asked)
    layer.set_projection(torch.nn.Linear(SIZE, SIZE, dtype=torch.bfloat16).requires_grad_(False))
    served(layer, guard, AttentionCall(*inputs()))
    report = guard.report()
    assert (report.tested, report.calls, len(report.missed)) == (1, compared, compared)
    assert bool(report.only_finite) != compared


def test_under_autocast_what_kernels_get_is_compared(eight_bits: None) -> None:
    guard = AttentionGuard(GuardBounds())
    (layer,) = layers(1, guard, attention_backend="sage_attn")
    hard = tuple(x.float() for x in one_large_channel())
    with torch.autocast("cpu", torch.bfloat16):
        outs = [served(layer, guard, AttentionCall(*hard)) for _ in range(2)]
    assert [out.dtype for out in outs] == [torch.bfloat16] * 2
    assert error(outs[0], hard) > 0.05 > 0.01 > error(outs[1], hard)


def test_queries_that_a_mask_leaves_out_may_hold_anything(eight_bits: None) -> None:
    guard = AttentionGuard(GuardBounds())
    (layer,) = layers(1, guard, attention_backend="sage_attn")
    hard = one_large_channel()
    keep = torch.arange(TOKENS).expand(1, TOKENS) < 150
    for x in hard:
        x[:, 150:] = torch.nan
    served(layer, guard, AttentionCall(*hard, mask=keep))
    report = guard.report()
    assert report.senseless == ()
    assert [miss.error is not None for miss in report.missed] == [True]


def test_calls_without_tokens_are_finite(eight_bits: None) -> None:
    guard = AttentionGuard(GuardBounds())
    (layer,) = layers(1, guard, attention_backend="sage_attn")
    q, k, v = inputs()
    for call in (AttentionCall(q[:, :0], k, v), AttentionCall(q, k[:, :0], v[:, :0])):
        assert not served(layer, guard, call).any()
        assert again_unless(torch.tensor(False), layer, call) is None
    report = guard.report()
    assert (report.calls, report.missed, report.senseless) == (2, (), ())


def test_layers_of_two_denoisers_may_have_the_same_name(eight_bits: None) -> None:
    guard = AttentionGuard(GuardBounds())
    found = []
    for component, x in (("transformer", one_large_channel()), ("transformer_2", inputs())) * 2:
        site = LayerSite(name="blocks.0", component=component, layer=0, num_layers=1)
        scope = scope_from(attention_backend="sage_attn")
        layer = LocalAttention(HEADS, SIZE, site=site, scope=scope)
        served(layer, guard, AttentionCall(*x))
        found.append([entry.calls for entry in layer.report().detours])
    assert [miss.component for miss in guard.report().missed] == ["transformer"]
    assert found == [[], [], [1], []]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, None),
        (False, None),
        (0.1, GuardBounds(quantized=0.1)),
        ("0.1", GuardBounds(quantized=0.1)),
        ("sparse=0.3", GuardBounds(sparse=0.3)),
        ({"quantized": 0.2, "sparse": 1}, GuardBounds(quantized=0.2, sparse=1.0)),
        ('{"quantized": 0.2}', GuardBounds(quantized=0.2)),
        ({"quantized": 0.05, "sparse": None}, GuardBounds()),
        ("sparse=none", GuardBounds()),
        ("quantized=0.1,sparse=None", GuardBounds(quantized=0.1)),
        ("sparse=0.3,quantized=none", GuardBounds(quantized=None, sparse=0.3)),
        ({"quantized": None}, GuardBounds(quantized=None)),
    ],
)
def test_bounds_have_several_forms(value: Any, found: GuardBounds | None) -> None:
    assert parse_guard_bounds(value) == found
    if found is not None:
        assert parse_guard_bounds(str(found)) == found
        is_plain = found.quantized is not None and found.sparse is None
        assert ("=" in str(found)) is not is_plain


@pytest.mark.parametrize(
    "value",
    [0, -1, "nan", "inf", "", "many", True, [], {}, "dense=1", "none", "sparse="],
)
def test_what_is_no_bound_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"attention_guard must be (a finite|quantized=B)"):
        parse_guard_bounds(value)


def test_what_is_refused_is_told_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"got 'quantised=0\.1', did you mean 'quantized'\?"):
        parse_guard_bounds("quantised=0.1")
    with pytest.raises(ConfigError, match=r"in Python also a mapping.*; give for example 0\.05"):
        parse_guard_bounds("dense=1")


@pytest.mark.parametrize("given", [{"quantized": -1.0}, {"sparse": "x"}, {"quantized": True}])
def test_bounds_of_ones_own_are_checked_too(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="GuardBounds must be a finite number above 0"):
        GuardBounds(**given)
