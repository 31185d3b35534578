"""The figures of a report, as SVG to stand in a page: text stays text, colours follow the theme.

Matplotlib draws them, because its pictures need no program in the page: they print, are read out by
their titles, and weigh a few kilobytes. Colours are stand-ins that become CSS variables of
`page.css`. Figures are drawn for the width of a phone, and a wide page puts several in a row.
"""

import html
import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from multimodal_gen.runtime.comparison.frames import mean_and_spread
from multimodal_gen.runtime.comparison.record import LayerErrors, Report, Run, grouped
from multimodal_gen.runtime.comparison.verdict import FACTOR, Measure

_STAND_INS: Mapping[str, str] = {
    "#10101a": "var(--ink)",
    "#20202a": "var(--muted)",
    "#30303a": "var(--line)",
    **{f"#5050{0xA0 + i:02x}": f"var(--series-{i})" for i in range(8)},
}
_INK, _MUTED, _LINE, *_SERIES = _STAND_INS
_MARKERS = "osD^vPX*"
_DASHES = ("-", "--", "-.", ":")
_SMALLEST_SHARE = 1e-4  # of the largest error: less gets the first colour of the scale
# Least height of an axis, below which differences are nothing to anybody.
_LEAST_SPANS: Mapping[str, float] = MappingProxyType({"psnr": 10.0, "vmaf": 10.0, "score": 0.2})


@dataclass(frozen=True, slots=True)
class Series:
    """How one run is drawn, wherever it is drawn.

    Attributes:
        run: the run.
        colour: stand-in for its colour.
        marker: as matplotlib names it.
        dash: as matplotlib names it.
    """

    run: Run
    colour: str
    marker: str
    dash: str

    @property
    def css(self) -> str:
        """Its colour in the page."""
        return _STAND_INS[self.colour]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A picture of numbers, with the numbers.

    Attributes:
        run: name of the run.
        component: pipeline component.
        across: what columns are, "step" or "head".
        rows: their labels, from the top.
        columns: their labels.
        values: relative L2 errors by row and column; None where nothing was measured.
        box: left, top, width and height of the cells, as shares of the picture.
        svg: the picture.
    """

    run: str
    component: str
    across: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]
    box: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)
    svg: str = ""


def series_of(report: Report) -> tuple[Series, ...]:
    """Return how every run is drawn: the reference in ink, exact kernels in grey."""
    drawn = [Series(report.reference, _INK, "o", "-")]
    drawn += [
        Series(run, _MUTED, _MARKERS[i % len(_MARKERS)], ":") for i, run in enumerate(report.floor)
    ]
    for i, run in enumerate(report.candidates):
        colour = _SERIES[i % len(_SERIES)]
        dash = _DASHES[i // len(_SERIES) % len(_DASHES)]
        drawn.append(Series(run, colour, _MARKERS[i % len(_MARKERS)], dash))
    return tuple(drawn)


def time_against_quality(series: Sequence[Series], measure: Measure) -> str | None:
    """Draw the time of a generation against a metric of frames; None where no run has both."""
    points = []
    for each in series:
        figures = [*measure.figures(each.run).values()]
        if figures and each.run.cost is not None:
            points.append((each, each.run.cost.generation_seconds, mean_and_spread(figures)))
    finite = [mean for _, _, (mean, _) in points if math.isfinite(mean)]
    if not points:
        return None
    reference = series[0].run.cost
    equal = max(finite, default=40.0) + 5
    with _figure(5.0, 3.1) as (figure, axes):
        for each, seconds, (mean, spread) in points:
            height = mean if math.isfinite(mean) else equal
            style = {"color": each.colour, "marker": each.marker, "markersize": 8}
            axes.errorbar(seconds, height, spread or None, label=each.run.name, **style, ls="none")
        if len(finite) < len(points):
            axes.axhline(equal, color=_LINE, lw=1, zorder=0)
            axes.text(1, equal, "equal", transform=axes.get_yaxis_transform(), va="bottom",
                      ha="right", color=_MUTED, fontsize=9)  # fmt: skip
        if reference is not None:
            axes.axvline(
                reference.generation_seconds, color=_INK, lw=1, ls=":", label="reference's time"
            )
        axes.set_xlim(left=0)
        axes.margins(x=0.1, y=0.15)
        low, high = axes.get_ylim()
        short_of = max(0.0, _LEAST_SPANS.get(measure.name, 0.0) - (high - low)) / 2
        axes.set_ylim(low - short_of, high + short_of)
        axes.set_xlabel("time per clip (s), less is better")
        unit = f" ({measure.unit})" if measure.unit else ""
        axes.set_ylabel(f"{measure.label}{unit}, {measure.better} is better")
        _legend(figure, axes)
        text = "; ".join(
            f"{each.run.name}: {seconds:.3g} s, {measure.text(mean)}"
            for each, seconds, (mean, _) in points
        )
        return _svg(figure, f"Time per clip against {measure.label}", text)


def latents_over_steps(series: Sequence[Series]) -> str | None:
    """Draw how far the latents are from the reference's after every step; None without any."""
    return _over_steps(
        series[1:],
        lambda run: (pair for clip in run.generations for pair in enumerate(clip.latents)),
        "Latents along the steps",
        "relative L2 distance of latents",
    )


