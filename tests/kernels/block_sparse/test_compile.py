"""The GPU kernels compile without a GPU, through their launchers: no spills, no ptxas warnings.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile. These
tests need triton 3.6 or later and a process of their own: test_children.py starts it, with the
oldest and the newest and without the cases marked slow. scripts/test leaves both in the
environment, so for all cases:

    PYTHONPATH=.venv/kernels/triton-3.6.0 .venv/bin/python -m pytest \
        tests/kernels/block_sparse/test_compile.py
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multimodal_gen.kernels.block_sparse import api
from multimodal_gen.kernels.block_sparse.api import RUN, request_for
from multimodal_gen.kernels.block_sparse.call import (
    Backward,
    Call,
    CallForm,
    PooledBlocks,
    TailCall,
    forms_of,
)
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.skip import Skip
from multimodal_gen.kernels.block_sparse.tuning import (
    GluonTile,
    backward_tiles,
    gluon_backward_tile,
    gluon_tail_tile,
    gluon_tile,
    triton_tile,
)
from multimodal_gen.kernels.launch.launcher import Direct, Launch, Launcher
from tests.helpers.block_plans import PlanShape, random_plan
from tests.kernels.cases import with_slow
from tests.kernels.compiling import (
    Compiler,
    StandInDriver,
    assert_clean,
    needs_gluon,
    with_oldest,
)

pytestmark = needs_gluon

# Compute capability -> shared memory of a program. SM80 is the A100.
SHARED_MEMORY = {80: 166912, 90: 232448}


def plan_of(form: str, q_size: int, kv_size: int) -> BlockPlan:
    """Return a plan that needs one variant of the kernels.

    Args:
        form: "dense" and "causal" keep everything, with whole blocks and with a short last one.
            "regular" chooses blocks, the last being short, and "bits" chooses for every row too;
            "padded" and "ragged" give the blocks lengths, and starts, of their own.
        q_size: rows of a query block.
        kv_size: keys of a key block.
    """
    if form in ("dense", "causal"):
        causal = form == "causal"
        keys = Blocks.regular(6 * kv_size - (5 if causal else 0), kv_size)
        return BlockPlan.dense(Blocks.regular(4 * q_size, q_size), keys, "cpu", causal=causal)
    blocks = "regular" if form == "bits" else form
    shape = PlanShape(
        heads=4,
        num_q=3,
        num_kv=5,
        q_size=q_size,
        kv_size=kv_size,
        q_form=blocks,
        kv_form=blocks,
        row_bits=form == "bits",
    )
    return random_plan(shape, seed=1)


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def tensors_for(plan: BlockPlan, head_size: int, dtype: torch.dtype) -> Tensors:
    q = torch.zeros(2, plan.q.total, 4, head_size, dtype=dtype)
    k, v = (torch.zeros(2, plan.kv.total, 2, head_size, dtype=dtype) for _ in range(2))
    return q, k, v, torch.empty_like(q)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of the SM90 kernel."""

    sizes: tuple[int, int]
    form: str
    fast: bool
    head_size: int = 128
    lse: bool = True
    deterministic: bool = False

    def __str__(self) -> str:
        marks = [self.form, "fast" if self.fast else "exact", f"d{self.head_size}"]
        marks += ["lse"] * self.lse + ["deterministic"] * self.deterministic
        return "-".join([*map(str, self.sizes), *marks])

    def tile(self, *, skips: bool = False) -> GluonTile:
        return gluon_tile(
            q_size=self.sizes[0],
            kv_size=self.sizes[1],
            regular=self.form in ("dense", "regular"),
            fast=self.fast,
            deterministic=self.deterministic,
            row_bits=self.form == "bits",
            skips=skips,
        )

    def launch(self, skip: Skip | None = None) -> None:
        from multimodal_gen.kernels.block_sparse.gluon_kernel import prepare

        plan = plan_of(self.form, *self.sizes)
        dtype = torch.bfloat16 if self.fast else torch.float16
        q, k, v, out = tensors_for(plan, self.head_size, dtype)
        lse = torch.empty(2, 4, plan.q.total) if self.lse else None
        form = CallForm(request_for(q, k, v, plan, backward=False))
        call = Call(q, k, v, plan, 0.1, self.lse, False, form, skip)
        prepare(call, out, lse, tile=self.tile(skips=skip is not None))(call, out, lse)


WIDE, SQUARE, SHORT, NARROW = (384, 384), (128, 128), (128, 64), (64, 64)

