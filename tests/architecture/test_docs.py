"""Commands and code in the documentation are checked against the program."""

import ast
import importlib
import importlib.util
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from multimodal_gen.cli.dotted import fold_dotted
from multimodal_gen.cli.main import app
from multimodal_gen.runtime.platforms.interface import AttentionBackendEnum

REPOSITORY = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = "docs/pages/guides/install.md"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
# Commands of other programs, which are not ours to check.
FOREIGN = {"pip", "python", "python3", "git", "cd", "source", "cat", "ls", "ln", "echo"}


def pages() -> list[str]:
    """Return the pages that are read, README first; not the laboratory notes of kernels."""
    docs = sorted((REPOSITORY / "docs" / "pages").rglob("*.md"))
    package = sorted((REPOSITORY / "multimodal_gen").rglob("README.md"))
    found = [page.relative_to(REPOSITORY).as_posix() for page in (*docs, *package)]
    return ["README.md", *(page for page in found if "/kernels/" not in page)]


MODULE_ROW = re.compile(r"^\| (`[^|]*`) \|", re.MULTILINE)


def missing_modules(readme: Path) -> list[str]:
    """Return what the table of modules of a folder's README names, and the folder lacks."""
    _, _, table = readme.read_text().partition("\n| module |")
    names = [name for cell in MODULE_ROW.findall(table) for name in re.findall(r"`([^`]+)`", cell)]
    folder = readme.parent
    return [x for x in names if not any((folder / f).exists() for f in (x, f"{x}.py"))]


def pages_with(language: str) -> list[str]:
    """Return the pages that have blocks of a language."""
    return [page for page in pages() if blocks((REPOSITORY / page).read_text(), language)]


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return [body for found, body in FENCE.findall(text) if found == language]


def commands(block: str) -> Iterator[list[str]]:
    """Yield the words of each command, continuation lines joined and comments dropped."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


def _parse(arguments: list[str], application: typer.Typer) -> None:
    """Let the program's own parser read `arguments`, without running the command."""
    command: Any = typer.main.get_command(application)
    context, name = None, "sglang"
    while True:
        context = command.make_context(name, arguments, parent=context)
        if not hasattr(command, "commands"):
            return
        name, command, arguments = command.resolve_command(
            context, [*getattr(context, "_protected_args", []), *context.args]
        )


def command_problems(words: list[str], application: typer.Typer, repository: Path) -> list[str]:
    """Return why a documented command would not work."""
    program, *arguments = words
    if "/" in program:
        works = os.access(repository / program, os.X_OK)
        return [] if works else [f"{program} is no executable file"]
    if program == "torchrun" and "multimodal_gen" in arguments:
        program, arguments = "sglang", arguments[arguments.index("multimodal_gen") + 1 :]
    if program not in ("sglang", "multimodal-gen"):
        files = [name for name in arguments if name.startswith(("scripts/", "tests/", "configs/"))]
        problems = [f"there is no {name}" for name in files if not (repository / name).exists()]
        return problems if program in FOREIGN else [f"unknown program {program}"]
    if "--help" in arguments:
        arguments = arguments[: arguments.index("--help")]
    try:
        _parse(fold_dotted(arguments), application)
        if "--attention-backend" in arguments and "diffusers" not in arguments:
            AttentionBackendEnum.parse(arguments[arguments.index("--attention-backend") + 1])
    except Exception as error:
        return [str(error)]
    return []


