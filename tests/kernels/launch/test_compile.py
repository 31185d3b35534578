"""Kernels are found without a GPU, compiled ahead in processes, shipped and taken from a folder."""

import errno
import io
import json
import math
import multiprocessing
import os
import pickle
import re
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations import warm
from multimodal_gen.integrations.ahead import generation_of, write
from multimodal_gen.integrations.warm import generation_of_args, rehearse
from multimodal_gen.kernels.launch import ahead
from multimodal_gen.kernels.launch.ahead import MANIFEST, make, place_of_gpu, saved, use
from multimodal_gen.kernels.launch.launcher import compile_together
from multimodal_gen.kernels.launch.rehearsal import Noted, Rehearsal
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.layers.attention.scope import scope_from
from multimodal_gen.runtime.managers.forward_context import ForwardContext, use_forward_context
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.testing.tiny_models import make_tiny_model
from scripts import kernel_list
from tests.helpers.fakes import simulated_h100
from tests.kernels.compiling import StandInDriver, needs_gluon, pinned_release, with_oldest

pytestmark = needs_gluon
DEVICE = torch.device("cuda", 0)
GRID = (21, 30, 52)


class Counted(StandInDriver):
    """A driver that knows no launchers."""

    launcher_cls = None


@contextmanager
def simulated_gpu(cache: Path) -> Iterator[None]:
    import triton

    with pytest.MonkeyPatch.context() as patch, simulated_h100(), triton.knobs.cache.scope():
        patch.setattr(triton.runtime.driver, "_active", Counted())
        triton.knobs.cache.dir = str(cache)
        yield


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path) -> Iterator[None]:
    with simulated_gpu(tmp_path / "cache"):
        yield


def rehearsed(
    backend: str, config: dict[str, Any], steps: tuple[int, ...] = (0, 1), layer: int = 1
) -> Rehearsal:
    """Return the rehearsal of a layer of Wan 1.3B at 480p."""
    scope = scope_from(attention_backend=backend, attention_backend_config=config)
    site = LayerSite(name="blocks.attn", component="transformer", layer=layer, num_layers=4)
    with torch.inference_mode(), Rehearsal() as rehearsal:
        attend = LocalAttention(12, 128, compute_dtype=torch.bfloat16, scope=scope, site=site)
        shape = (1, math.prod(GRID), 12, 128)
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
        for step in steps:
            context = ForwardContext(
                current_timestep=step, num_steps=8, latent_grid=GRID, request_id="r"
            )
            with use_forward_context(context):
                assert attend(q, k, v).shape == shape
    return rehearsal


def quick(rehearsal: Rehearsal) -> list[Noted]:
    """Return what compiles in a second: all but the attention itself."""
    return [each for each in rehearsal.noted.values() if each.name != "attention_kernel"]


def names(rehearsal: Rehearsal) -> set[str]:
    return {each.name for each in rehearsal.noted.values()}


def test_what_a_layer_launches_is_found_without_a_gpu() -> None:
    found = rehearsed("video_sparse_attn", {"sparsity": 0.9})
    expected = {"pool_kernel", "score_kernel", "select_kernel", "gather_kernel", "steps_kernel"}
    assert names(found) == {*expected, "attention_kernel", "scatter_kernel"}


def test_dense_steps_are_found_beside_sparse_ones() -> None:
    config = {"sparsity": 0.9, "dense_steps": "0"}
    sparse = rehearsed("video_sparse_attn", config, steps=(1,))
    both = rehearsed("video_sparse_attn", config)
    assert sparse.noted.keys() < both.noted.keys()


def test_a_step_of_the_same_kind_needs_nothing_more() -> None:
    config = {"sparsity": 0.9}
    once = rehearsed("video_sparse_attn", config, steps=(1,))
    assert once.noted.keys() == rehearsed("video_sparse_attn", config, steps=(1, 2, 3)).noted.keys()


def test_the_table_of_kernels_has_a_line_for_every_backend() -> None:
    table = kernel_list.PAGE.read_text().partition("<!-- kernels -->")[2]
    series = pinned_release("newest").rpartition(".")[0]
    assert f"(triton {series}, H100)" in table
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(kernel_list.BACKENDS)


