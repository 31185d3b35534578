"""What is to be written is refused before weights are read, whatever flag names it."""

import os
from pathlib import Path

import pytest

import multimodal_gen
from multimodal_gen.errors import UsageError
from multimodal_gen.runtime import benchmark
from multimodal_gen.runtime.generator import load, run
from multimodal_gen.runtime.generator.output import GrowingVideo, OutputTarget

GENERATE = ("generate", "--prompt", "a fox", "--device", "cpu", "--seed", "0")
COMPARE = ("attention", "compare", "--prompt", "a fox", "--device", "cpu", "--backends", "fa")
RECOMMEND = ("attention", "recommend", "--prompt", "a fox", "--device", "cpu")
SEARCH = ("attention", "sta", "search", "--prompt", "a fox", "--device", "cpu")
BENCH = ("attention", "bench", "--device", "cpu", "--shape", "1x64x2x32")
NAMED = {
    "record": ((*GENERATE, "--output-path", "out", "--record-attention"), "bad.json"),
    "output file": ((*GENERATE, "--output-path"), "bad.png"),
    "output folder": ((*GENERATE, "--output-path"), "bad"),
    "comparison": ((*COMPARE, "--no-page", "--output"), "bad"),
    "searched comparison": ((*RECOMMEND, "--comparison"), "bad"),
    "recommended config": ((*RECOMMEND, "--comparison", "out", "--output"), "bad.yaml"),
    "searches": ((*SEARCH, "--output"), "bad"),
    "table": ((*BENCH, "--save"), "bad.json"),
}


def make_bad(how: str, name: str) -> str:
    """Return a name, in this folder, at which nothing can be written unasked."""
    if how == "a link to nowhere":
        Path(name).symlink_to("no/where")
    elif how == "a link to itself":
        Path(name).symlink_to(name)
    elif how == "below a link to nowhere":
        Path("link").symlink_to("no/where")
        return f"link/{name}"
    elif how == "below a file":
        Path("file").write_text("")
        return f"file/{name}"
    elif how == "in a folder that takes none":
        return f"/proc/{name}"
    else:
        return "x" * 300 + name
    return name


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make loading a failure, and `tmp_path` the current folder."""

    def loads(*_: object, **__: object) -> None:
        pytest.fail("weights were read")

    for module in (load, run):
        monkeypatch.setattr(module, "load_pipeline", loads)
    monkeypatch.setattr(benchmark, "measure", loads)
    monkeypatch.chdir(tmp_path)


LINKS = ("a link to nowhere", "a link to itself")
BELOW = ("below a link to nowhere", "below a file", "in a folder that takes none", "too long")
CASES = [
    (what, how)
    for what in NAMED
    # Of a recommended config older files are replaced, and so are links.
    for how in (BELOW if what == "recommended config" else (*LINKS, *BELOW))
]


@pytest.mark.parametrize(("what", "how"), CASES)
def test_what_cannot_be_written_is_refused_first(
    sglang, tiny_pipeline, no_weights, what, how
) -> None:
    arguments, name = NAMED[what]
    model = () if what == "table" else ("--model-path", tiny_pipeline("wan"))
    if what == "output file":  # tried on images, whose encoder is always there
        model = ("--model-path", tiny_pipeline("flux"))
    bad = make_bad(how, name)
    before = sorted(os.walk("."))
    outcome = sglang(*arguments, bad, *model)
    assert outcome.code == 2, outcome.err
    (line,) = outcome.err.splitlines()
    assert line.startswith(f"error: {arguments[-1]} must ")
    assert sorted(os.walk(".")) == before


def test_a_link_to_nowhere_is_replaced_where_files_may_be(
    sglang, tiny_pipeline, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("fox.png", "attention.json"):
        Path(name).symlink_to("no/where")
    outcome = sglang(
        *(*GENERATE, "--model-path", tiny_pipeline("flux"), "--height", 64, "--width", 64),
        *("--num-inference-steps", 1, "--overwrite", "--output-path", "fox.png"),
        *("--record-attention", "attention.json"),
    )
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in Path().iterdir() if not path.is_symlink()) == [
        "attention.json",
        "fox.json",
        "fox.png",
    ]


def test_a_record_under_another_name_of_the_same_folder_is_refused(
    sglang, tiny_pipeline, no_weights
) -> None:
    Path("out").mkdir()
    Path("same").symlink_to("out")
    outcome = sglang(
        *(*GENERATE, "--model-path", tiny_pipeline("flux"), "--overwrite"),
        *("--output-path", "out/fox.png", "--record-attention", "same/fox.json"),
    )
    assert outcome.code == 2
    assert "--record-attention must be a file of its own, got 'same/fox.json'" in outcome.err


def test_a_record_that_was_written_meanwhile_is_kept(
    sglang, tiny_pipeline, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = run.output.write_image

    def and_a_rival(pixels: object, path: Path) -> None:
        written(pixels, path)
        Path("attention.json").write_text("the rival's")

    monkeypatch.setattr(run.output, "write_image", and_a_rival)
    outcome = sglang(
        *(*GENERATE, "--model-path", tiny_pipeline("flux"), "--height", 64, "--width", 64),
        *("--num-inference-steps", 1, "--output-path", "out"),
        *("--record-attention", "attention.json"),
    )
    assert outcome.code == 2
    assert (
        "--record-attention must not exist yet, got 'attention.json', which another program wrote "
        "meanwhile; run again with another name, or --overwrite"
    ) in outcome.err
    assert Path("attention.json").read_text() == "the rival's"
    assert not list(Path("out").iterdir())


def test_a_generation_in_one_call_refuses_its_files_first(tiny_pipeline, no_weights) -> None:
    Path("attention.json").symlink_to("no/where")
    with pytest.raises(UsageError, match="record_attention must be a file that does not exist"):
        multimodal_gen.generate(
            tiny_pipeline("flux"),
            prompt="a fox",
            device="cpu",
            output_path="out",
            record_attention="attention.json",
        )


def test_weights_are_kept_in_a_folder_that_takes_files(tiny_pipeline, no_weights) -> None:
    from multimodal_gen.runtime.generator import PipelineIndex
    from multimodal_gen.runtime.server_args import ServerArgs

    Path("weights").symlink_to("no/where")
    folder = tiny_pipeline("flux")
    args = ServerArgs(model_path=str(folder), offload="block", offload_folder="weights")
    with pytest.raises(UsageError, match="--offload-folder must lie in a folder, got 'weights'"):
        load.check_loading(PipelineIndex.read(str(folder)), args, load.torch.device("cuda"))


def test_a_stream_replaces_a_link(tmp_path) -> None:
    np = pytest.importorskip("numpy")
    path = tmp_path / "a.mp4"
    path.symlink_to("no/where")
    target = OutputTarget.plan(path, "video", stem="a", overwrite=True)
    video = GrowingVideo(target, fps=8)
    video.write(np.zeros((2, 16, 16, 3), dtype="float32"))
    video.close()
    assert path.is_file()
    assert not path.is_symlink()
