"""The generated tables of the attention README."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from multimodal_gen.integrations.models.registry import ADAPTERS
from multimodal_gen.runtime.layers.attention.backends.registry import backends_of
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "backend_table.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    spec = importlib.util.spec_from_file_location("backend_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def page(script, tmp_path, monkeypatch):
    copy = tmp_path / "README.md"
    copy.write_text(script.README.read_text())
    monkeypatch.setattr(script, "README", copy)
    models = tmp_path / "models.md"
    models.write_text(script.MODELS.read_text())
    monkeypatch.setattr(script, "MODELS", models)
    monkeypatch.setattr(script, "REPOSITORY", tmp_path)
    return copy


def test_the_committed_tables_are_up_to_date(script, capsys):
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_every_variant_of_every_backend_has_a_row(script):
    _, *rows = script.support()
    listed = [(row[0], row[1]) for row in rows]
    declared = [
        (str(name), variant.name)
        for name in AttentionBackendEnum
        for backend in backends_of(name)
        for variant in backend.variants
    ]
    assert listed == declared


def test_every_variant_said_to_run_for_real_exists(script):
    _, *rows = script.support()
    assert set(script.RUN_FOR_REAL) <= {(row[0], row[1]) for row in rows}


def test_every_sparse_method_can_be_part_of_each_setup_or_says_why_not(script):
    _, *rows = script.limits()
    assert {name.strip("`") for name, *_ in rows} == {
        str(name) for name in AttentionBackendEnum if name.is_sparse and backends_of(name)
    }
    for _, *cells in rows:
        assert all(cells)


def test_methods_ring_where_their_variants_declare_it(script):
    _, *rows = script.limits()
    for name, _, ring, *_ in rows:
        (backend,) = backends_of(AttentionBackendEnum.parse(name.strip("`")))
        declares = any(Feature.RING in variant.features for variant in backend.variants)
        assert declares == ring.startswith("yes")


def test_kernels_of_this_package_run_for_real(script):
    head, *rows = script.support()
    tested = head.index("tested on")
    found = {row[1]: set() for row in rows}
    for row in rows:
        found[row[1]].add(row[tested])
    assert found["gluon"] == found["triton"] == {"SM90"}
    assert found["reference"] == {"CPU"}
    assert found["fastvideo_kernel"] == {"simulation"}


def test_every_model_with_an_adapter_has_a_row(script):
    head, *rows = script.models()
    assert [row[0] for row in rows] == [f"`{name}`" for name in ADAPTERS]
    split = {row[0]: row[head.index("split over GPUs")] for row in rows}
    assert split["`SanaVideoTransformer3DModel`"].startswith("no: it has linear attention")
    assert split["`SD3Transformer2DModel`"] == "yes"
    plans = {name: adapter.split for name, adapter in ADAPTERS.items()}
    assert {name for name, plan in plans.items() if plan is None or isinstance(plan, str)} == {
        name.strip("`") for name, how in split.items() if how != "yes"
    }


def test_check_shows_the_difference_and_writes_nothing(script, page, capsys):
    stale = page.read_text().replace("| fa | fa3 | bf16, fp16 |", "| fa | fa3 | fp32 |")
    page.write_text(stale)
    assert script.main(["--check"]) == 1
    shown = capsys.readouterr()
    assert "-| fa | fa3 | fp32 |" in shown.out
    assert "+| fa | fa3 | bf16, fp16 |" in shown.out
    assert "run scripts/backend_table.py" in shown.err
    assert page.read_text() == stale


def test_writing_repairs_a_stale_table(script, page):
    good = page.read_text()
    page.write_text(good.replace("| yes |", "| perhaps |"))
    assert script.main([]) == 0
    assert page.read_text() == good


def test_a_page_without_markers_is_an_error(script, page):
    page.write_text("# nothing here\n")
    with pytest.raises(SystemExit, match=r"README.md must hold the markers of the table 'support'"):
        script.main([])
