"""Kernels compile in other processes while a pipeline loads, which end when it is let go of."""

import os
import pickle
import sys
import time
from pathlib import Path

import pytest

from multimodal_gen import DiffGenerator
from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.warm import Ahead
from multimodal_gen.runtime.server_args import ServerArgs


def test_it_is_refused_without_a_gpu(tiny_pipeline) -> None:
    with pytest.raises(
        UsageError, match=r"^compile_ahead \(compile_ahead\): kernels must be compi"
    ):
        DiffGenerator.from_pretrained(tiny_pipeline("wan"), device="cpu", compile_ahead=True)


def test_the_process_gets_the_generation_and_ends_with_all_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = tmp_path / "python"
    script = f"cat > {tmp_path}/given; sleep 100 & echo $! > {tmp_path}/pid; wait"
    stand_in.write_text(f"#!/bin/sh\n{script}\n")
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    args = ServerArgs(model_path="M", prompt="a fox", height=480)
    ahead = Ahead(args)
    file = tmp_path / "pid"
    while not (file.exists() and file.read_text()):
        time.sleep(0.01)
    assert pickle.loads((tmp_path / "given").read_bytes()) == args
    started = int(file.read_text())
    os.kill(started, 0)
    ahead.stop()
    ahead.stop()
    deadline = time.monotonic() + 10
    while is_running(started) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(started)


def test_a_process_that_cannot_serve_ends_by_itself(tiny_pipeline) -> None:
    args = ServerArgs(model_path=str(tiny_pipeline("wan")), prompt="a fox", device="cpu")
    ahead = Ahead(args)
    assert ahead.wait() != 0
    ahead.stop()


def is_running(pid: int) -> bool:
    """Whether there is a process that has not ended; who ended may be waited for by nobody."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
