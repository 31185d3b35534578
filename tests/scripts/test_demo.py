"""The demo, its commands run in this process; the README shows an excerpt of what it prints."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from multimodal_gen.cli.main import main
from tests.architecture.test_examples import missing

REPOSITORY = Path(__file__).resolve().parents[2]

# The excerpts were taken without a GPU, where other backends are usable.
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the README shows what a machine without a GPU prints"
)


def _excerpt(name: str) -> str:
    """Return the README's block of this name."""
    text = (REPOSITORY / "README.md").read_text()
    (block,) = re.findall(rf"<!-- {name} -->\n```text\n(.*?)```", text, re.DOTALL)
    return block


@pytest.fixture(scope="module")
def libraries() -> None:
    """Import them before output is captured: their log handlers keep the stderr they find."""
    import diffusers  # noqa: F401
    import transformers  # noqa: F401


@pytest.fixture
def output(
    libraries: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command in this process, on a terminal of 100 columns; return what it prints."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(main: Callable[[Sequence[str]], int], *words: str) -> str:
        capfd.readouterr()
        code = main(words)
        out, err = capfd.readouterr()
        assert code == 0, err
        return out

    return run


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], int]:
    """The script that compares the videos."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts" / "shapes"))
    return importlib.import_module("score").main


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts, with an environment that notes the arguments its commands get, one per line.

    An empty line ends a command.
    """
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    with (tmp_path / "scripts" / "_environment.sh").open("a") as environment:
        environment.write(
            f'use_environment() {{ ARGUMENTS=("$@"); PYTHON="{tmp_path}/bin/python"; '
            f'ENVIRONMENT="{tmp_path}"; cd "{tmp_path}"; }}\n'
        )
    (tmp_path / "bin").mkdir()
    for name in ("python", "sglang"):
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" '' >> '{tmp_path}/{name}'\n")
        command.chmod(0o755)
    return tmp_path


def _commands(file: Path) -> list[list[str]]:
    """Return the arguments of each command that was noted."""
    return [words.split("\n") for words in file.read_text().removesuffix("\n\n").split("\n\n")]


def _without_figures(text: str) -> str:
    """Return it without measured figures, which are not the same on every CPU."""
    return re.sub(r"\d+(\.\d+)?(?=%| dB)", "", text)


def test_the_demo_prints_what_the_readme_shows_and_leaves_two_videos(
    checkout: Path,
    score: Callable[[Sequence[str]], int],
    output: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    videos = [checkout / "outputs" / f"{name}.mp4" for name in ("dense", "sparse")]
    for left_over in videos:
        left_over.parent.mkdir(exist_ok=True)
        left_over.write_text("from an earlier run")
    demo = [str(checkout / "scripts" / "demo")]
    subprocess.run(demo, cwd=checkout, check=True, timeout=60)
    monkeypatch.chdir(checkout)
    generations = sorted(_commands(checkout / "sglang"), key=lambda words: "dense" not in words[-3])
    printed = "".join(output(main, *words) for words in generations)
    *_, (script, *compared) = _commands(checkout / "python")
    assert script == "scripts/shapes/score.py"
    printed += output(score, *compared)
    excerpt = _without_figures(_excerpt("demo output"))
    assert missing(excerpt, _without_figures(printed)) == [], printed
    for video in videos:
        assert video.stat().st_size > 1000
        assert json.loads(video.with_suffix(".json").read_text())
    shown = [float(x) for x in re.findall(r"(\d+)% of the caption", printed)]
    assert shown[0] >= 80
    assert len(shown) == 2


def test_the_demo_takes_another_sentence(checkout: Path) -> None:
    sentence = "a blue box stands still over a dotted ground"
    demo = [str(checkout / "scripts" / "demo"), "--prompt", sentence, "--seed", "2"]
    subprocess.run(demo, cwd=checkout, check=True, timeout=60)
    for words in _commands(checkout / "sglang"):
        assert [words[i + 1] for i, word in enumerate(words) if word == "--prompt"] == [sentence]
        assert words[-1] == "torch_sdpa" or "sparse" in words[-3]
        assert "2" in words
    (_, *checked), (_, *compared) = _commands(checkout / "python")
    assert checked == ["--", sentence]  # before anything is generated
    assert compared[0] == sentence


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--prompt"], '--prompt needs a sentence, such as "a red ball .* ground"'),
        (["--prompt", "a red fox runs"], "--prompt: a caption must be .*, got 'a red fox runs'"),
        (["--prompt="], "--prompt: a caption must be such as .*, got ''"),
        (["--prompt", "--seed", "2"], "--prompt: a caption must be such as .*, got '--seed'"),
    ],
)
def test_the_demo_refuses_what_is_no_caption_before_it_generates(
    checkout: Path, words: list[str], problem: str
) -> None:
    (checkout / "bin" / "python").write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    demo = [str(checkout / "scripts" / "demo"), *words]
    done = subprocess.run(demo, cwd=checkout, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(f"error: {problem}\n", done.stderr)
    assert not (checkout / "sglang").exists()


@pytest.mark.parametrize("words", [["--help"], ["--seed", "2", "-h"]])
def test_the_demo_says_what_it_does_and_does_nothing(checkout: Path, words: list[str]) -> None:
    demo = [str(checkout / "scripts" / "demo"), *words]
    done = subprocess.run(demo, cwd=checkout, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("From nothing to two videos")
    assert "scripts/demo [--constraints FILE] [--prompt " in done.stdout
    assert "set -euo" not in done.stdout
    assert not {"sglang", "python"} & {path.name for path in checkout.iterdir()}
