import resource
import subprocess
import sys

import pytest

from multimodal_gen import __version__
from multimodal_gen.cli import main as main_module
from multimodal_gen.cli.main import main
from multimodal_gen.errors import UsageError

HEAVY = ("torch", "diffusers", "transformers", "numpy")

LIST_HEAVY = f"""
import sys
from multimodal_gen.cli.main import main
code = main(sys.argv[1:])
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
raise SystemExit(code)
"""


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("-h",),
        ("--version",),
        ("generate", "--help"),
        ("attention", "list", "-h"),
        ("attention", "explain", "-h"),
    ],
    ids=" ".join,
)
def test_help_loads_no_heavy_package(arguments: tuple[str, ...]) -> None:
    done = _python("-c", LIST_HEAVY, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_help_answers_in_three_tenths_of_a_second() -> None:
    # Processor time of one thread that waits for nothing: unlike the clock, it does not count
    # what else the machine does. The best of several, because the first may read from disk.
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert _python("-m", "multimodal_gen", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(seconds) < 0.3, seconds


def test_help_names_the_commands(sglang) -> None:
    outcome = sglang("--help")
    assert outcome.code == 0
    assert "generate" in outcome.out
    assert "attention" in outcome.out


def test_no_arguments_print_the_help(sglang) -> None:
    outcome = sglang()
    assert outcome.code == 2
    assert "Usage: sglang" in outcome.out + outcome.err


def test_version_is_printed(sglang) -> None:
    outcome = sglang("--version")
    assert (outcome.code, outcome.out) == (0, f"multimodal_gen {__version__}\n")


def test_help_keeps_square_brackets_and_states_defaults(sglang) -> None:
    text = " ".join(sglang("generate", "--help").out.split())
    assert "[required]" in text
    assert "[default: auto]" in text
    assert "--dtype <auto|float32|float16|bfloat16>" in text or "[auto|float32" in text


@pytest.mark.parametrize("command", ["generate", "attention explain", "attention list"])
def test_every_option_explains_itself(command: str, sglang) -> None:
    import typer

    node = typer.main.get_command(main_module.app)
    for name in command.split():
        node = node.commands[name]
    silent = [parameter.name for parameter in node.params if not getattr(parameter, "help", "")]
    assert silent == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--frobnicate",), "No such option: --frobnicate"),
        (("generate", "--prompt", "x"), "Missing option '--model-path'"),
        (("generate", "--model-path", "m"), "Missing option '--prompt'"),
        (("generate", "--model-path", "m", "--prompt", "x", "--height", "0"), "--height"),
        (("generate", "--model-path", "m", "--prompt", "x", "--seed", "-1"), "--seed"),
        (("generate", "--model-path", "m", "--prompt", "x", "--fps", "fast"), "--fps"),
        (("generate", "--model-path", "m", "--prompt", "x", "--backend", "other"), "--backend"),
        (("generate", "--model-path", "m", "--prompt", "x", "--dtype", "int8"), "--dtype"),
        (("attention", "list", "--role", "both"), "--role"),
        (("attention", "list", "--head-size", "0"), "--head-size"),
    ],
)
def test_a_usage_error_names_the_option_and_exits_with_2(
    arguments: tuple[str, ...], message: str, sglang
) -> None:
    outcome = sglang(*arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_an_error_of_the_package_is_one_line(sglang, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arguments: list[str]) -> list[str]:
        raise UsageError("size must be [even], got 3\n  use [bold]4[/bold]")

    monkeypatch.setattr(main_module, "fold_dotted", refuse)
    outcome = sglang("generate")
    assert outcome.code == 2
    assert outcome.err == "error: size must be [even], got 3; use [bold]4[/bold]\n"
    assert outcome.out == ""


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> list[str]:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(main_module, "fold_dotted", fail)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        main(["generate"])


def test_dotted_flags_are_folded_before_parsing(sglang) -> None:
    outcome = sglang("generate", "--attention-config.backend")
    assert outcome.code == 2
    assert outcome.err == "error: --attention-config.backend must have a value, got none\n"
