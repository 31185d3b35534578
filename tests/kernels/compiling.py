"""Compiling kernels for a GPU that is not there, through their launchers.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
"""

import dataclasses
import importlib.metadata
import importlib.util
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from multimodal_gen.kernels.engine import TRITON_WITH_GLUON


def installed_release() -> str | None:
    """Return the release of the environment's own triton, if it has one."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


REPOSITORY = Path(__file__).resolve().parents[2]


def pinned_release(purpose: str) -> str:
    """Return the release that scripts/triton.txt pins for `purpose`."""
    lines = (REPOSITORY / "scripts" / "triton.txt").read_text().splitlines()
    pins = dict(line.split() for line in lines if line and not line.startswith("#"))
    return pins[purpose]


def with_oldest() -> bool:
    """Whether kernels are compiled with the oldest release, which most cases are left to.

    Newer ones take up to twice as long; their cases are others, so that together they are many.
    """
    return installed_release() == pinned_release("compile")


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
needs_gluon = pytest.mark.skipif(
    TRITON_WITH_GLUON.unsupported_reason(installed_release()) is not None,
    reason=str(TRITON_WITH_GLUON.unsupported_reason(installed_release())),
)


class StandInDriver:
    """What compiling asks of a GPU driver."""

    def __init__(self) -> None:
        self.capability = 90

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Triton asks for a device's target once.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel, and what ptxas says of it."""

    name: str
    ptx: str
    log: str

    @property
    def spills(self) -> list[int]:
        """Bytes that each of its functions spills; it should be one function."""
        return [int(n) for n in re.findall(r"(\d+) bytes spill stores", self.log)]

    @property
    def warnings(self) -> list[str]:
        """Warnings that asynchronous products are serialised."""
        return re.findall(r"\(C75\d\d\).*", self.log)


class Compiler:
    """Collects the kernels that launches would compile; nothing is launched."""

    def __init__(self, folder: Path) -> None:
        self.driver = StandInDriver()
        self.folder = folder
        self.kernels: list[Kernel] = []

    def add(self, name: str, ptx: str) -> None:
        from triton.backends.nvidia.compiler import get_ptxas

        source = self.folder / "kernel.ptx"
        source.write_text(ptx)
        (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
        ptxas = get_ptxas(self.driver.capability).path
        command = [ptxas, "-v", f"--gpu-name={target}", source, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        self.kernels.append(Kernel(name.strip("_"), ptx, log))

    @property
    def names(self) -> set[str]:
        return {kernel.name for kernel in self.kernels}

    def assert_clean(self) -> None:
        assert_clean(self.kernels)


def assert_clean(kernels: Sequence[Kernel], most: int = 0) -> None:
    """Assert that no kernel spills more than `most` bytes per thread, and none is warned of."""
    assert kernels
    assert [len(kernel.spills) for kernel in kernels] == [1] * len(kernels)
    assert [kernel.name for kernel in kernels if max(kernel.spills) > most] == []
    assert [warning for kernel in kernels for warning in kernel.warnings] == []


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """Compile what launches ask for, instead of launching it.

    Triton stops at PTX, which ptxas then compiles once; what it leaves out is kept from its cache.
    Nor does it note the lines of the source, which takes a tenth of its time.
    """
    import triton
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    from triton.backends.nvidia.compiler import CUDABackend

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(triton.knobs.compilation, "disable_line_info", True)
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_: b"")
    found = Compiler(tmp_path)
    original = JITFunction.run

    def run(
        self: JITFunction, *args: object, grid: object, warmup: bool, **options: object
    ) -> None:
        kernel = original(self, *args, grid=grid, warmup=True, **options)
        if warmup:
            return  # before a launch
        found.add(self.__name__, kernel.asm["ptx"])

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton.runtime.driver, "_active", found.driver)
    return found
