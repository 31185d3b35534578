"""The kernels compile for SM90 without a GPU, through their launchers: no spills, no warnings.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
test_compiler.py runs these tests in a process of their own.
"""

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
import torch

from multimodal_gen.kernels.block_sparse.providers import GLUON_TRITON
from multimodal_gen.kernels.cluster_attention.plan import TILE_ROWS, Groups, cut


def triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


pytestmark = [
    pytest.mark.skipif(
        not triton_version().startswith(GLUON_TRITON),
        reason=f"compiles with triton {GLUON_TRITON}x, this one is {triton_version()}",
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),
]


class StandInDriver:
    """What compiling asks of a GPU driver."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """Collects the PTX, and what ptxas says of it, of the kernels that launches would compile."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.runtime.jit import JITFunction

    ptxas = get_ptxas(90).path
    found: list[tuple[str, str]] = []
    original = JITFunction.run

    def run(
        self: JITFunction, *args: object, grid: object, warmup: bool, **options: object
    ) -> None:
        kernel = original(self, *args, grid=grid, warmup=True, **options)
        source = tmp_path / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        found.append((kernel.asm["ptx"], log))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton.runtime.driver, "_active", StandInDriver())
    return found


@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nothing_spills(
    compiled: list[tuple[str, str]], head_size: int, dtype: torch.dtype
) -> None:
    from multimodal_gen.kernels.cluster_attention.hopper.launch import attend

    x = torch.zeros(1, 4, 640, head_size, dtype=dtype).transpose(1, 2)
    starts = torch.arange(0, 640, 128, dtype=torch.int32).expand(1, 4, -1)
    order = torch.arange(640, dtype=torch.int32).expand(1, 4, -1)
    side = Groups(order=order, starts=starts, counts=torch.full_like(starts, 128))
    keep = torch.ones(1, 4, 5, 5, dtype=torch.bool)
    attend(x, x, x, cut(side, TILE_ROWS, multiple=64), side, keep, scale=0.1)
    # The lists, the attention and, where it has a fixed reference, the redo of flagged tiles.
    assert len(compiled) == (3 if dtype == torch.bfloat16 else 2)
    for _, log in compiled:
        assert re.findall(r"(\d+) bytes spill stores", log) == ["0"]
        assert "(C75" not in log


def test_boxes_lie_one_behind_the_other_in_both_halves_of_a_tile(
    compiled: list[tuple[str, str]],
) -> None:
    """A tile of 64 keys has two halves of 64 channels, 8 KiB each; a box takes 1 KiB of both."""
    test_nothing_spills(compiled, 128, torch.bfloat16)
    ptx = compiled[1][0]
    offsets = [int(n) for n in re.findall(r"add\.s32 \t%r\d+, %r\d+, (\d+);", ptx)]
    starts = {n for n in offsets if {n + 1024 * i for i in range(7)} <= set(offsets)}
    assert any({n + 8192 + 1024 * i for i in range(7)} <= set(offsets) for n in starts)
