"""What any router may say, and what becomes of what it cannot mean."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime import backend_names
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends import registry
from multimodal_gen.runtime.layers.attention.causal_cache import CacheSize, CausalCache
from multimodal_gen.runtime.layers.attention.config import SparseConfig, option
from multimodal_gen.runtime.layers.attention.layer import UlyssesAttention_VSA
from multimodal_gen.runtime.layers.attention.scope import scope_from
from multimodal_gen.runtime.layers.attention.sparse import router as router_module
from multimodal_gen.runtime.layers.attention.sparse import tiles as tiles_module
from multimodal_gen.runtime.layers.attention.sparse.executors.local import _lists_of_heads
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.pattern import Pattern
from multimodal_gen.runtime.layers.attention.sparse.router import Budget, Cut, Densities, Router
from multimodal_gen.runtime.layers.attention.sparse.tiles import lists_as_map
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import QKV, make_qkv
from tests.helpers.tolerance import assert_within_error_budget

HEADS, SIZE, GRID = 2, 16, (3, 4, 6)
SCALE = SIZE**-0.5
NUMBERS = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConfig(SparseConfig):
    topk: int = option(2, "blocks kept", ge=1)
    block_size: int = option(8, "tokens per block", ge=1)


class BestRouter(Router[RowsConfig]):
    """The best pieces of the sequence."""

    def cut(self, settings, grid):
        return Cut.rows(settings.block_size)

    def budget(self, settings, blocks, tokens):
        return Budget(min(settings.topk, blocks), blocks)


class KeysRouter(BestRouter):
    """Blocks of keys are half as long."""

    def cut(self, settings, grid):
        return Cut.rows(settings.block_size, keys=settings.block_size // 2)


@lru_cache
def band(num: int) -> Pattern:
    place = torch.arange(num)
    return Pattern.of_map((place[:, None] - place).abs() <= 1)


class BandRouter(Router[RowsConfig]):
    """Every block keeps those next to it."""

    chooses = "pattern"

    def cut(self, settings, grid):
        return Cut.rows(settings.block_size)

    def pattern(self, settings, grid, heads, context):
        return (band(-(-math.prod(grid) // settings.block_size)),)


class ShrinkingRouter(BestRouter):
    """From the second step on, blocks are half as long."""

    def varies(self, settings):
        return True

    def at(self, settings, step, total):
        return replace(settings, block_size=settings.block_size // (1 if step == 0 else 2))


class BranchRouter(ShrinkingRouter):
    """Adds the mean value of a row's own block."""

    branch = staticmethod(lambda stats, values: values)


@contextmanager
def serving(router: Any, **declared: Any) -> Iterator[str]:
    """Have a backend with this router among the plug-ins, under the name that is yielded."""
    name = f"routed_{next(NUMBERS)}_attn"
    attributes = {"summary": "a test's", "config_cls": RowsConfig, "router": router, **declared}
    try:
        attributes["backend"] = AttentionBackendEnum.register_plugin_name(name, sparse=True)
        backend = type("RoutedBackend", (SparseBackend,), attributes)
        with pytest.MonkeyPatch.context() as patch:
            plugins = {**registry.load_plugins(), name: (backend,)}
            patch.setattr(registry, "load_plugins", lambda: plugins)
            yield name
    finally:
        backend_names._PLUGINS.pop(name, None)


def layer_of(name: str, cls: type[Any] = LocalAttention, **options: Any) -> Any:
    scope = scope_from(attention_backend=name, attention_backend_config=options or None)
    return cls(HEADS, SIZE, scope=scope)


def video(grid=GRID) -> QKV:
    return make_qkv(1, math.prod(grid), HEADS, SIZE)


def attend(layer: Any, qkv: QKV, grid=GRID, step=0, **call: Any) -> torch.Tensor:
    with torch.no_grad(), set_forward_context(step, latent_grid=grid, num_steps=4):
        return layer(*qkv, **call)


