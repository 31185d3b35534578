"""The kernels compile for SM90 without a GPU, through their launchers: 16-byte accesses, no spills.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
test_children.py runs these tests in a process of their own.
"""

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
import torch

from multimodal_gen.kernels.launch.launcher import form_of
from tests.kernels.compiling import StandInDriver

triton = pytest.importorskip("triton")
# Triton announces a new default, which does not concern a copy.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

# 16 bytes: four registers of 32 bits or two of 64.
WIDE = re.compile(r"\.(v4\.[bfu]32|v2\.[bfu]64)\b")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a kernel takes of a multiprocessor, and its accesses to memory other than the index.

    Attributes:
        stack: bytes of local memory per thread: that is where registers are spilled to.
        registers: registers per thread.
        loads: the load instructions of PTX.
        stores: the store instructions of PTX.
    """

    stack: int
    registers: int
    loads: tuple[str, ...]
    stores: tuple[str, ...]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Compiled]:
    """Collects the kernels that launches would compile; nothing is launched."""
    from triton.runtime.jit import JITFunction

    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if triton.knobs.runtime.interpret or not dump.exists():
        pytest.skip("needs Triton's compiler for NVIDIA GPUs")
    found: list[Compiled] = []
    original = JITFunction.run

    def run(
        self: JITFunction, *args: object, grid: object, warmup: bool, **options: object
    ) -> None:
        kernel = original(self, *args, grid=grid, warmup=True, **options)
        text = kernel.asm["ptx"]
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        command = [dump, "--dump-resource-usage", binary]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
        loads = re.findall(r"\bld\.global\S*evict_first\S*", text)
        stores = re.findall(r"\bst\.global\S*", text)
        found.append(Compiled(int(stack), int(registers), tuple(loads), tuple(stores)))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton.runtime.driver, "_active", StandInDriver())
    return found


def launch(query: torch.Tensor, key: torch.Tensor) -> None:
    from multimodal_gen.kernels.tile_order.tile_order_kernel import prepare_gather, prepare_scatter

    index, tensors = torch.arange(query.shape[1], dtype=torch.int32), (query, key, key)
    tiled, *_ = prepare_gather(tuple(map(form_of, tensors)), form_of(index))(tensors, index)
    moved = (tiled, index, query)
    prepare_scatter(*map(form_of, moved))(*moved)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (32, torch.float32),
        (40, torch.bfloat16),
        (40, torch.float32),
        (64, torch.float16),
        (80, torch.bfloat16),
        (128, torch.bfloat16),
        (128, torch.float32),
    ],
    ids=str,
)
def test_every_access_is_16_bytes_and_nothing_spills(
    compiled: list[Compiled], size: int, dtype: torch.dtype
) -> None:
    query, key = (torch.zeros(1, 50, heads, size, dtype=dtype) for heads in (6, 2))
    launch(query, key)
    assert len(compiled) == 2
    for kernel in compiled:
        assert kernel.loads
        assert kernel.stores
        narrow = [access for access in kernel.loads + kernel.stores if not WIDE.search(access)]
        assert narrow == []
        assert kernel.stack == 0
        # 64 let 8 programs of 4 warps share a multiprocessor.
        assert kernel.registers <= 64


def test_a_slice_of_the_heads_is_accessed_as_widely(compiled: list[Compiled]) -> None:
    packed = torch.zeros(2, 50, 3, 10, 40, dtype=torch.bfloat16)
    launch(packed[:, :, 0, 2:8], packed[:, :, 1, 3:4])
    assert len(compiled) == 2
    assert all(WIDE.search(access) for kernel in compiled for access in kernel.loads)


@pytest.mark.parametrize("size", [33, 36])
def test_head_sizes_that_no_16_bytes_divide_do_not_spill(
    compiled: list[Compiled], size: int
) -> None:
    query, key = (torch.zeros(1, 50, heads, size, dtype=torch.bfloat16) for heads in (6, 2))
    launch(query, key)
    assert [kernel.stack for kernel in compiled] == [0, 0]


def test_shapes_share_a_compilation(compiled: list[Compiled]) -> None:
    from multimodal_gen.kernels.tile_order.tile_order_kernel import _gather_kernel

    def variants() -> int:
        return sum(len(caches[0]) for caches in _gather_kernel.device_caches.values())

    launch(*(torch.zeros(1, 50, 6, 72, dtype=torch.bfloat16) for _ in range(2)))
    before = variants()
    launch(*(torch.zeros(3, 77, 5, 72, dtype=torch.bfloat16) for _ in range(2)))
    assert compiled
    assert variants() == before


@pytest.mark.parametrize("size", [64, 128])
def test_an_order_per_head_is_moved_in_16_bytes(compiled: list[Compiled], size: int) -> None:
    from multimodal_gen.kernels.tile_order.tile_order_kernel import (
        gather_per_head,
        scatter_per_head,
    )

    tensor = torch.zeros(2, 100, 3, size, dtype=torch.bfloat16)
    index = torch.arange(100, dtype=torch.int32).expand(2, 3, -1)
    (moved,) = gather_per_head((tensor,), index)
    gather_per_head((tensor, tensor), index)
    scatter_per_head(moved, index, tensor)
    assert len(compiled) == 3
    for kernel in compiled:
        assert all(WIDE.search(access) for access in kernel.loads + kernel.stores)
        assert kernel.stack == 0
