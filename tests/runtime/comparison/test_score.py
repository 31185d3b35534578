"""What scores clips, and the one error of everything that cannot."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.comparison.score import Score, read_score

CLIP = np.zeros((5, 8, 8, 3), np.uint8)
SHAPES = Path(__file__).parents[3] / "scripts" / "shapes" / "score.py"
FILE = """
from dataclasses import dataclass

@dataclass(frozen=True, slots=True)
class Seen:
    share: "float"

def score(video, prompt):
    assert video.dtype == "uint8" and video.shape[-1] == 3 and video.flags.writeable
    return Seen(len(prompt) / 10).share

def alone(video):
    return 1

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_function_of_a_file_scores_clips(file: Path) -> None:
    score = read_score(f"{file}:score")
    assert score.name == f"{file}:score"
    for channels in (1, 3, 4):
        assert score.of(np.broadcast_to(CLIP[..., :1], (5, 8, 8, channels)), "a fox") == 0.5


def test_the_score_of_the_shapes_is_such_a_function() -> None:
    score = read_score(f"{SHAPES}:score")
    assert score.of(CLIP, "a red ball moves slowly right over a striped ground") == 0.0
    with pytest.raises(UsageError, match=r"a caption must be such as .*, got 'fox'"):
        score.of(CLIP, "fox")


def test_a_function_of_python_is_named_by_its_place() -> None:
    def half(video: Any, prompt: str) -> Any:
        return torch.tensor(0.5)

    score = read_score(half)
    assert score.of(CLIP, "") == 0.5
    assert score.name.endswith("test_a_function_of_python_is_named_by_its_place.<locals>.half")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{file}", r"--score must be FILE.py:function, got"),
        ("{file}:", r"--score must be FILE.py:function, got"),
        ("{file}:a-b", r"--score must be FILE.py:function, got"),
        ("score.txt:score", r"--score must be FILE.py:function, got 'score.txt:score'"),
        ("absent.py:score", r"--score must name a file that is there, got 'absent.py:score'"),
        ("{file}:scor", r"a function of '.*mine.py', got 'scor', did you mean 'score'\?"),
        ("{file}:number", r"a function of '.*mine.py', got 'number'"),
        ("{file}:alone", r"of a clip \[T, H, W, 3\] and its prompt, got '.*:alone', which cannot "),
    ],
)
def test_what_is_no_function_is_refused(file: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_score(text.format(file=file), name="--score")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["import no_such_package", "raise SystemExit(3)", "x ="])
def test_a_file_that_fails_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.py").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"that can be imported, got '.*bad.py:f', which raises"):
        read_score(f"{tmp_path / 'bad.py'}:f")


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (1.5, "1.5"),
        (-0.1, "-0.1"),
        (float("nan"), "nan"),
        (None, "None"),
        ("0.5", "'0.5'"),
        pytest.param(10**400, "1000", id="more than a float holds"),
        (np.zeros(3), "array"),
        (torch.zeros(2), "tensor"),
    ],
)
def test_what_is_no_share_is_refused(given: Any, got: str) -> None:
    score = Score("f", lambda video, prompt: given, "--score")
    with pytest.raises(
        UsageError, match=rf"--score must return a number in \[0, 1\] for every clip, got {got}"
    ):
        score.of(CLIP, "a fox")


@pytest.mark.parametrize(
    ("error", "got"),
    [
        (RuntimeError("no\nweights"), "RuntimeError: no"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit(), "SystemExit: SystemExit"),
    ],
)
def test_a_function_that_fails_is_refused(error: BaseException, got: str) -> None:
    """One that asks Python to exit fails, too: it would end the comparison without a word."""

    def fail(video: Any, prompt: str) -> float:
        raise error

    message = rf"for every clip, got {got} from 'f' for \[5, 8, 8, 3\] and the prompt 'a fox'"
    with pytest.raises(UsageError, match=message):
        Score("f", fail).of(CLIP, "a fox")


def test_what_is_no_function_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"score must be a function or FILE\.py:function, got 3"):
        read_score(3)