def attend_over_cache(layer: Any, qkv: QKV, step=0) -> torch.Tensor:
    """Attend to the only chunk of a cache."""
    size = CacheSize(
        num_layers=1,
        batch=1,
        num_kv_heads=HEADS,
        head_size=SIZE,
        chunk_tokens=math.prod(GRID),
        window=2,
        dtype=torch.float32,
    )
    cache = CausalCache(size)
    cache.begin(0, size.chunk_tokens)
    return attend(layer, qkv, step=step, cache=cache.layers[0])


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        (KeysRouter, "its blocks of keys have a size of their own"),
        (BandRouter, "its patterns are places in one latent grid"),
    ],
)
def test_what_a_cache_has_no_blocks_for_is_dense_with_its_reason(router, reason):
    qkv = video()
    with serving(router) as name:
        layer = layer_of(name)
        out = attend_over_cache(layer, qkv)
        assert not torch.allclose(out, attend(layer_of(name), qkv), atol=1e-3)
    assert_within_error_budget(out, *qkv, scale=SCALE)
    (entry,) = layer.report().detours
    assert reason in entry.selection.reason


@pytest.mark.parametrize("step", [0, 1])
def test_a_cache_is_cut_by_the_parameters_of_the_step(step):
    qkv = video()
    with serving(ShrinkingRouter) as name:
        cached, plain = layer_of(name), layer_of(name)
        out = attend_over_cache(cached, qkv, step)
        torch.testing.assert_close(out, attend(plain, qkv, step=step))
    densities = [dict(layer.report().entries[0].densities)[step] for layer in (cached, plain)]
    assert densities == pytest.approx([2 / 9 if step == 0 else 2 / 18] * 2)


@pytest.mark.parametrize(("step", "block"), [(0, 8), (1, 4)])
def test_a_dense_step_adds_the_branch_of_its_parameters(step, block):
    qkv = video()
    gate = torch.ones_like(qkv.query)
    with serving(BranchRouter) as name:
        layer = layer_of(name, UlyssesAttention_VSA, dense_steps="0-1")
        out = attend(layer, qkv, step=step, gate_compress=gate)
    means = qkv.value.unflatten(1, (-1, block)).mean(2).repeat_interleave(block, dim=1)
    assert_within_error_budget(out - means, *qkv, scale=SCALE)


def saying(base: type = BestRouter, **said: Any) -> type:
    """Return a router that says something else."""

    def telling(value: Any) -> Any:
        return lambda *_: value

    told = {name: telling(value) for name, value in said.items() if name != "chooses"}
    return type("SaidRouter", (base,), {**said, **told})


def chosen(make: Any) -> type:
    return type("SaidRouter", (BestRouter,), {"choose": lambda self, s, stats, b: make(stats, b)})


