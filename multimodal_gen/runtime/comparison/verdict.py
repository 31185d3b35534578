"""What the figures of a comparison mean: broken, failed, visible, or within the noise.

The noise is what the same model does with another exact kernel: both are right, so a difference of
that size means nothing. The rules, in this order:

broken
    A value of the latents or the pixels is NaN or infinite; a frame has one colour where the
    reference's has more; or a clip stands still (less than `STILL` of the reference's flicker)
    where the reference's moves (at least `MOVES` levels).
failed
    It did not run to its end: clips that it lacks might be the ones that it does badly.
unknown
    No clip was compared; the reference itself is broken; or something is beyond rounding and there
    is no noise to compare it with. VMAF alone is not: it gives equal clips 97 to 100.
within the noise of dense kernels
    Every measure's distance from the reference, as a mean over prompts and seeds, is at most
    `FACTOR` times that of exact kernels on the same prompts and seeds, plus `rounding`. With
    several exact kernels, the one that is farther away on a clip counts there. A kernel that
    left pairs out is none.
visible
    Anything else. The figures tell it from noise; whether it is worse is for eyes to judge.

A sparse method that left nothing out in any call, such as one whose dense steps cover the run, says
nothing of itself: its verdict says so first, and it is never named the fastest.

Distances: decibels as a ratio of squared error, 10^(-dB/10); SSIM, VMAF and JOD as what they lack
from 1, 100 and 10; LPIPS and latents as they are; flicker as |1 - flicker / that of the reference|.

A score by a function of the user's is no distance from the reference, and no verdict rests on it.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from multimodal_gen.errors import ConfigError
from multimodal_gen.runtime.comparison.frames import mean_and_spread
from multimodal_gen.runtime.comparison.paired import difference, own_noise, ratio_of_times
from multimodal_gen.runtime.comparison.record import Estimate, Generation, Report, Run, Verdict
from multimodal_gen.runtime.platforms import AttentionBackendEnum

FACTOR = 2.0
"""How many times the noise a distance may be. Twice the squared error is 3 dB."""

STILL = 0.01
"""Share of the reference's flicker below which a clip stands still."""

MOVES = 0.5
"""Flicker from which a clip moves, in levels of 8 bits: half a level on average."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a clip.

    Attributes:
        name: of its field in `FrameMetrics`; "latents", "flicker_change" or "score" for others.
        label: as people know it.
        unit: of the figure, or "".
        digits: behind the decimal point, in print; None for two digits wherever they are.
        better: which figures are closer to the reference.
        rounding: distance that is that of rounding: to 8 bits, which is invisible, or, of
            latents, of a run in float32.
        distance: from the reference, of a figure; 0 for equal clips, and more for farther ones.
    """

    name: str
    label: str
    unit: str
    digits: int | None
    better: Literal["higher", "lower"]
    rounding: float
    distance: Callable[[float], float]

    def of(self, generation: Generation) -> float | None:
        """Return the figure of one clip; None where it has none."""
        if self.name == "latents":
            return generation.latents[-1] if generation.latents else None
        if self.name == "score":
            return generation.score
        frames = generation.frames
        if frames is None:
            return None
        if self.name == "flicker_change":
            if frames.flicker is None or not frames.flicker_reference:
                return None
            return frames.flicker / frames.flicker_reference
        figure: float | None = getattr(frames, self.name)
        return figure

    def figures(self, run: Run) -> dict[tuple[int, int], float]:
        """Return the figure of every clip that has one, by prompt and seed."""
        found = {(each.prompt, each.seed): self.of(each) for each in run.generations}
        return {clip: figure for clip, figure in found.items() if figure is not None}

    def number(self, figure: float) -> str:
        """Return a figure without its unit."""
        return f"{figure:.2g}" if self.digits is None else f"{figure:.{self.digits}f}"

    def text(self, figure: float) -> str:
        """Return a figure with its unit."""
        return f"{self.number(figure)} {self.unit}".strip()

    def apart(self, found: Estimate) -> tuple[str, str]:
        """Return a difference of figures with its sign, and its interval; "" for one clip."""
        figures = (found.mean, found.low, found.high)
        numbers = [self.number(figure) for figure in figures if figure is not None]
        # What rounds to nothing has no sign.
        texts = [n.lstrip("-") if not float(n) else f"+{n}" if n[0] != "-" else n for n in numbers]
        return texts[0], f"[{texts[1]}, {texts[2]}]" if len(texts) > 1 else ""


def _squared_error(decibels: float) -> float:
    return 10 ** (-decibels / 10)


