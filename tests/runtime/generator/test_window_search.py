import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.sampling import output_size
from multimodal_gen.runtime.generator.window_search import WindowSearch
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    POSITIVE,
    SearchFile,
    branch_folder,
    search_name,
)
from multimodal_gen.runtime.server_args import ServerArgs


@pytest.fixture
def model(tiny_pipeline, tmp_path) -> Path:
    """Return a copy of the tiny Wan without its weights."""
    ignored = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(tiny_pipeline("wan"), tmp_path / "models" / "wan", ignore=ignored))


def args(model_path: object = "models/wan", **changes: object) -> ServerArgs:
    return ServerArgs(
        **{
            "model_path": str(model_path),
            "dtype": "float32",
            "prompt": "",
            "backend": "sglang",
            "attention_backend": "sliding_tile_attn",
            "attention_backend_config": {"tile_size": [1, 2, 2]},
            "seed": 0,
            **changes,
        }
    )


def leave_file(folder: Path, search: WindowSearch, prompt: str) -> Path:
    """Leave what a finished search of a prompt leaves."""
    losses = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    found = SearchFile(windows=((1, 1, 1),), l2=losses, l1=losses, tiles=(3, 2, 3))
    path = branch_folder(folder, POSITIVE, width=96, height=64) / search_name(prompt)
    settings = {"prompt": prompt, **search._settings}
    replace(found, settings=settings, tile_size=search._tile_size).write(path)
    return path


def test_repeated_prompts_are_searched_once_and_finished_ones_not_again(model, tmp_path) -> None:
    first = WindowSearch(args(model), ["a fox", "a cat", "a fox"], tmp_path)
    assert (first.done, first.pending) == ((), ("a fox", "a cat"))
    leave_file(tmp_path, first, "a fox")
    assert first.num_steps is None
    second = WindowSearch(args(model), ["a fox", "a cat"], tmp_path)
    assert (second.done, second.pending) == (("a fox",), ("a cat",))
    assert second.num_steps == 1


def test_a_finished_search_is_found_without_the_pipelines_library(
    model, tmp_path, monkeypatch
) -> None:
    leave_file(tmp_path, WindowSearch(args(model), ["a fox"], tmp_path), "a fox")
    monkeypatch.setattr(PipelineIndex, "read", None)
    assert WindowSearch(args(model), ["a fox"], tmp_path).done == ("a fox",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_inference_steps": 30}, "num_inference_steps None, this search has 30; name another"),
        ({"seed": 7}, "seed 0, this search has 7"),
        ({"dtype": "bfloat16"}, "dtype 'float32', this search has 'bfloat16'"),
        ({"attention_backend_config": {"tile_size": [6, 8, 8]}}, r"tile_size \[1, 2, 2\], this"),
    ],
)
def test_a_search_with_other_settings_is_refused_with_both_values(
    model, tmp_path, changes, message
) -> None:
    leave_file(tmp_path, WindowSearch(args(model), ["a fox"], tmp_path), "a fox")
    with pytest.raises(UsageError, match=message):
        WindowSearch(args(model, **changes), ["a fox"], tmp_path)


def test_a_search_of_another_model_of_that_name_is_refused(model, tmp_path) -> None:
    leave_file(tmp_path, WindowSearch(args(model), ["a fox"], tmp_path), "a fox")
    other = Path(shutil.copytree(model, tmp_path / "others" / "wan"))
    with pytest.raises(UsageError, match=r"model '/.*/models/wan', this search has '/.*/others/"):
        WindowSearch(args(other), ["a fox"], tmp_path)
    link = tmp_path / "link"
    link.symlink_to(model)
    assert WindowSearch(args(link), ["a fox"], tmp_path).done == ("a fox",)


def test_a_search_of_a_model_that_changed_since_is_refused(model, tmp_path) -> None:
    leave_file(tmp_path, WindowSearch(args(model), ["a fox"], tmp_path), "a fox")
    path = model / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "_diffusers_version": "0"}))
    assert WindowSearch(args(model), ["a fox"], tmp_path).done == ("a fox",)
    path.write_text(json.dumps({**config, "num_layers": 30}))
    with pytest.raises(UsageError, match=r"denoisers '[0-9a-f]{16}', this search has '[0-9a-f]"):
        WindowSearch(args(model), ["a fox"], tmp_path)
    path.unlink()
    with pytest.raises(UsageError, match=r"transformer/config.json of .* must be a JSON file"):
        WindowSearch(args(model), ["a fox"], tmp_path)


def test_a_damaged_search_file_is_named_in_full_with_the_remedy(model, tmp_path) -> None:
    path = leave_file(tmp_path, WindowSearch(args(model), ["a fox"], tmp_path), "a fox")
    path.write_text("{")
    message = (
        f"search file {str(path)!r} must be a readable JSON file: .*; delete it to search again"
    )
    with pytest.raises(ConfigError, match=message):
        WindowSearch(args(), ["a fox"], tmp_path)


@pytest.mark.parametrize(
    ("family", "pipe", "changes", "size"),
    [
        ("wan", SimpleNamespace(), {}, (832, 480)),  # the defaults of the signature
        ("wan", SimpleNamespace(), {"width": 96, "height": 64}, (96, 64)),
        ("flux", SimpleNamespace(default_sample_size=128, vae_scale_factor=8), {}, (1024, 1024)),
        ("flux", SimpleNamespace(), {"width": 96}, (96, "default")),
    ],
)
def test_the_size_in_a_folder_name_is_that_of_the_output(
    tiny_pipeline, family, pipe, changes, size
) -> None:
    index = PipelineIndex.read(str(tiny_pipeline(family)))
    assert output_size(pipe, index, args(**changes)) == size