def test_the_table_of_kernels_is_written_with_the_newest_triton_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = kernel_list.PAGE.read_text()
    for release in (None, "3.5.0"):
        monkeypatch.setattr(kernel_list, "installed_release", lambda found=release: found)
        with pytest.raises(SystemExit, match="2"):
            kernel_list.main([])
        assert f"got {release or 'none'}; install that" in capsys.readouterr().err
    assert kernel_list.PAGE.read_text() == before


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=[pytest.mark.slow] if with_oldest() else [])
        for name in kernel_list.BACKENDS
    ],
)
def test_the_table_of_kernels_says_what_first_calls_compile(backend: str) -> None:
    """Else run scripts/kernel_list.py."""
    assert f"\n{kernel_list.row(backend)}\n" in kernel_list.PAGE.read_text()


def test_where_a_list_of_blocks_begins_makes_no_kernel_of_its_own() -> None:
    """Layers of V-MoBA read counts and lengths of their parts from inside of one tensor."""
    config = {"temporal_chunk_size": 3, "spatial_chunk_size": [5, 13], "st_chunk_size": [7, 5, 13]}
    config |= {"moba_select_mode": "topk", "temporal_topk": 2, "spatial_topk": 6, "st_topk": 18}
    kinds = [rehearsed("vmoba_attn", {**config, "first_full_step": 0}, layer=n) for n in range(3)]
    noted = {key: each for kind in kinds for key, each in kind.noted.items()}
    attention = [each for each in noted.values() if each.name == "attention_kernel"]
    assert {each.options["C"].fast for each in attention} == {True, False}
    assert len(attention) == 2


def test_what_was_computed_on_the_cpu_is_read_back_and_nothing_else_is() -> None:
    with Rehearsal():
        moved = torch.arange(6).to(DEVICE)
        assert moved.device == DEVICE
        assert (moved[2:] * 2).tolist() == [4, 6, 8, 10]
        assert torch.tensor([True, False, True], device=DEVICE).nonzero().shape == (2, 1)
        unknown = torch.empty(6, device=DEVICE)
        assert unknown[moved > 3].shape == (2,)
        with pytest.raises(RuntimeError, match="meta"):
            unknown.tolist()
        moved += unknown.to(torch.int64)
        with pytest.raises(RuntimeError, match="meta"):
            moved.tolist()
    assert torch.arange(3).device.type == "cpu"


def test_kernels_are_compiled_in_processes_and_once(tmp_path: Path) -> None:
    def binaries() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.cubin")}

    noted = quick(rehearsed("video_sparse_attn", {"sparsity": 0.9}))
    made = make(noted, workers=2)
    assert {each.name for each in made} == {each.name for each in noted}
    compiled = binaries()
    assert {file.parent.name for file in compiled} == {each.key for each in made}
    again = make([*noted, *noted], workers=2)
    assert [each.key for each in again] == [each.key for each in made]
    assert binaries() == compiled


def test_what_differs_in_options_alone_compiles_in_threads() -> None:
    import triton

    (first, *_) = quick(rehearsed("video_sparse_attn", {"sparsity": 0.9}))
    rest = {name: value for name, value in first.options.items() if name != "enable_fp_fusion"}
    variants = [{**rest, "num_warps": warps} for warps in (1, 2)]
    met, threads = threading.Barrier(len(variants), timeout=60), set()

    def listener(**told: object) -> None:
        met.wait()  # until the other one is compiled, too
        threads.add(threading.get_ident())

    triton.knobs.compilation.listener = listener
    try:
        compile_together(first.kernel, first.grid, first.arguments, variants)
        assert len(threads) == len(variants)
        triton.knobs.compilation.listener = lambda **told: pytest.fail("it was compiled again")
        for options in variants:
            first.kernel.warmup(*first.arguments, grid=first.grid, enable_fp_fusion=True, **options)
    finally:
        triton.knobs.compilation.listener = None


def test_an_option_that_does_not_compile_raises_where_it_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, *_) = quick(rehearsed("video_sparse_attn", {"sparsity": 0.9}))
    rest = {name: value for name, value in first.options.items() if name != "enable_fp_fusion"}
    fails, works = ({**rest, "num_warps": warps} for warps in (8, 4))
    first.kernel.warmup(*first.arguments, grid=first.grid, **first.options)
    original, tried = first.kernel.compile, []

    def compile_one(source: Any, *, options: dict[str, Any], **more: Any) -> Any:
        tried.append(options["num_warps"])
        if options["num_warps"] == 8:
            raise RuntimeError("too many registers")
        return original(source, options=options, **more)

    monkeypatch.setattr(first.kernel, "compile", compile_one)
    for _ in range(2):  # what failed leaves nothing behind
        compile_together(first.kernel, first.grid, first.arguments, [fails, works])
    assert sorted(tried) == [4, 8, 8]
    with pytest.raises(RuntimeError, match="too many registers"):
        first.kernel.warmup(*first.arguments, grid=first.grid, enable_fp_fusion=True, **fails)


