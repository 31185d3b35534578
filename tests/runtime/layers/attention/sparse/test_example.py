"""The worked example of the attention README is a sparse method that works, alone and on ranks."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multimodal_gen.cli.main import main
from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.distributed.groups import parallel_groups, use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import USPAttention
from multimodal_gen.runtime.layers.attention.backends import registry
from multimodal_gen.runtime.platforms import interface
from multimodal_gen.testing.inputs import QKV
from multimodal_gen.testing.processes import own
from multimodal_gen.testing.sparse import (
    SparseMethod,
    joint_mask,
    run_sparse,
    text_places,
    token_mask,
    tokens_of_tiles,
    video_tokens,
)
from multimodal_gen.testing.tolerance import assert_within_error_budget

README = Path(__file__).parents[5] / "multimodal_gen/runtime/layers/attention/README.md"
NAME = "near_first_attn"
GRID, TILE, TOPK, DECAY = (5, 4, 6), (2, 2, 2), 3, 0.4
TEXTS = text_places(GRID, 11)
SETTINGS = {"topk": TOPK, "decay": DECAY, "tile_size": TILE}


def example() -> str:
    fences = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    (found,) = [text for text in fences if "class NearFirstBackend" in text]
    return found


def forget() -> None:
    for remembered in (registry._read_plugins, registry.current_environment):
        remembered.cache_clear()
    registry.cpu_environment.cache_clear()


@contextmanager
def package(folder: Path) -> Iterator[None]:
    """Have the example as an installed package, with the entry point that the README gives."""
    (entry,) = re.findall(rf'^`({NAME} = ".*")`', README.read_text(), re.M)
    code, info = folder / "your_package", folder / "your_package-1.0.dist-info"
    for made in (code, info):
        made.mkdir(parents=True, exist_ok=True)
    (code / "__init__.py").touch()
    (code / f"{NAME}.py").write_text(example())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: your-package\nVersion: 1.0\n")
    group = "[multimodal_gen.attention_backends]"
    (info / "entry_points.txt").write_text(f"{group}\n{entry.replace(chr(34), '')}\n")
    sys.path.insert(0, str(folder))
    forget()
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        interface._PLUGINS.pop(NAME, None)
        for name in ("your_package", f"your_package.{NAME}"):
            sys.modules.pop(name, None)
        forget()


@contextmanager
def installed(folder: Path) -> Iterator[SparseMethod]:
    """Have the example installed and imported."""
    with package(folder):
        module = importlib.import_module(f"your_package.{NAME}")
        backend = module.NearFirstBackend.backend
        yield SparseMethod(backend=backend, config_cls=module.NearFirstConfig, given=SETTINGS)


@pytest.fixture
def method(tmp_path: Path) -> Iterator[SparseMethod]:
    with installed(tmp_path) as found:
        yield found


def definition(qkv: QKV, text=None, keep=None, grid=GRID) -> torch.Tensor:
    """Return the method's mask: the best tiles by their means, less what distance takes off."""
    blocks = tokens_of_tiles(grid, TILE, text)
    batch, tokens, heads, size = qkv.query.shape
    chosen = torch.zeros(batch, heads, len(blocks), len(blocks), dtype=torch.bool)
    times = [i // (len(blocks) // -(-grid[0] // TILE[0])) for i in range(len(blocks))]
    for b in range(batch):
        real = [[t for t in block if keep is None or keep[b, t]] for block in blocks]
        for h in range(heads):
            query, key = (
                [x[b, tokens, h].double().mean(0) for tokens in real] for x in (qkv.query, qkv.key)
            )
            for i, mean in enumerate(query):
                scores = {
                    j: float(mean @ key[j]) * size**-0.5 - DECAY * abs(times[i] - times[j])
                    for j in range(len(blocks))
                    if real[j]
                }
                chosen[b, h, i, sorted(scores, key=scores.__getitem__)[-TOPK:]] = True
    mask = token_mask(chosen, blocks, blocks, tokens, tokens)
    return joint_mask(mask, video_tokens(grid, text), keep)


def test_the_example_is_short() -> None:
    assert len(example().splitlines()) < 120


@pytest.mark.parametrize("where", TEXTS)
def test_it_attends_to_the_mask_of_its_definition(method: SparseMethod, where: str) -> None:
    text = TEXTS[where]
    qkv, attention = method.inputs(GRID, text=text), method.layer(strict=True)
    out = run_sparse(attention, qkv, GRID, text=text)
    mask = definition(qkv, text)
    assert_within_error_budget(out, *qkv, scale=method.scale, mask=mask)
    (entry,) = attention.report().entries
    assert str(entry.selection.backend) == NAME
    assert 0.1 < dict(entry.densities)[0] < 0.7
    if text is None:
        share = TOPK / len(tokens_of_tiles(GRID, TILE))
        assert dict(entry.densities)[0] == pytest.approx(share, abs=0.05)


def test_padding_has_no_influence_whatever_it_holds(method: SparseMethod) -> None:
    text = TEXTS["text last"]
    qkv = method.inputs(GRID, text=text)
    keep = torch.ones(qkv.query.shape[:2], dtype=torch.bool)
    keep[0, -4:] = keep[1, 20:50] = False
    dirty = QKV(*(x.masked_fill(~keep[..., None, None], torch.nan) for x in qkv))
    out = run_sparse(method.layer(), dirty, GRID, text=text, attn_mask=keep)
    mask = definition(qkv, text, keep) & keep[:, None, :, None]
    assert_within_error_budget(out, *qkv, scale=method.scale, mask=mask)


def test_dense_steps_errors_and_parameters_come_with_the_base(method: SparseMethod) -> None:
    qkv, attention = method.inputs(GRID), method.layer(dense_steps="0-1")
    out = run_sparse(attention, qkv, GRID, step=1)
    assert_within_error_budget(out, *qkv, scale=method.scale)
    with pytest.raises(UsageError, match=f"{NAME} must know the latent grid"):
        run_sparse(attention, qkv, None, step=2)
    with pytest.raises(ConfigError, match=f"`topk` of {NAME} must be an integer >= 1, got 0"):
        method.config(topk=0)


def test_who_only_names_it_gets_its_schedule_too(tiny_pipeline, tmp_path, capsys) -> None:
    settings = {"topk": 2, "tile_size": [2, 2, 2], "dense_steps": "0", "dense_layers": "0"}
    command = ["attention", "explain", "--json", "--model-path", str(tiny_pipeline("wan"))]
    command += ["--attention-backend", NAME, "--attention-backend-config", json.dumps(settings)]
    with package(tmp_path):
        code = main(command)
    told, said = capsys.readouterr()
    assert code == 0, said
    layers = json.loads(told)["layers"]
    entries = {x["layer"]: x["entries"] for x in layers if x["role"] == "self"}
    ran = {layer: [(e["steps"], e["backend"]) for e in found] for layer, found in entries.items()}
    assert ran[0] == [(None, "torch_sdpa")]
    assert ran[1] == [("0", "torch_sdpa"), (None, NAME)]
    assert not any(e["fallback"] for x in layers for e in x["entries"])


def check_on_rank(folder: Path, lengths: tuple[int, ...], masked: bool) -> float:
    """Compare this rank's tokens with the method on one process; return the density there."""
    groups = parallel_groups()
    with installed(folder / str(groups.sequence.index)) as method:
        method = replace(method, layer_cls=USPAttention)
        text = TEXTS["text last"]
        qkv = method.inputs(GRID, text=text, batch=1)
        tokens = sum(lengths) + text.length
        keep = (torch.arange(tokens) % 5 != 2).unsqueeze(0) if masked else None
        call = {"attn_mask": keep, "num_replicated_suffix": text.length}
        with torch.no_grad():
            with use_parallel_groups(None):
                want = run_sparse(method.layer(strict=True), qkv, GRID, text=text, **call)
            local = QKV(*(own(x, lengths, 0, text.length) for x in qkv))
            if masked:
                call["attn_mask"] = own(keep, lengths, 0, text.length)
            attention = method.layer(strict=True)
            out = run_sparse(attention, local, GRID, text=text, **call)
        torch.testing.assert_close(out, own(want, lengths, 0, text.length))
        (entry,) = attention.report().entries
        return dict(entry.densities)[0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ring=2)], ids=["ulysses", "ring"])
