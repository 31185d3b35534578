"""A launcher compiles once per kind of arguments, and launches what fits them."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from multimodal_gen.kernels.launch import launcher
from multimodal_gen.kernels.launch.launcher import Launch, Launcher, form_of, load_triton_early
from multimodal_gen.runtime.layers.attention import LocalAttention, attention_layer
from tests.helpers.fakes import simulated_h100


@dataclass
class Compiled:
    """What a kernel was compiled to: it notes its launches."""

    kernel: "Kernel"
    launches: list[tuple[Any, ...]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any) -> None:
            self.kernel.began()
            self.launches.append((grid, arguments))

        return run


class Kernel:
    """A Triton kernel of a pointer, a value, a size and a shape: compiles at every call."""

    def __init__(self, *, parameters: bool = True) -> None:
        names = (("pointer", False), ("value", False), ("size", True), ("shape", False))
        self.params = [SimpleNamespace(name=name, do_not_specialize=free) for name, free in names]
        if not parameters:
            self.params = []
        self.compiled: list[Compiled] = []

    def began(self) -> None:
        """Be told of every launch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, shape: object, num_warps: int, enable_fp_fusion: bool) -> Compiled:
            assert enable_fp_fusion, "what releases of Triton do unasked differs"
            self.began()
            self.compiled.append(Compiled(self, [(grid, (*arguments, shape))]))
            return self.compiled[-1]

        return run


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> list[list[object]]:
    """Take NVIDIA's GPUs, and return the shapes that were compiled side by side."""
    found: list[list[object]] = []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(
        launcher,
        "compile_together",
        lambda *given: found.append([options["shape"] for options in given[-1]]),
    )
    return found


DATA = torch.zeros(64)


def test_a_second_launch_of_its_kind_compiles_nothing() -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    for size in (5, 16):
        launch((3,), DATA, 7, size, shape=0, num_warps=4)
    (compiled,) = kernel.compiled
    assert [(grid, arguments[1:]) for grid, arguments in compiled.launches] == [
        ((3,), (7, 5, 0)),
        ((3, 1, 1), (7, 16, 0)),
    ]


def test_every_variant_is_launched_in_order() -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    for _ in range(2):
        variants = [{"shape": shape, "num_warps": 4} for shape in ("do", "redo")]
        launch.each((1,), DATA, 7, 5, variants=variants)
    assert [[a[-1] for _, a in compiled.launches] for compiled in kernel.compiled] == [
        ["do", "do"],
        ["redo", "redo"],
    ]


def test_variants_that_were_not_compiled_are_compiled_side_by_side(
    together: list[list[object]],
) -> None:
    launch = Launcher(Kernel())
    for shapes in ("a", "ab", "abcd", "dcba", "e"):
        variants = [{"shape": shape, "num_warps": 4} for shape in shapes]
        launch.each((1,), DATA, 7, 5, variants=variants)
    assert together == [["c", "d"]]


@pytest.mark.parametrize(
    ("other", "num_warps"),
    [
        ((DATA.double(), 7, 5), 4),
        ((DATA[1:], 7, 5), 4),
        ((DATA, 8, 5), 4),
        ((DATA, 7, 1 << 31), 4),
        ((DATA, 7.0, 5), 4),
        ((DATA, 7, 5), 8),
    ],
    ids=["dtype", "alignment", "value", "width", "type", "warps"],
)
def test_whatever_compilations_depend_on_compiles_anew(
    other: tuple[Any, ...], num_warps: int
) -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    launch((1,), DATA, 7, 5, shape=0, num_warps=4)
    launch((1,), *other, shape=0, num_warps=num_warps)
    assert len(kernel.compiled) == 2


def test_descriptors_differ_by_dtype_and_box() -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    for dtype, box in ((torch.half, [64]), (torch.half, [64]), (torch.half, [32]), (None, [64])):
        described = SimpleNamespace(base=DATA.to(dtype or torch.float), block_shape=box)
        launch((1,), described, 7, 5, shape=0, num_warps=4)
    assert [len(compiled.launches) for compiled in kernel.compiled] == [2, 1, 1]


@pytest.mark.parametrize("case", ["amd", "interpreter"])
def test_elsewhere_triton_looks_at_every_launch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "amd":
        monkeypatch.setattr(torch.version, "hip", "6.0")
    kernel = Kernel(parameters=case == "amd")
    launch = Launcher(kernel)
    for _ in range(2):
        launch((1,), DATA, 7, 5, shape=0, num_warps=4)
    assert len(kernel.compiled) == 2