def error_over_steps(series: Sequence[Series]) -> str | None:
    """Draw the error of attention layers by step, mean over layers and heads; None without any."""
    return _over_steps(
        series[1:],
        lambda run: ((call.step, error) for call in run.layers for error in call.relative_l2),
        "Error of layers along the steps",
        "relative L2 error of attention",
    )


def heat_maps(series: Sequence[Series], floor: Sequence[Run]) -> tuple[HeatMap, ...]:
    """Draw the relative L2 errors of runs by layer and step, and by head.

    All share one scale of colours, which is logarithmic. Means are over what is not an axis. Runs
    whose errors are those of exact kernels, by `largest_error`, have no map: of one colour, it
    would show nothing.

    Args:
        series: all runs, the reference first.
        floor: the exact kernels among them.
    """
    noise = FACTOR * max(map(largest_error, floor), default=0.0)
    most = max((largest_error(each.run) for each in series[1:]), default=0.0)
    noise = max(noise, most * _SMALLEST_SHARE if math.isfinite(most) else 0.0)
    grids = [
        _undrawn(each.run.name, component, calls, across)
        for each in series[1:]
        if largest_error(each.run) > noise
        for component, calls in grouped((x.component, x) for x in each.run.layers).items()
        for across in ("step", "head")
    ]
    found = [value for grid in grids for row in grid.values for value in row if value and value > 0]
    if not found:
        return ()
    high = max(found)
    low = max(min(found), high * _SMALLEST_SHARE)
    return tuple(_drawn(grid, (low, high if high > low else low * 10)) for grid in grids)


def largest_error(run: Run) -> float:
    """Return the largest relative L2 error of a layer; infinity where one is not finite."""
    errors = [error for call in run.layers for error in call.relative_l2]
    return max(errors, default=0.0) if all(map(math.isfinite, errors)) else math.inf