def test_a_kernel_that_does_not_compile_is_named() -> None:
    (first, *_) = quick(rehearsed("video_sparse_attn", {"sparsity": 0.9}))
    with pytest.raises(UsageError, match=rf"{first.name} must compile, it did not"):
        make([first._replace(arguments=())], workers=1)


def test_what_fails_leaves_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second, *_) = quick(rehearsed("video_sparse_attn", {"sparsity": 0.9}))
    compile_one = ahead._compile

    def slowly(noted: Noted) -> ahead.Made:
        if noted.arguments:
            (tmp_path / "begun").touch()
            time.sleep(60)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        return compile_one(noted)

    monkeypatch.setattr(ahead, "_compile", slowly)
    with (
        pytest.raises(UsageError, match="must compile, it did not"),
        saved(tmp_path / "a" / "b", place_of_gpu(DEVICE)),
    ):
        make([first, second._replace(arguments=())], workers=2)
    assert not multiprocessing.active_children()
    assert [file.name for file in tmp_path.iterdir()] == ["begun"]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Noted]]:
    """A folder of kernels that was moved, and what it was made from."""
    folder = tmp_path_factory.mktemp("kernels")
    with simulated_gpu(folder / "cache"):
        noted = quick(rehearsed("video_sparse_attn", {"sparsity": 0.9}))[:2]
        with saved(folder / "made", place_of_gpu(DEVICE)):
            make(noted, workers=2)
    return (folder / "made").rename(folder / "moved"), noted


@pytest.fixture
def shipped(moved: tuple[Path, list[Noted]], tmp_path: Path) -> tuple[Path, list[Noted]]:
    """A copy of it that a test may damage, and what it was made from."""
    folder, noted = moved
    return shutil.copytree(folder, tmp_path / "shipped"), noted


def test_a_folder_can_be_moved_and_its_kernels_are_taken(
    shipped: tuple[Path, list[Noted]], tmp_path: Path
) -> None:
    import triton

    folder, noted = shipped
    triton.knobs.cache.dir = str(tmp_path / "another")
    texts = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    assert not any(str(tmp_path.parent).encode() in text for text in texts)
    assert use(folder, DEVICE) == len(noted)
    assert use(folder, DEVICE) == 0
    found: list[bool] = []
    triton.knobs.compilation.listener = lambda **told: found.append(told["cache_hit"])
    try:
        for each in noted:
            each.kernel.device_caches.clear()
            each.kernel.warmup(*each.arguments, grid=each.grid, **each.options)
    finally:
        triton.knobs.compilation.listener = None
    assert found == [True] * len(noted)


