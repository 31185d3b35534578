#!/usr/bin/env python3
"""Print what a warm call passes on its way from a layer's `forward` to the kernel.

    python3 scripts/call_chains.py [--check] [--tree]

Every case runs on the CPU until it is warm; then every Python function of the package is recorded
that one more call enters. What a kernel does inside is its own matter: a chain ends at a function
of a kernel's `api.py`, or at PyTorch's attention. One goes instead from the text of a backend and
its parameters to a bound layer. Printed are

- nested calls: how many functions are running where the kernel is entered, and which;
- files: how many different files the functions lie in that the call enters outside of kernels;
- changes: how often the next function entered lies in another file than the one before;
- functions: how many are entered outside of kernels, generators once per value;
- further files that kernels enter.

`--check` exits with status 1 where a case is over its budget; `--tree` prints all that was entered.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

# A checkout works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import multimodal_gen
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import LocalAttention, USPAttention
from multimodal_gen.runtime.layers.attention.backends.registry import backends_of
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    SelectionScope,
    Source,
    scope_from,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.processes import World

PACKAGE = Path(multimodal_gen.__file__).parent
HEADS, HEAD_SIZE, GRID = 4, 64, (6, 16, 16)
WARM_CALLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a chain may take at most; None for no limit."""

    nested: int | None = None
    files: int | None = None
    functions: int | None = None


