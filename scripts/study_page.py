"""The blocks of the page on the shapes study, from the rows of `scripts/shapes/study.py`.

A page names one in a comment, and `measured_tables.py` writes it:

    <!-- measured
    study: when
    -->

Times are those of `study_times.csv`; speeds are over `auto`, the exact attention that runs where
nothing is asked for. What was compared on many clips, in `study_front.csv`, goes before what was
compared on few, in `study_screen.csv`, which stands alone while there is no other. Differences are
paired by clip.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

# A checkout works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal_gen.runtime.comparison.paired import difference, estimate
from multimodal_gen.runtime.comparison.record import Estimate

Row: TypeAlias = Mapping[str, str]
RowsOf: TypeAlias = Callable[[str], Sequence[Row]]

LIMIT = 0.03
"""How far below that of dense attention a score may be, at the lower end of the interval."""
DENSE, AUTO = "torch_sdpa", "auto"
PERCEPTUAL = {"st_lpips": ("ST-LPIPS", ".4f"), "cvvdp": ("JOD", ".2f")}
"""What only the first captions of the front have: its name on the page, and its digits."""
VARIANTS = {"tail": "with its tail", "dense first": "with its first steps dense"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a configuration did.

    Attributes:
        name: in the study.
        score: mean over its clips.
        apart: its score less that of dense attention, paired by clip.
        seconds: of a video at the dimensions of Wan 1.3B.
        row: of the comparison.
    """

    name: str
    score: float
    apart: Estimate
    seconds: float
    row: Row

    @property
    def method(self) -> str:
        """The backend."""
        return self.row["configuration"].partition(":")[0]

    @property
    def holds(self) -> bool:
        """Whether it is shown to score at most `LIMIT` less."""
        return self.apart.low is not None and self.apart.low >= -LIMIT

    @property
    def shown(self) -> str:
        """Its name on the page."""
        name, _, variant = self.name.partition(", ")
        return f"`{name}` {VARIANTS.get(variant, variant)}".rstrip()


class Study:
    """The rows of the study.

    Args:
        rows_of: returns the rows of a file of results.
    """

    def __init__(self, rows_of: RowsOf) -> None:
        self._rows_of = rows_of
        self.timed = {
            row["configuration"]: row for row in self.rows("times") if row["status"] == "done"
        }
        self.auto = float(self.timed[AUTO]["seconds"])
        self.dense_clips = self._clips("front").get(DENSE, {})
        screen, front = self._settings("screen"), self._settings("front")
        self.screen = {each.name: each for each in screen}
        self.front = {each.name: each for each in front}
        self.trained = self._settings("trained")

    def rows(self, part: str) -> Sequence[Row]:
        """Return the rows of a part; what was not measured has none."""
        return self._read(f"study_{part}.csv")

    def found(self, part: str) -> str:
        """Return the part, or the screen where that has no rows."""
        return part if self.rows(part) else "screen"

    def _read(self, file: str) -> Sequence[Row]:
        try:
            return self._rows_of(file)
        except FileNotFoundError:
            return ()

    def _clips(self, part: str) -> dict[str, dict[tuple[str, str], float]]:
        """Return scores by name, and by caption and seed."""
        found: dict[str, dict[tuple[str, str], float]] = {}
        for row in self._read(f"study_{part}_clips.csv"):
            of_name = found.setdefault(row["name"], {})
            of_name[row["caption"], row["seed"]] = float(row["score"])
        return found

    def _settings(self, part: str) -> list[Setting]:
        """Return the settings of a part that have a time and a score.

        Trained models are set beside dense attention before the training.
        """
        clips = self._clips(part)
        dense = self.dense_clips if part == "trained" else clips.get(DENSE, {})
        found = []
        for row in self.rows(part):
            timed = self.timed.get(row["configuration"])
            if row["configuration"] == DENSE or row["status"] != "done" or timed is None:
                continue
            apart = difference(clips[row["name"]], dense)
            if apart is not None:
                seconds, score = float(timed["seconds"]), float(row["score"])
                kept = {"score": score, "apart": apart, "seconds": seconds}
                found.append(Setting(name=row["name"], row=row, **kept))
        return found

    def ends(self) -> Iterator[tuple[str, Estimate]]:
        """Yield real clips, those with captions of others, and exact kernels, with their scores."""
        part = self.found("front")
        clips = self._clips(part)
        for row in self.rows(part):
            name, configuration = row["name"], row["configuration"]
            # Clips of one caption are like each other, and count as one.
            by_caption: dict[str, list[float]] = {}
            for (caption, _), scored in clips.get(name, {}).items():
                by_caption.setdefault(caption, []).append(scored)
            found = estimate([fmean(each) for each in by_caption.values()])
            is_setting = ":" in configuration or configuration in self.timed
            if found is None or (is_setting and configuration != DENSE):
                continue
            shown = f"`{configuration}`" if configuration else name
            yield ("dense attention" if configuration == DENSE else shown), found

    def variants(self, variant: str) -> Iterator[tuple[Setting, Setting, Estimate]]:
        """Yield settings of the screen without and with a variant, and what it adds to a score."""
        clips = self._clips("screen")
        for name, changed in self.screen.items():
            plain = self.screen.get(name.removesuffix(f", {variant}"))
            if plain is None or plain is changed:
                continue
            apart = difference(clips[name], clips[plain.name])
            if apart is not None:
                yield plain, changed, apart

    def beats(self, setting: Setting) -> str:
        """Return what scores no less than a setting of the screen in no more time, or nothing."""
        dense = next(row for row in self.rows("screen") if row["configuration"] == DENSE)
        points = [(float(dense["score"]), self.auto, "exact attention")]
        points += [(x.score, x.seconds, x.shown) for x in self.screen.values() if x is not setting]
        own = (setting.score, setting.seconds)
        better = [
            (score, -seconds, shown)
            for score, seconds, shown in points
            if score >= own[0] and seconds <= own[1] and (score, seconds) != own
        ]
        return max(better)[2] if better else ""


