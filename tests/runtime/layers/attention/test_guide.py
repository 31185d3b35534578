"""The backend of the guide to plug-ins works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from multimodal_gen.runtime.layers.attention.scope import Source

REPOSITORY = Path(__file__).resolve().parents[4]
PAGES = REPOSITORY / "docs" / "pages"
GUIDE = PAGES / "guides" / "plug-ins.md"


def block(language: str, marker: str) -> str:
    """Return the one fenced block of a language that holds `marker`."""
    fences = re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (found,) = [text for text in fences if marker in text]
    return found


def install_plugin(folder: Path) -> None:
    """Lay out the example as an installed package, with the entry point the guide gives."""
    package = folder / "your_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plain_attn.py").write_text(block("python", "class PlainBackend"))
    project = block("toml", "entry-points").strip()
    ((name, entry),) = re.findall(r'^\[project\.entry-points\."(.*)"\]\n(.*)$', project, re.M)
    info = folder / "your_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: your-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{name}]\n{entry.replace(chr(34), '')}\n")


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        timeout=120,
    )


CHECK = """
import torch.nn.functional as F

want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
assert torch.allclose(out, want, atol=1e-5)
assert "plain_attn" in str(layer.report()), layer.report()

mask = torch.ones(2, 100, dtype=torch.bool)
mask[1] = False
with global_force_attn_backend_context_manager(AttentionBackendEnum.parse("plain-attn")):
    assert not layer(q, k, v, mask)[1].any()
    LocalAttention(4, 64, num_kv_heads=2)(q, k[:, :, :2], v[:, :, :2])  # not declared
"""


def test_who_asks_is_told_in_the_order_of_precedence_by_the_names_reports_use():
    page = (PAGES / "concepts" / "selection.md").read_text()
    told = page.partition("## Who asks")[2].partition("## What can serve")[0]
    assert re.findall(r"^\d\. `(.*?)`:", told, re.M) == [str(source) for source in Source]


def test_the_example_backend_runs_as_an_installed_plug_in(tmp_path):
    install_plugin(tmp_path)
    result = run(tmp_path, block("python", "layer = LocalAttention") + CHECK)
    assert result.returncode == 0, result.stderr
    warning = (
        "attention backend plain_attn (forced) cannot serve this layer, so torch_sdpa runs "
        "instead: does not support gqa. "
    )
    assert warning in result.stderr


@pytest.mark.slow
def test_the_example_backend_can_be_named_on_the_command_line(tmp_path):
    install_plugin(tmp_path)
    code = (
        "from multimodal_gen.cli.main import main\n"
        "import sys\n"
        "sys.argv = ['sglang', 'attention', 'list']\n"
        "main()\n"
    )
    result = run(tmp_path, code)
    assert result.returncode == 0, result.stderr
    assert "plain_attn" in result.stdout
