"""What programs could gain by sharing their loads of K and V, at most.

Two programs of a cluster that load K and V once for both (TMA multicast, triton 3.7 and later)
halve what is read from the L2 cache. Here nobody shares, but the engine's copies of V, or of K and
V, lie outside of the tensors: the copy engine fills them with zeros and reads nothing. The tensors
hold zeros as well, so that all contenders of a case compute the same and only the loads differ.
`ratio_to_best` says what is left to gain; results go to `engine.csv`.

    python3 scripts/bench/shared_loads.py --commit HASH [--only dense] [--rounds 7]
"""

import dataclasses
import importlib.util
import statistics
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from _harness import interleave, parse_arguments, rows_of, version_of, write_rows
from engine import HEAD_SIZE, HEADS, OWN, PAIR, WIDE, make_case

from multimodal_gen.kernels.block_sparse import gluon_kernel
from multimodal_gen.kernels.block_sparse.tuning import GluonTile

TILES: dict[str, GluonTile] = {"dense": WIDE, "sta": WIDE, "r128": PAIR, "r64": OWN}
# The load of a tensor as the kernel has it, and rows that no tensor has.
LOADS = {"k": "dk, [work.b, work.kv_h, start, 0]", "v": "dv, [work.b, work.kv_h, start, 0]"}
BEYOND = 1 << 29


def kernel_without(tensors: str, folder: Path) -> ModuleType:
    """Return the module of the kernel, whose loads of `tensors` ("v" or "kv") read nothing."""
    source = Path(gluon_kernel.__file__).read_text()
    for tensor in tensors:
        load = LOADS[tensor]
        if source.count(load) != 1:
            raise SystemExit(f"expected one load `{load}` in {gluon_kernel.__file__}")
        source = source.replace(load, load.replace("start", f"start + {BEYOND}"))
    path = folder / f"gluon_kernel_without_{tensors}.py"
    path.write_text(source)  # Triton reads functions from files
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Time every pattern with all loads and without some of them; append to `engine.csv`."""
    arguments = parse_arguments(__doc__ or "")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        kernels = {name: kernel_without(name, Path(folder)) for name in ("v", "kv")}
        for name, tile in TILES.items():
            if arguments.only not in name:
                continue
            case = make_case(name, "cuda")
            shape = (1, case.tokens, HEADS, HEAD_SIZE)
            q, k, out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            zeros = torch.zeros_like(q)
            for tensors, keys in (("v", k), ("kv", zeros)):
                runs = {
                    label: partial(
                        # A plan of its own: launches are kept with plans.
                        module.attend, q, keys, zeros, dataclasses.replace(case.plan), out, None,
                        scale=HEAD_SIZE**-0.5, tile=tile,
                    )
                    for label, module in (
                        (f"{tensors} read", gluon_kernel), (f"{tensors} not read", kernels[tensors])
                    )
                }  # fmt: skip
                for run in runs.values():
                    out.fill_(torch.nan)
                    run()
                    if not torch.equal(out, zeros):
                        raise SystemExit(f"{name}: the weights of zeros are not zero")
                times = interleave(runs, rounds=arguments.rounds)
                rows = rows_of(
                    times,
                    commit=arguments.commit,
                    benchmark="shared loads",
                    case=f"{name}, zeros for {tensors}",
                    shape=f"B1 H{HEADS} S{case.tokens} D{HEAD_SIZE} bf16",
                    flop=case.flop,
                    flop_formula="4*H*D*kept pairs",
                    errors=dict.fromkeys(times, 0.0),
                    versions=dict.fromkeys(times, version_of("triton")),
                )
                write_rows(arguments.out / "engine.csv", rows)
                read, unread = (statistics.median(times[run]) for run in runs)
                print(f"{name}: {tensors} not read takes {unread / read:.3f} of {read:.3f} ms")


if __name__ == "__main__":
    main()
