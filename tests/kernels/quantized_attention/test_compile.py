"""The GPU kernels compile without a GPU, through their launchers: no spills, no ptxas warnings.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile. What
chooses the units of a step computes with numbers alone, and is run. These tests need triton 3.6 or
later and a process of their own: test_children.py starts it, with the oldest and the newest and
without the cases marked slow.
"""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.kernels.block_sparse.call import forms_of
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.launch.launcher import Launch
from multimodal_gen.kernels.quantized_attention.api import RUN, Call, _checked
from tests.helpers.block_plans import PlanShape, random_plan
from tests.kernels.compiling import Compiler, assert_clean, needs_gluon, with_oldest

pytestmark = needs_gluon


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of one provider."""

    kernel: str
    sizes: tuple[int, int] = (128, 128)
    form: str = "regular"
    e4m3: bool = False
    head_size: int = 128
    lse: bool = True
    capability: int = 90

    def __str__(self) -> str:
        marks = [self.kernel, f"sm{self.capability}", *map(str, self.sizes), self.form]
        marks += ["e4m3" if self.e4m3 else "16-bit", f"d{self.head_size}"] + ["lse"] * self.lse
        return "-".join(marks)

    def plan(self) -> BlockPlan:
        q_size, kv_size = self.sizes
        if self.form in ("dense", "causal"):
            causal = self.form == "causal"
            keys = Blocks.regular(6 * kv_size - (5 if causal else 0), kv_size)
            return BlockPlan.dense(Blocks.regular(4 * q_size, q_size), keys, "cpu", causal=causal)
        shape = PlanShape(
            heads=1,
            num_q=3,
            num_kv=5,
            q_size=q_size,
            kv_size=kv_size,
            q_form="regular" if self.form == "mixed" else self.form,
            kv_form="padded" if self.form == "mixed" else self.form,
        )
        return random_plan(shape, seed=1)

    def launch(self, plan: BlockPlan) -> None:
        q = torch.zeros(2, plan.q.total, 4, self.head_size, dtype=torch.bfloat16)
        k, v = (
            torch.zeros(2, plan.kv.total, 2, self.head_size, dtype=torch.bfloat16) for _ in range(2)
        )
        form = _checked(q, k, v, plan, 0.1, "e4m3" if self.e4m3 else "16-bit")
        RUN[self.kernel](Call(q, k, v, plan, 0.1, self.lse, self.e4m3, None, form))


SQUARE, SHORT, NARROW, SMALL = (128, 128), (128, 64), (64, 128), (64, 64)
FORMS = ("dense", "regular", "padded", "ragged")

EVERY_GLUON = [
    Case("gluon", sizes, form, e4m3, head_size, lse)
    for sizes in (SQUARE, SHORT, NARROW, SMALL)
    for form in FORMS
    for e4m3 in (True, False)
    for head_size, lse in ((64, False), (96, True), (128, True))
]
# Either kind of values with each release; the other sizes of blocks are slow.
OLDEST = [Case("gluon", SQUARE, "regular", e4m3=True, head_size=128, lse=True)]
NEWEST = [
    Case("gluon", SMALL, "ragged", e4m3=False, head_size=128, lse=True),
]
EVERY_PORTABLE = [
    Case("triton", (q_size, 128), form, e4m3, head_size, True, capability)
    for q_size, form, head_size in itertools.product((64, 128), (*FORMS, "causal"), (64, 128))
    for capability, e4m3 in ((80, False), (89, True), (90, True), (90, False))
    # On SM89 partial steps of e4m3 values with 128 channels spill 8 bytes.
    if (capability, head_size, form) != (89, 128, "padded")
]
PORTABLE = [
    Case("triton", SQUARE, "dense", e4m3=False, capability=80),
    Case("triton", SQUARE, "ragged", e4m3=True, capability=90),
    # Bounds of keys alone: the quantising kernel has both sides.
    Case("triton", SQUARE, "mixed", e4m3=True, capability=90),
]
EVERY_PORTABLE.append(PORTABLE[-1])


def marked(cases: list[Case], quick: list[Case]) -> list[object]:
    """Mark the cases that are not among the quick ones as slow."""
    assert set(quick) <= set(cases)
    return [
        pytest.param(case, marks=[] if case in quick else [pytest.mark.slow], id=str(case))
        for case in cases
    ]


# Blocks and form -> what a Gluon kernel of 16-bit values spills with the newest release, in bytes
# per thread at most: most of it the exact one that redoes a flagged tile.
NEWER_SPILLS = {
    (SQUARE, "padded"): 56,
    (SQUARE, "ragged"): 56,
    (SHORT, "padded"): 16,
    (SHORT, "ragged"): 16,
}
QUICK = OLDEST if with_oldest() else NEWEST


@pytest.mark.slow_cases("triton-sm80-128-128-dense-16-bit-d128-lse")
@pytest.mark.parametrize(
    "case",
    [
        *marked(EVERY_GLUON, QUICK),
        *marked(EVERY_PORTABLE, PORTABLE if with_oldest() else []),
    ],
)
def test_every_kernel_compiles_without_spills_or_warnings(compiler: Compiler, case: Case) -> None:
    compiler.driver.capability = case.capability
    case.launch(case.plan())
    made = {"attention_kernel", "quantise_kernel", "centre_kernel"}
    assert compiler.names >= made
    assert_clean(compiler.kernels, known_spills(case))


@pytest.mark.parametrize("form", ["regular", "ragged"])
def test_launches_are_prepared_once_for_all_plans_of_a_form(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    case = Case("gluon", SQUARE, form)
    made: list[Launch] = []
    read: list[object] = []
    start = Launch.__init__
    monkeypatch.setattr(Launch, "__init__", lambda self, *x: made.append(self) or start(self, *x))
    monkeypatch.setattr(Launch, "__call__", lambda _, first: read.extend(first))
    forms_of.cache_clear()
    plans = [case.plan() for _ in range(3)]
    for plan in plans:
        read.clear()
        case.launch(plan)
        # Where blocks are ragged, lists are cut into steps first.
        own = plan.tensors() if form == "regular" else (*plan.q.tensors(), *plan.kv.tensors())
        seen = {x.data_ptr() for x in read if isinstance(x, torch.Tensor)}
        assert own
        assert seen >= {x.data_ptr() for x in own}  # its own, not those of the first
    assert len(made) == 3  # for the centres, to quantise, to attend


def known_spills(case: Case) -> int:
    if with_oldest():  # the quantising kernel, on 128 keys
        return 20 if case.kernel == "gluon" and case.e4m3 else 0
    if case.kernel == "triton":
        return 8 if case.capability == 89 else 0
    return 0 if case.e4m3 else NEWER_SPILLS.get((case.sizes, case.form), 0)


class Entries:
    """A pointer to numbers that a kernel reads."""

    def __init__(self, numbers: list[int], at: int = 0) -> None:
        self.numbers, self.at = numbers, at

    def __add__(self, more: int) -> "Entries":
        return Entries(self.numbers, self.at + more)


def load(at: Entries, mask: bool = True, other: int = 0) -> int:
    if not mask:
        return other
    assert 0 <= at.at < len(at.numbers), "a list is read where it is not"
    return at.numbers[at.at]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> object:
    """What says which units a step has, to be called on numbers."""
    from multimodal_gen.kernels.block_sparse import gluon_work_kernel as lists
    from multimodal_gen.kernels.quantized_attention import gluon_work_kernel as work

    numbers = SimpleNamespace(
        minimum=min, maximum=max, load=load, where=lambda which, x, y: x if which else y
    )
    for module in (lists, work):
        monkeypatch.setattr(module, "gl", numbers)
    for name in ("start_of", "step_counts", "step_keys", "step_starts", "_unit_keys"):
        monkeypatch.setattr(work, name, getattr(work, name).fn)
    return work


def units_of(steps, work: SimpleNamespace, shape: SimpleNamespace) -> list[tuple[int, int]]:
    """Return first key and keys of every unit of all steps, those without any left out."""
    work.lead, work.whole, count = steps.step_counts(work.num_full, work.num_tail, shape)
    places = 1 + (shape.unit < shape.keys)
    assert count == -(-(work.num_full % places + work.num_tail) // places) + work.num_full // places
    seen = []
    for step in range(count):
        whole = step - work.lead in range(work.whole)
        keys = (shape.unit, shape.unit) if whole else steps.step_keys(work, step, shape)
        seen += list(zip(steps.step_starts(work, step, shape), keys, strict=True))[:places]
    return sorted(unit for unit in seen if unit[1])


@pytest.mark.parametrize("pairs", [True, False])
def test_steps_have_every_unit_of_a_list_once(steps, pairs: bool) -> None:
    """Of a list with whole units in front and partial ones from the back."""
    shape = SimpleNamespace(unit=64, keys=128 if pairs else 64, sub=0, ragged=True)
    for full, tails in itertools.product(range(6), range(5)):
        if full + tails == 0:
            continue
        whole = [(64 * i, 64) for i in range(full)]
        partial = [(1000 + 64 * t, 7 + t) for t in range(tails)]
        starts = [start for start, _ in [*whole, *reversed(partial)]]
        lengths = [keys for _, keys in partial]
        work = SimpleNamespace(
            row_list=Entries(starts), num_full=full, num_tail=tails, tail=len(starts) - 1,
            tail_keys=Entries(lengths),
        )  # fmt: skip
        assert units_of(steps, work, shape) == sorted(whole + partial)


@pytest.mark.parametrize("pairs", [True, False])
def test_steps_have_every_unit_of_regular_blocks_once(steps, pairs: bool) -> None:
    """Blocks have two units; the keys may end in either of the last one's, or behind it."""
    shape = SimpleNamespace(unit=64, keys=128 if pairs else 64, sub=2, ragged=True)
    units = [64 * (2 * block + half) for block in (3, 5, 8) for half in range(2)]
    for full, keys in itertools.product(range(6), (0, 9)):
        if full == 0 and not keys:
            continue
        work = SimpleNamespace(
            row_list=Entries([3, 5, 8]), num_full=full, num_tail=int(keys > 0), tail=5000,
            tail_keys=keys,
        )  # fmt: skip
        wanted = [(start, 64) for start in units[:full]] + [(5000, keys)] * (keys > 0)
        assert units_of(steps, work, shape) == sorted(wanted)