def test_launches_go_to_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current, seen = ["first"], []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append("the tensor's" if tensor is DATA else "another")
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for parameters in (True, False):
        kernel = Kernel(parameters=parameters)
        monkeypatch.setattr(kernel, "began", lambda: seen.append(current[-1]))
        launcher = Launcher(kernel)
        for _ in range(2):
            launcher((1,), DATA, 7, 5, shape=0, num_warps=4)
        launch = Launch(launcher, (1,), (7, 5), VARIANTS[:1])
        for _ in range(2):
            launch((DATA,))
    assert seen == ["the tensor's"] * 8
    assert current == ["first"]


VARIANTS = ({"shape": "do", "num_warps": 4}, {"shape": "redo", "num_warps": 4})


def test_a_launch_with_fixed_arguments_compiles_once_and_passes_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    launch = Launch(launcher, (3,), (7, 5), VARIANTS)
    tensors = DATA, DATA.clone(), DATA.clone()
    launch((tensors[0],))
    monkeypatch.delattr(Launcher, "each")  # nothing is looked up again
    for tensor in tensors[1:]:
        launch((tensor,))
    assert len(kernel.compiled) == 2
    for compiled, shape in zip(kernel.compiled, ("do", "redo"), strict=True):
        for (grid, arguments), tensor in zip(compiled.launches, tensors, strict=True):
            assert grid == (3, 1, 1)
            assert arguments[0] is tensor
            assert arguments[1:] == (7, 5, shape)


def test_tensors_of_other_forms_are_told_apart() -> None:
    others = (DATA[1:33], DATA[:32:2], DATA[:31], DATA[:32].view(8, 4), DATA[:32].int())
    forms = [form_of(x) for x in (DATA[:32], *others)]
    assert len(set(forms)) == len(forms)
    assert form_of(DATA[4:36]) == forms[0]
    assert form_of(DATA[:32].to("meta")) != forms[0]


def test_launches_with_other_fixed_arguments_share_what_is_compiled() -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    for grid in (1, 2):
        Launch(launcher, (grid,), (7, 5), VARIANTS[:1])((DATA,))
    (compiled,) = kernel.compiled
    assert [grid for grid, _ in compiled.launches] == [(1, 1, 1), (2, 1, 1)]


def test_launches_of_a_kernel_may_have_grids_of_their_own(together: list[list[object]]) -> None:
    kernel = Kernel()
    launch = Launch(Launcher(kernel), [(3,), (2, 5)], (7, 5), VARIANTS)
    for _ in range(2):
        launch((DATA,))
    grids = [[grid for grid, _ in compiled.launches] for compiled in kernel.compiled]
    assert grids == [[(3, 1, 1)] * 2, [(2, 5, 1)] * 2]
    assert together == [["do", "redo"]]


def make_early(monkeypatch: pytest.MonkeyPatch, triton_key: Any) -> Any:
    """Return `load_triton_early` as in a new process whose Triton has this hash."""
    for name in ("triton", "triton.runtime", "triton.runtime.cache"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(triton_key=triton_key))
    return cache(load_triton_early.__wrapped__)


def test_triton_hashes_itself_in_one_thread_of_its_own(monkeypatch):
    asked: list[threading.Thread] = []
    early = make_early(monkeypatch, lambda: asked.append(threading.current_thread()))
    hashed = early()
    assert early() is hashed
    assert hashed.result() is None
    (thread,) = asked
    assert thread is not threading.main_thread()


def test_a_triton_that_cannot_hash_or_import_is_left_to_the_first_launch(monkeypatch, capfd):
    def broken() -> None:
        raise OSError("no libtriton")

    assert isinstance(make_early(monkeypatch, broken)().exception(), OSError)
    assert capfd.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    assert load_triton_early.__wrapped__() is None


def test_triton_is_imported_by_the_caller(monkeypatch):
    importers: list[threading.Thread] = []

    class Cache(ModuleType):
        def __getattr__(self, name: str) -> Any:
            importers.append(threading.current_thread())
            return lambda: None

    early = make_early(monkeypatch, None)
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", Cache("triton.runtime.cache"))
    early().result()
    assert {*importers} == {threading.main_thread()}


def test_a_layer_has_triton_load_where_there_is_a_gpu(monkeypatch):
    begun: list[bool] = []
    monkeypatch.setattr(attention_layer, "load_triton_early", lambda: begun.append(True))
    LocalAttention(2, 64)
    assert begun == []
    with simulated_h100():
        LocalAttention(2, 64)
    assert begun == [True]