# 60 dB is a squared error of 0.065: one value in fifteen is one level away.
MEASURES = (
    Measure("psnr", "PSNR", "dB", 1, "higher", 1e-6, _squared_error),
    Measure("ssim", "SSIM", "", 4, "higher", 1e-3, lambda ssim: max(0.0, 1 - ssim)),
    Measure("xpsnr", "XPSNR", "dB", 1, "higher", 1e-6, _squared_error),
    Measure("vmaf", "VMAF", "", 1, "higher", 1.0, lambda vmaf: max(0.0, 100 - vmaf)),
    Measure("lpips", "LPIPS", "", 4, "lower", 1e-3, lambda lpips: lpips),
    Measure("st_lpips", "ST-LPIPS", "", 4, "lower", 1e-3, lambda lpips: lpips),
    Measure("cvvdp", "CVVDP", "JOD", 2, "higher", 0.02, lambda jod: max(0.0, 10 - jod)),
    Measure("flicker_change", "flicker", "x", 2, "lower", 0.01, lambda ratio: abs(1 - ratio)),
    Measure("latents", "latents", "", None, "lower", 1e-5, lambda error: error),
)
"""What verdicts rest on. The ratio of flickers is 1 for equal clips; 2 flickers twice as much."""

SCORE = Measure("score", "score", "", 3, "higher", 0.0, lambda score: 1 - score)
"""What a function of the user's gives a clip, without the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseComparison:
    """One measure of a run, compared with the noise.

    Attributes:
        measure: which.
        count: clips (prompts times seeds) that both the run and the noise have a figure of; of the
            run alone where there is no noise.
        mean: the run's figure, mean over these clips; infinite ones count as in `frames.py`.
        spread: its standard deviation over these clips, n - 1; 0 for one.
        noise: the same mean of exact kernels, of each clip the farther one; None without any.
        difference: from them, paired by clip; None without any.
        within: whether the distance is within the noise, by the rules above; None where there is
            no noise and it is beyond rounding.
    """

    measure: Measure
    count: int
    mean: float
    spread: float
    noise: float | None
    difference: Estimate | None
    within: bool | None


def judged(report: Report) -> Report:
    """Return the report with what is paired by clip, and the verdict of all but the reference."""
    reference = replace(report.reference, speed=own_noise(report.reference))
    floor = [_paired(run, report) for run in report.floor]
    candidates = [_paired(run, report) for run in report.candidates]
    notes = report.notes
    if defects := defects_of(reference):
        reason = f"The reference, {reference.name}, is broken: {' '.join(defects)}"
        verdicts = [Verdict(word="unknown", reasons=(reason,))] * (len(floor) + len(candidates))
        notes = (*notes, reason)
    else:
        verdicts = [*map(_of_floor, floor), *(judge(run, floor) for run in candidates)]
    runs = [
        replace(run, verdict=verdict)
        for run, verdict in zip((*floor, *candidates), verdicts, strict=True)
    ]
    return replace(
        report,
        reference=reference,
        floor=tuple(runs[: len(floor)]),
        candidates=tuple(runs[len(floor) :]),
        notes=notes,
    )


def _paired(run: Run, report: Report) -> Run:
    """Return a run with what is paired by clip."""
    found = compare_with_noise(run, report.floor)
    differences = {
        each.measure.name: each.difference for each in found if each.difference is not None
    }
    score = difference(SCORE.figures(run), SCORE.figures(report.reference))
    if score is not None:
        differences["score"] = score
    return replace(run, speed=ratio_of_times(run, report.reference), differences=differences)


def _of_floor(run: Run) -> Verdict:
    if run.status == "done" and _leaves_pairs_out(run) and not defects_of(run):
        reason = "It leaves pairs out, so its difference is not the noise; name an exact kernel."
        return Verdict(word="unknown", reasons=(reason,))
    verdict = judge(run, [run])
    if verdict.word != "within the noise of dense kernels":
        return verdict
    return replace(verdict, reasons=("An exact kernel: its difference is the noise.",))


def _leaves_pairs_out(run: Run) -> bool:
    return run.cost is not None and not _attends_to_all(run)


def _is_sparse(backend: str) -> bool:
    try:
        return AttentionBackendEnum.parse(backend).is_sparse
    except ConfigError:  # of a plug-in that is not there any more
        return False


def _attends_to_all(run: Run) -> bool:
    return run.cost is not None and run.cost.density > 1 - 1e-6


def was_dense(run: Run) -> bool:
    """Whether a sparse method left nothing out in any call: its figures are a dense kernel's."""
    return _attends_to_all(run) and _is_sparse(run.backend)


def judge(run: Run, floor: Sequence[Run]) -> Verdict:
    """Return the verdict on a run.

    Args:
        run: what is judged.
        floor: exact kernels on the same prompts and seeds. Those that are broken, did not finish or
            left pairs out are no noise.
    """
    verdict = _judge(run, floor)
    if verdict.word == "broken" or not was_dense(run):
        return verdict
    dense = (
        "It attended to every pair in every layer and step: this says nothing of the method, and "
        "it is not named the fastest."
    )
    ran = (f"{line}." for line in run.attention if ".self, " in line)
    return replace(verdict, reasons=(dense, *ran, *verdict.reasons))