def lines_of(block: str, rows_of: RowsOf) -> Iterator[str]:
    """Yield the lines of a block, see `BLOCKS`, and what it was measured on.

    Args:
        block: its name; after that of "settings", the method.
        rows_of: returns the rows of a file of results.
    """
    study = Study(rows_of)
    name, _, method = block.partition(" ")
    write, parts = BLOCKS[name]
    yield from write(study, method) if method else write(study)
    yield ""
    yield f"<small>{_source(parts, study)}</small>"


def _ends(study: Study) -> Iterator[str]:
    yield from _table(["", "score", "captions"])
    for name, found in study.ends():
        yield _line([name, _interval(found, ""), str(found.count)])


def _front(study: Study) -> Iterator[str]:
    yield from _by_time(study.front.values(), study)


def _settings(study: Study, method: str) -> Iterator[str]:
    tried = _of(method, study.screen) or _of(method, study.front)
    given = [json.loads(each.row["configuration"].partition(":")[2]) for each in tried]
    common = {
        key: value for key, value in given[0].items() if all(x.get(key) == value for x in given)
    }
    more = ", ".join(f"{key}={json.dumps(value)}" for key, value in common.items())
    yield from textwrap.wrap(
        f"On the large shapes model of `scripts/shapes`, with {tried[0].apart.count} captions"
        f"{f', all with `{more}`' if more else ''}. The score is the share of its caption that a "
        f"clip shows, less that of dense attention's clip, with a 95 % interval; 1 - cosine is of "
        f"the rows that a layer gives and those of exact attention on what it was given, of its "
        f"worst head, mean over layers and steps; PSNR and VMAF are distances from dense "
        f"attention's clip. Times are of the denoising of a video at the dimensions of Wan 1.3B, "
        f"480p, and speeds are over `auto`.",
        width=110,
    )
    yield ""
    yield from _by_time(tried, study)


def _exact(study: Study) -> Iterator[str]:
    settings = study.front or study.screen
    yield from _by_time([x for x in settings.values() if ":" not in x.row["configuration"]], study)


