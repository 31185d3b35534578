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

from multimodal_gen.kernels.chunk_select.rule import Rule

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


def assert_clean(logs: list[str]) -> None:
    assert logs
    assert [re.findall(r"(\d+) bytes spill stores", log) for log in logs] == [["0"]] * len(logs)
    assert [log for log in logs if "(C75" in log] == []


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("indexed", [False, True])
def test_means_do_not_spill(logs: list[str], head_size: int, indexed: bool) -> None:
    from multimodal_gen.kernels.chunk_select.kernel import chunk_means

    key = torch.empty(1, 640, 4, head_size, dtype=torch.bfloat16)
    starts = torch.zeros(7).int()
    index = torch.zeros(640).int() if indexed else None
    chunk_means(key, starts, starts, 600, index, torch.ones(1, 640).bool(), starts.unsqueeze(0))
    assert len(logs) == 1
    assert_clean(logs)


@pytest.mark.parametrize("num_chunks", [7, 24, 40, 72])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("rule", [Rule(topk=2), Rule(threshold=0.25)], ids=str)
def test_the_choice_does_not_spill(
    logs: list[str], num_chunks: int, head_size: int, rule: Rule
) -> None:
    from multimodal_gen.kernels.chunk_select.kernel import select_chunks

    query = torch.empty(1, 640, 4, head_size, dtype=torch.bfloat16)
    means = torch.empty(1, 4, num_chunks, head_size)
    counts, own = torch.zeros(1, num_chunks).int(), torch.zeros(640).int()
    keep = torch.ones(1, 640).bool()
    select_chunks(query, means, counts, own, rule, masked=True, keep=keep)
    assert len(logs) == 2
    assert_clean(logs)
