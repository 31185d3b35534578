"""The benchmark over several GPUs: what it counts, and a run of two processes on tiny cases."""

import contextlib
import csv
import importlib
import io
import sys
from itertools import product

import pytest
import torch

from multimodal_gen.runtime.distributed.collectives import (
    gather_heads,
    partition_heads,
    scatter_heads,
)
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from tests.helpers.processes import World
from tests.scripts.conftest import BENCH

TOKENS, HEADS, SIZE = 12, 4, 8


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("_ranks")


def bytes_that_leave():
    """Return the bytes that one rank's exchanges of a layer hand to others."""
    group, sent = parallel_groups().ulysses, 0
    real = torch.distributed.all_to_all_single

    def counted(received, data, coming, leaving, **options):
        nonlocal sent
        others = sum(n for rank, n in enumerate(leaving) if rank != group.index)
        sent += others * data.element_size()
        return real(received, data, coming, leaving, **options)

    torch.distributed.all_to_all_single = counted
    spans, lengths = partition_heads(HEADS, HEADS, group.size).queries, [TOKENS // 2] * 2
    x = torch.zeros(1, TOKENS // 2, HEADS, SIZE, dtype=torch.bfloat16)
    q, _, _ = scatter_heads((x, x, x), [spans] * 3, lengths, group)
    gather_heads(q, spans, lengths, group)
    torch.distributed.all_to_all_single = real
    return sent


def test_the_bytes_by_formula_are_those_that_leave(ranks, tmp_path):
    mesh = Mesh(ulysses=2)
    with World(2, tmp_path) as world:
        sent = world.run(mesh, bytes_that_leave)
    expected = ranks.sent_bytes(mesh, tokens=TOKENS, heads=HEADS, size=SIZE)
    assert sent == [expected, expected]


def test_layouts_send_what_the_readme_says(ranks):
    one = 100 * 8 * 16 * 2  # bytes of q
    shape = {"tokens": 100, "heads": 8, "size": 16}
    assert ranks.sent_bytes(Mesh(), **shape) == 0
    for n in (2, 4):
        assert ranks.sent_bytes(Mesh(ulysses=n), **shape) == 4 * one * (n - 1) / n**2
        assert ranks.sent_bytes(Mesh(ring=n), **shape) == 2 * one * (n - 1) / n
    both = ranks.sent_bytes(Mesh(ulysses=2, ring=2), **shape)
    assert both == 4 * one / 4 / 2 + 2 * one / 4


def run_tiny(out):
    """Run the command line in one process; return what it leaves with, and what it prints."""
    sys.path.insert(0, str(BENCH))
    for name in ("parallel", "_harness", "_ranks", "_parallel_layers"):
        importlib.import_module(name).DEVICE = "cpu"
    words = ["parallel", "--commit", "c0ffee", "--smoke", "--out", str(out)]
    words += ["--layer-rounds", "1", "--only", "exchange,layer dense"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            return importlib.import_module("run").main(words), said.getvalue()
        except SystemExit as error:
            return error.code, said.getvalue()


@pytest.mark.slow
def test_a_tiny_run_of_two_processes_writes_its_rows(tmp_path):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    with World(2, meeting) as world:
        (first, said), (second, nothing) = world.run(None, run_tiny, tmp_path)
    assert (first, second, nothing) == (0, 0, ""), said
    with (tmp_path / "parallel.csv").open() as file:
        rows = list(csv.DictReader(file))
    layer = {row["contender"]: row for row in rows if row["case"] == "layer dense"}
    chunked = [f"dense, ulysses 2{text}" for text in ("", ", 2 chunks", ", 4 chunks")]
    assert list(layer) == ["dense, 1 GPU", *chunked, "dense, ring 2"]
    for name, column in product([*chunked, "dense, ring 2"], ("communication_ms", "attention_ms")):
        assert float(layer[name][column]) > 0
    assert {row["gpus"] for row in rows} == {"1", "2"}
    assert "exchange" in {row["case"] for row in rows}
