"""Draws the rows of `error_curves.csv`: a panel per method, with and without its tail.

Of several commits, the last that measured a method is drawn. The file's ending decides what is
written, a PNG or an SVG. Needs matplotlib, which the extra `compare` brings.

    python3 scripts/bench/plot_error_curves.py [--case wan] [--out error_curves.svg]
"""

import argparse
import csv
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = Path(__file__).resolve().parents[2] / "docs/pages/performance/error_curves.svg"
SECTIONS = {
    "none": ("without tail", "tab:orange", "o--"),
    "pooled": ("pooled tail", "tab:blue", "o-"),
}


def read_rows(path: Path, case: str) -> list[dict[str, str]]:
    """Return the rows of a case, of each method those of the last commit that measured it.

    Raises:
        SystemExit: there are none.
    """
    if not path.exists():
        raise SystemExit(f"{path} must exist; `run.py error_curves` writes it")
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if case in row["case"]]
    if not rows:
        raise SystemExit(f"{path} must hold rows of a case with {case!r} in its name, it has none")
    if len({row["case"] for row in rows}) > 1:
        rows = [row for row in rows if row["case"] == rows[-1]["case"]]
    last = {row["method"]: (row["commit"], row["date"]) for row in rows}
    return [row for row in rows if (row["commit"], row["date"]) == last[row["method"]]]


def draw(rows: list[dict[str, str]], out: Path) -> None:
    """Write the picture of rows."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "error curves"  # the same rows give the same file
    from matplotlib import pyplot, ticker

    methods = list(dict.fromkeys(row["method"] for row in rows if row["tail"] == "pooled"))
    columns = min(3, len(methods))
    figure, axes = pyplot.subplots(
        -(-len(methods) // columns),
        columns,
        figsize=(3.4 * columns, 2.7 * -(-len(methods) // columns)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for axis, method in zip(axes.flat, methods, strict=False):
        for tail, (label, colour, style) in SECTIONS.items():
            curve = sorted(
                (float(row["median_ms"]), float(row["error_to_dense"]))
                for row in rows
                if row["method"] == method and row["tail"] == tail
            )
            axis.plot(*zip(*curve, strict=True), style, color=colour, label=label, markersize=4)
        axis.set(title=method, xscale="log", yscale="log")
        axis.grid(visible=True, which="both", alpha=0.25)
        for side in (axis.xaxis, axis.yaxis):
            side.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
            side.set_major_formatter("{x:g}")
            side.set_minor_formatter("{x:g}")
        axis.tick_params(which="both", labelsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("layer, ms")
    for axis in axes[:, 0]:
        axis.set_ylabel("error to dense")
    axes[0, 0].legend(fontsize="small")
    first, commits = rows[0], dict.fromkeys(row["commit"] for row in rows)
    title = f"{first['case']}, {first['gpu']}, commit {' and '.join(commits)}"
    figure.suptitle(title, fontsize="small")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=150)
    pyplot.close(figure)


def main() -> int:
    """Read and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=RESULTS / "error_curves.csv")
    parser.add_argument("--case", default="wan", help="draw the case whose name contains this")
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    draw(read_rows(options.rows, options.case), options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
