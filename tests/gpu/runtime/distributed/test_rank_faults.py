"""Ranks on GPUs that are killed, hang or run out of memory end the run soon, and by name.

Each test runs this file as a program, which starts two ranks.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from multimodal_gen.errors import RankError
from multimodal_gen.runtime.distributed.groups import init_parallel
from multimodal_gen.runtime.distributed.launch import launch_ranks, run_rank
from multimodal_gen.runtime.layers.attention import USPAttention

pytestmark = pytest.mark.multi_gpu

TIMEOUT_S = 15
# Of which starting the ranks and their GPUs takes most.
BOUND_S = 75
HEADS, SIZE, TOKENS = 4, 128, 512


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(10 * BOUND_S)


def run_out_of_memory() -> None:
    torch.empty(1 << 50, device="cuda")


FAULTS = {fault.__name__: fault for fault in (be_killed, hang, run_out_of_memory)}


def attend(fault: str, folder: Path) -> None:
    """Call a split layer six times; something befalls rank 1 the third time."""
    groups = init_parallel(device_type="cuda", rank_timeout=TIMEOUT_S)
    (folder / str(groups.rank)).write_text(str(os.getpid()))
    layer = USPAttention(HEADS, SIZE)
    for step in range(6):
        q, k, v = torch.randn(3, 1, TOKENS, HEADS, SIZE, device="cuda").bfloat16().unbind()
        if step == 2 and groups.rank == 1:
            FAULTS[fault]()
        layer(q, k, v).sum().item()
    sys.stdout.write(f"rank {groups.rank} is done\n")


def rank(fault: str, folder: Path) -> None:
    run_rank(lambda num_ranks: attend(fault, folder), timeout=TIMEOUT_S)


def run(fault: str, folder: Path) -> tuple[int, list[str]]:
    """Return exit status and lines of the standard error of a run; nothing of it is left."""
    done = subprocess.run(
        [sys.executable, __file__, fault, folder],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.stdout == ""
    pids = [int(file.read_text()) for file in folder.iterdir()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError, match="No such process"):
            os.kill(pid, 0)
    return done.returncode, done.stderr.splitlines()


def said(lines: list[str]) -> str:
    """Return the one line in which a run says why it ended."""
    (line,) = (line for line in lines if line.startswith("error: "))
    assert line.startswith("error: rank 1 (pid ")
    return line


def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    status, lines = run("be_killed", tmp_path)
    assert status == 1
    assert "was ended by signal 9 (SIGKILL)" in said(lines)


def test_a_rank_that_hangs_is_named_by_the_one_that_waits(tmp_path: Path) -> None:
    status, lines = run("hang", tmp_path)
    assert status == 1
    assert f"no answer within {TIMEOUT_S} s" in said(lines)


def test_a_rank_that_runs_out_of_memory_speaks_first(tmp_path: Path) -> None:
    status, lines = run("run_out_of_memory", tmp_path)
    assert status == 1
    assert "OutOfMemoryError: CUDA out of memory" in said(lines)


if __name__ == "__main__":
    try:
        sys.exit(launch_ranks(rank, sys.argv[1], Path(sys.argv[2]), num_ranks=2))
    except RankError as error:
        sys.exit(f"error: {error}")
