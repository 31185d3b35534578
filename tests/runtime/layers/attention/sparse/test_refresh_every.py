"""`refresh_every`: what was chosen in one step serves the next ones, and when it does not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.kernels.engine import SelectedKernel
from multimodal_gen.runtime.layers.attention.sparse.executors import kept, local
from multimodal_gen.runtime.layers.attention.sparse.executors.kept import Chosen
from multimodal_gen.runtime.layers.attention.warn_once import WarnOnce
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.inputs import QKV
from tests.helpers.methods import DEFINED, Defined, method
from tests.helpers.sparse import run_sparse, text_places

REFUSED = {
    "sta": "its patterns are known before the calls",
    "static, lvsa": "its patterns are known before the calls",
    "static, chunks": "its patterns are known before the calls",
    "vmoba, temporal": "its queries choose one by one",
    "vmoba, spatial": "its queries choose one by one",
    "vmoba, st": "its queries choose one by one",
}
KEEP = [name for name in DEFINED if name not in REFUSED]
BEST = DEFINED["cube"]


def pair(defined: Defined, text=None, batch: int = 1) -> tuple[QKV, QKV]:
    """Return inputs of two steps by which other blocks are chosen."""
    first = defined.inputs(text, batch=batch)
    return first, QKV(first.query.flip(1), first.key, first.value)


def by(defined: Defined, qkv: QKV) -> Defined:
    """Return the definition whose choice is by other inputs than those it attends to."""

    def choose(_: QKV, *blocks: Any, **rule: Any) -> torch.Tensor:
        return defined.choose(qkv, *blocks, **rule)

    return replace(defined, choose=choose)


def known(**more: Any) -> dict[str, Any]:
    return {"num_steps": 20, "request_id": "one", "branch_key": "cond", **more}


@pytest.mark.parametrize(
    ("where", "masked", "tail"),
    [("no text", False, "none"), ("text last", False, "pooled"), ("text first", True, "none")],
)
@pytest.mark.parametrize("name", KEEP)
def test_a_choice_serves_so_many_steps(name: str, where: str, masked: bool, tail: str) -> None:
    defined, text = DEFINED[name], text_places(DEFINED[name].grid, 35)[where]
    old, new = pair(defined, text)
    token_mask = torch.arange(old.key.shape[1])[None] % 7 != 3 if masked else None
    assert not torch.equal(defined.mask(old, text), defined.mask(new, text))
    layer = defined.method.layer(kv_heads=1, refresh_every=3, tail=tail)
    given = {"text": text, "token_mask": token_mask, "layer": layer, "tail": tail, "known": known()}
    defined.check(qkv=old, step=2, **given)
    for step in (3, 4):  # what is told is true, too
        mask = by(defined, old).check(qkv=new, step=step, **given).mask
        if not masked:
            (entry,) = layer.report().entries
            density = dict(entry.densities)[step]
            far = 0.02 if name == "sla" else 1e-6
            assert density == pytest.approx(float(mask.double().mean()), abs=far)
    defined.check(qkv=new, step=5, **given)
    by(defined, new).check(qkv=old, step=7, **given)
    defined.check(qkv=old, step=8, **given)


@pytest.mark.parametrize("name", ["cube", "subblock"])  # a map and lists
def test_no_statistics_are_made_where_a_choice_serves(name: str, monkeypatch) -> None:
    defined, made = DEFINED[name], []
    for pool in ("pool_video", "pool_cells"):
        own = getattr(local, pool)
        monkeypatch.setattr(local, pool, lambda *x, own=own, **y: made.append(1) or own(*x, **y))
    layer, qkv = defined.method.layer(kv_heads=1, refresh_every=2), defined.inputs()
    counts = []
    for step in (1, 2, 3):
        run_sparse(layer, qkv, defined.grid, step=step, known=known())
        counts.append(len(made))
    assert 0 < counts[0] == counts[1] < counts[2]


@pytest.mark.parametrize(
    "other",
    [
        {"request_id": "two"},
        {"branch_key": "uncond"},
        {"component": "transformer_2"},
        {"request_id": None},
    ],
    ids=str,
)
def test_another_request_or_branch_has_a_choice_of_its_own(other: dict[str, Any]) -> None:
    old, new = pair(BEST)
    layer = BEST.method.layer(kv_heads=1, refresh_every=9)
    BEST.check(qkv=old, layer=layer, step=1, known=known())
    BEST.check(qkv=new, layer=layer, step=2, known=known(**other))
    by(BEST, old).check(qkv=new, layer=layer, step=2, known=known())


def test_calls_without_a_branch_count_in_turn() -> None:
    old, new = pair(BEST)
    layer, context = BEST.method.layer(kv_heads=1, refresh_every=9), known(branch_key=None)
    for step in (1, 2):
        for qkv in (old, new):
            BEST.check(qkv=qkv, layer=layer, step=step, known=context)
    by(BEST, old).check(qkv=new, layer=layer, step=3, known=context)


def test_the_first_step_of_a_run_and_another_kind_of_call_choose_anew() -> None:
    old, new = pair(BEST)
    layer = BEST.method.layer(kv_heads=1, refresh_every=9)
    text = text_places(BEST.grid, 35)["text last"]
    BEST.check(qkv=old, layer=layer, step=3, known=known())
    BEST.check(qkv=new, layer=layer, step=2, known=known())  # an earlier step
    BEST.check(qkv=old, layer=layer, step=0, known=known())
    by(BEST, old).check(qkv=new, layer=layer, step=1, known=known())
    BEST.check(text, qkv=pair(BEST, text)[1], layer=layer, step=1, known=known())
    BEST.check(qkv=new, layer=layer, step=2, known=known())


@pytest.mark.parametrize("name", KEEP)
def test_another_mask_chooses_anew(name: str) -> None:
    defined = DEFINED[name]
    qkv, layer = defined.inputs(), defined.method.layer(kv_heads=1, refresh_every=9)
    num = qkv.key.shape[1]
    first = torch.arange(num)[None] < num // 2
    given = {"qkv": qkv, "layer": layer, "known": known()}
    for step, token_mask in ((1, first), (2, ~first)):
        defined.check(token_mask=token_mask, step=step, **given)


def test_a_mask_that_was_written_to_chooses_anew() -> None:
    old, new = pair(BEST)
    layer = BEST.method.layer(kv_heads=1, refresh_every=9)
    mask = torch.arange(old.key.shape[1])[None] % 7 != 3
    given = {"token_mask": mask, "layer": layer, "known": known()}
    BEST.check(qkv=old, step=1, **given)
    by(BEST, old).check(qkv=new, step=2, **given)
    mask[:, : mask.shape[1] // 2] = False
    BEST.check(qkv=new, step=3, **given)


def test_masks_whose_writes_are_not_counted_choose_anew() -> None:
    old, new = pair(BEST)
    layer = BEST.method.layer(kv_heads=1, refresh_every=9)
    with torch.inference_mode():
        mask = torch.arange(old.key.shape[1])[None] % 7 != 3
        for step, qkv in ((1, old), (2, new)):
            BEST.check(qkv=qkv, token_mask=mask, layer=layer, step=step, known=known())


def layer_that_tells() -> tuple[Any, WarnOnce]:
    """Return a layer, and what its user is told."""
    layer, told = BEST.method.layer(kv_heads=1, refresh_every=4), WarnOnce()
    layer.attn_impl.layer = layer.attn_impl._kept._layer = replace(
        layer.attn_impl.layer, warnings=told
    )
    return layer, told


def told_by(calls: list[dict[str, Any]], **given: Any) -> tuple[str, ...]:
    """Return what the user of a layer is told of calls, step by step."""
    (layer, told), qkv = layer_that_tells(), BEST.inputs()
    for step, call in enumerate(calls):
        run_sparse(layer, qkv, BEST.grid, step=step, known=known(**given), **call)
    return told.given


def test_calls_that_it_serves_nothing_are_told_of_once() -> None:
    mask = torch.arange(BEST.inputs().key.shape[1])[None] % 7 != 3
    assert told_by([{}] * 3, request_id=None) == (
        "`refresh_every` of cube_sparse_attn of a layer is 4, and calls choose blocks anew that "
        "have no `request_id`; give `set_forward_context` one",
    )
    (told,) = told_by([{"attn_mask": mask.clone()} for _ in range(3)])
    assert "that have another mask than the step before" in told
    for calls in ([{}] * 3, [{"attn_mask": mask}] * 3):
        assert told_by(calls) == ()


@pytest.mark.parametrize("other", ["branch_key", "request_id"])
@pytest.mark.parametrize(("number", "is_told"), [(8, False), (9, True), (20, True)])
def test_more_branches_than_are_kept_are_told_of_once(other, number, is_told) -> None:
    (layer, told), qkv = layer_that_tells(), BEST.inputs()
    for step in range(3):
        for i in range(number):
            run_sparse(layer, qkv, BEST.grid, step=step, known=known(**{other: str(i)}))
    want = (
        "`refresh_every` of cube_sparse_attn of a layer is 4, and calls choose blocks anew that "
        "had 8 others, of requests and of branches of guidance, since the step before, and no more "
        "are kept; run fewer at a time"
    )
    assert told.given == ((want,) if is_told else ())


def test_requests_that_were_left_are_not_told_of() -> None:
    (layer, told), qkv = layer_that_tells(), BEST.inputs()
    for i in range(20):
        for step in (1, 2):
            run_sparse(layer, qkv, BEST.grid, step=step, known=known(request_id=str(i)))
    assert told.given == ()


def test_a_share_that_changes_chooses_anew() -> None:
    old, new = pair(BEST)
    layer = BEST.method.layer(kv_heads=1, refresh_every=9, topk_ratio={0: 0.5, 0.5: 0.25})
    for step, qkv, by_inputs, number in ((8, old, old, 9), (9, new, old, 9), (10, new, new, 4)):
        rule = {"kept": number}
        by(BEST, by_inputs).check(qkv=qkv, layer=layer, step=step, known=known(), rule=rule)


def test_what_is_kept_goes_with_the_last_step_and_with_the_request() -> None:
    layer, qkv = BEST.method.layer(kv_heads=1, refresh_every=9), BEST.inputs()
    impl = layer.attn_impl
    for step, held in ((17, 1), (18, 1), (19, 0), (2, 1)):
        run_sparse(layer, qkv, BEST.grid, step=step, known=known())
        assert len(impl._kept) == held
    for i in range(20):
        run_sparse(layer, qkv, BEST.grid, step=1, known=known(branch_key=i))
    assert len(impl._kept) == 8
    assert impl.keeps_state
    layer.end_request("one")
    assert len(impl._kept) == 0


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_keep_no_choices_refuse_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`refresh_every` of .* must be 1.*{REFUSED[name]}"):
        DEFINED[name].method.layer(kv_heads=1, refresh_every=2)


def test_groups_are_not_kept() -> None:
    dense = {"svg2_first_layers_fp": 0, "svg2_first_times_fp": 0}
    svg2 = method("sparse_video_gen_2_attn", **dense, refresh_every=2)
    with pytest.raises(ConfigError, match="must be 1, got 2: its groups are others in every step"):
        svg2.layer()


def test_a_package_that_chooses_by_itself_is_refused() -> None:
    router = DEFINED["sla"].method.layer().attn_impl.router
    router.layer = replace(router.layer, kernel=SelectedKernel("sla"))
    config = DEFINED["sla"].method.config()
    assert kept.reason_against(router, config) == (
        "kernel sla chooses by itself; or name another `kernel`"
    )


def test_rings_and_caches_have_their_reason() -> None:
    limits = BEST.method.layer(refresh_every=2).attn_impl.limits
    assert (limits.ring, limits.cache) == (kept.RING, kept.CACHE)
    assert BEST.method.layer().attn_impl.limits.ring is None


def test_gradients_and_graphs_are_refused(monkeypatch) -> None:
    layer, qkv = BEST.method.layer(kv_heads=1, refresh_every=2), BEST.inputs()
    given = QKV(qkv.query.clone().requires_grad_(), *qkv[1:])
    with pytest.raises(UsageError, match="of cube_sparse_attn must be 1 where a gradient"):
        run_sparse(layer, given, BEST.grid, known=known())
    monkeypatch.setattr(kept, "being_captured", lambda: True)
    with (
        set_forward_context(1, latent_grid=BEST.grid, **known()),
        pytest.raises(UnsupportedBackendError, match="cannot be captured in a CUDA graph"),
    ):
        layer(*qkv)


@pytest.mark.parametrize("num", [1, 7, 8, 9, 64, 65])
def test_what_is_packed_is_what_was_chosen(num: int) -> None:
    generator = torch.Generator().manual_seed(num)
    chosen = torch.rand(2, 3, 5, num, generator=generator) < 0.4
    found = Chosen(3, ())
    assert found.get() is None
    found.set(chosen, num)
    assert torch.equal(found.get(), chosen)
    for most, dtype in ((num, torch.int16), (40_000, torch.int32)):
        lists = torch.randint(0, num, (1, 3, 5, 4), generator=generator, dtype=torch.int32)
        found.set(lists, most)
        assert torch.equal(found.get(), lists)
        assert found._packed.data.dtype == dtype
