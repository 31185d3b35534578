"""Run benchmarks and append what they measure to a CSV file of their name.

    python3 scripts/bench/run.py NAME... --commit HASH [--only PATTERN] [--rounds N] [--out FOLDER]
    python3 scripts/bench/run.py NAME --commit HASH --against CHECKOUT [--turns 2]
    python3 scripts/bench/run.py NAME --smoke                  # tiny cases, where there are any
    python3 scripts/bench/run.py NAME --help                   # its own options
    python3 scripts/bench/run.py --list                        # what there is

A benchmark is a module of this folder, or a list of layers in `layers.yaml`. A module has `CASES`,
tiny ones in `SMOKE` where it has any, and `measure(case, bench)`, which checks, times and writes
one; or `main(bench)` in their place. Where it takes more than the options of all it has
`add_options(parser)`; `--case` among them selects cases, and `--only` what is measured of each.
Rows of tiny cases go to a temporary folder, unless `--out` names one. What rows hold is in
`_harness.py`.
"""

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch
import yaml
from _against import add_turns, run_by_turns
from _harness import RESULTS, Bench, fresh_folder, pattern, positive

FOLDER = Path(__file__).parent
LAYERS = yaml.safe_load((FOLDER / "layers.yaml").read_text("utf-8"))["benchmarks"]
MODULES = (
    "auto", "backward", "cold_start", "dense", "engine", "generation", "graphs", "guard",
    "layer_overhead", "parallel", "skip_bound", "stages", "streaming", "train_step", "wan_forward",
)  # fmt: skip
BENCHMARKS = tuple(sorted((*MODULES, *LAYERS)))


def about(name: str) -> str:
    """Return what a benchmark says of itself, without importing what it needs."""
    if name in LAYERS:
        return LAYERS[name]["about"]
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def make_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks and those of one."""
    form = {"prog": f"run.py {name}", "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = add_turns(_Parser(description=about(name), **form))
    parser.add_argument("--commit", default="", help="commit that is measured")
    parser.add_argument("--rounds", type=positive, default=9, help="interleaved rounds (9)")
    parser.add_argument("--out", type=Path, help="folder of the CSV files (results)")
    parser.add_argument("--only", type=pattern, default="", help="run the cases whose name matches")
    if hasattr(module, "SMOKE"):
        parser.add_argument("--smoke", action="store_true", help="tiny cases, on any machine")
    if hasattr(module, "add_options"):
        module.add_options(parser)
    return parser


def run(name: str, words: Sequence[str]) -> int | str:
    """Run a benchmark on the words of its command line.

    Returns:
        The exit status; what was asked for where nothing has such a name.
    """
    module = importlib.import_module("layers" if name in LAYERS else name)
    parser = make_parser(name, module)
    options = parser.parse_args(words)
    smoke = getattr(options, "smoke", False)
    if not options.commit and not smoke and not getattr(options, "table", False):
        parser.error("the following arguments are required: --commit")
    if smoke:
        options.commit = options.commit or "-"
    if options.out is None and (options.against or not smoke):
        options.out = fresh_folder(name) if smoke else RESULTS
    if options.against:
        return run_by_turns(name, words, options)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.enable_grad():  # what one benchmark sets is not for the next
            bench = Bench(name, options)
            found = module.main(bench) if hasattr(module, "main") else run_cases(module, bench)
            return bench.unknown() or found or 0
    except argparse.ArgumentError as error:
        parser.error(str(error))


def run_cases(module: ModuleType, bench: Bench) -> int:
    """Measure the cases of a benchmark that are asked for; 1 if anything was wrong."""
    options = bench.options
    option = "case" if hasattr(options, "case") else "only"
    for case in module.SMOKE if getattr(options, "smoke", False) else module.CASES:
        if bench.wants(case.name, option):
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
    if not names and {"-h", "--help"} & {*words}:
        print(__doc__.strip())
        return 0
    if unknown or not names:
        got = f", got {', '.join(unknown)}" if unknown else "; --help says more"
        raise SystemExit(f"name benchmarks among {', '.join(BENCHMARKS)}{got}")
    codes = [run(name, words[len(names) :]) for name in names]
    known = [code for code in codes if isinstance(code, int)]
    if not known:
        print(f"error: {'; '.join(map(str, codes))}", file=sys.stderr)
    return max(known, default=2)


if __name__ == "__main__":
    sys.exit(main())
