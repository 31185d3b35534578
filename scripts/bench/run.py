"""Run benchmarks and append what they measure to a CSV file of their name.

    python3 scripts/bench/run.py NAME... --commit HASH [--only TEXT] [--rounds N] [--out FOLDER]
    python3 scripts/bench/run.py NAME --commit HASH --against CHECKOUT [--turns 2]
    python3 scripts/bench/run.py NAME --commit HASH --smoke    # tiny cases, where there are any
    python3 scripts/bench/run.py NAME --help                   # its own options
    python3 scripts/bench/run.py --list                        # what there is

A benchmark is a module of this folder, or a list of layers in `layers.yaml`. A module has `CASES`,
tiny ones in `SMOKE` where it has any, and `measure(case, bench)`, which checks, times and writes
one; or `main(bench)` in their place. Where it takes more than the options of all it has
`add_options(parser)`; `--case` among them selects cases, and `--only` what is measured of each.
What CSV rows hold is in `_harness.py`.
"""

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import torch
import yaml
from _against import add_turns, run_by_turns
from _harness import RESULTS, Bench

FOLDER = Path(__file__).parent
LAYERS = yaml.safe_load((FOLDER / "layers.yaml").read_text("utf-8"))["benchmarks"]
MODULES = (
    "auto", "backward", "dense", "engine", "graphs", "layer_overhead",
    "parallel", "stages", "streaming", "train_step", "wan_forward",
)  # fmt: skip
BENCHMARKS = tuple(sorted((*MODULES, *LAYERS)))


def about(name: str) -> str:
    """Return what a benchmark says of itself, without importing what it needs."""
    if name in LAYERS:
        return LAYERS[name]["about"]
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""


def make_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks and those of one."""
    form = {"prog": f"run.py {name}", "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = add_turns(argparse.ArgumentParser(description=about(name), **form))
    parser.add_argument("--commit", default="", help="commit that is measured")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    if hasattr(module, "SMOKE"):
        parser.add_argument("--smoke", action="store_true", help="tiny cases, on any machine")
    if hasattr(module, "add_options"):
        module.add_options(parser)
    return parser


def run(name: str, words: Sequence[str]) -> int:
    """Run a benchmark on the words of its command line; returns the exit status."""
    module = importlib.import_module("layers" if name in LAYERS else name)
    parser = make_parser(name, module)
    options = parser.parse_args(words)
    if not options.commit and not getattr(options, "table", False):
        parser.error("the following arguments are required: --commit")
    if options.against:
        return run_by_turns(name, words, options)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.enable_grad():  # what one benchmark sets is not for the next
            bench = Bench(name, options)
            return module.main(bench) or 0 if hasattr(module, "main") else run_cases(module, bench)
    except argparse.ArgumentError as error:
        parser.error(str(error))


def run_cases(module: ModuleType, bench: Bench) -> int:
    """Measure the cases of a benchmark that are asked for; 1 if anything was wrong."""
    options = bench.options
    for case in module.SMOKE if getattr(options, "smoke", False) else module.CASES:
        if getattr(options, "case", options.only) in case.name:
            with bench.case(case.name):
                module.measure(case, bench)
    return bench.status()


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmarks that are named first, all with the same options."""
    words = sys.argv[1:] if words is None else words
    if [*words] == ["--list"]:
        for name in BENCHMARKS:
            print(f"{name:16}{about(name).partition(chr(10))[0]}")
        return 0
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        raise SystemExit(f"name benchmarks among {', '.join(BENCHMARKS)}, got {unknown}")
    return max([run(name, words[len(names) :]) for name in names])


if __name__ == "__main__":
    sys.exit(main())
