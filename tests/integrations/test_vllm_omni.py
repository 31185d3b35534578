"""The sparse methods under a stand-in of vllm-omni's dispatcher, which calls them as it does."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.integrations import vllm_omni
from multimodal_gen.integrations.vllm_omni import sparse_attention
from multimodal_gen.runtime.layers.attention.warn_once import WarnOnce

TILES = {"tile_size": [1, 2, 2], "dense_above": 1.0, "skip_time_steps": 0}
SHAPE, PATCH = (3, 8, 12), (1, 2, 2)


class Dispatcher:
    """Merges parameters and calls the plug-in, and refuses what it does not say it can."""

    def __init__(self, method: str, **static: Any) -> None:
        self.plugin, self.static = sparse_attention, {"method": method, **static}

    def forward(self, qkv: Any, *, mask: Any = None, extra: Any = None, **per_forward: Any) -> Any:
        params = {**self.static, **per_forward, **(extra or {})}
        params = {name: value for name, value in params.items() if value is not None}
        if mask is not None:
            assert self.plugin.capabilities["supports_attention_mask"]
            params["attn_mask"] = mask
        scale = qkv[0].shape[-1] ** -0.5
        return self.plugin(*qkv, params, is_causal=False, softmax_scale=scale)


def of_step(step: int, total: int = 4, shape: Any = SHAPE) -> dict[str, Any]:
    """What the framework says of a call, for each of two samples."""
    return {
        "denoise_step_idx": torch.tensor([step, step]),
        "total_denoise_steps": torch.tensor([total, total]),
        "latent_shape": torch.tensor([shape, shape]),
        "patch_size": torch.tensor([PATCH, PATCH]),
    }


@pytest.fixture
def qkv() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 72, 2, 16, generator=generator) for _ in range(3))


def dense(qkv: Any, mask: Any = None) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in qkv)
    return scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def test_a_window_over_everything_is_dense_and_a_small_one_is_not(qkv):
    whole = Dispatcher("sliding_tile_attn", window=[9, 9, 9], **TILES)
    torch.testing.assert_close(whole.forward(qkv, **of_step(0)), dense(qkv))
    few = Dispatcher("sliding_tile_attn", window=[1, 1, 1], **TILES).forward(qkv, **of_step(0))
    own = torch.zeros(72, 72, dtype=torch.bool)
    places = torch.arange(72).view(3, 4, 6)
    for frame in range(3):
        for row in range(0, 4, 2):
            for column in range(0, 6, 2):
                tile = places[frame, row : row + 2, column : column + 2].flatten()
                own[tile[:, None], tile] = True
    torch.testing.assert_close(few, dense(qkv, own))


def test_steps_and_shares_of_steps_are_those_of_the_framework(qkv):
    given = {**TILES, "skip_time_steps": 2}
    plugin = Dispatcher("sliding_tile_attn", window=[1, 1, 1], **given)
    torch.testing.assert_close(plugin.forward(qkv, **of_step(1)), dense(qkv))
    assert not torch.allclose(plugin.forward(qkv, **of_step(2)), dense(qkv), atol=1e-2)


def test_a_mask_is_honoured(qkv):
    keep = torch.ones(2, 72, dtype=torch.bool)
    keep[1, 60:] = False
    plugin = Dispatcher("sliding_tile_attn", window=[9, 9, 9], **TILES)
    out = plugin.forward(qkv, mask=keep, **of_step(0))
    expected = dense(qkv, keep[:, None, None])
    torch.testing.assert_close(out[0], expected[0])
    torch.testing.assert_close(out[1, :60], expected[1, :60])


@pytest.mark.parametrize("told", [{}, of_step(0, shape=(3, 8, 8))])
def test_a_call_without_its_own_grid_runs_dense_and_says_so(qkv, told, caplog):
    plugin = Dispatcher("sla_attn", topk_ratio=0.1)
    torch.testing.assert_close(plugin.forward(qkv, **told), dense(qkv))
    assert "works on a latent grid, and" in caplog.text


@pytest.mark.parametrize("method", ["sol_attn", "sparse_video_gen_2_attn"])
def test_layers_that_are_dense_by_default_are_not_with_a_warning(qkv, method, caplog, monkeypatch):
    monkeypatch.setattr(vllm_omni, "PROCESS", WarnOnce())
    shares = {"svg2_first_times_fp": 0} if method == "sparse_video_gen_2_attn" else {}
    plugin = Dispatcher(method, dense_above=1.0, **shares)
    plugin.forward(qkv, **of_step(3))
    plugin.forward(qkv, **of_step(3))
    assert caplog.text.count(f"{method} runs in all layers: ") == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"sparsety": 0.5}, "did you mean 'sparsity'"),
        ({"sparsity": 2.0}, "sparsity"),
        ({"dense_layers": "0-1"}, "must be left out in vllm-omni"),
    ],
)
def test_wrong_parameters_are_refused(qkv, params, message):
    with pytest.raises(ConfigError, match=message):
        Dispatcher("video_sparse_attn", **params).forward(qkv, **of_step(0))


def test_what_a_model_adds_for_itself_is_left_alone(qkv):
    plugin = Dispatcher("sliding_tile_attn", window=[9, 9, 9], **TILES)
    extra = {"rope": torch.zeros(1), "cache": SimpleNamespace()}
    torch.testing.assert_close(plugin.forward(qkv, extra=extra, **of_step(0)), dense(qkv))


def test_samples_at_several_steps_are_refused(qkv):
    told = {**of_step(0), "denoise_step_idx": torch.tensor([0, 1])}
    with pytest.raises(UsageError, match="at one denoising step"):
        Dispatcher("sliding_tile_attn", window=[9, 9, 9], **TILES).forward(qkv, **told)


@pytest.mark.parametrize("name", ["fast_attn", "torch_sdpa", None])
def test_other_names_are_no_methods(qkv, name):
    with pytest.raises(ConfigError, match="method"):
        sparse_attention(*qkv, {"method": name})


def test_the_plug_in_is_declared_as_an_entry_point():
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (target,) = project["entry-points"]["vllm_omni.sparse_attn"].values()
    module, _, attribute = target.partition(":")
    assert getattr(importlib.import_module(module), attribute) is sparse_attention