def test_a_folder_for_another_gpu_or_release_is_refused(
    shipped: tuple[Path, list[Noted]],
) -> None:
    folder, noted = shipped
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": {}}))
    with pytest.raises(UsageError, match=r"it has no files; make it anew$"):
        use(folder, DEVICE)
    changed = {"capability": "8.0", "machine": "sparc", "multimodal_gen": "0.0.9"}
    changed |= {"torch": "1.0", "triton": "3.0.0"}
    assert {"gpu", *changed} == manifest["place"].keys()
    for name, value in changed.items():
        other = {**manifest, "place": {**manifest["place"], name: value}}
        (folder / MANIFEST).write_text(json.dumps(other))
        message = rf"must hold kernels for .* was made for .*{re.escape(value)}.*; run"
        with pytest.raises(UsageError, match=message):
            use(folder, DEVICE)
    same = {**manifest, "place": {**manifest["place"], "gpu": "NVIDIA H200"}}
    (folder / MANIFEST).write_text(json.dumps(same))
    assert use(folder, DEVICE) == len(noted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got '.*': Expecting value"),
        ("[1]", "got '.*'; make it anew|got '.*': 'list'"),
        ('{"format": 1}', "got '.*': it has format 1, not 2; make it anew"),
        ('{"format": 2}', "got '.*': 'place'"),
        ('{"format": 2, "place": {"x": 1}, "files": {}}', "got '.*': .*unexpected keyword"),
        (None, "got '.*': the file cannot be read: No such file or directory; check the path$"),
    ],
    ids=["empty", "list", "format", "place", "unknown", "missing"],
)
def test_a_folder_of_another_kind_is_refused(
    text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    start = r"^compiled_kernels \(--compiled-kernels\) must be a folder that `sglang attention warm"
    with pytest.raises(UsageError, match=rf"{start} --output` made, {message}"):
        use(tmp_path, DEVICE)


@pytest.mark.parametrize("damage", ["missing entry", "missing file", "empty file", "other text"])
def test_a_damaged_folder_is_refused_and_nothing_of_it_is_taken(
    damage: str, shipped: tuple[Path, list[Noted]], tmp_path: Path
) -> None:
    import triton

    folder, _ = shipped
    (*_, binary), (*_, group) = (sorted(folder.glob(each)) for each in ("*/*.cubin", "*/__grp__*"))
    if damage == "missing entry":
        shutil.rmtree(binary.parent)
    elif damage == "missing file":
        binary.unlink()
    elif damage == "empty file":
        binary.write_bytes(b"")
    else:
        group.write_text("{}")
    cache = tmp_path / "another"
    triton.knobs.cache.dir = str(cache)
    with pytest.raises(UsageError, match=r"is missing or was changed; copy it again"):
        use(folder, DEVICE)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_named_and_stays_clean(
    shipped: tuple[Path, list[Noted]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    folder, _ = shipped
    cache = tmp_path / "another"
    triton.knobs.cache.dir = str(cache)

    def copy_half(source: Path, target: Path) -> None:
        target.mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copytree", copy_half)
    with pytest.raises(UsageError, match=r"^Triton's cache must be .* '.*another': No space left"):
        use(folder, DEVICE)
    assert not [*cache.iterdir()]


def test_a_folder_is_made_anew_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    place = place_of_gpu(DEVICE)
    message = r"^--output must be a new folder, '.*there' exists; remove it$"
    with pytest.raises(UsageError, match=message), saved(tmp_path / "there", place):
        pass
    for error in (RuntimeError("fails"), FileNotFoundError(errno.ENOENT, "gone", "gcc")):
        with (
            pytest.raises(type(error), match=f"^{re.escape(str(error))}$"),
            saved(tmp_path / "no" / "half", place),
        ):
            raise error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["there"]


def test_no_folder_is_made_where_nothing_compiles_and_no_bar_is_shown_in_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm, "pick_device", lambda device: DEVICE)
    folder = make_tiny_model("wan", tmp_path / "wan")
    given: Any = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2}
    args = ServerArgs(
        model_path=str(folder), prompt="A fox", attention_backend="torch_sdpa", **given
    )
    capfd.readouterr()
    with pytest.raises(UsageError, match=r"^--output must be given for .* that launches none;"):
        warm.warm(args, tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists()
    assert warm.warm(args)[1] == ()
    assert "Loading" not in capfd.readouterr().err


def test_a_size_that_is_not_generated_is_not_rehearsed(tmp_path: Path) -> None:
    folder = make_tiny_model("wan", tmp_path / "wan")
    args = ServerArgs(model_path=str(folder), prompt="A fox", height=127, width=128)
    with pytest.raises(UsageError, match=r"^--height must be a multiple of 16 .*; try 112 or 128$"):
        generation_of_args(args, DEVICE)


@pytest.mark.parametrize("family", ["wan", "hunyuan_video", "flux", "qwen_image"])
def test_a_pipeline_is_rehearsed_without_its_weights(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / family)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    args = ServerArgs(
        model_path=str(folder),
        prompt="A fox",
        attention_backend="video_sparse_attn",
        attention_backend_config={"sparsity": 0.9},
        height=480,
        width=832,
        num_inference_steps=4,
        dtype="bfloat16",
    )
    found = {each.name for each in rehearse(generation_of_args(args, DEVICE))}
    assert {"attention_kernel", "pool_kernel", "select_kernel", "scatter_kernel"} <= found


def test_a_loaded_pipeline_is_rehearsed_as_one_without_weights_is(tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    folder = make_tiny_model("wan", tmp_path / "wan")
    size = {"height": 480, "width": 832, "num_frames": 9, "num_inference_steps": 4}
    backend: Any = {
        "attention_backend": "video_sparse_attn",
        "attention_backend_config": {"sparsity": 0.9},
    }
    args = ServerArgs(model_path=str(folder), prompt="A fox", dtype="bfloat16", **size, **backend)
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    generation = generation_of(pipe, size, scope_from(**backend), None)
    stream = io.BytesIO()
    write(replace(generation, device=DEVICE), stream)
    stream.seek(0)
    assert pickle.load(stream) == sys.path
    found = rehearse(pickle.load(stream))
    wanted = rehearse(generation_of_args(args, DEVICE))
    assert Counter(each.name for each in found) == Counter(each.name for each in wanted)
    assert all(x.device.type == "cpu" for x in pipe.transformer.parameters())
