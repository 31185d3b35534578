"""The kernels compile for SM90 without a GPU, through their launchers, and spill little.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
test_compiler.py runs these tests in a process of their own.
"""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.linear_attention.reference import FEATURE_MAPS, KeyState, Projection

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),
]

# Some registers of the pass over the keys may be: fewer warps are worth more than that.
FEW = 384

HALVES = [torch.bfloat16, torch.float16]


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


def assert_clean(logs: list[str], most: int = 0) -> None:
    """Assert that no kernel spills more than `most` bytes per thread."""
    assert logs
    spilled = [re.findall(r"(\d+) bytes spill stores", log) for log in logs]
    assert [len(found) for found in spilled] == [1] * len(logs)
    assert max(int(found[0]) for found in spilled) <= most


def state(head_size: int) -> KeyState:
    return KeyState(
        moments=torch.zeros(1, 2, head_size, head_size), sums=torch.zeros(1, 2, head_size)
    )


def projection(head_size: int) -> Projection:
    return Projection(weight=torch.zeros(head_size, head_size), bias=torch.zeros(head_size))


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("given", [False, True])
def test_both_passes_do_not_spill(
    logs: list[str], head_size: int, feature_map: str, given: bool
) -> None:
    from multimodal_gen.kernels.linear_attention.launch import add_linear, key_state

    x = torch.empty(1, 640, 2, head_size, dtype=torch.bfloat16)
    bounds = torch.zeros(10, dtype=torch.int32)
    blocks = Blocks.regular(640, 64)
    if given:
        blocks = Blocks.ragged(bounds, bounds, total=640, size=64)
    key_state(x, x, blocks, feature_map)
    add_linear(x, x, state(head_size), projection(head_size), slice(0, 640), feature_map)
    assert len(logs) == 2
    assert_clean(logs[:1], FEW)
    assert_clean(logs[1:])


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", HALVES)
def test_other_blocks_and_means_alone_do_not_spill(
    logs: list[str], size: int, dtype: torch.dtype
) -> None:
    from multimodal_gen.kernels.linear_attention.launch import key_means, key_state

    x = torch.empty(1, 640, 2, 128, dtype=dtype)
    key_state(x, x, Blocks.regular(640, size), "softmax")
    key_means(x, Blocks.regular(640, size))
    assert len(logs) == 2
    assert_clean(logs[:1], FEW)
    assert_clean(logs[1:])


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("q_size", [64, 128])
def test_the_pass_over_unselected_blocks_does_not_spill(
    logs: list[str], head_size: int, q_size: int
) -> None:
    from multimodal_gen.kernels.linear_attention.launch import add_unselected

    x = torch.empty(1, 640, 2, head_size, dtype=torch.bfloat16)
    plan = BlockPlan.dense(Blocks.regular(640, q_size), Blocks.regular(640, 64), "cpu")
    add_unselected(x, x, x, x, plan, projection(head_size), "softmax")
    assert_clean(logs)
