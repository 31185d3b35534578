"""Lay the package's kernels out as one of Hugging Face's `kernels`.

    python scripts/hf_kernels.py out/multimodal-gen-attention

The folder is a project of kernel-builder without a compile step (`build.toml`, `torch-ext/`), and
has its builds already (`build/torch-cuda`, `build/torch-rocm`, `build/torch-cpu`): what the Hub
wants of a repository of the type `kernel`, and what `kernels.get_local_kernel` loads. The code is
that of `multimodal_gen/kernels`, whose imports become relative, because a kernel has to load from
any path and together with other versions of itself. torch and its triton are all that it needs.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "multimodal_gen"
SOURCES = ("errors.py", "kernels")
BACKENDS = ("cuda", "rocm", "cpu")
LICENSE = "Apache-2.0"

# What a kernel offers: a name, and where it is defined.
OFFERED = {
    "BlockPlan": "kernels.block_sparse.plan",
    "Blocks": "kernels.block_sparse.plan",
    "block_sparse_attention": "kernels.block_sparse.api",
    "quantized_attention": "kernels.quantized_attention.api",
    "add_linear": "kernels.linear_attention.api",
    "key_state": "kernels.linear_attention.api",
    "cluster_attention": "kernels.cluster_attention.api",
}

_IMPORT = re.compile(rf"^(\s*)from {PACKAGE}((?:\.\w+)*) import ", re.MULTILINE)
_MODULE = re.compile(rf'"{PACKAGE}\.([\w.]+):')
_OPERATOR = re.compile(rf'"{PACKAGE}::')


def files() -> dict[Path, str]:
    """Return the code to take, by its path in the package."""
    root = REPOSITORY / PACKAGE
    found = [path for name in SOURCES for path in sorted((root / name).rglob("*.py"))]
    found += [root / name for name in SOURCES if name.endswith(".py")]
    return {path.relative_to(root): path.read_text(encoding="utf-8") for path in found}


def moved(path: Path, code: str, operators: str) -> str:
    """Return a module's code as part of a kernel.

    Args:
        path: its path in the package.
        code: what it is there.
        operators: the namespace of its operators.

    Raises:
        ValueError: it names the package in a way that this does not know.
    """
    up = "." * len(path.parts)

    def relative(match: re.Match[str]) -> str:
        return f"{match[1]}from {up}{match[2][1:]} import "

    code = _IMPORT.sub(relative, code)
    # A module that is named by text: the kernel's root is known when it runs alone.
    levels = len(path.parts) - 1
    root = f"__package__.rsplit('.', {levels})[0]" if levels else "__package__"
    code = _MODULE.sub(lambda match: f'f"{{{root}}}.{match[1]}:', code)
    code = _OPERATOR.sub(f'"{operators}::', code)
    left = [line for line in code.splitlines() if re.search(rf"(import|from) {PACKAGE}", line)]
    if left:
        raise ValueError(f"{path} must import from {PACKAGE} by `from ... import`, got {left[0]!r}")
    return code


def entry(version: int) -> str:
    """Return the `__init__.py` of the kernel."""
    lines = ['"""Attention kernels of multimodal_gen."""', ""]
    lines += [f"from .{module} import {name}" for name, module in OFFERED.items()]
    names = ", ".join(f'"{name}"' for name in sorted(OFFERED))
    return "\n".join([*lines, "", f"__all__ = [{names}]", f"__version__ = {version}", ""])


def manifest(name: str, version: int, repository: str | None) -> str:
    """Return `build.toml`."""
    hub = "" if repository is None else f'[general.hub]\nrepo-id = "{repository}"\n\n'
    return f"""\
[general]
name = "{name}"
version = {version}
edition = 5
license = "{LICENSE}"
backends = {json.dumps(BACKENDS)}

{hub}[torch-noarch]
"""


def build(folder: Path, name: str, version: int, repository: str | None = None) -> None:
    """Write the layout to a folder that does not exist.

    Args:
        folder: where to.
        name: the kernel's name: small letters, digits and dashes.
        version: its major version, which users ask for.
        repository: its place on the Hub, e.g. "org/name".
    """
    module = name.replace("-", "_")
    sources = files()
    text = "\0".join(f"{path}\0{code}" for path, code in sorted(sources.items()))
    unique = hashlib.sha256(f"{version}\0{text}".encode()).hexdigest()[:8]
    code = {
        path: moved(path, found, f"{module}_{unique}") for path, found in sorted(sources.items())
    }
    code[Path("__init__.py")] = entry(version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as making:
        root = Path(making) / "kernel"
        _write(root / "torch-ext" / module, code)
        (root / "build.toml").write_text(manifest(name, version, repository))
        shutil.copy(REPOSITORY / "LICENSE", root / "LICENSE")
        for backend in BACKENDS:
            variant = root / "build" / f"torch-{backend}"
            _write(variant, code)
            metadata = {
                "id": f"_{module}_{backend}_{unique}",
                "name": name,
                "version": version,
                "license": LICENSE,
                "python-depends": [],
                "backend": {"type": backend},
            }
            (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        root.rename(folder)


def _write(folder: Path, code: dict[Path, str]) -> None:
    for path, text in code.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    parser.add_argument("--name", default="multimodal-gen-attention", help="of the kernel")
    parser.add_argument("--version", type=int, default=1, help="its major version (1)")
    parser.add_argument("--repo-id", help="its place on the Hub, e.g. org/name")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", given.name):
        parser.error(f"--name must be small letters, digits and dashes, got {given.name!r}")
    if given.version < 1:
        parser.error(f"--version must be at least 1, got {given.version}")
    if given.folder.exists():
        parser.error(f"{given.folder} must not exist; remove it, or name another folder")
    try:
        build(given.folder, given.name, given.version, given.repo_id)
    except OSError as error:
        parser.error(f"{given.folder} must be a folder that can be made ({error.strerror})")
    print(
        f"{given.folder}: kernel {given.name}, version {given.version}, for {', '.join(BACKENDS)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
