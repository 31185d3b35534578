"""The layout for Hugging Face's `kernels` loads from any path, beside other versions of itself."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from scripts import hf_kernels
from tests.helpers.block_plans import PlanShape, random_plan


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("kernels")
    for version in (1, 2):
        assert hf_kernels.main([str(root / f"v{version}"), "--version", str(version)]) == 0
    return [root / "v1", root / "v2"]


@pytest.fixture(scope="module")
def loaded(folders: list[Path]) -> Iterator[list[ModuleType]]:
    """Both versions, loaded as `kernels` does it: by the id of a build, from its path."""
    before = set(sys.modules)
    yield [_load(folder / "build" / "torch-cpu") for folder in folders]
    for name in set(sys.modules) - before:
        if name.startswith("_multimodal_gen_attention"):
            del sys.modules[name]


def _load(variant: Path) -> ModuleType:
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec: Any = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_two_versions_compute_what_the_package_does(loaded):
    plan = random_plan(PlanShape(heads=2, q_size=16, kv_size=16), seed=0)
    tokens = (plan.q.total, plan.kv.total, plan.kv.total)
    q, k, v = (torch.randn(1, n, 2, 16) for n in tokens)
    expected = block_sparse_attention(q, k, v, plan)
    results = []
    for module in loaded:
        kept = {name: getattr(plan, name) for name in ("indices", "counts")}
        blocks = {
            side: module.Blocks(num=b.num, size=b.size, total=b.total)
            for side, b in (("q", plan.q), ("kv", plan.kv))
        }
        results.append(module.block_sparse_attention(q, k, v, module.BlockPlan(**kept, **blocks)))
    first, second = loaded
    assert first.BlockPlan is not second.BlockPlan
    assert (first.__version__, second.__version__) == (1, 2)
    for out in results:
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_nothing_of_the_package_is_left_in_it(folders):
    for path in folders[0].rglob("*.py"):
        text = path.read_text()
        assert "from multimodal_gen" not in text
        assert "import multimodal_gen" not in text
        assert '"multimodal_gen::' not in text
        assert '"multimodal_gen.' not in text


def test_modules_named_by_text_are_found_beside_their_kernel(loaded):
    engine = sys.modules[f"{loaded[0].__name__}.kernels.engine"]
    declared = (*engine.BLOCK_SPARSE.kernels, *engine.QUANTIZED.kernels)
    checks = [kernel.check for kernel in declared if kernel.check]
    assert checks
    for check in checks:
        assert importlib.util.find_spec(check.partition(":")[0]) is not None
        assert check.startswith(loaded[0].__name__)


def test_the_manifest_and_the_builds_say_the_same(folders):
    manifest = (folders[1] / "build.toml").read_text()
    assert 'name = "multimodal-gen-attention"\nversion = 2\nedition = 5\n' in manifest
    assert manifest.endswith("[torch-noarch]\n")
    ids = set()
    for backend in hf_kernels.BACKENDS:
        metadata = json.loads((folders[1] / f"build/torch-{backend}/metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        assert metadata["version"] == 2
        ids.add(metadata["id"])
    assert len(ids) == len(hf_kernels.BACKENDS)
    source = folders[1] / "torch-ext" / "multimodal_gen_attention"
    build = folders[1] / "build" / "torch-cuda"
    for path in source.rglob("*.py"):
        assert (build / path.relative_to(source)).read_text() == path.read_text()


def test_the_library_itself_loads_it(folders):
    kernels = pytest.importorskip("kernels")
    module = kernels.get_local_kernel(folders[0])
    assert module.__version__ == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "No Good"], "--name must be small letters"),
        (["--version", "0"], "--version must be at least 1, got 0"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        hf_kernels.main([str(tmp_path / "out"), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path, capsys):
    with pytest.raises(SystemExit):
        hf_kernels.main([str(tmp_path)])
    assert "must not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        hf_kernels.main([str(tmp_path / "file" / "out")])
    assert "must be a folder that can be made" in capsys.readouterr().err
