"""`sglang generate` on several ranks: the same result as one, and what is refused before any."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from multimodal_gen.cli.main import main
from multimodal_gen.runtime.distributed import launch
from multimodal_gen.testing.tiny_models import FAMILIES
from tests.conftest import A_PIPELINE, PROCESSES
from tests.helpers.flags import changed

FLAGS = {
    "height": "--height",
    "width": "--width",
    "num_frames": "--num-frames",
    "guidance_scale": "--guidance-scale",
    "true_cfg_scale": "--guidance-scale",
    "prompt": "--prompt",
    "negative_prompt": "--negative-prompt",
}
# A run that is not ended takes forever; ending one takes long only on a busy machine.
BOUND_S = 60
WAN = ("--height", "64", "--width", "96", "--num-frames", "5", "--num-inference-steps", "2")


def command(folder: Path, out: Path, *flags: object) -> list[str]:
    """Return a command line that also saves the latents."""
    line = (
        *("generate", "--model-path", folder, "--output-path", out, "--save-latents"),
        *("--seed", "0", "--device", "cpu", *flags),
    )
    return [str(word) for word in line]


def latents(out: Path) -> torch.Tensor:
    (file,) = out.glob("*.safetensors")
    return load_file(file)["latents"]


def record(out: Path) -> dict:
    (file,) = out.glob("*.json")
    return json.loads(file.read_text())


def generate_as_rank(arguments: list[str]) -> int:
    """Run the command line as a rank that has joined a world already."""
    launch.is_launched_rank = lambda: True
    launch.run_rank = lambda work, timeout: work(dist.get_world_size())
    return main(arguments)


def _flags(family) -> tuple[object, ...]:
    steps = family.num_inference_steps if family.name == "wan22" else 2
    given = [
        text
        for name, value in family.generate_kwargs.items()
        if name in FLAGS
        for text in (FLAGS[name], value)
    ]
    return (*given, "--num-inference-steps", steps)


@pytest.fixture(scope="module")
def alone(tiny_pipeline, tmp_path_factory):
    """Return the latents that one process makes, made once for the same flags."""
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def make(name: str, flags: tuple[object, ...]) -> torch.Tensor:
        out = folder / str(len(list(folder.iterdir())))
        assert main(command(tiny_pipeline(name), out, *flags)) == 0
        assert record(out)["mesh"] is None
        return latents(out)

    return make


# Families differ in how their tokens are split: tests of models and pipelines try the others.
QUICK = ("wan",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in FAMILIES],
)
def test_two_ranks_give_the_latents_of_one(name, two_ranks, tiny_pipeline, alone, tmp_path):
    flags = _flags(FAMILIES[name])
    codes = two_ranks.run(None, generate_as_rank, command(tiny_pipeline(name), tmp_path, *flags))
    assert codes == [0, 0]
    torch.testing.assert_close(latents(tmp_path), alone(name, flags), atol=1e-4, rtol=0)
    suffixes = sorted(path.suffix for path in tmp_path.iterdir())
    medium = ".mp4" if FAMILIES[name].output == "video" else ".png"
    assert suffixes == sorted([".json", medium, ".safetensors"])
    found = record(tmp_path)
    assert found["mesh"] == {"cfg": 1, "ring": 1, "ulysses": 2, "ranks": 2}
    assert any("2 ranks share the sequence" in note for note in found["attention"]["notes"])


def test_two_ranks_run_under_a_guard(two_ranks, tiny_pipeline, tmp_path):
    flags = (
        *("--attention-backend", "sliding_tile_attn", "--attention-guard", "sparse=0.001"),
        *(
            "--attention-backend-config",
            '{"window": [1, 1, 1], "tile_size": [1, 2, 2], "skip_time_steps": 0}',
        ),
    )
    line = command(tiny_pipeline("wan"), tmp_path, *WAN, "--prompt", "a fox", *flags)
    assert two_ranks.run(None, generate_as_rank, line) == [0, 0]
    found = record(tmp_path)["attention"]["guard"]
    assert found["calls"] == len(found["missed"]) == 2


@pytest.mark.slow
def test_ranks_make_several_generations_and_go_on_with_what_is_left(
    two_ranks, tiny_pipeline, alone, tmp_path
):
    flags = (*WAN, "--prompt", "a fox", "--prompt", "a cat")
    line = command(tiny_pipeline("wan"), tmp_path, *flags)
    assert two_ranks.run(None, generate_as_rank, line) == [0, 0]
    made = sorted(tmp_path.glob("*.safetensors"))
    for file, prompt in zip(reversed(made), ("a fox", "a cat"), strict=True):
        expected = alone("wan", (*WAN, "--prompt", prompt))
        torch.testing.assert_close(load_file(file)["latents"], expected, atol=1e-4, rtol=0)
    for file in tmp_path.glob("wan-seed0-2*"):
        file.unlink()
    assert two_ranks.run(None, generate_as_rank, [*line, "--resume"]) == [0, 0]
    again = load_file(tmp_path / "wan-seed0-2.safetensors")["latents"]
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=0)


def test_a_process_that_torchrun_started_joins_the_others(monkeypatch, tiny_pipeline, tmp_path):
    timeouts = []
    monkeypatch.setattr(launch, "is_launched_rank", lambda: True)
    monkeypatch.setattr(launch, "run_rank", lambda work, timeout: timeouts.append(timeout))
    flags = (*WAN, "--prompt", "a fox", "--rank-timeout", 120)
    assert main(command(tiny_pipeline("wan"), tmp_path, *flags)) == 0
    assert timeouts == [120]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow_cases("--ring-degree 2")
@pytest.mark.parametrize("degrees", [("--ring-degree", "2"), ("--cfg-parallel",)], ids=" ".join)
def test_rings_and_branches_give_the_latents_of_one(
    degrees, two_ranks, tiny_pipeline, alone, tmp_path
):
    flags = _flags(FAMILIES["wan"])
    line = command(tiny_pipeline("wan"), tmp_path, *flags, *degrees)
    assert two_ranks.run(None, generate_as_rank, line) == [0, 0]
    torch.testing.assert_close(latents(tmp_path), alone("wan", flags), atol=1e-4, rtol=0)
    mesh = {"cfg": 1, "ring": 1, "ulysses": 1, "ranks": 2}
    mesh["cfg" if degrees == ("--cfg-parallel",) else "ring"] = 2
    assert record(tmp_path)["mesh"] == mesh


def start(arguments: list[str], folder: Path, results) -> None:
    """Run the command line, whose ranks are forks of this process."""
    for number, name in ((1, "out"), (2, "err")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    config = launch._config
    launch._config = lambda *args: dataclasses.replace(config(*args), start_method="fork")
    results.send(main(arguments))


@pytest.mark.slow
def test_ranks_are_started_and_only_the_first_speaks(tiny_pipeline, alone, tmp_path):
    flags = _flags(FAMILIES["wan"])
    degrees = ("--num-gpus", "2", "--ring-degree", "2", "--rank-timeout", "120")
    made = tmp_path / "made"
    line = command(tiny_pipeline("wan"), made, *flags, *degrees)
    # Not of this process, whose threads and locks ranks would inherit.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PROCESSES, A_PIPELINE])
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=start, args=(line, tmp_path, theirs))
    process.start()
    theirs.close()
    try:
        assert mine.poll(BOUND_S), (tmp_path / "err").read_text()
        assert mine.recv() == 0, (tmp_path / "err").read_text()
    finally:
        process.kill()
    assert (tmp_path / "err").read_text() == ""
    torch.testing.assert_close(latents(made), alone("wan", flags), atol=1e-4, rtol=0)
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines.count("seed: 0") == 1
    assert lines.count("ranks: 2 (1 CFG x 2 ring x 1 Ulysses)") == 1
    assert sorted(path.name for path in made.iterdir()) == [
        *("wan-seed0.json", "wan-seed0.mp4", "wan-seed0.safetensors")
    ]


# The second rank stays in the second step. Ranks import this file under another name.
FAULTY = """
import os, pathlib, sys, time

