"""What was written for 0.1 against the guides of that release runs, from the same paths.

The texts are in `guides_of_0_1.md`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.models import registry
from multimodal_gen.integrations.models.adapter import ModelAdapter
from multimodal_gen.integrations.models.split_plan import SplitPlan
from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.architecture.test_docs import blocks
from tests.helpers.denoisers import SPLIT
from tests.runtime.layers.attention.sparse.test_example import check_on_rank

REPOSITORY = Path(__file__).resolve().parents[5]

GUIDES = Path(__file__).with_name("guides_of_0_1.md").read_text()
BACKEND, USE, CONFIGURED, SPARSE, RECORD = blocks(GUIDES, "python")
(ENTRY_POINT,) = blocks(GUIDES, "toml")

CHECK = """
import torch.nn.functional as F

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention.scope import scope_from


def asking(name, **settings):
    scope = scope_from(attention_backend=name, **settings)
    return LocalAttention(num_heads=4, head_size=64, scope=scope)


want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
assert torch.allclose(out, want, atol=1e-5)
assert "plain_attn" in str(layer.report()), layer.report()

layer = asking("plain_attn", strict=True)
assert torch.equal(layer(q, k, v), out)
mask = torch.ones(2, 100, dtype=torch.bool)
mask[1] = False
masked = layer(q, k, v, mask)
assert torch.allclose(masked[0], want[0], atol=1e-5) and not masked[1].any()
leaf = q.clone().requires_grad_()
layer(leaf, k, v).sum().backward()
assert leaf.grad.isfinite().all()
assert [str(entry.selection.backend) for entry in layer.report().entries] == ["plain_attn"]

try:
    asking("plain_attn", strict=True)(q.half(), k.half(), v.half())
except UnsupportedBackendError as error:
    assert "float32" in str(error), error
else:
    raise AssertionError("it declares float32 alone")

scaled = asking("scaled_attn", attention_backend_config="factor=2", strict=True)
assert torch.allclose(scaled(q, k, v), 2 * want, atol=1e-5)
"""

SPARSE_CHECK = """
from tests.helpers.sparse import SparseMethod, run_sparse, text_places
from tests.helpers.tolerance import assert_within_error_budget
from tests.runtime.layers.attention.sparse.test_example import (
    GRID, NAME, SETTINGS, defined, some_masked,
)
from your_package.near_first_attn import NearFirstBackend, NearFirstConfig

method = SparseMethod(backend=NearFirstBackend.backend, given=SETTINGS)
for text in text_places(GRID, 11).values():
    qkv = method.inputs(GRID, text=text)
    layer = method.layer(strict=True, dense_steps="0")
    dense = run_sparse(layer, qkv, GRID, text=text, step=0)
    assert_within_error_budget(dense, *qkv, scale=method.scale)
    for mask in (None, some_masked(text)):
        want = defined(method).mask(qkv, text, mask)
        want = want if mask is None else want & mask[:, None, :, None]
        out = run_sparse(layer, qkv, GRID, text=text, step=1, attn_mask=mask)
        assert_within_error_budget(out, *qkv, scale=method.scale, mask=want)
    entries = {str(entry.selection.backend): entry for entry in layer.report().entries}
    ((step, density),) = entries[NAME].densities
    assert step == 1 and 0.1 < density < 0.7, entries
"""

LIST = """
from multimodal_gen.cli.main import main

assert main(["attention", "list"]) == 0
"""


def install(folder: Path, entries: list[str], **modules: str) -> Path:
    """Make a folder with the installed package of somebody else."""
    package, info = folder / "your_package", folder / "your_package-1.0.dist-info"
    for each in (package, info):
        each.mkdir()
    (package / "__init__.py").touch()
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: your-package\nVersion: 1.0\n")
    text = "\n".join(["[multimodal_gen.attention_backends]", *entries, ""])
    (info / "entry_points.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two dense backends."""
    group, entry = ENTRY_POINT.strip().splitlines()
    assert group == '[project.entry-points."multimodal_gen.attention_backends"]'
    entries = [entry.replace('"', ""), "scaled_attn = your_package.scaled_attn:ScaledBackend"]
    folder = tmp_path_factory.mktemp("plugin")
    return install(folder, entries, plain_attn=BACKEND, scaled_attn=CONFIGURED)