WRONG = {
    "no cut": (type("SaidRouter", (Router,), {}), "with that and `cut` defined"),
    "cut alone": (type("SaidRouter", (Router,), {"cut": BestRouter.cut}), "`chooses` of Said"),
    "chooses": (saying(chooses="nope"), "`chooses` of SaidRouter must be one of"),
    "prune": (saying(prune=None), "`chooses` of SaidRouter must be 'map', with a `prune\\(\\)`"),
    "rows": (saying(chooses="rows"), "`chooses` of SaidRouter must be one of"),
    "no router": (None, "`router, config_cls` of RoutedBackend must be given"),
    "tuple": (saying(cut=(2, 2, 2)), r"`cut\(\)` of SaidRouter must be Cut"),
    "empty": (saying(cut=Cut((0, 2, 2))), r"`cut\(\)` of SaidRouter must be Cut"),
    "limits": (saying(limits={"ring": "x"}), r"`limits\(\)` of SaidRouter must be a Limits"),
    "map of keys": (saying(KeysRouter, chooses="map", choose=None), "`chooses` of SaidRouter"),
    "int": (saying(budget=3), r"`budget\(\)` of SaidRouter must be a Budget"),
    "nothing": (saying(budget=Budget(0, 9)), r"`budget\(\)` of SaidRouter must be a Budget"),
    "too many": (saying(budget=Budget(10, 10)), "must be a Budget that keeps 1 to 9 blocks"),
    "no budget of keys": (saying(KeysRouter, budget=None), "must be a Budget that keeps"),
    "two axes": (saying(cut=Cut((2, 2))), r"`cut\(\)` of SaidRouter must be Cut"),
    "none": (saying(choose=None), r"must be a tensor \[1, 2, 9, 2\], got None"),
    "heads": (
        chosen(lambda stats, b: stats.best(b.kept)[:, :1].expand(-1, 3, -1, -1)),
        r"must be a tensor \[1, 2, 9, 2\], got torch.int32 \[1, 3, 9, 2\]",
    ),
    "one head": (chosen(lambda stats, b: stats.best(b.kept)[0]), r"got torch.int32 \[2, 9, 2\]"),
    "narrow": (chosen(lambda stats, b: stats.best(1)), r"got torch.int32 \[1, 2, 9, 1\]"),
    "time of keys": (
        type("SaidRouter", (KeysRouter,), {"choose": lambda self, s, stats, b: stats.near(1)}),
        r"`in_time\(\)` of BlockStats",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_router_cannot_mean_is_refused(what):
    router, message = WRONG[what]
    with pytest.raises(UsageError, match=message), serving(router) as name:
        attend(layer_of(name), video())


@pytest.mark.parametrize("chooses", ["lists", "map"])
def test_what_all_heads_keep_may_be_said_once(chooses, monkeypatch):
    monkeypatch.setattr(tiles_module, "_SHARE_AT_ONCE", 0.0)
    for name in ("_BYTES_AT_ONCE", "_BYTES_IN_TWO"):  # a head at a time
        monkeypatch.setattr(tiles_module, name, 0)

    def first(stats, budget):
        lists = stats.best(2)[:, :1]
        return lists if chooses == "lists" else lists_as_map(lists, stats.num)

    said, outs = {"cut": Cut((2, 2, 2)), "chooses": chooses}, []
    for make in (first, lambda *given: first(*given).expand(-1, HEADS, -1, -1)):
        with serving(saying(chosen(make), **said)) as name:
            outs.append(attend(layer_of(name), video()))
    assert torch.equal(*outs)


def test_lists_of_any_heads_begin_where_kernels_expect_it():
    lists = torch.arange(4 * 3 * 3, dtype=torch.int32).view(1, 4, 3, 3)
    for first in range(4):
        part = _lists_of_heads(lists, slice(first, 4))
        assert part.data_ptr() % 16 == 0
        assert torch.equal(part, lists[:, first:])


def test_a_method_registered_as_dense_is_refused_when_it_loads():
    backend = AttentionBackendEnum.register_plugin_name("forgot_attn")
    declared = {"backend": backend, "router": BestRouter, "config_cls": RowsConfig}
    try:
        with pytest.raises(UsageError, match="must be registered with sparse=True"):
            type("ForgotBackend", (SparseBackend,), declared)
    finally:
        backend_names._PLUGINS.pop("forgot_attn", None)


@pytest.mark.parametrize("block_size", [7, 8])
def test_lists_without_a_budget_have_a_density(block_size):
    router = type(
        "FreeRouter",
        (BestRouter,),
        {"budget": lambda *_: None, "choose": lambda self, s, stats, b: stats.best(s.topk)},
    )
    with serving(router) as name:
        layer = layer_of(name, block_size=block_size)
        attend(layer, video())
    share = 2 / -(-72 // block_size)
    assert dict(layer.report().entries[0].densities)[0] == pytest.approx(share, abs=0.03)


def test_a_density_that_lies_in_a_graph_of_the_callers_is_not_noted(monkeypatch):
    noted, unwritten = Densities(), torch.tensor(torch.nan, dtype=torch.float64)
    noted.note(0, torch.tensor(0.25, dtype=torch.float64), 2)
    monkeypatch.setattr(router_module, "being_captured", lambda: True)
    noted.note(0, unwritten, 2)
    noted.note(1, unwritten, 2)
    noted.note(2, 0.5, 2)  # which holds for every replay
    assert noted.by_step() == {0: 0.25, 2: 0.5}
    with noted.apart() as found:  # by whoever reads it after a replay
        noted.note(0, unwritten, 2)
        assert found() == ((unwritten, 2),)
    noted.note(0, unwritten, 2)
    assert noted.by_step() == {0: 0.25, 2: 0.5}