def patch():
    import diffusers
    import torch.distributed as dist

    forward = diffusers.WanTransformer3DModel.forward
    calls = []

    def watched(*args, **kwargs):
        calls.append(1)
        if dist.is_initialized() and len(calls) == 2:
            here = pathlib.Path(sys.argv[-1], str(dist.get_rank()))
            here.with_suffix(".new").write_text(str(os.getpid()))
            here.with_suffix(".new").rename(here)
            if dist.get_rank() == 1:
                time.sleep(1000)
        return forward(*args, **kwargs)

    diffusers.WanTransformer3DModel.forward = watched

if __name__ == "__main__":
    from multimodal_gen.cli.main import main
    sys.exit(main(sys.argv[1:-1]))
patch()
"""


@pytest.fixture
def running(tiny_pipeline, tmp_path):
    """Start two ranks whose second one stays in the second step; return the process and pids."""
    script, pids = tmp_path / "faulty.py", tmp_path / "pids"
    script.write_text(FAULTY)
    pids.mkdir()
    line = command(tiny_pipeline("wan"), tmp_path / "out", "--num-gpus", "2", "--prompt", "a", *WAN)
    process = subprocess.Popen(
        [sys.executable, script, *line, str(pids)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        while not ((pids / "0").exists() and (pids / "1").exists()):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        yield process, [int((pids / name).read_text()) for name in "01"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_rank_killed_mid_run_ends_it_and_leaves_nothing(running, tmp_path):
    process, pids = running
    os.kill(pids[1], signal.SIGKILL)
    out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 1
    (line,) = err.splitlines()
    name = f"rank 1 (pid {pids[1]} on {socket.gethostname()})"
    assert line.startswith(f"error: {name} was ended by signal 9 (SIGKILL)")
    assert out == ""
    _assert_nothing_is_left(process, pids, tmp_path)


def test_ctrl_c_while_ranks_run_leaves_no_half_written_file(
    sglang, tiny_pipeline, tmp_path, monkeypatch
):
    out = tmp_path / "out"

    def be_interrupted(function, job, *, num_ranks):
        (out / f".{job.mark}wan.partial.mp4").write_bytes(b"half")
        raise KeyboardInterrupt

    out.mkdir()
    monkeypatch.setattr(launch, "launch_ranks", be_interrupted)
    line = command(tiny_pipeline("wan"), out, "--num-gpus", "2", "--prompt", "a", *WAN)
    done = sglang(*line)
    assert (done.code, done.out, done.err) == (130, "", "interrupted; no file was written\n")
    assert list(out.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_and_leaves_nothing(running, tmp_path):
    process, pids = running
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 130
    assert (out, err) == ("", "interrupted; no file was written\n")
    _assert_nothing_is_left(process, pids, tmp_path)


def _group(leader: int) -> list[str]:
    """Return the living processes of a group, as Linux lists them."""
    rows = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            rows.append([*stat.read_text().rpartition(")")[2].split()[:3], stat.parent.name])
    return [pid for state, _, group, pid in rows if int(group) == leader and state != "Z"]


def _assert_nothing_is_left(process: subprocess.Popen, pids: list[int], folder: Path) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError, match="No such process"):
            os.kill(pid, 0)
    end = time.monotonic() + 10
    # The tracker of Python's multiprocessing ends a moment after the process it served.
    while time.monotonic() < end and (left := _group(process.pid)):
        time.sleep(0.05)
    assert left == []
    assert not list((folder / "out").glob("*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--num-gpus", "8", "--ulysses-degree", "3"),
            "--ulysses-degree must divide 8, the GPUs there are, got 3; use --ulysses-degree 4",
        ),
        (
            ("--ulysses-degree", "8"),
            "--ulysses-degree must be at most 4, the heads of a layer, so that every GPU has one, "
            "got 8; use --ulysses-degree 4 --ring-degree 2",
        ),
        (("--num-gpus", "3", "--cfg-parallel"), "--num-gpus must be even with --cfg-parallel"),
        (
            ("--num-gpus", "2", "--backend", "diffusers"),
            "--backend must be sglang on several GPUs, got diffusers",
        ),
        (
            ("--num-gpus", "2", "--attention-backend", "native"),
            "--backend must be sglang on several GPUs, got diffusers for --attention-backend",
        ),
        (
            ("--num-gpus", "2", "--device", "cpu:0"),
            "--device must name no single device where several ranks run, got 'cpu:0'; use "
            "--device cpu",
        ),
        (("--num-gpus", "2", "--device", "meta"), "--device must be cuda or cpu where several"),
        (("--num-gpus", "2", "--device", "toaster"), "--device must be a torch device of this"),
        (("--num-gpus", "128"), "--num-gpus must be at most 64 on CPUs, a process each, got 128"),
        (("--num-gpus", "2", "--fps", "0"), "--fps must be"),
        (("--num-gpus", "2", "--rank-timeout", "1000001"), "--rank-timeout must be "),
        (("--num-gpus", "2", "--rank-timeout", "inf"), "--rank-timeout must be "),
        (("--num-gpus", "2", "--output-path", "out.png"), "--output-path must end in .mp4"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_line_before_any_rank_starts(
    flags, message, sglang, tiny_pipeline, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "launch_ranks", None)
    given = command(tiny_pipeline("wan"), tmp_path / "out", "--prompt", "a", *WAN)
    done = sglang(*changed(given, flags))
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []
