"""The example of the guide to sparse methods does all that its author is told.

Locally, with text and padding, on ranks, over a cache, with a tail, with gradients, under `apply`.
"""

import ast
import importlib
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from multimodal_gen.cli.main import main
from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime import backend_names
from multimodal_gen.runtime.distributed.groups import parallel_groups, use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import USPAttention
from multimodal_gen.runtime.layers.attention.backends import registry
from multimodal_gen.runtime.layers.attention.causal_cache import CacheSize, CausalCache
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend, SparseMethodImpl
from multimodal_gen.runtime.layers.attention.sparse.router import (
    BlockStats,
    Budget,
    Limits,
    Router,
    SparseLayer,
)
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from tests.helpers.denoisers import COMMON
from tests.helpers.inputs import QKV
from tests.helpers.methods import Blocks, Defined, tiles
from tests.helpers.processes import own
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import (
    SparseMethod,
    run_sparse,
    text_places,
    tokens_of_tiles,
)
from tests.helpers.tail import pooled_attention
from tests.helpers.tolerance import assert_within_error_budget

GUIDES = Path(__file__).parents[5] / "docs" / "pages" / "guides"
GUIDE, MIGRATING = GUIDES / "sparse-method.md", GUIDES / "migrating.md"
NAME = "near_first_attn"
GRID, TILE, TOPK, DECAY = (5, 4, 6), (2, 2, 2), 3, 0.4
TEXTS = text_places(GRID, 11)
SETTINGS = {"topk": TOPK, "decay": DECAY, "tile_size": TILE}


def example(marker: str = "class NearFirstBackend") -> str:
    fences = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (found,) = [text for text in fences if marker in text]
    return found


def forget() -> None:
    for remembered in (registry._read_plugins, registry.current_environment):
        remembered.cache_clear()
    registry.cpu_environment.cache_clear()


@contextmanager
def package(folder: Path, text: str | None = None) -> Iterator[None]:
    """Have the example, or another text, as a package with the entry point of the guide."""
    (entry,) = re.findall(rf'^({NAME} = ".*")$', GUIDE.read_text(), re.M)
    code, info = folder / "your_package", folder / "your_package-1.0.dist-info"
    for made in (code, info):
        made.mkdir(parents=True, exist_ok=True)
    (code / "__init__.py").touch()
    (code / f"{NAME}.py").write_text(text or example())
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
        backend_names._PLUGINS.pop(NAME, None)
        for name in ("your_package", f"your_package.{NAME}"):
            sys.modules.pop(name, None)
        forget()


@contextmanager
def installed(folder: Path, text: str | None = None) -> Iterator[SparseMethod]:
    """Have the example, or another text, installed and imported."""
    with package(folder, text):
        module = importlib.import_module(f"your_package.{NAME}")
        backend = module.NearFirstBackend.backend
        yield SparseMethod(backend=backend, given=SETTINGS)


@pytest.fixture
def method(tmp_path: Path) -> Iterator[SparseMethod]:
    with installed(tmp_path) as found:
        yield found


def cache_size(
    chunk: tuple[int, int, int], *, window: int, heads: int, head_size: int
) -> CacheSize:
    """Return the size of a cache of one layer that keeps chunks of so many frames tile by tile."""
    return CacheSize(
        num_layers=1,
        batch=2,
        num_kv_heads=heads,
        head_size=head_size,
        chunk_tokens=math.prod(chunk),
        window=window,
        sink=0,
        dtype=torch.float32,
        grid=chunk[1:],
        tile=TILE[1:],
    )


def near_first(
    qkv: QKV, blocks: Blocks, _: Blocks, *, frames: int, token_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Keep the best tiles by their means, less what distance takes off: bool [B, H, N, N]."""
    batch, _, heads, size = qkv.query.shape
    chosen = torch.zeros(batch, heads, len(blocks), len(blocks), dtype=torch.bool)
    times = [i // (len(blocks) // -(-frames // TILE[0])) for i in range(len(blocks))]
    for b, h in product(range(batch), range(heads)):
        real = [[t for t in block if token_mask is None or token_mask[b, t]] for block in blocks]
        query, key = (
            [x[b, tokens, h * x.shape[2] // heads].double().mean(0) for tokens in real]
            for x in (qkv.query, qkv.key)
        )
        for i, mean in enumerate(query):
            scores = {
                j: float(mean @ key[j]) * size**-0.5 - DECAY * abs(times[i] - times[j])
                for j in range(len(blocks))
                if real[j]
            }
            chosen[b, h, i, sorted(scores, key=scores.__getitem__)[-TOPK:]] = True
    return chosen


def defined(method: SparseMethod, grid: tuple[int, int, int] = GRID) -> Defined:
    """Return the method with its definition."""
    choose = partial(near_first, frames=grid[0])
    return Defined(method=method, cut=tiles(*TILE), choose=choose, grid=grid)


def some_masked(text: TextSpan | None) -> torch.Tensor:
    """Return tokens that count, bool [2, S]."""
    token_mask = torch.ones(2, math.prod(GRID) + (text.length if text else 0), dtype=torch.bool)
    token_mask[0, -4:] = token_mask[1, 20:50] = False
    return token_mask


def test_the_example_is_short() -> None:
    assert len(example().splitlines()) <= 80
    (router,) = (x for x in ast.parse(example()).body if "Router" in getattr(x, "name", ""))
    assert [x.name for x in router.body if isinstance(x, ast.FunctionDef)] == [
        "cut",
        "budget",
        "choose",
    ], "what is to be written, and the text below the example explains"


def test_what_the_guide_says_that_a_router_may_say_is_there() -> None:
    may = GUIDE.read_text().partition("## What a router may say")[2].partition("## What cannot")[0]
    migrating = MIGRATING.read_text().partition("| a router |")[2]
    records = (BlockStats, Budget, Limits, SparseLayer, *SparseBackend.__mro__[:-1])
    known = {*dir(Router), "SparseBackend", "settings", "stats", "self", "tail", "keys"}
    known |= {name for record in records for name in record.__annotations__}
    first = re.findall(r"^\| (`.*?) \|", may, re.M)
    second = re.findall(r"^\| .* \| (.*) \|$", migrating, re.M)
    names = {x for cell in (*first, *second) for x in re.findall(r"`(\w+)", cell)}
    assert names <= known
    assert len(names) > 30
    assert {x for x in vars(BlockStats) if f"`{x}`" in may} >= {"scores", "best", "top", "in_time"}


@pytest.mark.usefixtures("method")
def test_the_test_that_the_guide_shows_passes() -> None:
    names: dict[str, Any] = {}
    exec(compile(example("def test_it_attends"), str(GUIDE), "exec"), names)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    test()


def limit(patch: pytest.MonkeyPatch) -> None:
    """Give the installed example the router that the guide has for limits."""
    names: dict[str, type] = {}
    exec(compile(example("class OneCallRouter"), "limits.py", "exec"), names)
    backend = sys.modules[f"your_package.{NAME}"].NearFirstBackend
    patch.setattr(backend, "router", names["OneCallRouter"])


@pytest.fixture
def limited(method: SparseMethod, monkeypatch: pytest.MonkeyPatch) -> SparseMethod:
    """The example with the limits of the guide."""
    limit(monkeypatch)
    return method


def test_what_it_cannot_do_over_a_cache_is_dense_with_its_reason(limited: SparseMethod) -> None:
    size = cache_size((2, 4, 6), window=1, heads=limited.heads, head_size=limited.head_size)
    reason = "keys in a cache are those of several calls: it counts frames from the first one"
    qkv = limited.inputs((2, 4, 6))
    for strict in (False, True):
        cache, layer = CausalCache(size), limited.layer(strict=strict)
        cache.begin(0, size.chunk_tokens)
        with torch.no_grad(), set_forward_context(0, latent_grid=(2, 4, 6), num_steps=1):
            if strict:
                with pytest.raises(UnsupportedBackendError, match=reason):
                    layer(*qkv, cache=cache.layers[0])
            else:
                out = layer(*qkv, cache=cache.layers[0])
                assert_within_error_budget(out, *qkv, scale=limited.scale)
                (entry,) = layer.report().detours
                assert reason in entry.selection.reason


def check_limited_on_rank(folder: Path) -> None:
    lengths, groups = (67, 53), parallel_groups()
    with installed(folder / str(groups.rank)) as method, pytest.MonkeyPatch.context() as patch:
        limit(patch)
        method = replace(method, layer_cls=USPAttention)
        local = QKV(*(own(x, lengths).requires_grad_() for x in method.inputs(GRID, batch=1)))
        run_sparse(method.layer(strict=True), local, GRID).sum().backward()
        far = method.layer(strict=True, decay=2.0)
        with torch.no_grad():
            run_sparse(far, local, GRID)
        with pytest.raises(UnsupportedBackendError, match="its distances grow with the ranks"):
            run_sparse(far, local, GRID)


def test_what_it_cannot_train_in_a_ring_is_refused(two_ranks, tmp_path) -> None:
    two_ranks.run(Mesh(ring=2), check_limited_on_rank, tmp_path)


@pytest.mark.slow_cases("text first")
@pytest.mark.parametrize("where", TEXTS)
def test_it_attends_to_the_mask_of_its_definition(method: SparseMethod, where: str) -> None:
    text = TEXTS[where]
    attention = method.layer(strict=True, kv_heads=1)
    defined(method).check(text, layer=attention)
    (entry,) = attention.report().entries
    assert str(entry.selection.backend) == NAME
    assert 0.1 < dict(entry.densities)[0] < 0.7
    if text is None:
        share = TOPK / len(tokens_of_tiles(GRID, TILE))
        assert dict(entry.densities)[0] == pytest.approx(share, abs=0.05)


def test_padding_has_no_influence_whatever_it_holds(method: SparseMethod) -> None:
    text = TEXTS["text last"]
    defined(method).check(text, token_mask=some_masked(text))


@pytest.mark.parametrize("where", TEXTS)
def test_a_tail_counts_other_tiles_by_their_means(method: SparseMethod, where: str) -> None:
    text = TEXTS[where]
    token_mask = None if text is None else some_masked(text)
    defined(method).check(text, token_mask=token_mask, tail="pooled")


@pytest.mark.parametrize("tail", ["none", "pooled"])
@pytest.mark.parametrize("where", ["no text", "text last"])
def test_gradients_are_those_of_its_definition(method: SparseMethod, where: str, tail: str) -> None:
    defined(method).check_gradients(TEXTS[where], tail=tail)


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


def check_on_rank(
    folder: Path, lengths: tuple[int, ...], masked: bool, code: str | None = None
) -> float:
    """Compare this rank's tokens with the method on one process; return the density there."""
    groups = parallel_groups()
    with installed(folder / str(groups.sequence.index), code) as method:
        method = replace(method, layer_cls=USPAttention)
        text = TEXTS["text last"]
        qkv = method.inputs(GRID, text=text, batch=1)
        tokens = sum(lengths) + text.length
        token_mask = (torch.arange(tokens) % 5 != 2).unsqueeze(0) if masked else None
        call = {"attn_mask": token_mask, "num_replicated_suffix": text.length}
        with torch.no_grad():
            with use_parallel_groups(None):
                want = run_sparse(method.layer(strict=True), qkv, GRID, text=text, **call)
            local = QKV(*(own(x, lengths, 0, text.length) for x in qkv))
            if masked:
                call["attn_mask"] = own(token_mask, lengths, 0, text.length)
            attention = method.layer(strict=True)
            out = run_sparse(attention, local, GRID, text=text, **call)
        torch.testing.assert_close(out, own(want, lengths, 0, text.length))
        (entry,) = attention.report().entries
        return dict(entry.densities)[0]


@pytest.mark.slow_cases("ring-True", "ulysses-False")
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
def test_it_chooses_among_all_that_a_cache_shows(method: SparseMethod, tail: str) -> None:
    chunk, window = (2, 4, 6), 2
    size = cache_size(chunk, window=window, heads=method.heads, head_size=method.head_size)
    cache, attention = CausalCache(size), method.layer(strict=True, tail=tail)
    video = method.inputs((3 * chunk[0], *chunk[1:]))
    for number in range(3):
        own = slice(number * size.chunk_tokens, (number + 1) * size.chunk_tokens)
        cache.begin(own.start, size.chunk_tokens)
        with torch.no_grad(), set_forward_context(0, latent_grid=chunk, num_steps=1):
            out = attention(*(x[:, own] for x in video), cache=cache.layers[0])
        cache.commit()
        # As if the visible chunks were one video, of which the last rows are computed.
        first = max(0, own.stop - window * size.chunk_tokens)
        seen = QKV(*(x[:, first : own.stop] for x in video))
        grid = (seen.query.shape[1] // math.prod(chunk[1:]), *chunk[1:])
        mask, blocks = defined(method, grid).mask(seen), tokens_of_tiles(grid, TILE)
        want, _ = reference_attention(*seen, scale=method.scale, mask=mask)
        if tail == "pooled":
            want = pooled_attention(*seen, mask, blocks, scale=method.scale)
        want = want[:, -size.chunk_tokens :]
        torch.testing.assert_close(out.double(), want.double(), rtol=1e-4, atol=1e-5)
    assert attention.report().detours == ()
    assert 0 < dict(attention.report().entries[0].densities)[0] < 0.7


def output(model: torch.nn.Module) -> torch.Tensor:
    return model(**COMMON["wan"].make()[1], return_dict=False)[0]


def asking(**settings: object) -> dict[str, object]:
    given = {"tile_size": list(TILE), "topk": TOPK, "decay": DECAY, **settings}
    return {"attention_backend": NAME, "attention_backend_config": given, "strict": True}


def test_apply_runs_it_in_every_self_attention_of_a_model(
    method: SparseMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = [], SparseMethodImpl.forward

    def noted(self, query, key, value, *rest, **more):
        out = forward(self, query, key, value, *rest, **more)
        calls.append((out.clone(), QKV(query, key, value), self.softmax_scale))
        return out

    monkeypatch.setattr(SparseMethodImpl, "forward", noted)
    model = COMMON["wan"].make()[0]
    with torch.no_grad(), apply(model, **asking()) as handle:
        found = output(model)
        report = handle.report()
    assert len(calls) == len(model.blocks)
    for out, qkv, scale in calls:
        mask = defined(method, (3, 3, 5)).mask(qkv)
        assert_within_error_budget(out, *qkv, scale=scale, mask=mask)
    ran = {layer.name: e for layer in report.layers for e in layer.entries if e.calls}
    ours = [e for name, e in ran.items() if "attn1" in name]
    assert [str(e.selection.backend) for e in ours] == [NAME] * len(model.blocks)
    assert all(0 < e.density < 0.7 for e in ours)
    with torch.no_grad():
        stock = output(model)
        assert not torch.allclose(found, stock, rtol=1e-3, atol=1e-4)
        with apply(model, **asking(topk=99)):
            torch.testing.assert_close(output(model), stock, rtol=1e-4, atol=1e-5)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output(model).square().mean().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.usefixtures("method")
@pytest.mark.parametrize("tail", ["none", "pooled"])
def test_a_model_trains_under_apply(tail: str) -> None:
    model = COMMON["wan"].make()[0]
    stock = gradients(model)
    with apply(model, **asking(tail=tail)) as handle:
        plain = gradients(model)
        model.enable_gradient_checkpointing()
        again = gradients(model)
        model.disable_gradient_checkpointing()
        layers = handle.report().layers
    ran = {str(e.selection.backend) for x in layers for e in x.entries if "attn1" in x.name}
    assert ran == {NAME}
    with apply(model, **asking(topk=99)):
        all_tiles = gradients(model)
    name = "blocks.0.attn1.to_q.weight"
    assert plain.keys() == again.keys() == all_tiles.keys() == stock.keys()
    assert not torch.allclose(plain[name], stock[name], rtol=1e-2, atol=0)
    for name, wanted in stock.items():
        torch.testing.assert_close(again[name], plain[name])
        torch.testing.assert_close(all_tiles[name], wanted, rtol=1e-3, atol=1e-6)


def check_applied_on_rank(folder: Path, tail: str) -> None:
    groups = parallel_groups()
    with installed(folder / str(groups.rank)), torch.no_grad():
        model = COMMON["wan"].make()[0]
        with use_parallel_groups(None), apply(model, **asking(tail=tail)):
            want = output(model)
        with apply(model, **asking(tail=tail)) as handle:
            torch.testing.assert_close(output(model), want, rtol=1e-4, atol=1e-5)
            notes = handle.report().notes
    assert notes[-1].startswith("transformer: 2 ranks share the sequence")


@pytest.mark.parametrize("tail", ["none", "pooled"])
def test_ranks_share_a_model_under_apply(two_ranks, tmp_path, tail: str) -> None:
    two_ranks.run(Mesh(ring=2), check_applied_on_rank, tmp_path, tail)
