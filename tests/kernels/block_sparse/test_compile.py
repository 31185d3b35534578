"""The SM90 kernels compile without a GPU, through their launcher: no spills, no ptxas warnings.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
"""

import dataclasses
import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.providers import GLUON_TRITON
from multimodal_gen.kernels.block_sparse.tuning import hopper_tile
from multimodal_gen.testing.block_plans import PlanShape, random_plan


def triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


pytestmark = pytest.mark.skipif(
    not triton_version().startswith(GLUON_TRITON),
    reason=f"compiles with triton {GLUON_TRITON}x, this one is {triton_version()}",
)


class StandInDriver:
    """What compiling asks of a GPU driver."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What ptxas says of a kernel."""

    spilled: int
    warnings: tuple[str, ...]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Compiled]:
    """Collects the kernels that launches would compile; nothing is launched."""
    import triton
    from triton.runtime.jit import JITFunction

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    found: list[Compiled] = []
    original = JITFunction.run

    def run(
        self: JITFunction, *args: object, grid: object, warmup: bool, **options: object
    ) -> None:
        kernel = original(self, *args, grid=grid, warmup=True, **options)
        source = tmp_path / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spills = re.findall(r"(\d+) bytes spill stores", log)
        assert spills, log
        found.append(Compiled(sum(map(int, spills)), tuple(re.findall(r"\(C75\d\d\).*", log))))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton.runtime.driver, "_active", StandInDriver())
    return found


def launch(
    plan: BlockPlan,
    *,
    head_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
    with_lse: bool = True,
) -> None:
    from multimodal_gen.kernels.block_sparse.hopper.launch import attend

    q = torch.zeros(2, plan.q.total, 4, head_size, dtype=dtype)
    k, v = (torch.zeros(2, plan.kv.total, 2, head_size, dtype=dtype) for _ in range(2))
    out, lse = torch.empty_like(q), torch.empty(2, 4, plan.q.total)
    tile = hopper_tile(
        q_size=plan.q.size,
        kv_size=plan.kv.size,
        regular=plan.kv.is_regular,
        fast=dtype == torch.bfloat16,
        deterministic=deterministic,
    )
    attend(q, k, v, plan, out, lse if with_lse else None, scale=0.1, tile=tile)


def assert_clean(compiled: list[Compiled]) -> None:
    assert compiled
    assert [kernel.warnings for kernel in compiled if kernel.warnings] == []
    assert [kernel.spilled for kernel in compiled] == [0] * len(compiled)


def plan_of(form: str, q_size: int, kv_size: int) -> BlockPlan:
    if form == "dense":
        q, kv = Blocks.regular(4 * q_size, q_size), Blocks.regular(6 * kv_size, kv_size)
        return BlockPlan.dense(q, kv, "cpu")
    forms = {"q_form": form, "kv_form": form}
    shape = PlanShape(heads=4, num_q=3, num_kv=5, q_size=q_size, kv_size=kv_size, **forms)
    return random_plan(shape, seed=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["fast", "exact"])
@pytest.mark.parametrize("form", ["dense", "regular", "padded", "ragged"])
@pytest.mark.parametrize(
    ("q_size", "kv_size"), [(384, 384), (128, 128), (128, 64), (64, 64)], ids=str
)
def test_every_tile_compiles_without_spills_or_warnings(
    compiled: list[Compiled], q_size: int, kv_size: int, form: str, dtype: torch.dtype
) -> None:
    plan = plan_of(form, q_size, kv_size)
    launch(plan, dtype=dtype)
    assert_clean(compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["fast", "exact"])
@pytest.mark.parametrize("form", ["dense", "regular"])
def test_tiles_without_lse_compile_as_cleanly(
    compiled: list[Compiled], form: str, dtype: torch.dtype
) -> None:
    launch(plan_of(form, 128, 128), dtype=dtype, with_lse=False)
    assert_clean(compiled)


@pytest.mark.parametrize("head_size", [64, 96])
def test_other_head_sizes_compile_too(compiled: list[Compiled], head_size: int) -> None:
    plan = plan_of("regular", 128, 128)
    launch(plan, head_size=head_size, deterministic=True)
    assert_clean(compiled)