def _by_time(settings: Iterable[Setting], study: Study) -> Iterator[str]:
    """Yield a table of settings, the fastest first."""
    settings = sorted(settings, key=lambda each: each.seconds)
    more = [name for name in PERCEPTUAL if any(each.row.get(name) for each in settings)]
    head = ["", "score less dense", "time", "speed", "pairs kept", "1 - cosine", "PSNR", "VMAF"]
    yield from _table([*head, *(f"{PERCEPTUAL[name][0]}, first captions" for name in more)])
    for each in settings:
        yield _line(
            [
                each.shown,
                _interval(each.apart),
                f"{each.seconds:.1f} s",
                f"{study.auto / each.seconds:.2f}",
                f"{100 * float(each.row['density']):.0f} %",
                _small(each.row.get("layer_error")),
                _figure(each.row, "psnr", ".1f", " dB"),
                _figure(each.row, "vmaf", ".0f"),
                *(_figure(each.row, name, PERCEPTUAL[name][1]) for name in more),
            ]
        )


def _variants(study: Study) -> Iterator[str]:
    yield from _table(["", "what it adds to the score", "its time over that without"])
    for variant, words in VARIANTS.items():
        for plain, changed, apart in study.variants(variant):
            over = f"{changed.seconds / plain.seconds:.2f}"
            yield _line([f"{plain.shown}, {words}", _interval(apart), over])


def _trained(study: Study) -> Iterator[str]:
    yield from _table(["", "minutes", "score less dense", "untrained", "time", "speed"])
    before = {each.row["configuration"]: each for each in study.screen.values()}
    before |= {each.row["configuration"]: each for each in study.front.values()}
    for each in study.trained:
        untrained = before.get(each.row["configuration"])
        minutes = each.row.get("training_seconds") or ""
        yield _line(
            [
                each.name,
                minutes and f"{float(minutes) / 60:.0f}",
                _interval(each.apart),
                "" if untrained is None else _interval(untrained.apart),
                f"{each.seconds:.1f} s",
                f"{study.auto / each.seconds:.2f}",
            ]
        )


def _when(study: Study) -> Iterator[str]:
    for method in dict.fromkeys(each.method for each in study.screen.values()):
        yield f"- **`{method}`**: {_sentence(method, study)}."
    for row in study.rows("screen"):
        if row["status"] not in ("", "done"):
            yield f"- `{row['name']}` did not run: {row['status']}."


def _sentence(method: str, study: Study) -> str:
    """Return when to take a method."""
    mine = _of(method, study.front)
    if not mine:
        tried = _of(method, study.screen)
        unbeaten = [each for each in tried if not study.beats(each)]
        best = max(unbeaten or tried, key=lambda each: (each.score, -each.seconds))
        told, beaten = _told(best, study), study.beats(best)
        if beaten:
            return (
                f"nothing here speaks for it: {beaten} scores no less in no more time than {told}"
            )
        return f"nothing beats it here, but more clips would have to show that: {told}"
    fit = [each for each in mine if each.holds and each.seconds < study.auto]
    if not fit:
        nearest = max(mine, key=lambda each: (each.apart.mean, -each.seconds))
        if nearest.seconds >= study.auto:
            return f"take exact attention, which is faster than {_told(nearest, study)}"
        return f"take it where a loss is in order, which is least with {_told(nearest, study)}"
    best = min(fit, key=lambda each: each.seconds)
    better = [
        each
        for each in study.front.values()
        if each.holds and each.seconds < best.seconds and each.apart.mean >= best.apart.mean
    ]
    if better:
        first = min(better, key=lambda each: each.seconds)
        instead = f"take {first.shown} instead, which is faster and scores no less"
        return f"{instead} than {_told(best, study)}"
    return f"take {_told(best, study)}"


def _of(method: str, settings: Mapping[str, Setting]) -> list[Setting]:
    return [each for each in settings.values() if each.method == method]


def _told(setting: Setting, study: Study) -> str:
    """Return a setting, its score and its speed in words."""
    return (
        f"{setting.shown} (score {_interval(setting.apart)} from dense attention's on "
        f"{setting.apart.count} captions, {study.auto / setting.seconds:.2f} times as fast as "
        f"exact attention)"
    )


