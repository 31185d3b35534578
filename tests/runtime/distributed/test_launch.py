"""Ranks that are started, and runs that end when one of them fails: soon, and in one line.

Ranks are forks here, of a process that has imported what they need; those that import it
themselves are in the tests of the command line.
"""

import dataclasses
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from multimodal_gen.errors import RankError
from multimodal_gen.runtime.distributed import faults, launch
from multimodal_gen.runtime.distributed.groups import init_parallel
from multimodal_gen.runtime.distributed.handshake import handshake
from multimodal_gen.runtime.distributed.launch import launch_ranks, run_rank
from multimodal_gen.runtime.layers.attention import USPAttention

# Short, because tests wait for it; forks of one process start at the same time.
TIMEOUT_S = 4
GRACE_S = 1
# A run that is not ended takes forever; starting its processes may take long on a busy machine.
BOUND_S = 90


def attend(folder: Path, step_2) -> None:
    """Call a split layer four times; rank 1 does something else the third time."""
    groups = init_parallel(device_type="cpu", rank_timeout=TIMEOUT_S)
    (folder / str(groups.rank)).write_text(str(os.getpid()))
    layer = USPAttention(2, 8)
    torch.manual_seed(groups.rank)
    for step in range(4):
        q, k, v = torch.randn(3, 1, 6, 2, 8).unbind()
        mask = None
        if step == 2 and groups.rank == 1:
            mask = step_2()
        layer(q, k, v, attn_mask=mask)
    sys.stdout.write(f"rank {groups.rank} is done\n")


def wait_for_the_device(folder: Path, step_2) -> None:
    """Make a call whose exchange runs on a device, and never ends: rank 1 makes another one."""
    groups = init_parallel(device_type="cpu", rank_timeout=TIMEOUT_S)
    (folder / str(groups.rank)).write_text(str(os.getpid()))
    for size in (1, 2):  # later calls do not wait
        handshake(groups, "a call", {"batch size": size}, ())
    size = step_2() if groups.rank == 1 else 1
    handshake(groups, "a call", {"batch size": size}, (), wait=False)
    hang()


def rank(folder: Path, work, step_2) -> None:
    faults._GRACE_S, faults._STUCK_S = GRACE_S, 0.5
    run_rank(lambda num_ranks: work(folder, step_2), timeout=TIMEOUT_S)


def nothing() -> None:
    """Go on like all others."""


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(10 * BOUND_S)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def give_two() -> int:
    return 2


def mask_tokens() -> torch.Tensor:
    return torch.ones(1, 6, dtype=torch.bool)


def leave() -> None:
    os._exit(3)


def be_interrupted() -> None:
    os.kill(os.getppid(), signal.SIGINT)
    hang()


def start(folder: Path, work, step_2, results) -> None:
    """Start two ranks; send what they end with, and whether Ctrl-C does what it did before."""
    for number, name in ((1, "out"), (2, "err")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    pids = folder / "pids"
    pids.mkdir()
    config, before = launch._config, signal.getsignal(signal.SIGINT)
    launch._config = lambda *args: dataclasses.replace(config(*args), start_method="fork")
    try:
        outcome = launch_ranks(rank, pids, work, step_2, num_ranks=2)
    except (RankError, KeyboardInterrupt) as error:
        outcome = error
    results.send((outcome, signal.getsignal(signal.SIGINT) is before))


@pytest.fixture
def run(tmp_path):
    """Return what two ranks end with: status or exception, standard output and error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.processes", __name__])

    def run(step_2, work=attend):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=start, args=(tmp_path, work, step_2, theirs))
        process.start()
        theirs.close()
        try:
            assert mine.poll(BOUND_S)
            outcome, restored = mine.recv()
            process.join(BOUND_S)
        finally:
            process.kill()
        assert process.exitcode == 0
        assert restored
        pids = list((tmp_path / "pids").iterdir())
        for file in pids:
            with pytest.raises(ProcessLookupError, match="No such process"):
                os.kill(int(file.read_text()), 0)
        assert len(pids) == 2
        out = (tmp_path / "out").read_text()
        if torch.__version__.startswith("2.9."):  # whose gloo prints, too, when ranks meet
            out = "".join(x for x in out.splitlines(keepends=True) if x.startswith("rank "))
        return outcome, out, (tmp_path / "err").read_text()

    return run


def test_ranks_that_finish_say_only_what_they_print(run) -> None:
    status, out, err = run(nothing)
    assert status == 0
    assert sorted(out.splitlines()) == ["rank 0 is done", "rank 1 is done"]
    assert err == ""


def test_a_killed_rank_ends_the_run(run) -> None:
    error, out, err = run(be_killed)
    assert isinstance(error, RankError)
    assert str(error).startswith("rank 1 (pid ")
    assert f" on {socket.gethostname()}) was ended by signal 9 (SIGKILL)" in str(error)
    assert (out, err) == ("", "")


@pytest.mark.slow
def test_a_rank_that_leaves_without_a_word_ends_the_run(run) -> None:
    error, out, err = run(leave)
    assert isinstance(error, RankError)
    assert "ended with exit status 3; the other ranks were stopped" in str(error)
    assert (out, err) == ("", "")


@pytest.mark.parametrize("work", [attend, wait_for_the_device])
def test_a_rank_that_hangs_is_named_by_those_that_wait(run, work) -> None:
    status, out, err = run(hang, work)
    assert status == 1
    (line,) = err.splitlines()
    assert line.startswith("error: rank 1 (pid ")
    assert f"no answer within {TIMEOUT_S} s" in line
    assert out == ""


def test_ranks_that_disagree_while_they_wait_for_their_devices_say_so(run) -> None:
    status, out, err = run(give_two, wait_for_the_device)
    assert status == 1
    (line,) = err.splitlines()
    assert (
        "batch size must be the same on all ranks in a call, got 1 on rank 0, 2 on rank 1" in line
    )
    assert out == ""


def test_a_rank_that_runs_out_of_memory_speaks_first(run) -> None:
    status, out, err = run(run_out_of_memory)
    assert status == 1
    first, *rest = err.splitlines()
    assert first.startswith("error: rank 1 (pid ")
    assert first.endswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.")
    assert rest[0] == "Traceback (most recent call last):"
    assert not [line for line in rest if line.startswith("error: ")]
    assert out == ""


def test_ranks_with_different_inputs_end_with_who_has_what(run) -> None:
    status, out, err = run(mask_tokens)
    assert status == 2
    (line,) = err.splitlines()
    assert "must be the same on all ranks in " in line
    assert "on rank 0, " in line
    assert out == ""


def test_ctrl_c_ends_all_ranks(run) -> None:
    error, out, err = run(be_interrupted)
    assert isinstance(error, KeyboardInterrupt)
    assert (out, err) == ("", "")
