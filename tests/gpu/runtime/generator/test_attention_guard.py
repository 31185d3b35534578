"""The guard on a GPU: nothing in a layer waits for the device, and graphs are refused."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.attention_guard import (
    AttentionGuard,
    again_unless,
    dense_unless,
)
from multimodal_gen.runtime.guard_bounds import GuardBounds
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.managers.forward_context import set_forward_context

HEADS, SIZE, TOKENS = 4, 128, 2048
SCALE = SIZE**-0.5


@contextmanager
def no_waiting() -> Iterator[None]:
    """Let everything that waits for the device be an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def inputs() -> list[torch.Tensor]:
    """Return inputs that 8 bits cannot serve: one channel is a thousand times the rest."""
    torch.manual_seed(0)
    shape = (1, TOKENS, HEADS, SIZE)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[..., 0] *= 1000
    k[..., 0] /= 1000
    return [q, k, v]


def guarded(layer: int = 0, num_layers: int = 1) -> tuple[LocalAttention, AttentionGuard]:
    site = LayerSite(name="blocks", component="transformer", layer=layer, num_layers=num_layers)
    layer = LocalAttention(
        HEADS,
        SIZE,
        compute_dtype=torch.bfloat16,
        site=site,
        scope=scope_from(attention_backend="sage_attn"),
    )
    layer.guard = guard = AttentionGuard(GuardBounds())
    return layer, guard


def test_what_overflows_is_saved_at_once_whosever_turn_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, guard = guarded(layer=1, num_layers=2)
    given = inputs()
    cls: type[AttentionImpl] = type(layer.attn_impl)
    forward = cls.forward

    def overflows(*args, **kwargs):
        out = forward(*args, **kwargs)
        out[0, -1, 0, 0].fill_(torch.inf)
        return out

    with set_forward_context(0):
        layer(*given)  # compiles, and makes what is static
    monkeypatch.setattr(cls, "forward", overflows)
    layer.guard = guard = AttentionGuard(GuardBounds())
    with no_waiting(), set_forward_context(0):
        saved = layer(*given)
    truth = exact(*given)
    assert (saved - truth).norm() < 0.01 * truth.norm()
    assert guard.report().calls == 0
    assert [(miss.layer, miss.error) for miss in guard.report().missed] == [(1, None)]


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "mask of keys alone", "sinks"])
def test_calls_of_every_kind_are_computed_again_without_a_wait(kind: str, done: bool) -> None:
    given, decided = inputs(), torch.tensor(done, device="cuda")
    keep = (torch.arange(TOKENS, device="cuda") % 3 != 1).expand(1, TOKENS)
    masks = {"mask": keep, "mask of keys alone": keep[:, None, None]}
    sinks = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda") if kind == "sinks" else None
    layer = LocalAttention(HEADS, SIZE, causal=kind == "causal")
    call = AttentionCall(*given, mask=masks.get(kind), sink_logits=sinks)
    wanted = layer.attend(call).float() * (not done)
    if kind in masks:
        given[1][:, ~keep[0]] = given[2][:, ~keep[0]] = torch.nan
    again_unless(decided, layer, call)  # compiles
    with no_waiting():
        found = again_unless(decided, layer, call)
    assert found is not None
    out, sound = found
    assert sound
    assert (out - wanted).norm() <= 0.01 * wanted.norm()


def test_a_layer_is_saved_and_its_calls_wait_for_nothing() -> None:
    layer, guard = guarded()
    given = inputs()
    with set_forward_context(0):
        layer(*given)  # compiles, and makes what is static
    guard.settle()
    assert guard.report().missed
    layer.guard = guard = AttentionGuard(GuardBounds())
    with no_waiting(), set_forward_context(1):
        wrong = layer(*given)
    guard.settle()
    with set_forward_context(2):
        right = layer(*given)
    truth = exact(*given)
    assert (wrong - truth).norm() > 0.05 * truth.norm()
    assert (right - truth).norm() < 0.01 * truth.norm()


def test_queries_that_are_not_finite_are_told_whatever_8_bits_make_of_them() -> None:
    layer, guard = guarded()
    q, k, v = inputs()
    q[0, TOKENS // 2] = torch.nan
    with set_forward_context(0):
        layer(q, k, v)
    assert [found.step for found in guard.report().senseless] == [0]
    assert guard.report().missed == ()


@pytest.mark.parametrize("done", [False, True])
def test_the_device_decides_whether_a_call_is_computed_again(done: bool) -> None:
    given, decided = inputs(), torch.tensor(done, device="cuda")
    dense_unless(decided, *given, scale=SCALE)  # compiles
    with no_waiting():
        out, _ = dense_unless(decided, *given, scale=SCALE)
    truth = exact(*given)
    wanted = torch.zeros_like(truth) if done else truth
    assert (out - wanted).norm() <= 0.01 * truth.norm()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_is_refused() -> None:
    layer, _ = guarded()
    given = inputs()
    with set_forward_context(0):
        layer(*given)
    torch.cuda.synchronize()
    with (
        pytest.raises(UsageError, match="while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        set_forward_context(1),
    ):
        layer(*given)
