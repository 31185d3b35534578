"""The plug-in under stand-ins of sglang's interface, which record what is registered."""

import functools
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from multimodal_gen.errors import ConfigError
from multimodal_gen.integrations.sglang import register

ROOT = "sglang.multimodal_gen"
TILES = {"tile_size": [1, 2, 2], "dense_above": 1.0, "skip_time_steps": 0}


class _Own:
    """A backend of sglang itself."""

    get_enum = staticmethod(lambda: "FA")
    get_metadata_cls = staticmethod(lambda: "metadata")
    get_builder_cls = staticmethod(lambda: "builder")
    get_impl_cls = staticmethod(lambda: "own")


class _Backend:
    @classmethod
    def unsupported_requirements(cls, requirements: Any) -> tuple[str, ...]:
        return ("packed varlen attention",) if requirements.packed_varlen else ()


class Sglang:
    """What the plug-in sees: server arguments, the running call, the registry of hooks."""

    def __init__(self) -> None:
        self.args = SimpleNamespace(
            attention_backend_config={},
            pipeline_config=SimpleNamespace(dit_config=SimpleNamespace(patch_size=(1, 2, 2))),
        )
        self.running: Any = None
        self.hooks: dict[str, Any] = {}

    def ask(self, **config: Any) -> None:
        self.args.attention_backend_config = config

    def run(self, step: int, shape: Any = (1, 16, 3, 8, 12)) -> None:
        batch = SimpleNamespace(raw_latent_shape=shape)
        self.running = SimpleNamespace(current_timestep=step, forward_batch=batch)

    def forward_context(self) -> Any:
        assert self.running is not None
        return self.running

    def select(self, **given: Any) -> Any:
        """Choose a backend as a layer does, through the hooks."""
        own = lambda *args, **kwargs: _Own  # noqa: E731
        hook = self.hooks[f"{ROOT}.runtime.layers.attention.selector.get_attn_backend"]
        return functools.partial(hook, own)(32, torch.float32, **given)

    def layer(self, prefix: str = "blocks.0.attn1.impl", **given: Any) -> Any:
        impl = self.select().get_impl_cls()
        return impl(num_heads=4, head_size=16, softmax_scale=0.25, prefix=prefix, **given)


@pytest.fixture
def sglang() -> Iterator[Sglang]:
    engine = Sglang()

    def register_hook(target: str, hook: Any, kind: Any) -> None:
        assert kind == "around"
        engine.hooks[target] = hook

    contents = {
        f"{ROOT}.plugins": {
            "HookRegistry": SimpleNamespace(register=register_hook),
            "HookType": SimpleNamespace(AROUND="around"),
        },
        f"{ROOT}.runtime.server_args": {"get_global_server_args": lambda: engine.args},
        f"{ROOT}.runtime.managers.forward_context": {"get_forward_context": engine.forward_context},
        f"{ROOT}.runtime.layers.attention.backends.attention_backend": {
            "AttentionBackend": _Backend,
            "AttentionImpl": type("AttentionImpl", (), {}),
        },
    }
    modules = {}
    for name, attributes in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        vars(modules[name]).update(attributes)
    with patch.dict(sys.modules, modules):
        register()
        yield engine


@pytest.fixture
def qkv() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 72, 4, 16, generator=generator) for _ in range(3))


def dense(qkv: Any) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in qkv)
    return scaled_dot_product_attention(q, k, v, scale=0.25).transpose(1, 2)


def test_nothing_changes_until_a_run_asks_for_it(sglang):
    assert sglang.select() is _Own
    sglang.ask(multimodal_gen={})
    assert sglang.select() is _Own


def test_what_a_layer_needs_beyond_it_keeps_sglangs_own(sglang):
    sglang.ask(multimodal_gen="torch_sdpa")
    assert sglang.select(requirements=SimpleNamespace(packed_varlen=True)) is _Own
    ours = sglang.select(requirements=SimpleNamespace(packed_varlen=False))
    assert ours is not _Own
    assert (ours.get_enum(), ours.get_builder_cls()) == ("FA", "builder")


def test_a_dense_backend_serves_layers_with_all_or_some_of_their_heads(sglang, qkv):
    sglang.ask(multimodal_gen={"backend": "torch_sdpa"})
    layer = sglang.layer()
    torch.testing.assert_close(layer.forward(*qkv, None), dense(qkv))
    share = [x[:, :, :2] for x in qkv]
    sglang.run(0)
    torch.testing.assert_close(layer.forward(*share, None), dense(share))
    assert str(layer.layer.backend) == "torch_sdpa"
    assert layer.layer.site.layer == 0


def test_a_sparse_backend_gets_the_grid_and_the_step(sglang, qkv):
    tiles = {"backend": "sliding_tile_attn", **TILES}
    sglang.run(1)
    sglang.ask(multimodal_gen={**tiles, "window": [9, 9, 9]})
    torch.testing.assert_close(sglang.layer().forward(*qkv, None), dense(qkv))
    sglang.ask(multimodal_gen={**tiles, "window": [1, 1, 1], "dense_steps": "0"})
    layer = sglang.layer()
    assert not torch.allclose(layer.forward(*qkv, None), dense(qkv), atol=1e-2)
    sglang.run(0)
    torch.testing.assert_close(layer.forward(*qkv, None), dense(qkv))


def test_layers_that_stay_dense_are_known_by_their_prefix(sglang, qkv):
    sglang.run(1)
    config = {"backend": "sliding_tile_attn", **TILES, "window": [1, 1, 1], "dense_layers": "3"}
    sglang.ask(multimodal_gen=config)
    stays = sglang.layer(prefix="blocks.3.attn1.impl")
    torch.testing.assert_close(stays.forward(*qkv, None), dense(qkv))


def test_calls_of_other_tokens_run_dense(sglang, qkv):
    sglang.ask(multimodal_gen={"backend": "sliding_tile_attn", **TILES, "window": [1, 1, 1]})
    layer = sglang.layer()
    sglang.run(1, shape=(1, 16, 3, 8, 8))
    torch.testing.assert_close(layer.forward(*qkv, None), dense(qkv))
    cross = (qkv[0], qkv[1][:, :5], qkv[2][:, :5])
    sglang.run(1)
    torch.testing.assert_close(layer.forward(*cross, None), dense(cross))


def test_a_gate_without_a_branch_has_no_effect(sglang, qkv):
    sglang.ask(multimodal_gen="torch_sdpa")
    out = sglang.layer().forward(*qkv, None, gate_compress=torch.ones_like(qkv[0]))
    torch.testing.assert_close(out, dense(qkv))


@pytest.mark.parametrize("asked", ["fast", {"sparsity": 0.5}, {"backend": "fa", "speed": 9}, 3])
def test_wrong_requests_are_refused_when_a_layer_is_built(sglang, asked):
    sglang.ask(multimodal_gen=asked)
    with pytest.raises(ConfigError):
        sglang.select()


def test_the_plug_in_is_declared_as_an_entry_point():
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (target,) = project["entry-points"]["sglang.multimodal_gen.plugins"].values()
    module, _, attribute = target.partition(":")
    assert getattr(importlib.import_module(module), attribute) is register
