"""The blocks of the page on the shapes study: every word follows from a row."""

import csv
import importlib
from pathlib import Path
from types import ModuleType

import pytest

AUTO, SPARSE, TAIL, OTHER = "auto", 'a:{"x": 1}', 'a:{"x": 1, "tail": "pooled"}', 'b:{"y": 2}'
NAMES = {"torch_sdpa": "torch_sdpa", SPARSE: "a x=1", TAIL: "a x=1, tail", OTHER: "b y=2"}
SECONDS = {"torch_sdpa": 12.0, AUTO: 10.0, SPARSE: 5.0, TAIL: 6.0, OTHER: 8.0}
MADE = {"gpu": "cuda:0 (NVIDIA H200)", "torch": "2.11.0+cu130", "commit": "abc"}
CLIPS = 4


class Results:
    """Results of a study, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = [
            {"name": NAMES.get(x, x), "configuration": x, "status": "done", "seconds": seconds}
            for x, seconds in SECONDS.items()
        ]
        self.write("times", [{**row, **MADE, "gpu": "NVIDIA H200"} for row in rows])
        for part in ("screen", "front"):
            self.part(part, {SPARSE: [1, 1, 0.5, 1], TAIL: [1, 1, 1, 0.9], OTHER: [0, 0, 0, 0.1]})
        self.trained([0.98, 1, 1, 1])

    def part(self, part: str, scores: dict[str, list[float]]) -> None:
        """Write a part with the scores of configurations on the same clips."""
        all_of_them = {"torch_sdpa": [1.0] * CLIPS, **scores}
        ends = {"real clips": [1.0] * CLIPS, "captions swapped": [0.25, 0.75, 0.25, 0.75]}
        found = {**ends, **{NAMES[x]: found for x, found in all_of_them.items()}}
        texts = {name: text for text, name in NAMES.items()}
        self.clips(part, found)
        self.write(
            part,
            [
                {
                    "name": name,
                    "configuration": texts.get(name, ""),
                    "status": "done" if name in texts else "",
                    "score": sum(each) / CLIPS,
                    "density": 0.1,
                    "psnr": 20.0,
                    **(MADE if name in texts else {}),
                }
                for name, each in found.items()
            ],
        )

    def trained(self, scores: list[float]) -> None:
        """Write what training made of a configuration."""
        row = {"configuration": SPARSE, "status": "done", "training_seconds": 600, **MADE}
        self.write("trained", [{"name": "a, trained whole", "score": sum(scores) / CLIPS, **row}])
        self.clips("trained", {"a, trained whole": scores})

    def clips(self, part: str, scores: dict[str, list[float]]) -> None:
        self.write(
            f"{part}_clips",
            [
                {"name": name, "caption": f"caption {place}", "seed": 0, "score": score}
                for name, each in scores.items()
                for place, score in enumerate(each)
            ],
        )

    def write(self, name: str, rows: list[dict[str, object]]) -> None:
        columns = dict.fromkeys(key for row in rows for key in row)
        with (self.folder / f"study_{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*columns])
            writer.writeheader()
            writer.writerows(rows)

    def rows_of(self, file: str) -> list[dict[str, str]]:
        with (self.folder / file).open(newline="") as opened:
            return [*csv.DictReader(opened)]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path)


@pytest.fixture(scope="module")
def page() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("scripts")
        return importlib.import_module("study_page")


def block(page: ModuleType, results: Results, name: str) -> str:
    return "\n".join(page.lines_of(name, results.rows_of))


def test_ends_are_those_of_the_clips(page, results) -> None:
    found = block(page, results, "ends")
    assert "| real clips | 1.000 [1.000, 1.000] | 4 |" in found
    # Student's interval: 3.182 standard errors of 0.289 / 2.
    assert "| captions swapped | 0.500 [0.041, 0.959] | 4 |" in found
    assert "| dense attention | 1.000" in found
    assert found.endswith(
        "<small>NVIDIA H200, torch 2.11.0. Rows: `study_front.csv` at abc.</small>"
    )


def test_a_setting_without_a_time_is_no_exact_kernel(page, results) -> None:
    rows = results.rows_of("study_times.csv")
    results.write("times", [row for row in rows if row["configuration"] != OTHER])
    assert "y=2" not in block(page, results, "ends")


def test_the_front_is_a_table_by_time(page, results) -> None:
    lines = block(page, results, "front").splitlines()
    assert lines[2].startswith("| `a x=1` | -0.125 [-0.523, +0.273] | 5.0 s | 2.00 | 10 % |")
    assert lines[3].startswith("| `a x=1` with its tail | -0.025 [-0.105, +0.055] | 6.0 s | 1.67 |")


def test_metrics_that_some_rows_have_are_columns_more(page, results) -> None:
    plain = block(page, results, "front").splitlines()
    rows = results.rows_of("study_front.csv")
    for row in rows:
        measured = row["name"] == "a x=1"
        row |= {"st_lpips": "0.12345" if measured else "", "cvvdp": "9.5" if measured else ""}
    results.write("front", rows)
    found = block(page, results, "front").splitlines()
    assert found[0] == f"{plain[0]} ST-LPIPS, first captions | JOD, first captions |"
    assert found[2] == f"{plain[2]} 0.1235 | 9.50 |"
    assert found[3].replace(" ", "") == f"{plain[3]}||".replace(" ", "")


def test_what_keeps_every_pair_has_a_table_of_its_own(page, results, monkeypatch) -> None:
    assert "| `" not in block(page, results, "exact")
    monkeypatch.setitem(NAMES, "c", "c")
    monkeypatch.setitem(SECONDS, "c", 9.0)
    more = Results(results.folder)
    more.part("front", {"c": [1, 1, 1, 0.9], SPARSE: [1, 1, 1, 1]})
    (line,) = (line for line in block(page, more, "exact").splitlines() if "| `" in line)
    assert line.startswith("| `c` | -0.025 [-0.105, +0.055] | 9.0 s | 1.11 |")


def test_a_method_has_its_settings_with_what_all_of_them_share(page, results) -> None:
    lines = block(page, results, "settings a").splitlines()
    assert "with 4 captions, all with `x=1`. The score is" in " ".join(lines)
    found = [line for line in lines if line.startswith("| `a")]
    assert found[0].startswith("| `a x=1` | -0.125 [-0.523, +0.273] | 5.0 s | 2.00 | 10 % |")
    assert len(found) == 2, "and none of the other method"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (0.32455, "0.3246"),
        (0.001, "0.0010"),
        (0.00012, "1.2e-4"),
        (2e-05, "2e-5"),
        (1.12e-06, "1.1e-6"),
        (0.0, "< 1e-5"),
    ],
)
def test_an_error_of_layers_says_what_it_is_and_is_not_rounded_away(
    page, results, error, shown
) -> None:
    rows = results.rows_of("study_screen.csv")
    results.write("screen", [{**row, "layer_error": error} for row in rows])
    lines = block(page, results, "settings a").splitlines()
    assert "1 - cosine is of the rows that a layer gives" in " ".join(lines)
    head, *cells = [line.split("|")[1:] for line in lines if line.startswith(("| |", "| `a"))]
    place = [title.strip() for title in head].index("1 - cosine")
    assert {each[place].strip() for each in cells} == {shown}


def test_what_a_tail_adds_is_paired_with_the_same_setting_without(page, results) -> None:
    assert "| `a x=1`, with its tail | +0.100 [-0.331, +0.531] | 1.20 |" in block(
        page, results, "variants"
    )


def test_where_no_setting_holds_it_says_so(page, results) -> None:
    results.trained([0.5, 0.5, 0.5, 0.6])
    plain, _, trained, *_ = block(page, results, "verdict").splitlines()
    assert plain.startswith("**Without training** there is no setting whose score is not worse")
    assert (
        "none of 3 that were compared. The nearest is `a x=1` with its tail (score -0.025" in plain
    )
    assert trained.startswith("**After fine-tuning** there is no setting")
    assert "and that is faster than exact attention" in trained


def test_settings_that_hold_are_named_with_their_speed(page, results) -> None:
    results.part("front", {SPARSE: [1, 1, 0.5, 1], TAIL: [1, 1, 1, 0.99], OTHER: [1, 1, 1, 1]})
    plain, _, trained, *_ = block(page, results, "verdict").splitlines()
    assert "**Without training** there is a setting whose score" in plain
    assert "the fastest of 2 such settings: `a x=1` with its tail (score -0.003" in plain
    assert plain.endswith("1.67 times as fast as exact attention), 6.0 s in place of 10.0 s.")
    assert "and that is faster than the 6.0 s of the best without: " in trained
    assert (
        "(score -0.005 [-0.021, +0.011] from dense attention's on 4 captions, 2.00 times" in trained
    )


def test_training_that_gains_no_time_is_no_gain(page, results) -> None:
    results.part("front", {SPARSE: [1, 1, 1, 1]})
    trained = block(page, results, "verdict").splitlines()[2]
    assert "and that is faster than the 5.0 s of the best without: none of 1" in trained
    assert trained.endswith("exact attention). It is not faster.")


def test_training_is_set_beside_what_was_there_before(page, results) -> None:
    line = block(page, results, "trained").splitlines()[2]
    assert line.startswith("| a, trained whole | 10 | -0.005 [-0.021, +0.011] | -0.125 [-0.523")


@pytest.mark.parametrize(
    ("front", "method", "wanted"),
    [
        ({TAIL: [1, 1, 1, 0.99]}, "a", "take `a x=1` with its tail (score -0.003"),
        ({SPARSE: [0, 0, 0, 0.1]}, "a", "take it where a loss is in order, which is least with"),
        ({SPARSE: [1, 1, 1, 1]}, "b", "nothing here speaks for it: `a x=1` with its tail scores"),
        (
            {SPARSE: [1, 1, 1, 1], OTHER: [1, 1, 1, 1]},
            "b",
            "take `a x=1` instead, which is faster and scores no less than `b y=2` (",
        ),
    ],
)
def test_when_to_take_a_method_follows_from_its_rows(page, results, front, method, wanted) -> None:
    results.part("front", front)
    (line,) = (
        line for line in block(page, results, "when").splitlines() if f"**`{method}`**" in line
    )
    assert line.startswith(f"- **`{method}`**: {wanted}")
    assert line.endswith(".")


def test_what_is_slower_than_exact_attention_is_not_to_be_taken(page, results, monkeypatch) -> None:
    monkeypatch.setitem(SECONDS, SPARSE, 11.0)
    slow = Results(results.folder)
    slow.part("front", {SPARSE: [1, 1, 1, 1]})
    assert "**`a`**: take exact attention, which is faster than `a x=1` (" in block(
        page, slow, "when"
    )


def test_a_method_is_judged_by_what_nothing_beats(page, results, monkeypatch) -> None:
    monkeypatch.setitem(SECONDS, TAIL, 9.0)
    few = Results(results.folder)
    for part in ("front", "front_clips"):
        (few.folder / f"study_{part}.csv").unlink()
    # The best score of the one is less than the other's, in more time.
    few.part("screen", {SPARSE: [0.9] * 4, TAIL: [0.9, 1, 1, 1], OTHER: [1] * 4})
    (line,) = (x for x in block(page, few, "when").splitlines() if x.startswith("- **`a`**"))
    assert line.startswith("- **`a`**: nothing beats it here, but more clips would have to show")
    assert "`a x=1` (" in line


def test_clips_of_a_caption_count_as_one(page, results) -> None:
    rows = results.rows_of("study_front_clips.csv")
    results.write("front_clips", [{**row, "seed": seed} for row in rows for seed in (0, 1)])
    found = block(page, results, "ends")
    assert "| captions swapped | 0.500 [0.041, 0.959] | 4 |" in found


def test_a_setting_that_failed_is_told(page, results) -> None:
    rows = results.rows_of("study_screen.csv")
    rows[-1]["status"] = "out of memory"
    results.write("screen", rows)
    assert block(page, results, "when").splitlines()[1] == "- `b y=2` did not run: out of memory."


def test_the_screen_stands_alone_while_nothing_was_compared_on_many_clips(page, results) -> None:
    for part in ("front", "front_clips", "trained", "trained_clips"):
        (results.folder / f"study_{part}.csv").unlink()
    assert block(page, results, "ends").endswith("Rows: `study_screen.csv` at abc.</small>")
    when = block(page, results, "when").splitlines()
    assert when[0].startswith("- **`a`**: nothing beats it here, but more clips would have to show")
    assert when[1].startswith("- **`b`**: nothing here speaks for it: `a x=1` with its tail")
    assert when[-1].endswith("Rows: `study_times.csv` at abc; `study_screen.csv` at abc.</small>")