def _over_steps(
    series: Sequence[Series],
    errors: Callable[[Run], Iterable[tuple[int, float]]],
    title: str,
    label: str,
) -> str | None:
    """Draw the mean of the errors at each step, a line per run."""
    lines = [(each, grouped(errors(each.run))) for each in series]
    lines = [(each, by_step) for each, by_step in lines if by_step]
    if not lines:
        return None
    with _figure(5.0, 3.1) as (figure, axes):
        for each, by_step in lines:
            steps = sorted(by_step)
            means = [statistics.fmean(by_step[step]) for step in steps]
            # What is 0 has no place on a logarithmic axis, NaN on none: the line has a gap there.
            axes.plot(steps, [m if m > 0 else math.nan for m in means], color=each.colour,
                      ls=each.dash, marker=each.marker, markersize=4, lw=1.6,
                      markevery=max(1, len(steps) // 8), label=each.run.name)  # fmt: skip
        if any(error > 0 for _, by_step in lines for each in by_step.values() for error in each):
            axes.set_yscale("log")
            _whole_decades(axes)
            _plain_numbers(axes.yaxis)
        axes.set_xlabel("denoising step")
        axes.set_ylabel(label)
        _whole_numbers(axes.xaxis)
        _legend(figure, axes)
        last = "; ".join(
            f"{each.run.name}: {mean_and_spread(by_step[max(by_step)])[0]:.3g}"
            for each, by_step in lines
        )
        return _svg(figure, title, f"At the last step: {last}")


def _undrawn(run: str, component: str, calls: Sequence[LayerErrors], across: str) -> HeatMap:
    """Return the labels of rows and columns, and the mean errors, without a picture."""
    cells = grouped(
        ((call.layer, call.step if across == "step" else head), error)
        for call in calls
        for head, error in enumerate(call.relative_l2)
    )
    rows, columns = (tuple(sorted({place[axis] for place in cells})) for axis in range(2))

    def mean(place: tuple[int, int]) -> float | None:
        finite = [error for error in cells.get(place, ()) if math.isfinite(error)]
        return statistics.fmean(finite) if finite else None

    return HeatMap(
        run=run,
        component=component,
        across=across,
        rows=rows,
        columns=columns,
        values=tuple(tuple(mean((row, column)) for column in columns) for row in rows),
    )


def _drawn(grid: HeatMap, limits: tuple[float, float]) -> HeatMap:
    import numpy as np
    from matplotlib.colors import LogNorm

    with _figure(5.0, 3.3) as (figure, axes):
        axes.set_position((0.11, 0.18, 0.71, 0.78))
        numbers = np.array([[np.nan if v is None else v for v in row] for row in grid.values])
        picture = axes.imshow(
            np.clip(numbers, limits[0], None),  # 0 has no logarithm
            cmap="viridis", norm=LogNorm(*limits), aspect="auto", interpolation="nearest",
        )  # fmt: skip
        axes.set_xlabel({"step": "denoising step", "head": "head"}[grid.across])
        axes.set_ylabel("layer")
        axes.grid(False)
        for axis, labels in ((axes.xaxis, grid.columns), (axes.yaxis, grid.rows)):
            stride = max(1, math.ceil(len(labels) / 8))
            axis.set_ticks(range(0, len(labels), stride), [str(n) for n in labels[::stride]])
        bar = figure.colorbar(picture, cax=figure.add_axes((0.84, 0.18, 0.025, 0.78)))
        bar.outline.set_visible(False)
        _plain_numbers(bar.ax.yaxis)
        bar.ax.tick_params(labelsize=10)
        title = f"{grid.run}, {grid.component}: error by layer and {grid.across}"
        known = [v for row in grid.values for v in row if v is not None]
        svg = _svg(figure, title, f"From {min(known):.2g} to {max(known):.2g}." if known else "")
        place = axes.get_position()
    box = (place.x0, 1 - place.y1, place.width, place.height)
    return replace(grid, box=box, svg=svg)


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """Give a figure of inches of 72 pixels, in our style, whatever matplotlib's settings are."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 11.5,
        "axes.labelsize": 11.5,
        "text.color": _INK,
        "axes.labelcolor": _MUTED,
        "axes.edgecolor": _LINE,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": _LINE,
        "grid.linewidth": 0.8,
        "xtick.color": _LINE,
        "ytick.color": _LINE,
        "xtick.labelcolor": _MUTED,
        "ytick.labelcolor": _MUTED,
        "figure.facecolor": "none",
        "legend.frameon": False,
        "legend.fontsize": 10.5,
        "legend.labelcolor": _INK,
        "errorbar.capsize": 3.0,
    }
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **style, "backend": "svg"}):
        figure = Figure(figsize=(width, height), dpi=72)
        # Looking for margins that fit would take most of the time.
        yield figure, figure.add_axes((0.17, 0.18, 0.8, 0.78))


def _legend(figure: Any, axes: Any) -> None:
    """Put a legend below, and make the figure taller by it."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 1 if max(map(len, labels)) > 22 else 2
    width, height = figure.get_size_inches()
    below = 0.24 * math.ceil(len(labels) / columns) + 0.1
    left, bottom, across, up = axes.get_position().bounds
    figure.set_size_inches(width, height + below)
    whole = height + below
    axes.set_position((left, (bottom * height + below) / whole, across, up * height / whole))
    figure.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.0, 0.0), ncols=columns,
        handlelength=1.8, labelspacing=0.45, borderaxespad=0.2,
    )  # fmt: skip


def _plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis without formulas."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())  # most of the time of a figure is that of its ticks


def _whole_decades(axes: Any) -> None:
    """Let a logarithmic axis start and end at powers of ten, so that it has ticks, and no zoom."""
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    axes.set_ylim(10 ** math.floor(low), 10 ** math.ceil(high))


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    low, high = sorted(axis.get_view_interval())
    if high - low < 1:  # one number, for which a locator makes up a range of fractions
        middle = round((low + high) / 2)
        axis.axes.set_xlim(middle - 0.5, middle + 0.5)
    axis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))


def _svg(figure: Any, title: str, description: str) -> str:
    """Return a figure as an element that scales, with colours of the page and names of its own."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    for stand_in, variable in _STAND_INS.items():
        drawing = drawing.replace(stand_in, variable)
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    # The page's typeface, which the stylesheet sets.
    drawing = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", drawing)
    drawing = re.sub(r" font-family: [^;\"]*;", "", drawing)
    prefix = re.sub(r"\W+", "-", title)
    drawing = re.sub(r'\bid="', f'id="{prefix}-', drawing)
    drawing = re.sub(r'(url\(|href=")#', rf"\g<1>#{prefix}-", drawing)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)
    assert size is not None
    head = (
        f'<svg role="img" viewBox="0 0 {size[1]} {size[2]}" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink"><title>{html.escape(title)}</title>'
        f"<desc>{html.escape(description)}</desc>"
    )
    return head + drawing[drawing.index(">") + 1 :]
