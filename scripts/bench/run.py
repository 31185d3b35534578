"""Run benchmarks, each a module of this folder, and append what they measure to its CSV file.

    python3 scripts/bench/run.py NAME... --commit HASH [--only TEXT] [--rounds N] [--out FOLDER]
    python3 scripts/bench/run.py NAME --commit HASH --against CHECKOUT [--turns 2]
    python3 scripts/bench/run.py NAME --commit HASH --smoke    # tiny cases, where there are any
    python3 scripts/bench/run.py NAME --help                   # its own options
    python3 scripts/bench/run.py --list                        # what there is

A benchmark has `main(options)`, which returns whether anything was wrong, and where it takes more
than the options of all, `add_options(parser)`. What CSV rows hold is in `_harness.py`.
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
from _against import add_turns, run_by_turns
from _harness import RESULTS

BENCHMARKS = (
    "auto", "backward", "by_triton", "compare_cost", "dense", "dense_above", "engine",
    "error_curves", "graphs", "layer_overhead", "parallel", "quantized", "shared_loads", "sla",
    "sparse", "sparse_routers", "streaming", "svg2", "tail", "tile_order", "tile_pool",
    "train_step", "vmoba", "wan_forward",
)  # fmt: skip
FULL_SIZE_ALONE = ("auto", "dense", "engine", "shared_loads", "svg2", "tile_order", "tile_pool")


def question(name: str) -> str:
    """Return the first line of a benchmark's docstring, without importing what it needs."""
    source = Path(__file__).with_name(f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def make_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks and those of one."""
    parser = add_turns(argparse.ArgumentParser(prog=f"run.py {name}", description=module.__doc__))
    parser.add_argument("--commit", default="", help="commit that is measured")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    if name not in FULL_SIZE_ALONE:
        parser.add_argument("--smoke", action="store_true", help="tiny cases, on any machine")
    if hasattr(module, "add_options"):
        module.add_options(parser)
    return parser


def run(name: str, words: Sequence[str]) -> int:
    """Run a benchmark on the words of its command line; returns the exit status."""
    module = importlib.import_module(name)
    parser = make_parser(name, module)
    options = parser.parse_args(words)
    if not options.commit and not getattr(options, "table", False):
        parser.error("the following arguments are required: --commit")
    if options.against:
        return run_by_turns(name, words, options)
    try:
        with torch.enable_grad():  # what one benchmark sets is not for the next
            return module.main(options) or 0
    except argparse.ArgumentError as error:
        parser.error(str(error))


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmarks that are named first, all with the same options."""
    words = sys.argv[1:] if words is None else words
    if [*words] == ["--list"]:
        for name in BENCHMARKS:
            print(f"{name:16}{question(name)}")
        return 0
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        raise SystemExit(f"name benchmarks among {', '.join(BENCHMARKS)}, got {unknown}")
    return max([run(name, words[len(names) :]) for name in names])


if __name__ == "__main__":
    sys.exit(main())
