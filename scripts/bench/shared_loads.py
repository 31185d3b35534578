"""What programs could gain by sharing their loads of K and V, at most.

Two programs of a cluster that load K and V once for both (TMA multicast, triton 3.7 and later)
halve what is read from the L2 cache. Here nobody shares: the engine loads K and V as ever, or V in
the first steps of a tile alone, or both, and computes again with what it has then. That is wrong,
and takes what the products take without the loads: half of them, or none. `ratio_to_best` says what
is left to gain; results go to `engine.csv`.

    python3 scripts/bench/run.py shared_loads --commit HASH [--only dense] [--rounds 7]
"""

import importlib.util
import math
import tempfile
import textwrap
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from _harness import Bench, version_of
from engine import HEAD_SIZE, OWN, PAIR, WIDE, PlanCase, make_case, sampled_error

from multimodal_gen.kernels.block_sparse import gluon_kernel
from multimodal_gen.kernels.block_sparse.api import request_for
from multimodal_gen.kernels.block_sparse.call import Call, CallForm
from multimodal_gen.kernels.block_sparse.tuning import GluonTile

TILES: dict[str, GluonTile] = {"dense": WIDE, "sta": WIDE, "r128": PAIR, "r64": OWN}
# The loads of a step as the kernel has them.
LOADS = {
    "k": """\
            fetch(dk, [work.b, work.kv_h, start, 0], rings.k_full.index(slot), rings.k.index(slot))
""",
    "v": """\
    fetch(dv, [work.b, work.kv_h, start, 0], rings.v_full.index(slot), rings.v.index(slot))
""",
}
BOUND = 4e-3


def kernel_without(tensors: str, folder: Path) -> ModuleType:
    """Return the module of the kernel, which loads `tensors` ("v" or "kv") once for every slot."""
    source = Path(gluon_kernel.__file__).read_text()
    for tensor in tensors:
        load = LOADS[tensor]
        if source.count(load) != 1:
            raise SystemExit(f"expected these lines once in {gluon_kernel.__file__}:\n{load}")
        margin = load[: len(load) - len(load.lstrip())]
        source = source.replace(
            load,
            f"{margin}if step < C.stages:\n{textwrap.indent(load, '    ')}{margin}else:\n"
            f"{margin}    mbarrier.arrive(rings.{tensor}_full.index(slot), count=1)\n",
        )
    path = folder / f"gluon_kernel_without_{tensors}.py"
    path.write_text(source)  # Triton reads functions from files
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(bench: Bench) -> None:
    """Time every pattern with all loads and without some of them; append to `engine.csv`."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        kernels = {f"{name} once": kernel_without(name, Path(folder)) for name in ("v", "kv")}
        for name, tile in TILES.items():
            if bench.options.only in name:
                measure(make_case(name, "cuda"), tile, kernels, bench)


def measure(case: PlanCase, tile: GluonTile, kernels: dict[str, ModuleType], bench: Bench) -> None:
    """Check the kernel, then time a pattern with it and with those that load less."""
    (q, k, v), scale, runs = case.normal(), HEAD_SIZE**-0.5, {}
    for label, module in (("as ever", gluon_kernel), *kernels.items()):
        out = torch.empty_like(q)
        form = CallForm(request_for(q, k, v, case.plan, backward=False))
        call = Call(q, k, v, case.plan, scale, False, False, form)
        runs[label] = partial(module.prepare(call, out, None, tile=tile), call, out, None)
        runs[label]()
        if module is gluon_kernel:
            error = sampled_error(out, (q, k, v), case.plan, scale)
            if not error < BOUND:
                raise SystemExit(f"{case.name} is wrong, relative error {error:.2e}")
    bench.write(
        bench.time(runs),
        case,
        table="engine",
        benchmark="shared loads",
        flop=case.kept_flop,
        flop_formula="4*H*D*kept pairs",
        errors={"as ever": error} | dict.fromkeys(kernels, math.nan),
        versions=version_of("triton"),
    )