def import_problems(code: str) -> Iterator[str]:
    """Yield each name of ours that `code` imports and that does not exist."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multimodal_gen"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    yield f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("page", pages_with("bash"))
def test_every_documented_command_is_accepted(page: str) -> None:
    found = [
        words
        for block in blocks((REPOSITORY / page).read_text(), "bash")
        for words in commands(block)
    ]
    assert found
    assert [
        (shlex.join(words), problem)
        for words in found
        for problem in command_problems(words, app, REPOSITORY)
    ] == []


@pytest.mark.parametrize("page", pages_with("python"))
def test_every_python_example_compiles_and_imports_what_exists(page: str) -> None:
    for code in blocks((REPOSITORY / page).read_text(), "python"):
        compile(code, page, "exec")
        assert list(import_problems(code)) == []


def test_every_configuration_that_a_command_names_exists() -> None:
    named = {
        name
        for page in pages_with("bash")
        for name in re.findall(r"configs/attention/[\w/.]+", (REPOSITORY / page).read_text())
    }
    assert len(named) > 5
    assert [name for name in sorted(named) if not (REPOSITORY / name.rstrip(".")).exists()] == []


def dead_links(text: str, folder: Path) -> list[str]:
    """Return the links of a page to files that are not there."""
    links = [link for link in LINK.findall(text) if "://" not in link]
    return [link for link in links if not (folder / link).exists()]


@pytest.mark.parametrize("page", [page for page in pages() if not page.startswith("docs/")])
def test_every_link_of_a_readme_leads_somewhere(page: str) -> None:
    """Those between pages of docs are checked by mkdocs."""
    file = REPOSITORY / page
    assert dead_links(file.read_text(), file.parent) == []


def test_a_planted_dead_link_is_reported(tmp_path: Path) -> None:
    (tmp_path / "b.md").touch()
    text = "[b](b.md#part) [c](c.md) [web](https://example.org) ![picture](d.png)"
    assert dead_links(text, tmp_path) == ["c.md"]


def test_every_module_of_a_readme_exists() -> None:
    readmes = [*(REPOSITORY / "multimodal_gen").rglob("README.md")]
    assert [x for x in readmes if MODULE_ROW.search(x.read_text())]
    assert [(page.parent.name, lacks) for page in readmes if (lacks := missing_modules(page))] == []


def test_a_planted_module_that_is_gone_is_reported(tmp_path: Path) -> None:
    (tmp_path / "here.py").touch()
    page = tmp_path / "README.md"
    page.write_text("`word`\n\n| module | is about |\n|---|---|\n| `here`, `gone` | `text` |\n")
    assert missing_modules(page) == ["gone"]


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 250


def test_every_extra_is_documented_and_every_documented_one_declared() -> None:
    declared = (REPOSITORY / "pyproject.toml").read_text()
    texts = "".join((REPOSITORY / page).read_text() for page in pages())
    named = re.findall(r"\.\[([a-z0-9,]+)\]", texts)
    rows = re.findall(r"^\| (`[a-z0-9`, ]+`) \|", (REPOSITORY / INSTALL).read_text(), re.MULTILINE)
    listed = {extra for row in rows for extra in re.findall(r"`(\w+)`", row)}
    assert named
    for extra in listed | {extra for group in named for extra in group.split(",")}:
        assert re.search(rf"^{extra} = \[", declared, re.MULTILINE), extra
    (table,) = re.findall(r"^\[project\.optional-dependencies\]$(.*?)^\[", declared, re.M | re.S)
    assert set(re.findall(r"^(\w+) = \[", table, re.MULTILINE)) == listed


def quoted_commands(code: str) -> Iterator[str]:
    """Yield the name of each command that a text in `code` tells a user to run."""
    for node in ast.walk(ast.parse(code)) if "`sglang" in code else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"`sglang((?: [a-z]+)+)", node.value)


def missing_commands(quoted: Iterable[str]) -> list[str]:
    """Return those of some commands that the program does not have."""
    missing = []
    program = typer.main.get_command(app)
    for command in quoted:
        node: Any = program
        for name in command.split():
            node = getattr(node, "commands", {}).get(name)
        if node is None:
            missing.append(command.strip())
    return missing


def test_every_command_that_a_message_names_exists() -> None:
    sources = (path.read_text() for path in (REPOSITORY / "multimodal_gen").rglob("*.py"))
    quoted = [name for code in sources for name in quoted_commands(code)]
    assert len(quoted) >= 5
    assert missing_commands(quoted) == []


def test_a_planted_message_with_a_dead_command_is_reported() -> None:
    code = 'raise E("see `sglang attention sta " "seek` or `sglang attention list`")'
    assert missing_commands(quoted_commands(code)) == ["attention sta seek"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("sglang generate --model-path m --prompt p --no-such-flag 1", "--no-such-flag"),
        ("sglang generate --model-path m --prompt p --backend nobody", "nobody"),
        ("sglang generate --model-path m --prompt p --attention-backend best", "best"),
        ("sglang produce", "produce"),
        ("sglang attention lst", "lst"),
        ("scripts/absent", "no executable file"),
        ("mystery --flag", "unknown program"),
        ("python scripts/absent.py", "no scripts/absent.py"),
        ("torchrun --nnodes 2 -m multimodal_gen generate --model-path m --prompt p --no 1", "--no"),
    ],
)
def test_a_planted_wrong_command_is_reported(command: str, problem: str) -> None:
    (reported,) = command_problems(shlex.split(command), app, REPOSITORY)
    assert problem in reported


def test_commands_are_found_in_a_block() -> None:
    block = "# a comment\nA=1 sglang generate \\\n  --prompt 'two words'  # why\n\nls\n"
    assert list(commands(block)) == [["sglang", "generate", "--prompt", "two words"], ["ls"]]


def test_a_planted_wrong_import_is_reported() -> None:
    code = "from multimodal_gen.errors import ConfigError, Absent\n"
    assert list(import_problems(code)) == ["multimodal_gen.errors has no Absent"]


def test_the_reference_has_every_command_and_option() -> None:
    spec = importlib.util.spec_from_file_location("hooks", REPOSITORY / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = (REPOSITORY / "docs" / "pages" / "reference" / "command-line.md").read_text()
    text = hooks.on_page_markdown(page, page=None)
    assert hooks.MARK in page
    assert hooks.MARK not in text
    surface = (REPOSITORY / "tests" / "architecture" / "cli_surface.txt").read_text().splitlines()
    for path, options in (line.split(": ") for line in surface):
        assert f"\n## {path}\n" in text
        section = text.partition(f"\n## {path}\n")[2].partition("\n## ")[0]
        name = options.partition("/")[0]
        assert name in section or name.upper() in section
