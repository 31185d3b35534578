"""The kernels compile for SM90 without a GPU, through their launchers: no spills, no warnings.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
test_compiler.py runs these tests in a process of their own.
"""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
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
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Collects what ptxas says of the kernels that launches would compile; nothing is launched."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    ptxas = get_ptxas(90).path
    found: list[str] = []
    original = JITFunction.run

    def run(
        self: JITFunction, *args: object, grid: object, warmup: bool, **options: object
    ) -> None:
        kernel = original(self, *args, grid=grid, warmup=True, **options)
        source = tmp_path / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", "/dev/null"]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stderr)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton.runtime.driver, "_active", StandInDriver())
    return found


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [
        (64, torch.bfloat16),
        (128, torch.bfloat16),
        (128, torch.float16),
        (256, torch.bfloat16),
        (64, torch.float32),
        (128, torch.float32),
        (256, torch.float32),
    ],
)
def test_nothing_spills(logs: list[str], head_size: int, dtype: torch.dtype) -> None:
    from multimodal_gen.kernels.kmeans.kernel import kmeans_triton

    x, start = torch.empty(1, 640, 4, head_size, dtype=dtype), torch.zeros(1, 4, 1000, head_size)
    kmeans_triton(x, start, torch.ones(1, 640).bool(), iterations=1, tolerance=1e-4)
    assert len(logs) == 6
    assert [re.findall(r"(\d+) bytes spill stores", log) for log in logs] == [["0"]] * 6
    assert [log for log in logs if "(C75" in log] == []
