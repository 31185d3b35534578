"""The page of a report: complete in itself, safe with any text, never larger than allowed.

It is looked at in a real browser that has no network.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multimodal_gen.cli.compare import print_report
from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.runtime.comparison import page as module
from multimodal_gen.runtime.comparison.page import LIMIT, write_page
from multimodal_gen.runtime.comparison.plots import (
    error_over_steps,
    heat_maps,
    series_of,
    time_against_quality,
)
from multimodal_gen.runtime.comparison.record import FrameMetrics, LayerErrors, Report, Run
from multimodal_gen.runtime.comparison.verdict import MEASURES, SCORE, judged
from tests.helpers.reports import make_report

FRAMES = 7
SMALL = {"size": (FRAMES, 48, 84), "layers": 4, "steps": 6, "heads": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return make_report(folder, **SMALL)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def page_file(folder: Path, report: Report) -> Path:
    write_page(report, folder, folder / "report.html")
    return folder / "report.html"


def few(report: Report) -> Report:
    """Return the report with one candidate and without layers, which is drawn faster."""
    candidate = replace(report.candidates[1], layers=(), masks=())
    return replace(report, floor=(), candidates=(candidate,))


def written(report: Report, folder: Path, path: Path, limit: int = LIMIT) -> str:
    size = write_page(report, folder, path, limit=limit)
    data = path.read_bytes()
    assert len(data) == size <= limit
    return data.decode()


def test_the_page_holds_everything_it_shows(report: Report, page_file: Path) -> None:
    page = page_file.read_text("utf-8")
    sources = re.findall(r"""(?:src|href)\s*=\s*["']?([^"' >]*)""", page)
    assert {source.partition(":")[0] for source in sources if source[0] != "#"} == {"data"}
    assert page.count("data:video/mp4") == 2 * 7
    for run in report.runs:
        assert run.name in page
    for word in ("within the noise", "visible", "broken", "failed", "out of memory: needs 151 GiB"):
        assert word in page
    assert page.count('class="plot map"') == 5 * 2
    assert re.search(
        r"without a map have the errors of exact kernels: fa \(at most 0\.0\d+\)", page
    )
    assert page.count('class="mask"') == 6
    assert "Random weights prove the tool, not a method." in page
    assert re.findall(r"var\(--([a-z]+-\d)\)", page)
    assert not re.search(r"#(?:10101a|20202a|30303a|5050a\d)", page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert not list(page_file.parent.glob(".*"))


def test_speed_is_that_of_generations_wherever_it_stands(
    report: Report,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a row in one line
    (slow,) = few(report).candidates
    assert slow.cost is not None
    assert report.reference.cost is not None
    seconds = 2 * report.reference.cost.generation_seconds  # and a median step that is short
    clips = tuple(
        replace(clip, seconds=2 * other.seconds)
        for clip, other in zip(slow.generations, report.reference.generations, strict=True)
    )
    cost = replace(slow.cost, generation_seconds=seconds)
    slow = replace(slow, cost=cost, generations=clips)
    changed = judged(replace(few(report), candidates=(slow,), seeds=()))
    changed = replace(changed, candidates=(replace(changed.candidates[0], verdict=slow.verdict),))
    page = written(changed, folder, tmp_path / "report.html")
    won = r"Fastest with a visible difference</dt>.*\s*<small>0.50 \[0.50, 0.50\] x the reference"
    assert re.search(won, page)
    assert "no faster than its own noise" in page
    assert page.count("<span>0.50 x<small>[0.50, 0.50]</small></span>") == 1
    assert ">time per clip (s), less is better<" in page
    assert f"{slow.name}: {seconds:.3g} s" in page
    print_report(changed)
    (line,) = re.findall(rf"^{slow.name} +{seconds:.2f} s .*$", capsys.readouterr().out, re.M)
    assert line.split()[3:6] == ["0.50", "[0.50,", "0.50]"]


def test_a_sparse_method_that_was_dense_throughout_wins_nothing(
    report: Report, folder: Path, tmp_path: Path
) -> None:
    (sparse,) = few(report).candidates
    assert sparse.cost is not None
    clips = tuple(replace(clip, seconds=0.9 * clip.seconds) for clip in sparse.generations)
    cost = replace(sparse.cost, density=1.0)
    dense = replace(sparse, name="dense-run", cost=cost, generations=clips)
    both = judged(replace(few(report), candidates=(dense, sparse))).candidates
    both = tuple(replace(each, verdict=sparse.verdict) for each in both)
    page = written(replace(few(report), candidates=both), folder, tmp_path / "report.html")
    won = re.findall(r"<dt>Fastest with a visible difference</dt><dd>(\S+)", page)
    assert won == [sparse.name]
    assert page.count("<small>dense in every call: no winner</small>") == 1


@pytest.mark.parametrize(
    ("steps", "ticks"), [((1,), "1"), ((0, 1), "0 1"), ((3, 9), "3 4 5 6 7 8 9")]
)
def test_steps_are_whole_numbers(report: Report, steps: tuple[int, ...], ticks: str) -> None:
    run = report.candidates[1]
    layers = tuple(replace(run.layers[0], step=step) for step in steps)
    few_steps = replace(report, floor=(), candidates=(replace(run, layers=layers),))
    drawing = error_over_steps(series_of(few_steps))
    assert drawing is not None
    axis, _ = drawing.split(">denoising step<")
    shown = re.findall(r"text-anchor: middle[^>]*>(\d[^<]*)</text>", axis)
    assert shown == ticks.split()


def test_text_of_users_is_text(report: Report, folder: Path, tmp_path: Path) -> None:
    nasty = "</script><script>alert('x')</script><img src=x onerror=alert(1)> \ud83d \u6bd4\u8f03"
    model = replace(report.model, path=nasty)
    candidate = replace(report.candidates[1], name='a"<b>$x_1$', configuration=nasty)
    spoilt = replace(report, prompts=(nasty,), notes=(nasty,), model=model, candidates=(candidate,))
    page = written(judged(spoilt), folder, tmp_path / "report.html")
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert page.count("<script") == 1
    assert "a&#34;&lt;b&gt;$x_1$" in page
    assert "\u6bd4\u8f03" in page


def test_images_are_shown_as_images(folder: Path, tmp_path: Path) -> None:
    report = make_report(tmp_path, kind="image", **SMALL)  # type: ignore[arg-type]
    page = written(few(report), tmp_path, tmp_path / "report.html")
    assert page.count("data:image/jpeg") == 2 * 2
    assert 'id="play"' not in page


@pytest.mark.slow
def test_a_page_that_is_too_large_has_coarser_clips_and_then_fewer(
    report: Report, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    report = few(report)
    whole = len(written(report, folder, path))
    coarse = written(report, folder, path, limit=whole - 10)
    assert coarse.count("data:video/mp4") == 4
    assert "left out of this page" not in coarse
    monkeypatch.setattr(module, "SIZES", module.SIZES[:1])
    page = written(report, folder, path, limit=whole - 10)
    assert page.count("data:video/mp4") == 2
    assert "The clips of 1 of 2 prompts and seeds are left out of this page" in page
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"limit must be at least \d+ bytes, .* got 1000"):
        write_page(report, folder, path, limit=1000)
    assert path.read_bytes() == before


def test_a_comparison_in_which_nothing_finished_has_a_page(
    report: Report, folder: Path, tmp_path: Path
) -> None:
    reference = replace(report.reference, generations=(), layers=(), cost=None, status="failed")
    failed = judged(
        replace(report, reference=reference, floor=(), candidates=report.candidates[-1:])
    )
    page = written(failed, folder, tmp_path / "report.html")
    assert "out of memory: needs 151 GiB" in page
    assert "<svg role" not in page


def test_what_is_not_a_number_is_shown_as_such(
    report: Report, folder: Path, tmp_path: Path
) -> None:
    nan = float("nan")
    spoilt = report.candidates[1]
    layers = [replace(each, relative_l2=(nan,) * 3) for each in spoilt.layers]
    clips = [replace(each, latents=(nan, nan), frames=None) for each in spoilt.generations]
    spoilt = replace(spoilt, layers=tuple(layers), generations=tuple(clips), masks=())
    sound = replace(report.candidates[0], layers=report.candidates[0].layers[:1])
    spoilt_report = judged(replace(report, floor=(), candidates=(spoilt, sound)))
    page = written(spoilt_report, folder, tmp_path / "report.html")
    assert page.count("Empty cells have no finite error.") == 2
    assert ">nan<" in re.sub(r"\s", "", page)
    assert len(re.findall("<span>the reference, score 0.9\\d0</span>", page)) == 2


def test_a_clip_that_is_gone_is_said(report: Report, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the clip .* must be a NumPy file"):
        write_page(few(report), tmp_path, tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_said_with_its_remedy(
    report: Report, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'multimodal_gen\[compare\]'"):
        write_page(report, folder, tmp_path / "report.html")


class Opened:
    """A page, and what it complained of or asked the network for."""

    def __init__(self, context: Any, file: Path) -> None:
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri(), wait_until="load")

    def wait_for(self, condition: str) -> None:
        self.page.wait_for_function(f"() => {condition}", timeout=20_000)

    def frames(self) -> list[float]:
        """Return which frame every clip that is shown stands at, and those on the stage."""
        self.wait_for(
            "[...document.querySelectorAll('video')].filter((v) => v.offsetParent)"
            ".every((v) => v.readyState >= 2 && !v.seeking)"
        )
        return self.page.evaluate(
            f"""() => [...document.querySelectorAll("video")].filter((v) => v.offsetParent)
                .map((v) => Math.floor({FRAMES} * v.currentTime / v.duration))"""
        )


@pytest.fixture(scope="module")
def opened(browser: Any, page_file: Path) -> Iterator[Opened]:
    context = browser.new_context(viewport={"width": 1440, "height": 900}, offline=True)
    yield Opened(context, page_file)
    context.close()


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_seen_and_nothing_is_fetched(
    opened: Opened, page_file: Path, width: int, scheme: str
) -> None:
    page = opened.page
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    opened.wait_for("[...document.querySelectorAll('video')].every((v) => v.readyState >= 1)")
    seen, scrolled = page.evaluate("() => [innerWidth, document.documentElement.scrollWidth]")
    assert scrolled <= seen == width
    plots = page.evaluate(
        """() => [...document.querySelectorAll(".plot svg")].map((svg) => {
            const { left, right, width, height } = svg.getBoundingClientRect();
            const drawn = [...svg.querySelectorAll("use, image")].some((each) => {
                const box = each.getBoundingClientRect();
                return box.width > 0 && box.height > 0;
            });
            return drawn && left >= 0 && right <= innerWidth && width >= 250 && height >= 150;
        })"""
    )
    assert plots == [True] * (5 + 5 * 2)
    pictures = page.evaluate(
        "() => [...document.querySelectorAll('.cells img')].map((i) => i.naturalWidth)"
    )
    assert pictures == [26] * len(pictures) != []
    # Text stands out from what is behind it, whatever the scheme.
    dark = scheme == "dark"
    ground, ink = page.evaluate(
        """() => [["section", "backgroundColor"], ["h2", "color"]].map(([name, property]) =>
            getComputedStyle(document.querySelector(name))[property].match(/\\d+/g)
                .slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765)"""
    )
    assert (ground < 0.15, ink > 0.85) == (dark, dark)
    assert abs(ground - ink) > 0.7
    assert opened.complaints == []
    remote = [url for url in opened.requests if not url.startswith("data:")]
    assert remote == [page_file.as_uri()]


HIDDEN = """() => {
    const all = [...document.querySelectorAll(".scroll")];
    for (const each of document.querySelectorAll("details")) each.open = true;
    return all.map((each) => each.scrollWidth - each.clientWidth);
}"""


@pytest.mark.parametrize("width", [1100, 890, 390])
def test_tables_are_seen_whole_on_a_small_screen(opened: Opened, width: int) -> None:
    """But for that of all layers and runs, at whose edge a shadow says that there is more."""
    page = opened.page
    page.set_viewport_size({"width": width, "height": 900})
    *hidden, layers = page.evaluate(HIDDEN)
    assert hidden == [0] * 4
    assert (layers > 0) == (width < 1100)
    outside = page.evaluate(
        """() => [...document.querySelectorAll(".cards td > *, .verdict")].filter((each) => {
            const { left, right } = each.getBoundingClientRect();
            return left < 0 || right > innerWidth;
        }).length"""
    )
    assert outside == 0
    cue = page.evaluate(
        """() => {
            const style = getComputedStyle(document.querySelector(".scroll"));
            return [style.backgroundAttachment, style.backgroundImage.match(/linear/g).length];
        }"""
    )
    assert cue == ["local, local, scroll, scroll", 4]
    labels = page.evaluate(
        """() => [...document.querySelectorAll(".cards td.number")].slice(0, 3)
            .map((each) => getComputedStyle(each, "::before").content)"""
    )
    assert labels == (["none"] * 3 if width == 1100 else ['"PSNR"', '"SSIM"', '"XPSNR"'])
    page.set_viewport_size({"width": 1440, "height": 900})


def heights(drawing: str | None) -> list[float]:
    """Return the numbers beside the left axis of a figure."""
    assert drawing is not None
    texts = re.findall(r"text-anchor: end[^>]*>([\d.\u2212-]+)</text>", drawing)
    return [float(text.replace("\u2212", "-")) for text in texts]


def test_an_axis_shows_no_less_than_what_means_something(report: Report) -> None:
    """Two methods a hundredth of a decibel apart look as they are: the same."""
    measures = {measure.name: measure for measure in (*MEASURES, SCORE)}
    base = report.candidates[1]
    close = [
        replace(
            base,
            name=name,
            generations=tuple(
                replace(each, score=0.9, frames=FrameMetrics(psnr=psnr, vmaf=90.0))
                for each in base.generations
            ),
        )
        for name, psnr in (("one", 30.0), ("other", 30.01))
    ]
    reference = replace(
        report.reference,
        generations=tuple(replace(each, score=0.9) for each in report.reference.generations),
    )
    series = series_of(replace(report, reference=reference, floor=(), candidates=tuple(close)))
    for name, least in (("psnr", 8), ("vmaf", 8), ("score", 0.15)):
        shown = heights(time_against_quality(series, measures[name]))
        assert max(shown) - min(shown) >= least, name


def test_errors_that_differ_little_stand_between_powers_of_ten(report: Report) -> None:
    run = report.candidates[1]
    layers = tuple(
        replace(run.layers[0], step=step, relative_l2=(error,) * 3)
        for step, error in enumerate((0.021, 0.022))
    )
    drawing = error_over_steps(
        series_of(replace(report, floor=(), candidates=(replace(run, layers=layers),)))
    )
    assert heights(drawing) == [0.01, 0.1]


@pytest.mark.parametrize("known", [True, False])
def test_no_map_is_of_one_colour(report: Report, known: bool) -> None:
    """An exact candidate is told by the noise, or without any by errors that are as nothing."""
    sparse = report.candidates[1]

    def exact(error: float) -> tuple[LayerErrors, ...]:
        return tuple(replace(each, relative_l2=(error,) * 3) for each in sparse.layers)

    floor = (replace(report.floor[0], layers=exact(0.002)),) if known else ()
    same = replace(sparse, name="same", layers=exact(0.003 if known else 1e-7))
    runs = replace(report, floor=floor, candidates=(same, sparse))
    drawn = [each.run for each in heat_maps(series_of(runs), floor)]
    assert drawn == [sparse.name] * 2


def test_the_fastest_is_named_with_those_that_are_as_fast(
    report: Report, folder: Path, tmp_path: Path
) -> None:
    (one,) = few(report).candidates
    first, second = one.generations
    swapped = (replace(first, seconds=second.seconds), replace(second, seconds=first.seconds))
    both = (one, replace(one, name="as-fast", generations=swapped))
    failed = replace(one, name="cut-short", status="failed", message="why", generations=(
        replace(first, seconds=0.1),
    ))  # fmt: skip
    changed = judged(replace(report, floor=report.floor, candidates=(*both, failed)))
    page = written(changed, folder, tmp_path / "report.html")
    (won,) = re.findall(r"<dt>Fastest with a visible difference</dt><dd>([^\n]*)", page)
    assert sorted(won.split(" or ")) == ["as-fast", one.name]
    assert re.search(r"<dt>Failed</dt><dd>cut-short", page)


@pytest.mark.parametrize(
    ("speed", "won", "hint"),
    [
        (0.61, "torch_sdpa", "the reference: nothing within the noise is faster by more than"),
        (1.0, "torch_sdpa", "the reference: nothing within the noise is faster by more than"),
        (2.0, "block_sparse", "2.00 [2.00, 2.00] x the reference"),
    ],
)
def test_within_the_noise_the_reference_wins_unless_an_exact_kernel_is_faster(
    report: Report, folder: Path, tmp_path: Path, speed: float, won: str, hint: str
) -> None:
    """The block-sparse kernel with all blocks is one, unlike a candidate that was dense."""
    (sparse,) = few(report).candidates
    (exact,) = report.floor
    assert exact.cost is not None

    def at(name: str, backend: str, speed: float) -> Run:
        clips = tuple(
            replace(clip, seconds=other.seconds / speed)
            for clip, other in zip(exact.generations, report.reference.generations, strict=True)
        )
        return replace(exact, name=name, backend=backend, generations=clips, layers=())

    floor = (at("block_sparse", sparse.backend, speed), at("flex_attn", "flex_attn", 0.31))
    dense = at("dense-run", sparse.backend, 3.0)
    changed = judged(replace(report, floor=floor, candidates=(dense, sparse)))
    assert {run.verdict.word for run in (*changed.floor, changed.candidates[0]) if run.verdict} == {
        "within the noise of dense kernels"
    }
    page = written(changed, folder, tmp_path / "report.html")
    ((name, said),) = re.findall(
        r"<dt>Fastest within the noise</dt><dd>([^\n]*)\n\s*<small>([^<]*)", page
    )
    assert name == won
    assert said.startswith(hint)


def test_candidates_are_compared_with_the_best_of_them(
    report: Report, folder: Path, tmp_path: Path
) -> None:
    page = re.sub(r"\s+", " ", written(report, folder, tmp_path / "report.html"))
    best, dense = re.findall(r'aria-label="Differences from [a-z ]*">(.*?)</table>', page)
    assert best.count(">best<") == 9  # each of the measures
    rows = re.findall(r'<th scope="row">([^<]*)</th>', best)
    assert rows == [run.name for run in report.candidates[:-2]]  # the others: broken, failed
    assert re.search(r"<span>-\d+\.\d<small>\[-\d+\.\d, -\d+\.\d\]</small></span>", best)
    assert re.findall(r'<th scope="row">([^<]*)</th>', dense) == ["fa", *rows, "vmoba_attn"]
    assert "score.py:score" in page


def test_clips_move_in_step(opened: Opened) -> None:
    page = opened.page
    shown = 7 + 2  # one clip per run that has one, and two on the stage
    assert opened.frames() == [0] * shown
    page.get_by_role("button", name="One frame forth").press("Enter")
    assert opened.frames() == [1] * shown
    page.get_by_role("slider", name="Frame").fill("5")
    assert opened.frames() == [5] * shown
    page.get_by_role("button", name="Play").press("Space")
    opened.wait_for("document.getElementById('frame').value === '2'")
    page.get_by_role("button", name="Pause").press("Space")
    frames = opened.frames()
    assert len(frames) == shown
    assert len(set(frames)) == 1
    page.get_by_role("combobox", name="Show").select_option("seed 1")
    assert opened.frames() == frames
    assert page.locator("[data-take]:visible").get_attribute("data-take") == "1"


def test_one_clip_is_laid_over_the_reference(opened: Opened) -> None:
    page = opened.page
    page.get_by_role("combobox", name="Run").select_option("sage_attn")
    top = page.locator("#stage > :last-child")
    assert top.get_attribute("data-run") == "sage_attn"
    page.get_by_role("slider", name="Reference to the left of").fill("30")
    assert "30%" in top.evaluate("(clip) => getComputedStyle(clip).clipPath")
    page.get_by_role("combobox", name="View").select_option("difference")
    assert top.evaluate("(clip) => getComputedStyle(clip).mixBlendMode") == "difference"


def test_a_cell_of_a_map_can_be_read(opened: Opened) -> None:
    drawing = opened.page.locator(".map svg").first
    drawing.scroll_into_view_if_needed()
    drawing.hover()
    text = opened.page.locator(".map output").first.inner_text()
    assert text.startswith("layer 2, step ")
