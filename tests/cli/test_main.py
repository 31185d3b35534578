import errno
import io
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

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


@pytest.mark.slow_cases("attention explain -h", "attention list -h", "generate --help")
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


def test_the_module_of_the_command_line_is_a_program() -> None:
    done = _python("-m", "multimodal_gen.cli.main", "--version")
    assert (done.returncode, done.stdout[:15]) == (0, "multimodal_gen ")


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
    assert "[required, here or in --config]" in text
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


def _commands(group=None, path: tuple[str, ...] = ()):
    """Yield every command with what is typed to call it."""
    import typer

    group = group or typer.main.get_command(main_module.app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_no_help_text_shows_what_python_calls_a_default(sglang) -> None:
    texts = {" ".join(path): sglang(*path, "--help").out for path, _ in _commands()}
    assert len(texts) == 12
    assert [name for name, text in texts.items() if re.search(r"inspect|class '", text)] == []


REQUIRED = [
    "explain --model-path",
    "calibrate --output",
    "calibrate --model-path",
    "compare --backends",
    "compare --output",
    "compare --model-path",
    "recommend --comparison",
    "warm --model-path",
    "search --output",
    "search --model-path",
    "tune --searches",
    "tune --output",
]
"""Which flags of which commands are required; `generate` takes its own from files, too."""


def test_every_command_wants_each_of_its_required_flags(
    sglang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = []
    for path, command in _commands():
        required = [each for each in command.params if each.required and each.opts[0][0] == "-"]
        for left_out in required:
            given = [each for each in required if each is not left_out]
            words = [word for each in given for word in (each.opts[0], "m")]
            outcome = sglang(*path, *words)
            (line,) = outcome.err.splitlines()
            expected = f"error: {left_out.opts[0]} must be given; see `sglang {' '.join(path)} "
            assert (outcome.code, line) == (2, f"{expected}--help`")
            missing.append(f"{path[-1]} {left_out.opts[0]}")
    assert missing == REQUIRED
    assert list(tmp_path.iterdir()) == []


FOLDED = ("--attention-config", "--component-attention-backends")
"""Flags that mappings are put together from."""


def test_every_command_takes_a_flag_once_but_for_lists(sglang) -> None:
    for path, command in _commands():
        flags = [
            each
            for each in command.params
            if each.opts[0][0] == "-" and not (each.multiple or each.is_eager)
        ]
        for flag in (each for each in flags if each.opts[0] not in FOLDED):
            words = [flag.opts[-1]] if flag.is_flag else [flag.opts[-1], "m"]
            outcome = sglang(*path, *words, *words)
            expected = f"error: {flag.opts[0]} must be given once, got it 2 times; see `sglang "
            assert (outcome.code, outcome.err) == (2, f"{expected}{' '.join(path)} --help`\n")


@pytest.mark.parametrize(
    "words",
    [
        ("--help", "--help"),
        ("generate", "-h", "--help"),
        ("generate", "--seed", "1", "--seed", "2", "--help"),
    ],
)
def test_help_is_shown_whatever_else_is_there(sglang, words) -> None:
    outcome = sglang(*words)
    assert (outcome.code, outcome.err) == (0, "")
    assert "Usage:" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cache", "cross_attention", "--cache", "first_block"), "--cache must be given once"),
        (("--overwrite", "--no-overwrite"), "--overwrite must be given once, got it 2 times"),
        (("--log-level", "info", "--log-level=debug"), "--log-level must be given once"),
        (("--prompt", "a", "--prompt", "b", "--seed=-1"), "--seed must be"),
    ],
    ids=str,
)
def test_a_flag_that_is_given_twice_is_one_line(sglang, arguments, message) -> None:
    outcome = sglang("generate", *arguments)
    (line,) = outcome.err.splitlines()
    assert (outcome.code, line.startswith(f"error: {message}")) == (2, True), line