@pytest.fixture(scope="module")
def sparse_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sparse method."""
    entry = "near_first_attn = your_package.near_first_attn:NearFirstBackend"
    return install(tmp_path_factory.mktemp("sparse"), [entry], near_first_attn=SPARSE)


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run code where the package is installed; every warning is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_sparse_method_that_attends_itself_runs_and_is_told_to_move_on(
    sparse_plugin: Path,
) -> None:
    result = run(sparse_plugin, SPARSE_CHECK, "-W", "always::DeprecationWarning")
    assert result.returncode == 0, result.stderr
    told = [line for line in result.stderr.splitlines() if "SparseImpl" in line]
    assert "near_first_attn.py" in told[0], result.stderr
    assert "NearFirstImpl derives from SparseImpl" in told[0]
    page = REPOSITORY / "docs/pages/guides/migrating.md"
    assert str(page.relative_to(REPOSITORY)) in told[0]
    assert '"Migrating a `SparseImpl` to a router"' in told[0]
    assert "## Migrating a `SparseImpl` to a router" in page.read_text()


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=["ulysses", "ring"])
def test_a_sparse_method_that_attends_itself_runs_on_ranks(two_ranks, tmp_path, mesh) -> None:
    densities = two_ranks.run(mesh, check_on_rank, tmp_path, (67, 53), True, SPARSE)
    assert densities[0] == pytest.approx(densities[1], abs=0.02)


def test_a_dense_backend_runs_as_it_is(plugin: Path) -> None:
    result = run(plugin, USE + CHECK)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_a_dense_backend_is_listed(plugin: Path) -> None:
    result = run(plugin, LIST)
    assert result.returncode == 0, result.stderr
    for name, summary in (
        ("plain_attn", "attention in two matrix products"),
        ("scaled_attn", "the same, times a factor"),
    ):
        assert name in result.stdout
        assert summary in " ".join(result.stdout.split())


def record() -> ModelAdapter:
    """Return the record of the guide, as if its file were ours."""
    names: dict[str, ModelAdapter] = {}
    exec(compile(RECORD, "skyreels_v2.py", "exec"), names)
    return names["SKYREELS_V2"]


def outputs(**settings: object) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...], set[str]]:
    """Return what one process and the ranks get of a model known by the record, and the report."""
    model, inputs = SPLIT["skyreels v2"].make()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(registry, "ADAPTERS", {name: record() for name in record().classes})
        with use_parallel_groups(None), apply(model, **settings):
            alone = model(**inputs, return_dict=False)[0]
        with apply(model, **settings) as handle:
            shared = model(**inputs, return_dict=False)[0]
            report = handle.report()
    entries = [entry for layer in report.layers for entry in layer.entries if layer.calls]
    return alone, shared, report.notes, {str(entry.selection.backend) for entry in entries}


def test_a_model_record_tells_the_grid_that_sparse_backends_need() -> None:
    adapter = record()
    assert isinstance(adapter, ModelAdapter)
    assert isinstance(adapter.split, SplitPlan)
    config = {"window": [1, 1, 1], "tile_size": [1, 2, 2], "skip_time_steps": 0}
    sparse = {"attention_backend": "sliding_tile_attn", "attention_backend_config": config}
    found, _, notes, backends = outputs(**sparse)
    assert notes == ()
    assert str(AttentionBackendEnum.SLIDING_TILE_ATTN) in backends
    model, inputs = SPLIT["skyreels v2"].make()
    with torch.no_grad():
        with apply(model, **sparse):  # by the record of today
            assert torch.equal(found, model(**inputs, return_dict=False)[0])
        stock = model(**inputs, return_dict=False)[0]
    assert (found - stock).abs().max() > 1e-3 * stock.abs().max(), "a window of one tile"


def test_a_model_record_changes_nothing_of_a_dense_model() -> None:
    found, *_ = outputs(attention_backend="torch_sdpa")
    model, inputs = SPLIT["skyreels v2"].make()
    with torch.no_grad():
        stock = model(**inputs, return_dict=False)[0]
    torch.testing.assert_close(found, stock)


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=["ulysses", "ring"])
def test_a_model_record_tells_how_tokens_are_split(two_ranks, mesh: Mesh) -> None:
    for alone, shared, notes, _ in two_ranks.run(mesh, outputs):
        assert notes[-1].startswith("transformer: 2 ranks share the sequence")
        assert (shared - alone).abs().max() <= 1e-4 * alone.abs().max()