BUDGETS = {
    "torch_sdpa": Budget(nested=5, files=2),
    "sliding_tile_attn": Budget(files=10),
    "Ulysses": Budget(files=8, functions=100),
    "apply": Budget(nested=7, files=8),
    "text to bound layer": Budget(files=12),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A function that was entered: how many of the package's lie below it, and where it is."""

    depth: int
    file: str
    name: str


@dataclass(slots=True)
class Chain:
    """What one call entered, in order.

    Attributes:
        entries: every function of the package, those inside of kernels left out.
        stack: the functions that were running when the deepest kernel was entered.
        inner_files: files of what kernels entered.
    """

    entries: list[Entry] = field(default_factory=list)
    stack: list[Entry] = field(default_factory=list)
    inner_files: set[str] = field(default_factory=set)

    @property
    def files(self) -> list[str]:
        """Different files, in the order in which they were entered."""
        return list(dict.fromkeys(entry.file for entry in self.entries))

    @property
    def changes(self) -> int:
        """How often the next function entered is in another file."""
        files = [entry.file for entry in self.entries]
        return sum(files[i] != files[i + 1] for i in range(len(files) - 1))


class Recorder:
    """Records what one thread enters, by `sys.setprofile`."""

    def __init__(self) -> None:
        self.chain = Chain()
        self._running: list[Entry] = []
        self._kernel_depth: int | None = None

    def start(self) -> None:
        """Record what this thread enters from now on."""
        sys.setprofile(self._notice)

    def stop(self) -> None:
        """Record no more."""
        sys.setprofile(None)

    def _notice(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument is torch.nn.functional.scaled_dot_product_attention:
            if self._kernel_depth is None:
                self._kernel_entered()
            return
        file = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or PACKAGE not in file.parents:
            return
        if event == "call":
            self._call(frame, file.relative_to(PACKAGE))
        else:
            self._running.pop()
            if self._kernel_depth == len(self._running):
                self._kernel_depth = None

    def _call(self, frame: FrameType, file: Path) -> None:
        entry = Entry(len(self._running), file.as_posix(), frame.f_code.co_name)
        self._running.append(entry)
        if self._kernel_depth is not None:
            self.chain.inner_files.add(entry.file)
            return
        self.chain.entries.append(entry)
        if file.parts[0] == "kernels" and file.name == "api.py":
            self._kernel_entered()
            self._kernel_depth = entry.depth

    def _kernel_entered(self) -> None:
        if len(self._running) > len(self.chain.stack):
            self.chain.stack = list(self._running)


def record(call: Callable[[], object]) -> Chain:
    """Return what `call` enters once it is warm."""
    for _ in range(WARM_CALLS):
        call()
    recorder = Recorder()
    recorder.start()
    call()
    recorder.stop()
    return recorder.chain


def inputs(tokens: int) -> list[torch.Tensor]:
    """Return q, k and v."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens, HEADS, HEAD_SIZE)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def asking_for(name: str, **config: Any) -> SelectionScope:
    """Return the scope of a user who asked for a backend."""
    backend = AttentionBackendEnum.parse(name)
    config_cls = backends_of(backend)[0].config_cls
    settings = None if config_cls is None else config_cls(**config)
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=settings)
    return SelectionScope(default=asked)


def dense() -> Chain:
    """Return the chain of a layer on one device."""
    layer, qkv = LocalAttention(HEADS, HEAD_SIZE, scope=asking_for("torch_sdpa")), inputs(128)
    return record(lambda: layer(*qkv))


def sliding_tiles() -> Chain:
    """Return the chain of a sparse layer on one device."""
    scope = asking_for("sliding_tile_attn", window=(1, 1, 1))
    layer = LocalAttention(HEADS, HEAD_SIZE, scope=scope)
    qkv = inputs(GRID[0] * GRID[1] * GRID[2])
    with set_forward_context(20, latent_grid=GRID):
        return record(lambda: layer(*qkv))


def ulysses() -> Chain:
    """Return the chain of a layer whose heads are split over two ranks."""
    with tempfile.TemporaryDirectory() as folder, World(2, Path(folder)) as world:
        chain: Chain = world.run(Mesh(ulysses=2), on_a_rank)[0]
        return chain


def on_a_rank() -> Chain:
    """Return what a rank's call enters."""
    layer, qkv = USPAttention(HEADS, HEAD_SIZE, scope=asking_for("torch_sdpa")), inputs(128)
    with torch.inference_mode():
        return record(lambda: layer(*qkv))


def applied() -> Chain:
    """Return the chain of the first self-attention layer of a stock model."""
    from multimodal_gen.testing.tiny_models import FAMILIES

    pipe = FAMILIES["wan"].build(0)
    transformer, recorder = pipe.transformer, Recorder()
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, transformer.config.in_channels, 2, 8, 8, generator=generator)
    text = torch.randn(1, 8, transformer.config.text_dim, generator=generator)

    def begin(*_: object) -> None:
        recorder.start()

    def end(*_: object) -> None:
        recorder.stop()

    with multimodal_gen.apply(pipe, attention_backend="torch_sdpa"):
        for call in range(WARM_CALLS + 1):
            if call == WARM_CALLS:
                layer = transformer.blocks[0].attn1
                layer.register_forward_pre_hook(begin)
                layer.register_forward_hook(end)
            transformer(latents, torch.tensor([500]), text, return_dict=False)
    return recorder.chain


def bound_from_text() -> Chain:
    """Return what is entered from the text of a configuration to a layer with its backend."""

    def bind() -> None:
        scope = scope_from(
            attention_backend="sliding_tile_attn", attention_backend_config="window=[3,3,3]"
        )
        LocalAttention(HEADS, HEAD_SIZE, compute_dtype=torch.float32, scope=scope)

    return record(bind)


CASES: dict[str, Callable[[], Chain]] = {
    "torch_sdpa": dense,
    "sliding_tile_attn": sliding_tiles,
    "Ulysses": ulysses,
    "apply": applied,
    "text to bound layer": bound_from_text,
}


def show(name: str, chain: Chain, *, tree: bool) -> None:
    """Print a chain."""
    print(
        f"{name}: {len(chain.stack)} nested calls, {len(chain.files)} files, "
        f"{chain.changes} changes of file, {len(chain.entries)} functions; "
        f"{len(chain.inner_files - set(chain.files))} more files inside of kernels"
    )
    for entry in chain.entries if tree else chain.stack:
        print(f"  {'  ' * entry.depth}{entry.name}  {entry.file}")
    others = [file for file in chain.files if file not in {entry.file for entry in chain.stack}]
    if others:
        print(f"  also: {', '.join(others)}")


def excess(name: str, chain: Chain) -> list[str]:
    """Return what is over the case's budget."""
    budget = BUDGETS[name]
    figures = (
        ("nested calls", budget.nested, len(chain.stack)),
        ("files", budget.files, len(chain.files)),
        ("functions", budget.functions, len(chain.entries)),
    )
    return [
        f"{name} must take at most {limit} {what}, got {figure}"
        for what, limit, figure in figures
        if limit is not None and figure > limit
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the chains; return 1 where `--check` is given and one is over its budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where a case is over its budget")
    parser.add_argument("--tree", action="store_true", help="print every function entered")
    options = parser.parse_args(arguments)
    problems = []
    for name, case in CASES.items():
        with torch.no_grad():
            chain = case()
        show(name, chain, tree=options.tree)
        problems += excess(name, chain)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if options.check and problems else 0


if __name__ == "__main__":
    sys.exit(main())