RUN = ("generate", "--model-path", "m", "--prompt", "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--frobnicate",), "no such option '--frobnicate'; see `sglang --help`"),
        (("--prompt", "x"), "no such option '--prompt'; see `sglang --help`"),
        (("generate", "--heigth=4"), "no such option '--heigth', did you mean '--height'?"),
        (("genrate",), "no such command 'genrate'.*"),
        (("attention", "lst"), "no such command 'lst'.*"),
        (("generate", "--prompt", "x"), "--model-path must be given, or be in --config; .*"),
        (("generate", "--model-path", "m"), "--prompt must be given, or be in --prompt-file or .*"),
        ((*RUN, "--steps"), "no such option '--steps'.*"),
        ((*RUN, "--seed"), "option '--seed' requires an argument"),
        ((*RUN, "--overwrite=3"), "option '--overwrite' does not take a value"),
        ((*RUN, "y"), r"got unexpected extra argument.* \(y\); see `sglang generate --help`"),
        ((*RUN, "--height", "0"), "--height must be an integer >= 1, got 0; see .*"),
        ((*RUN, "--height", "70000"), "--height must be at most 65536, got 70000; see .*"),
        ((*RUN, "--seed=-1"), "--seed must be .*0, got -1; see .*"),
        ((*RUN, "--fps", "fast"), "--fps must be an integer >= 1, got 'fast'; see .*"),
        ((*RUN, "--guidance-scale", ""), "--guidance-scale must be .*, got ''; see .*"),
        (
            (*RUN, "--backend", "other"),
            "--backend must be one of auto, sglang, diffusers, got 'other'; "
            "see `sglang generate --help`",
        ),
        (("attention", "list", "--role", "both"), "--role must be one of self, .*, got 'both'.*"),
        (("attention", "list", "--head-size", "0"), "--head-size must be .*1, got 0; see .*"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_usage_error_is_one_line_with_what_was_typed_and_exits_with_2(
    arguments: tuple[str, ...], message: str, sglang
) -> None:
    outcome = sglang(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert re.fullmatch("error: " + message.replace("?", r"\?"), line), line


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


def _interrupted_import(folder: Path, tail: str) -> subprocess.CompletedProcess[str]:
    """Run a command while Ctrl-C arrives during the import of torch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        f"import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n{tail}\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "multimodal_gen", "attention", "list"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{Path.cwd()}"},
        # A test run in the background of a shell ignores the signal, and its children would, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.slow_cases("turned into another exception")
@pytest.mark.parametrize(
    "tail",
    [
        "finally:\n    pass",
        "except KeyboardInterrupt:\n    raise RuntimeError('could not import') from None",
    ],
    ids=["as it is", "turned into another exception"],
)
def test_ctrl_c_during_an_import_is_one_line(tail: str, tmp_path: Path) -> None:
    done = _interrupted_import(tmp_path, tail)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_handler_of_ctrl_c_is_put_back(sglang) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert sglang("--version").code == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_the_command_line_runs_outside_the_main_thread() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["--version"])))
    thread.start()
    thread.join()
    assert codes == [0]


def test_a_reader_that_closes_the_pipe_gets_no_traceback() -> None:
    shell = f"'{sys.executable}' -u -m multimodal_gen generate --help | true"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("option", "hint"), [("--nope", "; see"), ("--sed", ", did you mean '--seed'?")]
)
def test_an_option_is_suggested_only_where_the_names_are_close(option, hint, sglang) -> None:
    done = sglang("generate", option, "1")
    assert done.code == 2
    assert f"no such option {option!r}{hint}" in done.err


def test_a_full_disk_behind_the_output_is_one_line(monkeypatch, capsys) -> None:
    from multimodal_gen.cli import main as module

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.typer, "echo", lambda *a, err=False, **k: None if err else full())
    assert module.main(["--version"]) == 1


def test_a_closed_output_is_no_error() -> None:
    shell = f"'{sys.executable}' -m multimodal_gen --version >&-"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_text_that_the_terminal_cannot_encode_is_escaped(monkeypatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["--version"]) == 0
    sys.stdout.write("\xfc")
    sys.stdout.flush()
    assert raw.getvalue().endswith(b"\\xfc")


def test_a_pipe_that_nobody_reads_is_said_by_generate(monkeypatch, sglang) -> None:
    from multimodal_gen.cli import generate as module

    def unread(asked):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(module, "_start", unread)
    monkeypatch.setattr(main_module, "_drop_output", lambda: None)
    done = sglang("generate", "--model-path", "m", "--prompt", "a fox")
    assert done.code == 1
    assert done.err == "the output is not read any more; files that are written stay\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [((), True), (("--log-level", "error"), False), (("--log-level=error",), False)],
    ids=["usual", "errors", "errors by ="],
)
def test_warnings_are_said_unless_only_errors_are_asked_for(flags, said, tmp_path) -> None:
    code = (
        "import logging, sys, warnings\n"
        "from multimodal_gen.cli import main as module\n"
        "@module.app.command()\n"
        "def probe() -> None:\n"
        "    logging.getLogger('of.another').warning('a warning')\n"
        "    warnings.warn('another')\n"
        f"sys.exit(module.main(['probe', *{flags!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("a warning" in done.stderr) == ("another" in done.stderr) == said


def test_a_level_that_there_is_not_is_one_line(sglang) -> None:
    outcome = sglang("attention", "list", "--log-level", "loud")
    assert outcome.code == 2
    assert "--log-level must be one of debug, info, warning, error, got 'loud'" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("attention", "sta", "tune", "--searches", "s"), "--output"),
        (("attention", "sta", "search", "--model-path", "m", "--prompt", "x"), "--output"),
        (("attention", "compare", *RUN[1:], "--backends", "sage_attn"), "--output"),
        (("attention", "recommend", "--comparison", "c"), "--output"),
        (("attention", "bench"), "--save"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, tuple) else "",
)
def test_an_output_is_a_path_and_its_home_is_known(arguments, flag, sglang, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for given, told in (("~nosuch/y", "a path"), (" ", "a file or folder")):
        outcome = sglang(*arguments, flag, given)
        assert outcome.code == 2
        assert outcome.err.startswith(f"error: {flag} must be {told}, got {given!r}")
    assert list(tmp_path.iterdir()) == []