EVERY_CASE = [
    Case(sizes, form, fast)
    for sizes in (WIDE, SQUARE, SHORT, NARROW)
    for form in ("dense", "regular", "padded", "ragged", "bits")
    for fast in (True, False)
]
EVERY_CASE += [
    Case(SQUARE, form, fast, head_size, lse, deterministic)
    for form in ("dense", "regular")
    for fast in (True, False)
    for head_size in (64, 96, 128)
    for lse in (True, False)
    for deterministic in (True, False)
    if Case(SQUARE, form, fast, head_size, lse, deterministic) not in EVERY_CASE
]

# Together every tile once, but for how often sweeps are aligned, and every other choice.
OLDEST = [
    Case(WIDE, "regular", fast=False),
    Case(SQUARE, "regular", fast=True),
    Case(SQUARE, "regular", fast=False, head_size=64, lse=False),
    Case(SQUARE, "bits", fast=True),
    Case(SHORT, "padded", fast=False),
    Case(NARROW, "ragged", fast=True),
    Case(NARROW, "bits", fast=False),
]
# Blocks with lengths and starts of their own take twice as long with newer releases.
NEWEST = [
    Case(WIDE, "dense", fast=True),
    Case(SQUARE, "dense", fast=False, head_size=96, deterministic=True),
]
CASES = OLDEST if with_oldest() else NEWEST


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tile_of_sm90_compiles_without_spills_or_warnings(
    compiler: Compiler, case: Case
) -> None:
    case.launch()
    assert "attention_kernel" in compiler.names
    assert_clean(compiler.kernels)
    assert not any(counts(kernel.ptx) for kernel in compiler.kernels)


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(96, marks=() if with_oldest() else pytest.mark.slow),
        pytest.param(4096, marks=pytest.mark.slow),
    ],
)
def test_small_calls_launch_once(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Without flags of tiles that are done again, nor a place for them."""
    from multimodal_gen.kernels.block_sparse.gluon_kernel import attention_kernel

    launches = []
    compile_it = attention_kernel.run  # which the fixture replaced

    def run(*arguments: object, **options: object) -> None:
        launches.append(arguments)
        compile_it(*arguments, **options)

    monkeypatch.setattr(attention_kernel, "run", run)
    q = torch.zeros(1, tokens, 24, 128, dtype=torch.bfloat16)
    blocks = Blocks.regular(tokens, 384)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    form = CallForm(request_for(q, q, q, plan, backward=False))
    RUN["gluon"](Call(q, q, q, plan, 0.1, False, False, form))
    assert_clean(compiler.kernels)
    small = tokens == 96
    assert len(launches) == (1 if small else 2)
    # out, lse, flags and sweeps follow the three descriptors.
    assert all((arguments[5] is plan.counts) == small for arguments in launches)


Launched = list[tuple[object, ...]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Note what the kernel sees of every launch; nothing is compiled."""
    from multimodal_gen.kernels.block_sparse.gluon_kernel import attention_kernel

    found: Launched = []

    def note(grid: tuple[int, ...], first: Any, rest: Any) -> None:
        found.append((math.prod(grid), *map(as_the_kernel_sees_it, (*first, *rest))))

    def each(
        self: Launcher, grids: list[tuple[int, ...]], *arguments: Any, variants: Any
    ) -> list[Callable[..., None] | None]:
        if self.kernel is not attention_kernel:
            return [None]  # what makes the lists of a plan
        for grid, options in zip(grids, variants, strict=True):
            note(grid, arguments, self.named(options, len(arguments)))
        return [note] * len(variants)

    monkeypatch.setattr(Launcher, "each", each)
    return found


def as_the_kernel_sees_it(argument: Any) -> object:
    """Return a value that is equal for arguments that it does the same with."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape, argument.stride()
    if hasattr(argument, "block_shape"):
        return argument.base.address, *map(tuple, (argument.shape, argument.strides))
    return argument


def inputs_of_many_forms(plan: BlockPlan, dtype: torch.dtype) -> list[Tensors]:
    """Return q, k and v of one plan, two of each form."""
    packed = torch.zeros(2, plan.q.total + plan.kv.total, 3, 4, 64, dtype=dtype)
    together = (packed[:, : plan.q.total, 0], *packed[:, plan.q.total :, 1:].unbind(2))
    alone = tensors_for(plan, 64, dtype)[:3]
    shared = tensors_for(plan, 128, dtype)[:3]
    again = [tuple(x.clone() for x in inputs) for inputs in (alone, shared)]
    padded = tuple(torch.cat((x, x), 3)[..., :64] for x in alone)
    one_other = [(*alone[:i], padded[i], *alone[i + 1 :]) for i in range(3)]
    return [alone, together, shared, *again, *one_other, together, alone]


@pytest.mark.parametrize("form", ["dense", "regular", "ragged", "bits"])
@pytest.mark.parametrize("large", [False, True])
def test_launches_that_a_plan_keeps_are_those_of_a_new_plan(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, form: str, large: bool
) -> None:
    if large:  # the fast variant, and its redo
        monkeypatch.setattr(api, "REDO_PAYS", 0)
    plan = plan_of(form, 128, 128)
    ways = [
        {"return_lse": return_lse, "deterministic": deterministic, "scale": scale, **more}
        for return_lse in (False, True)
        for deterministic in (False, True)
        for scale in (0.1, 0.2)
        for more in ({}, {"overwrite_q": True}, *({"skip": Skip(below=x)} for x in (20.0, 30.0)))
    ]
    every = [*inputs_of_many_forms(plan, torch.bfloat16), *inputs_of_many_forms(plan, torch.half)]
    for way, inputs in itertools.product(ways, every):
        others = [dataclasses.replace(plan) for _ in range(2)]
        for now in (plan, plan, *others):
            if now is others[1]:
                forms_of.cache_clear()  # or it would be launched like those before
            checked = api._checked(*inputs, now, None)
            assert checked is not None
            call = Call(*inputs, now, form=checked, **way)
            out, lse = RUN["gluon"](call)
            assert (out is inputs[0]) == ("overwrite_q" in way and plan.q.starts is None)
            assert (lse is not None) == way["return_lse"]
        num = len(launched) // 4
        assert num >= 1
        assert launched == 4 * launched[:num]
        launched.clear()


def test_launches_are_prepared_once_for_all_plans_of_a_form(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("regular", 128, 128)
    plan = dataclasses.replace(plan, indices=plan.indices.contiguous())
    made, read, original, launch = [], [], api._prepare_gluon, Launch.__call__
    monkeypatch.setattr(api, "_prepare_gluon", lambda *x: made.append(x) or original(*x))
    monkeypatch.setattr(Launch, "__call__", lambda self, x: read.append(x) or launch(self, x))
    forms_of.cache_clear()
    inputs = tensors_for(plan, 64, torch.bfloat16)[:3]

    def call(plan: BlockPlan, scale: float = 0.1) -> None:
        checked = api._checked(*inputs, plan, scale)
        assert checked is not None
        RUN["gluon"](Call(*inputs, plan, scale, False, False, checked))

    for scale in (0.1, 0.1, 0.2):
        call(plan, scale)
    kept = len(plan.cache)
    call(plan, 0.3)
    assert len(plan.cache) == kept
    for _ in range(3):
        new = dataclasses.replace(plan, indices=plan.indices.clone())
        call(new)
        assert any(x is new.indices for x in read[-1])  # its own lists
    assert len(made) == 1
    assert len(launched) == 7
    room = plan.indices.shape[3]
    others: dict[str, Any] = {
        "indices": torch.nn.functional.pad(plan.indices, (0, 1))[..., :room],
        "counts": torch.nn.functional.pad(plan.counts, (1, 0))[..., 1:],
        "uniform": True,
        "row_bits": torch.zeros(1, 1, plan.q.total, 1, dtype=torch.int32),
        "order": torch.arange(plan.counts.numel(), dtype=torch.int32),
    }
    for number, (name, other) in enumerate(others.items()):
        call(dataclasses.replace(plan, **{name: other}))
        assert len(made) == 2 + number, name


def counts(ptx: str) -> bool:
    """Whether a kernel adds up in memory, as it does for the steps that it skips."""
    return "atom.global" in ptx or "red.global" in ptx or "atom.relaxed" in ptx


SKIPPING = [
    Case(sizes, form, fast=False, head_size=head_size)
    for sizes, form, head_size in (
        (SQUARE, "regular", 128),
        (NARROW, "ragged", 128),
        (WIDE, "regular", 128),
        (SHORT, "ragged", 128),
        (NARROW, "bits", 128),
        (SQUARE, "bits", 64),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if with_oldest() and i == 0 else pytest.mark.slow)
        for i, case in enumerate(SKIPPING)
    ],
    ids=str,
)
def test_skipping_steps_compiles_without_spills_or_warnings(compiler: Compiler, case: Case) -> None:
    case.launch(Skip(below=30.0))
    assert_clean(compiler.kernels)
    (kernel,) = (kernel for kernel in compiler.kernels if kernel.name == "attention_kernel")
    assert counts(kernel.ptx)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in EVERY_CASE if case not in CASES], ids=str)
def test_every_variant_of_sm90_compiles_without_spills_or_warnings(
    compiler: Compiler, case: Case
) -> None:
    case.launch()
    assert "attention_kernel" in compiler.names
    # Three consumers that pass over blocks keep a few values of each step in memory.
    passes = case.form == "bits" and case.sizes == WIDE and case.fast
    assert_clean(compiler.kernels, 32 if passes else 0)


def test_no_tile_and_no_choice_is_left_to_the_slow_cases() -> None:
    both = [*OLDEST, *NEWEST]
    every, quick = (
        {dataclasses.replace(case.tile(), sync=0) for case in c} for c in (EVERY_CASE, both)
    )
    assert every == quick
    for field in dataclasses.fields(Case):
        every_value, quick_value = (
            {getattr(case, field.name) for case in c} for c in (EVERY_CASE, both)
        )
        assert every_value == quick_value


def launch_portable(
    compiler: Compiler,
    capability: int,
    form: str,
    q_size: int,
    head_size: int,
    skip: Skip | None = None,
) -> None:
    """Launch the portable kernel, through the copy engine on SM90."""
    from multimodal_gen.kernels.block_sparse.triton_kernel import attend

    compiler.driver.capability = capability
    plan = plan_of(form, q_size, 128)
    q, k, v, out = tensors_for(plan, head_size, torch.bfloat16)
    tile = triton_tile(
        head_size=head_size,
        q_size=q_size,
        kv_size=plan.kv.size if plan.kv.is_regular else 1,
        capability=(capability // 10, capability % 10),
        shared_memory=SHARED_MEMORY[capability],
    )
    lse = torch.empty(2, 4, plan.q.total)
    form = CallForm(request_for(q, k, v, plan, backward=False))
    call = Call(q, k, v, plan, 0.1, True, False, form, skip)
    attend(call, out, lse, tile=tile, copy_engine=capability >= 90)


FORMS = ("dense", "regular", "ragged", "bits", "causal")
ROWS = (64, 128)
# With 128 rows of 256 channels, blocks with starts of their own spill 4 bytes.
EVERY_PORTABLE_SM90 = [
    case
    for case in itertools.product(FORMS, ROWS, (64, 96, 128, 256))
    if case != ("ragged", 128, 256)
]
PORTABLE_SM90 = [("bits", 128, 128)]
# From 96 channels on, partial steps take more registers than SM80 has: they spill.
EVERY_PORTABLE_SM80 = [
    *itertools.product(FORMS, ROWS, (64,)),
    *itertools.product(("dense",), ROWS, (96, 128)),
    ("dense", 64, 256),
]
PORTABLE_SM80 = [("dense", 128, 128)]


@pytest.mark.slow_cases("bits-128-128")
@pytest.mark.parametrize(
    ("form", "q_size", "head_size"),
    with_slow(EVERY_PORTABLE_SM90, PORTABLE_SM90 if with_oldest() else []),
)
def test_the_portable_kernel_does_not_spill_on_sm90(
    compiler: Compiler, form: str, q_size: int, head_size: int
) -> None:
    launch_portable(compiler, 90, form, q_size, head_size)
    assert "attention_kernel" in compiler.names
    compiler.assert_clean()


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "q_size", "head_size"),
    [("regular", 64, 128), ("regular", 128, 128), ("ragged", 64, 64), ("dense", 128, 64)],
)
def test_leaving_products_out_does_not_spill_on_sm90(
    compiler: Compiler, form: str, q_size: int, head_size: int
) -> None:
    launch_portable(compiler, 90, form, q_size, head_size, Skip(below=30.0))
    assert "attention_kernel" in compiler.names
    compiler.assert_clean()


@pytest.mark.slow_cases("dense-128-128")
@pytest.mark.parametrize(
    ("form", "q_size", "head_size"),
    with_slow(EVERY_PORTABLE_SM80, PORTABLE_SM80 if with_oldest() else []),
)
def test_the_portable_kernel_does_not_spill_on_sm80(
    compiler: Compiler, form: str, q_size: int, head_size: int
) -> None:
    launch_portable(compiler, 80, form, q_size, head_size)
    assert "attention_kernel" in compiler.names
    compiler.assert_clean()


@pytest.mark.parametrize(
    ("form", "q_size", "head_size"),
    with_slow(
        [("regular", 64, 128), ("regular", 384, 64), ("ragged", 64, 40), ("padded", 64, 128)],
        [("regular", 64, 128) if with_oldest() else ("regular", 384, 64)],
    ),
)
def test_the_tail_in_gluon_compiles_without_spills_or_warnings(
    compiler: Compiler, form: str, q_size: int, head_size: int
) -> None:
    from multimodal_gen.kernels.block_sparse.gluon_tail_kernel import add_tail

    queries = plan_of(form, q_size, 64).q
    out = torch.zeros(2, queries.total, 4, head_size, dtype=torch.bfloat16)
    means = torch.zeros(2, 2, 300, head_size, dtype=torch.bfloat16)
    kept = torch.zeros(1, 4, queries.num, 300, dtype=torch.bool)
    pooled = PooledBlocks(keys=means, values=means, counts=torch.ones(1, 1, 300).int())
    lse = torch.zeros(2, 4, queries.total)
    add_tail(TailCall(out, lse, out, pooled, kept, queries, 0.1), tile=gluon_tail_tile())
    assert compiler.names == {"pack_kernel", "gluon_tail_kernel", "tail_kernel"}
    # Only what is read once per tile spills; the last kernel hardly ever has anything to do.
    assert_clean(compiler.kernels, most=320)


def launch_backward(
    compiler: Compiler, capability: int, form: str, size: int, channels: int
) -> None:
    """Launch the portable kernels of the backward pass, through the copy engine on SM90."""
    from multimodal_gen.kernels.block_sparse.backward_kernel import attend_backward

    compiler.driver.capability = capability
    plan = plan_of(form, size, size)
    q, k, v, out = tensors_for(plan, channels, torch.bfloat16)
    tiles = backward_tiles(
        head_size=channels,
        q_size=size,
        kv_size=size,
        whole=form in ("dense", "regular"),
        capability=(capability // 10, capability % 10),
        shared_memory=SHARED_MEMORY[capability],
    )
    lse = torch.empty(2, 4, plan.q.total)
    call = Backward(q, k, v, plan, out, lse, out, None, 0.1)
    attend_backward(call, tiles=tiles, copy_engine=capability >= 90)


# On SM80 rows that choose spill, and so do causal plans in the wider steps of 64 channels.
EVERY_BACKWARD = [
    *itertools.product((90,), ("dense", "ragged", "causal"), ROWS, (64, 128)),
    *itertools.product((90,), ("dense",), ROWS, (256,)),
    *itertools.product((80,), ("dense",), ROWS, (64, 128)),
    *itertools.product((80,), ("causal",), ROWS, (128,)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "form", "size", "channels"), EVERY_BACKWARD)
def test_the_backward_kernels_hardly_spill(
    compiler: Compiler, capability: int, form: str, size: int, channels: int
) -> None:
    launch_backward(compiler, capability, form, size, channels)
    assert {"query_gradient_kernel", "key_gradients_kernel"} <= compiler.names
    assert_clean(compiler.kernels, most=16)


def stand_in(launches: list[Any]) -> Any:
    """Return a compilation of four parameters, two of them descriptors, that notes its launches.

    All of it is Triton's own but the function that asks the driver to launch.
    """
    from triton.backends.nvidia import driver
    from triton.compiler.compiler import CompiledKernel

    run = object.__new__(driver.CudaLauncher)
    zero = ("launch_pdl", "launch_cooperative_grid", "gsan_enabled")
    for kind in ("global", "profile"):
        zero += (f"{kind}_scratch_size", f"{kind}_scratch_align")
    run.__dict__ |= dict.fromkeys(zero, 0)
    run.__dict__ |= {"num_ctas": 1, "arg_annotations": "a", "kernel_signature": "s"}
    run.launch = driver.wrap_handle_tensordesc(
        lambda *passed: launches.append(passed),
        {0: "i32", 1: "tensordesc<bf16[64]>", 2: "tensordesc<bf16[64]>", 3: "i32"},
        ["first", "second"],
    )
    compiled = object.__new__(type("Compiled", (CompiledKernel,), {"__del__": lambda self: None}))
    compiled.__dict__ |= {"module": 1, "function": 5, "_run": run, "packed_metadata": "packed"}
    compiled.__dict__ |= {"name": "kernel", "src": None}
    return compiled


@contextmanager
def as_current(place: SimpleNamespace, device: int) -> Iterator[None]:
    """Make a device the current one for a while."""
    before, place.device = place.device, device
    yield
    place.device = before


def test_direct_launches_pass_what_triton_would(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.nvidia import driver

    from multimodal_gen.kernels.launch.descriptors import describe_tokens as describe

    made, launches = [], []

    def make(descriptor: Any, layout: Any, *_: object) -> list[Any]:
        made.append(layout)
        return [("map", descriptor.base.data_ptr(), layout), *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    active = StandInDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    compiled = stand_in(launches)
    q, k = (torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    arguments = (7, describe(q, 64, 64), describe(k, 64, 64), 8)
    direct = Direct.of(compiled, arguments)
    assert direct is not None
    compiled[3, 1, 1](*arguments)
    made.clear()
    direct((3, 1, 1), arguments)
    direct((3, 1, 1), arguments[:3], arguments[3:])
    assert made == ["first", "second"]
    plain, *kept = launches
    for passed in kept:
        # What profilers are told is left out: nobody listens.
        seen = [None if b is None else a for a, b in zip(plain, passed, strict=True)]
        assert [tuple(x) if isinstance(x, list) else x for x in seen] == list(passed)
        assert sum(value is None for value in passed) - sum(value is None for value in plain) == 3
    direct((3, 1, 1), (7, describe(k, 64, 64), describe(k, 64, 64), 8))
    assert made == ["first", "second"] * 2
    with monkeypatch.context() as patched:
        # Another device is current.
        other = SimpleNamespace(device=active.capability, stream=3)
        patched.setattr(active, "get_current_device", lambda: other.device)
        patched.setattr(active, "get_current_stream", lambda device: 100 * device + other.stream)
        patched.setattr(torch.cuda, "device", lambda device: as_current(other, device))
        other.device = 0
        direct((3, 1, 1), arguments)
        assert launches[-1][3] == 100 * active.capability + 3
        assert other.device == 0
    with monkeypatch.context() as patched:
        hook = triton.knobs.runtime.launch_enter_hook
        patched.setattr(hook, "calls", [lambda metadata: None])
        direct((3, 1, 1), arguments[:3], arguments[3:])
        assert hook in launches[-1]
        # Newer releases pass the arguments in a list.
        assert launches[-1][-1] == 8 or launches[-1][-1][-1] == 8


EVERY_SM90_BACKWARD = [
    (form, size, of_keys)
    for form in ("dense", "regular", "ragged")
    for size in (64, 128, 384)
    for of_keys in (False, True)
]
SM90_BACKWARD = [("ragged" if with_oldest() else "dense", 64, True)]


@pytest.mark.parametrize(("form", "size", "of_keys"), with_slow(EVERY_SM90_BACKWARD, SM90_BACKWARD))
def test_the_backward_kernels_for_sm90_compile(
    compiler: Compiler, form: str, size: int, of_keys: bool
) -> None:
    from multimodal_gen.kernels.block_sparse.gluon_backward_kernel import launch

    plan = plan_of(form, size, size)
    q, k, v, out = tensors_for(plan, 128, torch.bfloat16)
    k, v = (torch.zeros(2, plan.kv.total, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    rows = torch.empty(2, 2, 4, max(plan.q.total, plan.kv.total))
    results = tuple(torch.empty_like(out) for _ in range(1 + of_keys))
    tile = gluon_backward_tile(block=size)
    launch((q, out), (k, v), plan, rows, results, scale=0.1, tile=tile)
    assert_clean(compiler.kernels)


EVERY_FUSED = [
    (form, size, channels)
    for form in ("dense", "regular")
    for size in (128, 384)
    for channels in (96, 128)
]
FUSED = [("regular", 128, 96)]


@pytest.mark.parametrize(("form", "size", "channels"), with_slow(EVERY_FUSED, FUSED))
def test_the_backward_kernel_of_all_gradients_compiles(
    compiler: Compiler, form: str, size: int, channels: int
) -> None:
    from multimodal_gen.kernels.block_sparse.gluon_fused_kernel import attend_backward

    plan = plan_of(form, size, size)
    q, _, _, out = tensors_for(plan, channels, torch.bfloat16)
    k, v = (torch.zeros(2, plan.kv.total, 4, channels, dtype=torch.bfloat16) for _ in range(2))
    rows = torch.empty(2, 2, 4, plan.q.total)
    attend_backward(Backward(q, k, v, plan, out, rows[0], out, None, 0.1), rows)
    assert_clean(compiler.kernels)
    (kernel,) = (each for each in compiler.kernels if each.name == "fused_backward_kernel")
    assert "cp.reduce.async.bulk" in kernel.ptx
