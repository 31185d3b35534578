"""The tables of the documentation that declarations give."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from multimodal_gen.integrations.models.registry import ADAPTERS
from multimodal_gen.runtime.layers.attention.backends.registry import backends_of
from multimodal_gen.runtime.layers.attention.config import parameters_of
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
    """Copies of the pages; that of the support table."""
    for name in script.pages():
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((script.PAGES / name).read_text())
    monkeypatch.setattr(script, "PAGES", tmp_path)
    return tmp_path / "reference" / "support.md"


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
        assert declares == bool(re.search(r"\byes\b", ring))


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


def test_every_sparse_method_has_a_page_a_row_and_its_parameters(script):
    pages = {Path(name).stem for name in script.pages() if name.startswith("methods/")}
    assert pages == {"index", "dense", *script.SPARSE}
    _, *rows = script.methods()
    assert [row[0] for row in rows] == [f"[`{name}`]({name}.md)" for name in script.SPARSE]
    common = {row[0] for row in script.common()}
    for name in script.SPARSE:
        (backend,) = backends_of(AttentionBackendEnum.parse(name))
        listed = {row[0] for row in script.parameters(backend)} | common
        assert listed >= {f"`{each}`" for each in parameters_of(backend.config_cls)}


def test_defaults_are_as_describe_prints_them(script):
    (backend,) = backends_of(AttentionBackendEnum.SLIDING_TILE_ATTN)
    defaults = {row[0]: row[2] for row in script.parameters(backend)}
    assert defaults["`tile_size`"] == "`[6, 8, 8]`"
    assert defaults["`retarget`"] == "`false`"
    assert defaults["`window`"] == "`null`"


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
    with pytest.raises(
        SystemExit, match=r"support.md must hold the markers of the table 'support'"
    ):
        script.main([])
