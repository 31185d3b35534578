"""Two hosts with addresses of their own, as network namespaces: torchrun gives what one gives."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from multimodal_gen.cli.main import main

PORT = 29551
FLAGS = (
    *("--prompt", "a fox", "--height", "64", "--width", "96", "--num-frames", "5"),
    *("--num-inference-steps", "2", "--seed", "0", "--device", "cpu", "--save-latents"),
)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture
def hosts():
    """Make two hosts that a cable joins; return (namespace, interface, address) of each."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip of iproute2")
    names = [f"mmgen-{os.getpid()}-{end}" for end in "ab"]
    cables = [f"mg{os.getpid()}{end}" for end in "ab"]
    addresses = ["10.183.0.1", "10.183.0.2"]
    with contextlib.ExitStack() as undo:
        try:
            for name in names:
                _ip("netns", "add", name)
                undo.callback(_ip, "netns", "delete", name)
            _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
            for name, cable, address in zip(names, cables, addresses, strict=True):
                _ip("link", "set", cable, "netns", name)
                _ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
                _ip("-n", name, "link", "set", cable, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs leave to make network namespaces: {error.stderr.strip()}")
        yield list(zip(names, cables, addresses, strict=True))


def _torchrun(hosts, node: int, arguments: list[str]) -> subprocess.Popen:
    name, cable, _ = hosts[node]
    return subprocess.Popen(
        [
            *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"),
            *("--master-addr", hosts[0][2], "--master-port", str(PORT)),
            *("-m", "multimodal_gen", *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Gloo would look for its interface by the name of the host, which both share.
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": cable,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
    )


@pytest.mark.slow
def test_two_hosts_give_the_latents_of_one_process(hosts, tiny_pipeline, tmp_path) -> None:
    def command(out: str) -> list[str]:
        where = ("--model-path", str(tiny_pipeline("wan")), "--output-path", str(tmp_path / out))
        return ["generate", *where, *FLAGS]

    assert main(command("one")) == 0
    started = [_torchrun(hosts, node, command("two")) for node in (0, 1)]
    try:
        (out, err), (quiet, other) = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.terminate()  # torchrun ends its ranks
            process.wait(timeout=60)
    assert [process.returncode for process in started] == [0, 0], err + other
    assert quiet == ""
    # Groups that exchange heads stay within a host; the ring crosses it.
    assert "ranks: 2 (1 CFG x 2 ring x 1 Ulysses)" in out.splitlines()
    one, two = (
        load_file(tmp_path / name / "wan-seed0.safetensors")["latents"] for name in ("one", "two")
    )
    torch.testing.assert_close(two, one, atol=1e-4, rtol=0)
