"""A seeded fuzzer over everything that users hand in: no traceback, no hang, nothing lost.

Each case is made from its number alone, so that one that fails can be run again. A case either
works or is refused by an error of this package; one that is known to be wrong has to be refused.
"""

import json
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from multimodal_gen.cli.main import main
from multimodal_gen.errors import MultimodalGenError, UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.runtime.generator import PipelineIndex, load_skeleton
from multimodal_gen.runtime.layers.attention import LocalAttention, UlyssesAttention, USPAttention
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.causal_cache import CacheSize, CausalCache
from multimodal_gen.runtime.layers.attention.config import build_config, parameters_of
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.layers.attention.selector import get_attn_backend
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import read_mapping

CASES = 2400
SHARE = 12  # of them, one in so many is part of the gate
MOST_SECONDS = 60.0  # of busy machines; what hangs takes for ever

HEADS, SIZE, GRID = 2, 32, (2, 4, 4)
TOKENS = 32
SPARSE = {
    "sla_attn": {"topk_ratio": 0.3},
    "sage_sla_attn": {"topk_ratio": 0.3},
    "video_sparse_attn": {"sparsity": 0.5},
    "sliding_tile_attn": {"window": [1, 1, 1], "tile_size": [2, 2, 2], "skip_time_steps": 0},
    "vmoba_attn": {"temporal_chunk_size": 1, "spatial_layer": 0, "st_layer": 0},
}
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1.5, float("nan"), float("inf"), 10**400, -(10**30), "", " ", "x",
    "\0", "\ud800", "0-3", "-1", "a=b", "[1", '{"a": 1}', [], [1], [None], (1, 2, 3), {}, {"a": 1},
    {1: 2}, b"x", object(), int, torch.ones(1), torch.ones(2, 2), Path("/dev/zero"), "/dev/urandom",
    "~nobody/x", "/", ".", "x" * 5000, 1 + 2j, {3}, range(3),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One case: what it does, and whether it has to be refused."""

    text: str
    run: Callable[[], object]
    wrong: bool = False


@dataclass(frozen=True)
class Place:
    """Where cases find files: a folder with some that are none, and a pipeline to spoil."""

    folder: Path
    pipeline: Path

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(str(self.folder / name) for name in ("fifo", "folder", "bad.json", "none"))


def tensors(r: random.Random) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    return [torch.randn(1, TOKENS, HEADS, SIZE, generator=generator) for _ in range(3)]


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "another dtype": lambda x: x.bfloat16(),
    "the meta device": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x[0]], layout=torch.jagged),
    "complex": lambda x: x.to(torch.complex64),
    "too few axes": lambda x: x[0],
    "heads and tokens swapped": lambda x: x.transpose(1, 2),
    "no heads": lambda x: x[:, :, :0],
    "one head": lambda x: x[:, :, :1],
    "half a head": lambda x: x[..., : SIZE // 2],
    "another batch": lambda x: x.expand(3, -1, -1, -1),
    "no tensor": lambda x: x.tolist(),
    "None": lambda x: None,
}
MASKS: dict[str, Callable[[], Any]] = {
    "bool": lambda: torch.ones(1, TOKENS, dtype=torch.bool),
    "additive": lambda: torch.zeros(1, 1, 1, TOKENS),
    "-inf": lambda: torch.full((1, TOKENS), -torch.inf),
    "NaN": lambda: torch.full((1, 1, TOKENS, TOKENS), torch.nan),
    "every pair": lambda: torch.ones(HEADS, TOKENS, TOKENS, dtype=torch.int64)[:1],
}
WRONG_MASKS: dict[str, Callable[[], Any]] = {
    "complex": lambda: torch.ones(1, TOKENS, dtype=torch.complex64),
    "sparse": lambda: torch.ones(1, TOKENS).to_sparse(),
    "meta": lambda: torch.ones(1, TOKENS, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(TOKENS)], layout=torch.jagged),
    "five axes": lambda: torch.ones(1, 1, 1, 1, TOKENS),
    "too long": lambda: torch.ones(1, TOKENS + 1),
    "a list": lambda: [True] * TOKENS,
}


def layer_of(r: random.Random, cls: Any = None) -> tuple[str, Any]:
    backend = r.choice([None, "torch_sdpa", *SPARSE])
    given = SPARSE.get(backend or "")
    scope = scope_from(
        attention_backend=backend,
        attention_backend_config=None if given is None else dict(given),
        component_attention_backends=None,
        attention_config=None,
        strict=r.random() < 0.2,
    )
    cls = cls or r.choice([LocalAttention, USPAttention, UlyssesAttention])
    site = LayerSite(name="blocks.0", layer=0)
    return f"{cls.__name__} {backend}", cls(HEADS, SIZE, site=site, scope=scope)


def calls_with_wrong_tensors(r: random.Random, place: Place) -> Case:
    name, layer = layer_of(r)
    x = tensors(r)
    position, (what, change) = r.randrange(3), r.choice([*WRONG.items()])
    every = what in ("heads and tokens swapped", "no heads", "one head", "half a head")
    for i in range(3):
        if every or i == position:
            x[i] = change(x[i])

    def run() -> object:
        with set_forward_context(0, latent_grid=GRID, num_steps=50):
            return layer(*x)

    return Case(f"{name}: {what} at {position}", run, wrong=True)


def calls_with_masks(r: random.Random, place: Place) -> Case:
    name, layer = layer_of(r, r.choice([LocalAttention, USPAttention]))
    wrong = r.random() < 0.5
    what, make = r.choice([*(WRONG_MASKS if wrong else MASKS).items()])
    x = tensors(r)

    def run() -> object:
        with set_forward_context(0, latent_grid=GRID, num_steps=50):
            return layer(*x, make())

    return Case(f"{name}: a {what} mask", run, wrong=wrong)


def calls_with_options(r: random.Random, place: Place) -> Case:
    name, layer = layer_of(r, USPAttention)
    names = ("num_replicated_prefix", "num_replicated_suffix", "num_replicated_kv_prefix")
    option = r.choice([*names, "seq_lens", "q_prefix", "attn_mask_meta"])
    value = r.choice(VALUES)
    x = tensors(r)

    def run() -> object:
        with set_forward_context(0, latent_grid=(1, 4, 4), num_steps=50):
            return layer(*x, **{option: value})

    return Case(f"{name}: {option}={value!r:.40}", run)


def contexts(r: random.Random, place: Place) -> Case:
    name, layer = layer_of(r)
    keys = ("latent_grid", "text_span", "num_steps", "current_timestep", "start", "length")
    key, value = (
        r.choice(keys),
        r.choice((*VALUES, (4, 4), (2.0, 4.0, 4.0), (-2, -4, 4), (0, 1, 1))),
    )
    x = tensors(r)

    def run() -> object:
        known: dict[str, Any] = {"current_timestep": 0, "latent_grid": GRID, "num_steps": 50}
        if key in ("start", "length"):
            known["text_span"] = TextSpan(**{"start": 0, "length": 0} | {key: value})
        else:
            known[key] = value
        with set_forward_context(**known):
            return layer(*x)

    return Case(f"{name}: {key}={value!r:.40}", run)


def constructions(r: random.Random, place: Place) -> Case:
    options = (
        "num_heads", "head_size", "num_kv_heads", "softmax_scale", "causal",
        "supported_attention_backends", "default_attention_backend", "compute_dtype", "site",
        "scope",
    )  # fmt: skip
    option, value = r.choice(options), r.choice(VALUES)
    sizes = {"num_heads": HEADS, "head_size": SIZE} | {option: value}
    return Case(f"LocalAttention({option}={value!r:.40})", lambda: LocalAttention(**sizes))


def configurations(r: random.Random, place: Place) -> Case:
    backend = r.choice([*AttentionBackendEnum])
    cls: Any = find_backend(backend, current_platform().name).config_cls
    names = [*parameters_of(cls), "nonsense", ""]
    given = {r.choice(names): r.choice((*VALUES, *place.files)) for _ in range(r.randint(1, 2))}
    return Case(f"{backend} {given!r:.60}", lambda: build_config(cls, given, backend=str(backend)))


def texts(r: random.Random, place: Place) -> Case:
    text = r.choice(
        [
            '{"a": [1, {"b": null}]}',
            "a=1,b=[2,3],c='x,y'",
            "topk_ratio=0.1",
            *place.files,
            "/dev/zero",
        ]
    )
    letters = list(text)
    for _ in range(r.randint(0, 3)):
        letters.insert(r.randrange(len(letters) + 1), r.choice('[]{}",=\\\0\n:#&*!-\ud8001e9'))
    changed = "".join(letters)
    return Case(f"read_mapping({changed!r})", lambda: read_mapping(changed))


def arguments(r: random.Random, place: Place) -> Case:
    names = [field.name for field in fields(ServerArgs)]
    given = {r.choice(names): r.choice((*VALUES, *place.files)) for _ in range(r.randint(1, 2))}
    return Case(f"ServerArgs({given!r:.80})", lambda: ServerArgs(**{"model_path": "x", **given}))


def commands(r: random.Random, place: Place) -> Case:
    typed = r.choice(
        [value for value in VALUES if isinstance(value, str)]
        + [*place.files, "10" * 20, "/dev/zero"]
    )
    folder = str(place.folder)
    # A size below one token, so that nothing is generated where the rest is right.
    small = ["generate", "--model-path", str(place.pipeline), "--height", "1", "--prompt", "x"]
    image = [*small, "--pipeline-class-name", "WanImageToVideoPipeline"]
    argv = r.choice(
        [
            ["attention", "describe", typed],
            ["attention", "list", "--head-size", typed],
            ["attention", "sta", "show", typed],
            ["attention", "sta", "tune", "--searches", typed, "--output", f"{folder}/out.json"],
            ["attention", "sta", "tune", "--searches", folder, "--output", typed],
            ["generate", "--model-path", typed, "--prompt", "x"],
            ["generate", "--model-path", folder, "--prompt", "x", "--output-path", typed],
            ["generate", "--model-path", folder, "--prompt", "x", "--num-gpus", typed],
            ["generate", "--model-path", folder, "--prompt", "x", "--attention-config", typed],
            [*small, "--prompt", typed],
            [*small, "--prompt-file", typed],
            [*small, "--config", typed],
            [*small, "--pipeline-class-name", typed],
            [*small, "--sigmas", typed],
            [*small, "--pipeline-arg", f"max_sequence_length={typed}"],
            [*small, "--lora-path", typed],
            [*small, "--quantize", f"transformer={typed}.gguf"],
            [*small, "--scheduler", typed],
            [*image, "--image-path", typed],
            [*image, "--pipeline-arg", f"image=@{typed}"],
            [typed],
        ]
    )

    def run() -> object:
        status = main(argv)
        assert status in (0, 1, 2), status
        if status:
            raise MultimodalGenError
        return status

    return Case(f"sglang {argv!r:.120}", run)


def folders(r: random.Random, place: Place) -> Case:
    name = r.choice(["model_index.json", "transformer/config.json", "vae/config.json"])
    content = json.loads((place.pipeline / name).read_text())
    key = r.choice([*content])
    plain = [v for v in VALUES if isinstance(v, (str, int, float, list, dict, type(None)))]
    value = r.choice([v for v in plain if v != {1: 2}])

    def run() -> object:
        folder = place.folder / "spoilt"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(place.pipeline, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        text = json.dumps({**content, key: value}) if r.random() < 0.9 else str(value)
        (folder / name).write_text(text, encoding="utf-8", errors="replace")
        index = PipelineIndex.read(str(folder))
        return load_skeleton(index, "float32", torch.device("cpu"))

    return Case(f"{name}: {key}={value!r:.40}", run)


KINDS = (
    calls_with_wrong_tensors, calls_with_masks, calls_with_options, contexts, constructions,
    configurations, texts, arguments, commands, folders,
)  # fmt: skip


def case_of(number: int, place: Place) -> Case:
    return KINDS[number % len(KINDS)](random.Random(number), place)


@pytest.fixture
def place(tmp_path, tiny_pipeline) -> Place:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.json").write_text('{"a": ')
    return Place(tmp_path, tiny_pipeline("wan"))


def problem_of(case: Case) -> str | None:
    """Return what is wrong with what a case did, or None."""
    started = time.perf_counter()
    try:
        case.run()
    except MultimodalGenError:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    else:
        if case.wrong:
            return "was accepted"
    seconds = time.perf_counter() - started
    return f"took {seconds:.0f} s" if seconds > MOST_SECONDS else None


def check(numbers: range, place: Place) -> None:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in numbers:
            case = case_of(number, place)
            problem = problem_of(case)
            if problem is not None:
                found.append(f"{number}: {case.text}: {problem}")
    assert not found, "\n".join(found)


def test_a_share_of_the_odd_inputs_is_taken_or_refused(place, capsys) -> None:
    # A step that all kinds take part in.
    check(range(0, CASES, SHARE + 1), place)


@pytest.mark.slow
def test_all_odd_inputs_are_taken_or_refused(place, capsys) -> None:
    check(range(CASES), place)


BLOCKS = Blocks.regular(128, 64)
PLAN = {
    "indices": torch.zeros(1, 1, 2, 1, dtype=torch.int32),
    "counts": torch.ones(1, 1, 2, dtype=torch.int32),
    "q": BLOCKS,
    "kv": BLOCKS,
}


@pytest.mark.parametrize("name", [*PLAN, "row_bits", "order"])
def test_a_plan_of_something_else_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}` must be of type (Tensor|Blocks), got 'text'"):
        BlockPlan(**{**PLAN, name: "text"})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: BlockPlan.dense(BLOCKS, BLOCKS, "nowhere"), "device"),
        (lambda: BlockPlan.from_map(None, BLOCKS, BLOCKS), "block_mask"),
        (lambda: Blocks.regular("many", 64), "total"),
        (lambda: Blocks.regular(64, None), "size"),
        (lambda: Blocks.ragged(None, None, total=3, size=2), "starts"),
        (lambda: Blocks.padded(None, 2), "lengths"),
    ],
)
def test_blocks_of_something_else_are_refused_by_name(make, name: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}` must be "):
        make()


@pytest.mark.parametrize("name", ["uniform", "causal"])
def test_a_flag_of_a_plan_is_no_text(name: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}` must be of type bool, got 'no'"):
        BlockPlan(**{**PLAN, name: "no"})


CACHE = CacheSize(
    num_layers=1,
    batch=1,
    num_kv_heads=1,
    head_size=8,
    chunk_tokens=4,
    window=2,
    dtype=torch.float32,
)
CHUNK = torch.zeros(1, 4, 1, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(CACHE, before_rope="no"), "before_rope must be True or False, got 'no'"),
        (lambda: CausalCache(CACHE, rotate="yes"), "rotate must be a function of keys and a"),
        (lambda: CausalCache(CACHE, limit_bytes="1 GiB"), "limit_bytes must be a whole number"),
        (
            lambda: CausalCache(CACHE).layers[0].append(None, CHUNK, start=0),
            r"key must be a torch.Tensor \[B, S, H, D\], got None",
        ),
        (
            lambda: CausalCache(CACHE).layers[0].append(CHUNK, 3, start=0),
            r"value must be a torch.Tensor \[B, S, H, D\], got 3",
        ),
        (
            lambda: CausalCache(CACHE).layers[0].append(CHUNK[0, 0, 0, 0], CHUNK, start=0),
            r"tokens must be in \[1, 4\], got 0",
        ),
        (
            lambda: LocalAttention(2, 8, site=LayerSite(component={})),
            "component of a LayerSite must be a name or None",
        ),
        (
            lambda: LocalAttention(2, 8, site=LayerSite(role="cross")),
            "role of a LayerSite must be an AttentionRole such as AttentionRole.CROSS, got",
        ),
        (
            lambda: LocalAttention(2, 8, site=LayerSite(layer="3")),
            "layer of a LayerSite must be an index or None, got '3'",
        ),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(make, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head_size": [1]}, r"head_size must be a whole number, got \[1\]"),
        ({"dtype": "bfloat16"}, "dtype must be a dtype such as torch.bfloat16, got 'bfloat16'"),
        ({"is_cross_attention": "no"}, "is_cross_attention must be True or False, got 'no'"),
        ({"attention_requirements": {}}, "attention_requirements must be AttentionRequirements"),
        ({"supported_attention_backends": 3}, "must be a collection of backends, got 3"),
        ({"selected_attention_backend": 3}, "attention backend must be .* member or its name"),
    ],
)
def test_a_backend_is_chosen_for_a_layer_that_can_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        get_attn_backend(**{"head_size": 64, "dtype": torch.float32, **given})


@pytest.mark.parametrize("device", ["nowhere", None, "cuda:99"])
def test_a_cache_on_no_device_is_refused(device) -> None:
    with pytest.raises(UsageError, match="`device` must be a torch device of this machine, got"):
        CausalCache(CACHE, device)
    with pytest.raises(UsageError, match="size must be a CacheSize, got None"):
        CausalCache(None)
