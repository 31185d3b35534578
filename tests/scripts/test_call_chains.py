"""The script that prints what a warm call passes on its way to the kernel."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("call_chains")


def test_every_chain_is_within_its_budget_and_printed(script, capsys) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr()
    lines = capsys.readouterr().out.splitlines()
    headings = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert headings == list(script.BUDGETS)
    assert lines[1] == "  forward  runtime/layers/attention/attention_layer.py"


def test_a_chain_ends_where_the_kernel_is_entered(script) -> None:
    chain = script.sliding_tiles()
    assert chain.stack[0].name == "forward"
    assert Path(chain.stack[-1].file).name == "api.py"
    assert [entry.depth for entry in chain.stack] == list(range(len(chain.stack)))
    inside = {file for file in chain.inner_files if file.startswith("kernels/block_sparse/")}
    assert inside - set(chain.files)


def test_a_chain_over_its_budget_is_reported(script, monkeypatch, capsys) -> None:
    here = script.Entry(0, "layer.py", "forward")
    there = script.Entry(1, "backend.py", "forward")
    chain = script.Chain(entries=[here, there, here], stack=[here, there])
    assert (chain.files, chain.changes) == (["layer.py", "backend.py"], 2)
    monkeypatch.setattr(script, "CASES", {"a layer": lambda: chain})
    budget = script.Budget(nested=2, files=2, functions=3)
    monkeypatch.setattr(script, "BUDGETS", {"a layer": budget})
    assert script.main(["--check"]) == 0
    monkeypatch.setattr(script, "BUDGETS", {"a layer": script.Budget(nested=1, files=2)})
    assert script.main(["--check"]) == 1
    assert capsys.readouterr().err == "a layer must take at most 1 nested calls, got 2\n"
    monkeypatch.setattr(script, "BUDGETS", {"a layer": script.Budget(functions=2)})
    assert script.main(["--check"]) == 1
    assert capsys.readouterr().err == "a layer must take at most 2 functions, got 3\n"