def _verdict(study: Study) -> Iterator[str]:
    sparse = [each for each in study.front.values() if ":" in each.row["configuration"]]
    plain = _held(sparse, study.auto)
    yield _found("Without training", plain, sparse, study.auto, study)
    yield ""
    bound = plain[0].seconds if plain else study.auto
    yield _found("After fine-tuning", _held(study.trained, bound), study.trained, bound, study)


def _held(settings: Iterable[Setting], seconds: float) -> list[Setting]:
    """Return those whose score holds in less time than that, the fastest first."""
    return sorted((x for x in settings if x.holds and x.seconds < seconds), key=lambda x: x.seconds)


def _found(
    when: str, held: Sequence[Setting], tried: Sequence[Setting], bound: float, study: Study
) -> str:
    """Return whether there is a setting whose score holds, and which is the fastest."""
    rule = (
        f"whose score is not worse than that of dense attention by more than {LIMIT} at the lower "
        f"95 % bound of the paired difference"
    )
    faster = "faster than exact attention"
    if bound < study.auto:
        faster = f"faster than the {bound:.1f} s of the best without"
    if held:
        others = f", the fastest of {len(held)} such settings" if len(held) > 1 else ""
        return (
            f"**{when}** there is a setting {rule}, and that is {faster}{others}: "
            f"{_told(held[0], study)}, {held[0].seconds:.1f} s in place of {study.auto:.1f} s."
        )
    if not tried:
        return f"**{when}** nothing was compared."
    nearest = max(
        tried, key=lambda each: each.apart.mean if each.apart.low is None else each.apart.low
    )
    meaning = "It is not faster"
    if not nearest.holds:
        meaning = (
            "Either it costs something of what captions say, or more clips are needed to show that "
            "it does not"
        )
    return (
        f"**{when}** there is no setting {rule}, and that is {faster}: none of {len(tried)} that "
        f"were compared. The nearest is {_told(nearest, study)}. {meaning}."
    )


def _interval(found: Estimate, sign: str = "+") -> str:
    """Return a figure with its 95 % interval."""
    bounds = "" if found.low is None else f" [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"
    return f"{found.mean:{sign}.3f}{bounds}"


def _small(text: str | None) -> str:
    """Return a figure with four decimals, or as 2e-5; older rows keep five of it."""
    if not text:
        return ""
    value = float(text)
    if value >= 1e-3:
        return f"{value:.4f}"
    if not value:
        return "< 1e-5"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def _figure(row: Row, name: str, form: str, unit: str = "") -> str:
    return f"{float(row[name]):{form}}{unit}" if row.get(name) else ""


def _table(head: Sequence[str]) -> Iterator[str]:
    yield from (_line(head), _line(["---"] * len(head)))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _source(parts: Sequence[str], study: Study) -> str:
    """Return what the rows of parts were measured on, and where they are."""
    places: dict[str, None] = {}
    told = []
    for part in dict.fromkeys(map(study.found, parts)):
        commits: dict[str, None] = {}
        for row in study.rows(part):
            if row.get("gpu"):
                gpu = re.sub(r"^cuda:\d+ \((.*)\)$", r"\1", row["gpu"])
                places[f"{gpu}, torch {row['torch'].partition('+')[0]}"] = None
                commits[row["commit"]] = None
        told.append(f"`study_{part}.csv` at {', '.join(commits)}")
    return f"{'; '.join(places)}. Rows: {'; '.join(told)}."


BLOCKS: Mapping[str, tuple[Callable[..., Iterator[str]], tuple[str, ...]]] = {
    "ends": (_ends, ("front",)),
    "verdict": (_verdict, ("times", "front", "trained")),
    "when": (_when, ("times", "screen", "front")),
    "front": (_front, ("times", "front")),
    "settings": (_settings, ("times", "screen")),
    "exact": (_exact, ("times", "front")),
    "variants": (_variants, ("times", "screen")),
    "trained": (_trained, ("times", "front", "trained")),
}
"""What a page may ask for: what writes it, and the parts whose rows it is made of."""