def _judge(run: Run, floor: Sequence[Run]) -> Verdict:
    if defects := defects_of(run):
        return Verdict(word="broken", reasons=defects)
    if run.status != "done":
        reason = f"{run.status}: {run.message}" if run.message else f"It ended as {run.status}."
        return Verdict(word="failed", reasons=(reason,))
    found = compare_with_noise(run, floor)
    if not found:
        return Verdict(word="unknown", reasons=("No clip was compared.",))
    beyond = [each for each in found if each.within is False]
    if beyond:
        return Verdict(word="visible", reasons=tuple(map(_sentence, beyond)))
    unjudged = [each for each in found if each.within is None]
    if [each.measure.name for each in unjudged] == ["vmaf"] and len(found) > 1:
        unjudged = []
    if unjudged:
        reason = "No other exact kernel ran, so there is no noise to compare the figures with."
        return Verdict(word="unknown", reasons=(reason, *map(_sentence, unjudged)))
    by_name = {each.measure.name: each for each in found}
    reasons = tuple(map(_sentence, found))
    if "psnr" in by_name and math.isinf(by_name["psnr"].mean):
        reasons = ("Every clip equals the reference's.",)
    return Verdict(word="within the noise of dense kernels", reasons=reasons)


def compare_with_noise(run: Run, floor: Sequence[Run]) -> tuple[NoiseComparison, ...]:
    """Compare every measure of a run with the noise; measures without figures are left out.

    Args:
        run: what is judged.
        floor: exact kernels on the same prompts and seeds.
    """
    noises = [
        each
        for each in floor
        if each.status == "done" and not defects_of(each) and not _leaves_pairs_out(each)
    ]
    found = (_compare_measure(measure, run, noises) for measure in MEASURES)
    return tuple(each for each in found if each is not None)


def _compare_measure(measure: Measure, run: Run, floor: Sequence[Run]) -> NoiseComparison | None:
    figures = measure.figures(run)
    others = [measure.figures(each) for each in floor]
    noise = {
        clip: max((other[clip] for other in others if clip in other), key=measure.distance)
        for clip in figures
        if any(clip in other for other in others)
    }
    paired = [clip for clip in figures if clip in noise] or list(figures)
    if not paired:
        return None
    mean, spread = mean_and_spread([figures[clip] for clip in paired])
    apart = statistics.fmean(measure.distance(figures[clip]) for clip in paired)
    compared = NoiseComparison(
        measure=measure,
        count=len(paired),
        mean=mean,
        spread=spread,
        noise=None,
        difference=None,
        within=True if apart <= measure.rounding else None,
    )
    if not noise:
        return compared
    allowed = statistics.fmean(measure.distance(noise[clip]) for clip in paired)
    return replace(
        compared,
        noise=mean_and_spread([noise[clip] for clip in paired])[0],
        difference=difference(figures, noise),
        within=apart <= FACTOR * allowed + measure.rounding,
    )


def defects_of(run: Run) -> tuple[str, ...]:
    """Return a sentence for each kind of defect that makes a run broken, the reference too."""
    clips = run.generations
    frames = [each.frames for each in clips if each.frames is not None]
    not_finite = sum(each.non_finite > 0 for each in clips)
    not_finite = max(not_finite, sum(each.non_finite > 0 for each in frames))
    diverged = any(not math.isfinite(error) for each in clips for error in each.latents)
    constant = sum(each.constant for each in frames)
    still = sum(
        each.flicker is not None
        and each.flicker_reference is not None
        and each.flicker_reference >= MOVES
        and each.flicker < STILL * each.flicker_reference
        for each in frames
    )
    sentences = (
        (not_finite, f"NaN or infinite values in {_clips(not_finite, len(clips))}."),
        (diverged and not not_finite, "The latents became NaN or infinite."),
        (constant, f"A frame of one colour in {_clips(constant, len(clips))}."),
        (still, f"No motion in {_clips(still, len(clips))}, where the reference moves."),
    )
    return tuple(sentence for found, sentence in sentences if found)


def _clips(count: int, total: int) -> str:
    return f"{count} of {total} clip{'s' if total > 1 else ''}"


def _sentence(found: NoiseComparison) -> str:
    measure = found.measure
    text = f"{measure.label} {measure.text(found.mean)}"
    if found.count > 1:
        text += f" (spread {measure.number(found.spread)} over {found.count} clips)"
    if found.noise is None:
        return f"{text}."
    text += f"; dense kernels {measure.text(found.noise)}"
    if found.difference is not None and found.difference.low is not None:
        text += f", by clip {' '.join(measure.apart(found.difference))}"
    return f"{text}."