def test_ranks_compute_what_one_process_does(two_ranks, tmp_path, mesh, masked) -> None:
    densities = two_ranks.run(mesh, check_on_rank, tmp_path, (67, 53), masked)
    assert 0.2 < densities[0] < 0.7
    assert densities[0] == pytest.approx(densities[1], abs=0.02)  # ragged tiles, heads of a rank


def check_trained_on_rank(folder: Path, tail: str) -> None:
    groups = parallel_groups()
    with installed(folder / str(groups.sequence.index)) as method:
        method = replace(method, layer_cls=USPAttention)
        qkv = method.inputs(GRID, batch=1)
        weight = torch.randn(qkv.query.shape, generator=torch.Generator().manual_seed(1))
        outs = []
        for here in (None, groups):
            lengths = (67, 53)
            local = [x if here is None else own(x, lengths) for x in (*qkv, weight)]
            leaves = [x.detach().requires_grad_() for x in local[:3]]
            with use_parallel_groups(here), torch.enable_grad():
                out = run_sparse(method.layer(strict=True, tail=tail), QKV(*leaves), GRID)
                grads = torch.autograd.grad(out, leaves, local[3])
            outs.append([x if here else own(x, lengths) for x in (out, *grads)])
        for got, want in zip(outs[1], outs[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tail", ["none", "pooled"])
def test_it_trains_in_a_ring(two_ranks, tmp_path, tail) -> None:
    two_ranks.run(Mesh(ring=2), check_trained_on_rank, tmp_path, tail)


@pytest.mark.parametrize("tail", ["none", "pooled"])
def test_it_sees_a_cache(method: SparseMethod, tail) -> None:
    from multimodal_gen.runtime.layers.attention.causal_cache import CacheSize, CausalCache
    from multimodal_gen.runtime.managers.forward_context import set_forward_context

    frames, height, width = 2, 8, 6
    grid = (frames, height, width)
    qkv = method.inputs(grid, batch=1)
    layer = method.layer(strict=True, tail=tail)
    size = CacheSize(
        num_layers=1,
        batch=1,
        num_kv_heads=qkv.key.shape[2],
        head_size=qkv.key.shape[3],
        chunk_tokens=qkv.key.shape[1],
        window=2,
        sink=0,
        dtype=qkv.key.dtype,
        grid=(height, width),
        tile=(2, 2),
    )
    cache = CausalCache(size)
    for chunk in range(3):
        cache.begin(chunk * size.chunk_tokens, size.chunk_tokens)
        with torch.no_grad(), set_forward_context(0, latent_grid=grid, num_steps=1):
            out = layer(*qkv, cache=cache.layers[0])
        cache.commit()
        if not chunk:
            want = run_sparse(method.layer(strict=True, tail=tail), qkv, grid)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    assert layer.report().detours == ()
    assert 0 < dict(layer.report().entries[0].densities)[0] < 0.7
