"""The self-checks themselves, on references that stand in for kernels: right, or a fifth off."""

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multimodal_gen.kernels import gluon_check
from multimodal_gen.kernels.block_sparse import tuning
from multimodal_gen.kernels.block_sparse.call import Backward, Call, PooledBlocks, TailCall
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.block_sparse.reference import (
    attention_reference,
    attention_reference_backward,
)
from multimodal_gen.kernels.block_sparse.tail_reference import add_tail_reference
from multimodal_gen.kernels.cluster_attention.plan import cluster_plan
from multimodal_gen.kernels.quantized_attention import tuning as quantized_tuning
from multimodal_gen.kernels.quantized_attention.api import Call as QuantizedCall

KERNELS = "multimodal_gen.kernels"
CHECKS = {
    "block_sparse": ("block-sparse attention", "clusters"),
    "gradients": ("gradients", "gradients in one kernel"),
    "pooled_tail": ("the tail",),
    "quantized": ("8-bit attention",),
}
OFF = 1.2


class Kernels:
    """Stands in for the Gluon kernels, and notes which of them were launched.

    Attributes:
        off: which of them are wrong.
        tiles: shapes of the programs that were launched.
        redone: of every launch of a fast variant, whether it must redo some rows, and only some.
        forms: of every other property of a call, whether any had it.
    """

    def __init__(self) -> None:
        self.launched: set[str] = set()
        self.off: set[str] = set()
        self.tiles: set[object] = set()
        self.redone: list[bool] = []
        self.forms: set[str] = set()

    def given(self, name: str, exact: torch.Tensor) -> torch.Tensor:
        """Return what the kernel of a name gives, where this is exact."""
        self.launched.add(name)
        return (exact * (OFF if name in self.off else 1.0)).bfloat16()

    def prepare(self, call: Call, out, lse, *, tile):
        plan, skip = call.plan, call.skip
        self.tiles.add(replace(tile, sync=0))
        held = {"row bits": plan.row_bits is not None, "skipped steps": skip is not None}
        self.forms.update(name for name, there in held.items() if there)

        def launch(call: Call, out, lse):
            q, k, v = (x.double() for x in call[:3])
            scale = call.scale
            exact, lse = attention_reference(q, k, v, plan, scale=scale)
            if tile.fast:
                self.redone.append(must_redo(q, k, plan, lse, scale, tile.keys))
            out.copy_(self.given("block-sparse attention", exact))

        return launch

    def attention(self, name: str, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.double() for x in (call.q, call.k, call.v))
        if isinstance(call, QuantizedCall):
            blocks = call.plan.kv
            sizes = {"q_size": call.plan.q.size, "kv_size": blocks.size}
            tile = quantized_tuning.gluon_tile(**sizes, regular=blocks.is_regular, e4m3=call.e4m3)
            self.tiles.add(tile)
        out, lse = attention_reference(q, k, v, call.plan, scale=call.scale)
        if isinstance(call, QuantizedCall) and tile.fast:
            self.redone.append(must_redo(q, k, call.plan, lse, call.scale, tile.keys))
        return self.given(name, out), lse.float()

    def clusters(self, q, k, v, pieces, side, keep, *, scale):
        plan = cluster_plan(side, side, keep)
        out, lse = attention_reference(q.double(), k.double(), v.double(), plan, scale=scale)
        return self.given("clusters", out), lse

    def gradients(self, name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
        def attend_backward(call: Backward, **_):
            plan, scale = call.plan, call.scale
            q, k, v, out, grad = (x.double() for x in (*call[:3], call.out, call.grad_out))
            _, lse = attention_reference(q, k, v, plan, scale=scale)
            exact = Backward(q, k, v, plan, out, lse, grad, None, scale)
            found = attention_reference_backward(exact)
            return tuple(self.given(name, x) for x in found)

        return attend_backward

    def add_tail(self, call: TailCall, *, tile):
        pooled = call.pooled
        keys, values = pooled.keys.double(), pooled.values.double()
        means = PooledBlocks(keys=keys, values=values, counts=pooled.counts)
        exact = TailCall(*(x.double() for x in call[:3]), means, *call[4:])
        found, _ = add_tail_reference(exact)
        call.out.copy_(self.given("the tail", found))


def must_redo(
    q: torch.Tensor, k: torch.Tensor, plan: BlockPlan, lse: torch.Tensor, scale: float, keys: int
) -> bool:
    """Tell whether sums of some rows, and not of all, are above 2^64 of the first step's largest.

    All rows keep the first `keys` keys, which are the first step.
    """
    assert bool((plan.indices[..., 0] == 0).all())
    first = torch.einsum("bqhd,bkhd->bhqk", q, k[:, :keys]).amax(-1) * scale
    over = (lse - first) / math.log(2.0) > 64
    return bool(over.any() and not over.all())


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    blocks = f"{KERNELS}.block_sparse"
    stand_ins = {
        f"{KERNELS}.launch.compat": {"lacking": lambda: ()},
        f"{blocks}.gluon_kernel": {"prepare": kernels.prepare},
        f"{blocks}.gluon_backward_kernel": {"attend_backward": kernels.gradients("gradients")},
        f"{blocks}.gluon_fused_kernel": {
            "attend_backward": kernels.gradients("gradients in one kernel"),
        },
        f"{blocks}.gluon_tail_kernel": {"add_tail": kernels.add_tail},
        f"{KERNELS}.cluster_attention.cluster_attention_kernel": {"attend": kernels.clusters},
    }
    for module, names in stand_ins.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))
    for run, name in (
        ("BLOCK_SPARSE_KERNELS", "block-sparse attention"),
        ("QUANTIZED_KERNELS", "8-bit attention"),
    ):
        launch = {"gluon": lambda call, name=name: kernels.attention(name, call)}
        monkeypatch.setattr(gluon_check, run, launch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return kernels


@pytest.mark.parametrize("name", CHECKS)
def test_kernels_that_are_right_pass_and_are_launched_by_the_check(
    name: str, kernels: Kernels
) -> None:
    # What a check leaves to the choice of a kernel is not what it checks, and would wait for it.
    assert getattr(gluon_check, name)(torch.device("cpu")) is None
    assert kernels.launched.issuperset(CHECKS[name])


@pytest.mark.parametrize(
    ("name", "tuning"), [("block_sparse", tuning), ("quantized", quantized_tuning)]
)
def test_every_tile_is_checked(name: str, tuning: Any, kernels: Kernels) -> None:
    assert getattr(gluon_check, name)(torch.device("cpu")) is None
    assert kernels.tiles == {
        replace(tile, sync=0) if hasattr(tile, "sync") else tile for tile in tuning._HOPPER.values()
    }


@pytest.mark.parametrize(("name", "fast"), [("block_sparse", 5), ("quantized", 4)])
def test_rows_that_a_fast_variant_must_redo_are_in_every_call(
    name: str, fast: int, kernels: Kernels
) -> None:
    assert getattr(gluon_check, name)(torch.device("cpu")) is None
    assert kernels.redone == [True] * fast


def test_every_form_of_a_call_is_checked(kernels: Kernels) -> None:
    assert gluon_check.block_sparse(torch.device("cpu")) is None
    assert kernels.forms == {"row bits", "skipped steps"}


@pytest.mark.parametrize(
    ("name", "kernel"), [(name, kernel) for name, launched in CHECKS.items() for kernel in launched]
)
def test_a_kernel_that_is_off_does_not_pass(name: str, kernel: str, kernels: Kernels) -> None:
    kernels.off = {kernel}
    fault = getattr(gluon_check, name)(torch.device("cpu"))
    assert fault is not None
    assert fault.startswith("relative error 0.")


@pytest.mark.parametrize("name", CHECKS)
def test_what_the_language_lacks_is_a_fault_before_anything_runs(
    name: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    compat = SimpleNamespace(lacking=lambda: ("tma.async_load",))
    monkeypatch.setitem(sys.modules, f"{KERNELS}.launch.compat", compat)
    fault = getattr(gluon_check, name)(torch.device("cpu"))
    assert fault == "its Gluon lacks tma.async_load"
    assert kernels.launched == set()
