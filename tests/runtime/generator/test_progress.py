"""What a terminal shows of a run, and the time that compiling takes."""

import io
import sys

import torch

from multimodal_gen.runtime.generator.progress import Compilation, each_frame, follow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Pipeline:
    """Denoises in two steps, then decodes."""

    def progress_bar(self, total):
        from tqdm import tqdm

        return tqdm(total=total, file=sys.stderr, **self._progress_bar_config)

    def __call__(self) -> None:
        with self.progress_bar(total=2) as bar:
            bar.update()
            bar.update()


def test_a_terminal_shows_a_bar_per_stage_with_the_time_left(monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)  # here: pytest sets its own after fixtures
    pipe = Pipeline()
    with follow(pipe):
        pipe()
    assert list(each_frame("abc", 3)) == ["a", "b", "c"]
    text = terminal.getvalue()
    assert [name for name in ("denoise", "decode", "save") if name in text] == [
        *("denoise", "decode", "save")
    ]
    assert text.index("denoise") < text.index("decode") < text.index("save")
    assert "100%" in text
    assert "<00:00" in text  # the time left
    assert "progress_bar" not in vars(pipe)


def test_nothing_is_shown_where_there_is_no_terminal(capfd) -> None:
    pipe = Pipeline()
    with follow(pipe):
        pipe()
    assert list(each_frame("abc", 3)) == ["a", "b", "c"]
    assert capfd.readouterr().err == ""


def test_the_time_of_compiling_is_taken_and_said() -> None:
    from tqdm import tqdm

    terminal = Terminal()

    def twice(x):
        return x * 2

    with Compilation() as compilation:
        compilation.bar = tqdm(total=1, file=terminal)
        compiled = torch.compile(twice, backend="eager")
        assert compiled(torch.ones(2)).tolist() == [2, 2]
        first = compilation.seconds
        compiled(torch.ones(2))
        compilation.bar.close()
    assert first > 0
    assert compilation.seconds == first  # the second call compiles nothing
    assert "compiling kernels" in terminal.getvalue()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert compilation.seconds == first  # and it listens no more
