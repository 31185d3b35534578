"""Heads run on two streams of a GPU: no share of them touches what another one makes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from multimodal_gen.runtime.layers.attention import UlyssesAttention_VSA
from multimodal_gen.runtime.layers.attention.sparse import tiles
from tests.helpers.inputs import QKV
from tests.helpers.methods import DEFINED, SMALL, Defined, method
from tests.helpers.sparse import run_sparse, text_places
from tests.helpers.two_streams import TwoStreams, watch_two_streams

HEADS = 3
KNOWN = {"num_steps": 20, "request_id": "one", "branch_key": "cond"}
ON_TWO = [name for name in DEFINED if name != "sla" and not name.startswith("vmoba")]
LISTS_OR_MAPS = [name for name in ON_TWO if not name.startswith("sta")]
EIGHT_BITS = ["vsa", "vsa by cells", "sol", "subblock"]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> TwoStreams:
    return watch_two_streams(monkeypatch)


def with_heads(name: str, **parts: Any) -> Defined:
    """Return a method on layers of several heads, whose shares run on two streams."""
    defined = DEFINED[name]
    return replace(defined, method=replace(defined.method, heads=HEADS, **parts))


def run(
    defined: Defined,
    *places: str,
    options: Sequence[Mapping[str, Any]] = ({},),
    masked: bool = False,
    **call: Any,
) -> None:
    """Call layers in two steps, each time with inputs of its own, and new layers once more.

    The first ones fill caches, for which the host waits.
    """
    for _ in range(2):
        layers = [defined.method.layer(**given) for given in options]
        for layer, where, step in product(layers, places, range(2)):
            text = text_places(defined.grid, 35)[where]
            qkv = defined.inputs(text, kv_heads=HEADS)
            qkv = QKV(*(x.roll(step, 1) for x in qkv))
            if masked:
                call["attn_mask"] = torch.arange(qkv.key.shape[1])[None] % 7 != 3
            run_sparse(layer, qkv, defined.grid, text=text, step=step, known=KNOWN, **call)


@pytest.mark.parametrize(
    ("where", "masked", "given"),
    [("text last", True, {}), ("text first", False, {"tail": "pooled"})],
    ids=["masked", "tail"],
)
@pytest.mark.parametrize("name", ON_TWO)
def test_no_share_touches_what_another_makes(name, where, masked, given, watched) -> None:
    defined = with_heads(name)
    run(defined, where, options=[given], masked=masked)
    assert watched.runs == [HEADS + 1] * 4


@pytest.mark.parametrize("name", LISTS_OR_MAPS)
def test_no_share_touches_what_another_chose(name, watched) -> None:
    defined = with_heads(name)
    run(defined, "text first", options=[{"refresh_every": 2}])
    assert watched.runs == [HEADS + 1] * 4


@pytest.mark.parametrize("tail", ["none", "pooled"])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_no_share_touches_what_another_quantised(name, tail, watched) -> None:
    defined = with_heads(name)
    run(defined, "text first", options=[{"tail": tail, "compute_mode": "sage_bf16"}])
    assert watched.runs == [HEADS + 1] * 4


def test_no_share_touches_what_another_makes_beside_a_gate(watched) -> None:
    defined = with_heads("vsa", layer_cls=UlyssesAttention_VSA)
    gate = torch.ones_like(defined.inputs().query)
    run(defined, "no text", gate_compress=gate)
    assert watched.runs == [HEADS] * 4


def test_with_gradients_there_is_one_stream(watched) -> None:
    defined = with_heads("vsa")
    qkv = QKV(*(x.requires_grad_() for x in defined.inputs(kv_heads=HEADS)))
    run_sparse(defined.method.layer(), qkv, defined.grid).sum().backward()
    assert not watched.runs


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tail", ["none", "pooled"])
def test_no_share_touches_the_groups_of_another(masked, tail, watched) -> None:
    defined = replace(
        DEFINED["vsa"], method=method("sparse_video_gen_2_attn", **SMALL["sparse_video_gen_2_attn"])
    )
    defined = replace(defined, method=replace(defined.method, heads=HEADS))
    run(defined, "text last", options=[{"tail": tail}], masked=masked)
    assert watched.runs == [2, HEADS] * 4, "sides are clustered, then heads attend"


def test_what_one_layer_derives_from_a_plan_is_there_for_the_next(watched) -> None:
    """One has no tail, and so no map of what is kept; the other makes it of the same plan."""
    defined = with_heads("sta")
    run(defined, "text first", options=[{"tail": "none"}, {"tail": "pooled"}])
    assert watched.runs == [HEADS + 1] * 8


def test_densities_of_calls_with_and_without_text_are_of_no_share(watched) -> None:
    """The first heads, which stand for all, are not on the same stream in both."""
    defined = with_heads("vsa")
    run(defined, "no text", "text first")
    assert watched.runs == [HEADS, HEADS, HEADS + 1, HEADS + 1] * 2


@pytest.mark.parametrize("name", ["vsa", "cube"])
def test_a_call_that_failed_half_way_is_repeated(name, monkeypatch, watched) -> None:
    """What was chosen until then is of some heads alone."""
    defined = with_heads(name)
    layer, scatter, calls = defined.method.layer(refresh_every=9), tiles.scatter_tokens, []

    def scatter_tokens(*given: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        scatter(*given)

    text, wanted = text_places(defined.grid, 35)["text first"], defined.method.layer()
    given = {"text": text, "step": 1, "known": KNOWN}
    run(defined, "text first")
    monkeypatch.setattr(tiles, "scatter_tokens", scatter_tokens)
    qkv = defined.inputs(text, kv_heads=HEADS)
    with pytest.raises(torch.OutOfMemoryError):
        run_sparse(layer, qkv, defined.grid, **given)
    out = run_sparse(layer, qkv, defined.grid, **given)
    assert torch.equal(out, run_sparse(wanted, qkv, defined.grid, **given))
