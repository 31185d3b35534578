"""The examples of README and docs run, page by page, with a small model in place of a large one.

Blocks of a page run in their order, in one namespace, and in a folder of their own. Of commands
those run that need nothing but the model in the repository; test_docs.py parses the others. A block
that cannot run here says why in the line above it.
"""

import contextlib
import io
import itertools
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from multimodal_gen.cli.main import main
from tests.architecture.test_docs import REPOSITORY, commands, pages

# What a checkout has, and what stands for a large model.
SHAPES = "scripts/shapes/small"
TINY = "outputs/tiny-wan"
# What stands in examples, and what runs here.
SMALLER = {
    r'"Wan-AI/Wan2\.1-T2V-1\.3B-Diffusers"': f'"{TINY}"',
    r'"cuda"': '"cpu"',
    r"torch\.bfloat16": "torch.float32",  # in which CPUs are fast
    r'"bfloat16"': '"float32"',
    # Where a page leaves the size to the model, which is minutes of a CPU.
    r"\bnum_inference_steps=30, on_step\b": (
        "height=64, width=96, num_frames=5, num_inference_steps=2, on_step"
    ),
    r"\bheight=480\b": "height=64",
    r"\bwidth=832\b": "width=96",
    r"\bnum_frames=33\b": "num_frames=5",
    r"\bnum_inference_steps=30\b": "num_inference_steps=2",
}
# Commands print nothing of their steps that a page shows.
FEWER_STEPS = {"--num-inference-steps": "2"}
# Pages whose code is held by tests of its own, as a package or as part of this one.
ELSEWHERE = {
    "docs/pages/guides/plug-ins.md": "tests/runtime/layers/attention/test_guide.py",
    "docs/pages/guides/sparse-method.md": "tests/runtime/layers/attention/sparse/test_example.py",
    "docs/pages/contributing/transformer.md": "tests/integrations/models/test_worked_example.py",
}
REASONS = (
    "needs a GPU",
    "needs eight ranks",
    "needs two releases of Triton",
    "stands for a model of yours",
    "the interface of 0.1",
)
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the pages show what a machine without a GPU prints"
)


class Block(NamedTuple):
    """A fenced block; `mark` is the comment above it."""

    mark: str
    language: str
    text: str

    @property
    def reason(self) -> str:
        """Why it does not run."""
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run: ") else ""


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page that run here, and what they print."""
    text = (REPOSITORY / page).read_text()
    found = [Block(mark or "", *rest) for mark, *rest in BLOCK.findall(text)]
    return [block for block in found if runs(page, block) or block.mark == "output"]


def runs(page: str, block: Block) -> bool:
    """Tell whether a block is run here."""
    if block.language == "bash":
        return any(map(is_run, commands(block.text)))
    return block.language == "python" and not block.reason and page not in ELSEWHERE


def is_run(words: list[str]) -> bool:
    """Tell whether a command needs nothing but the model in the repository."""
    if words[0] not in ("sglang", "multimodal-gen"):
        return False
    if words[1:3] in (["attention", "list"], ["attention", "describe"]):
        return True
    return "--model-path" in words and words[words.index("--model-path") + 1] == SHAPES


def missing(excerpt: str, output: str) -> list[str]:
    """Return the lines of `excerpt` that `output` does not hold in that order; "..." is any."""
    printed = iter(output.splitlines())
    return [line for line in excerpt.splitlines() if line != "..." and line not in printed]


@pytest.fixture
def folder(
    tiny_pipeline: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Be in a folder where both models lie, on a terminal of 100 columns."""
    shutil.copytree(tiny_pipeline("wan"), tmp_path / TINY)
    (tmp_path / SHAPES).parent.mkdir(parents=True)
    (tmp_path / SHAPES).symlink_to(REPOSITORY / SHAPES)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    before = torch.is_grad_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries
        yield
    torch.set_grad_enabled(before)


def run_command(words: list[str]) -> str:
    """Run a command in this process; return what it prints."""
    given = [FEWER_STEPS.get(flag, word) for flag, word in itertools.pairwise(words)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(given)
    assert code == 0, words
    return out.getvalue()


def run_code(code: str, page: str, names: dict[str, object]) -> str:
    """Run an example in the names of its page; return what it prints."""
    for written, here in SMALLER.items():
        code = re.sub(written, here, code)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, page, "exec"), names)
    return out.getvalue()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", [page for page in pages() if blocks_of(page)])
def test_every_example_of_a_page_runs_and_prints_what_it_shows(page: str) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    printed = ""
    for block in blocks_of(page):
        if block.language == "python":
            printed = run_code(block.text, page, names)
        elif block.language == "bash":
            printed = "".join(run_command(each) for each in commands(block.text) if is_run(each))
        else:
            assert missing(block.text, printed) == [], printed


def test_what_does_not_run_says_why() -> None:
    told = [
        block.reason
        for page in pages()
        for block in (Block(*found) for found in BLOCK.findall((REPOSITORY / page).read_text()))
        if block.reason
    ]
    assert set(told) == set(REASONS)


@pytest.mark.parametrize("page", ELSEWHERE)
def test_what_is_held_elsewhere_is_named_there(page: str) -> None:
    test = (REPOSITORY / ELSEWHERE[page]).read_text()
    assert Path(page).name in test


def test_a_line_that_is_not_printed_is_reported() -> None:
    output = "first\nsecond\nthird\n"
    assert missing("first\n...\nthird", output) == []
    assert missing("third\nfirst", output) == ["first"]
    assert missing("fourth", output) == ["fourth"]


def test_blocks_are_told_apart() -> None:
    text = "<!-- not run: needs a GPU -->\n```python\nx\n```\n\n```bash\nls\n```\n"
    first, second = (Block(*found) for found in BLOCK.findall(text))
    assert first == ("not run: needs a GPU", "python", "x\n")
    assert first.reason == "needs a GPU"
    assert (second.language, second.reason) == ("bash", "")
    assert not is_run(["sglang", "generate", "--model-path", "m"])
    assert is_run(["sglang", "attention", "explain", "--model-path", SHAPES])
