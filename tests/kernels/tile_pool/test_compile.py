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


def assert_clean(logs: list[str]) -> None:
    assert logs
    assert [re.findall(r"(\d+) bytes spill stores", log) for log in logs] == [["0"]] * len(logs)
    assert [log for log in logs if "(C75" in log] == []


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pooling_and_the_gated_sum_do_not_spill(
    logs: list[str], head_size: int, dtype: torch.dtype
) -> None:
    from multimodal_gen.kernels.tile_pool.kernel import add_gated, pool_tiles

    x, tiles = torch.empty(1, 640, 4, head_size, dtype=dtype), torch.zeros(10).int()
    coarse = pool_tiles(x, tiles, tiles, tiles)
    pool_tiles(x, tiles, tiles, tiles, torch.ones(1, 640).bool())
    add_gated(x, x, coarse, tiles, tiles, tiles)
    assert len(logs) == 3
    assert_clean(logs)


# 144 is 128 and the channels in which tiles that hold no key score minus infinity.
@pytest.mark.parametrize("num_kv", [300, 1440, 1800, 4096, 32768])
@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [
        (64, torch.bfloat16),
        (128, torch.bfloat16),
        (144, torch.bfloat16),
        (144, torch.float32),
        (128, torch.float16),
        (256, torch.bfloat16),
        (128, torch.float32),
        (256, torch.float32),
    ],
)
def test_selection_does_not_spill(
    logs: list[str], num_kv: int, head_size: int, dtype: torch.dtype
) -> None:
    from multimodal_gen.kernels.tile_pool.kernel import select_tiles

    query = torch.empty(1, 2, 64, head_size, dtype=dtype)
    out = torch.empty(1, 2, 64, 34, dtype=torch.int32)
    select_tiles(query, torch.empty(1, 2, num_kv, head_size, dtype=dtype), 30, 4, out)
    assert len(logs) == 2
    assert_clean(logs)
