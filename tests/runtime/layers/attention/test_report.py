import json
from dataclasses import replace

import pytest
import torch

from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    SparseConfig,
    build_config,
)
from multimodal_gen.runtime.layers.attention.report import LayerReport, ReportEntry
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import (
    AUTO,
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.selector import Rejected, Selection
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.methods import SMALL

FA, SDPA = AttentionBackendEnum.FA, AttentionBackendEnum.TORCH_SDPA
CHOSEN = Selection(
    backend=FA,
    variant="fa3",
    asked=BackendPreference(source=Source.COMPONENT, backend=FA, detail="transformer"),
    reason="asked for",
)
FALLEN = Selection(
    backend=SDPA,
    variant="torch_sdpa",
    asked=BackendPreference(source=Source.SETTINGS, backend=FA),
    reason="fa cannot serve this layer: no",
    rejected=(Rejected(backend=FA, reasons=("no", "nor this")),),
    fallback=True,
)
DETOUR = Selection(backend=SDPA, variant="torch_sdpa", asked=AUTO, reason="fa has no dense_mask")


def entry(selection, calls=2, steps=None) -> ReportEntry:
    return ReportEntry(steps=steps, selection=selection, calls=calls)


def layer(index, *entries, detours=(), role=AttentionRole.SELF, component="transformer"):
    return LayerReport(
        component=component,
        name=f"blocks.{index}.attn1",
        role=role,
        layer=index,
        entries=entries,
        detours=detours,
    )


@pytest.fixture
def report():
    return AttentionReport(
        layers=(
            layer(0, entry(CHOSEN)),
            layer(1, entry(CHOSEN)),
            layer(2, entry(CHOSEN, 1, "0-3"), entry(FALLEN, 5)),
            layer(3, entry(CHOSEN), detours=(entry(DETOUR, 4),)),
            layer(None, entry(FALLEN, 1), role=AttentionRole.CROSS, component=None),
        ),
        notes=("vae was left alone: no adapter",),
    )


def test_a_summary_groups_layers_that_ran_the_same_way(report):
    assert report.summary().splitlines() == [
        "transformer.self, layers 0-1,3: fa (fa3) [component (transformer)], 2 calls each; "
        "asked for",
        "transformer.self, layers 2, steps 0-3: fa (fa3) [component (transformer)], 1 call each; "
        "asked for",
        "transformer.self, layers 2, steps other: torch_sdpa [settings], 5 calls each; "
        "fallback, because fa cannot serve this layer [1]",
        "transformer.self, layers 3: detour to torch_sdpa [auto], 4 calls each; "
        "fa has no dense_mask",
        "-.cross, layers 1 unnumbered: torch_sdpa [settings], 1 call each; as line 3",
        "note: vae was left alone: no adapter",
        "[1] fa rejected: no; nor this",
    ]


def test_a_report_without_layers_has_an_empty_summary():
    assert AttentionReport(layers=()).summary() == ""


def test_the_dictionary_is_json_and_complete(report):
    data = json.loads(json.dumps(report.as_dict()))
    assert data["notes"] == ["vae was left alone: no adapter"]
    assert len(data["layers"]) == 5
    fallen = data["layers"][2]["entries"][1]
    assert fallen == {
        "steps": None,
        "backend": "torch_sdpa",
        "variant": "torch_sdpa",
        "source": "settings",
        "detail": "",
        "asked": "fa",
        "config": None,
        "reason": "fa cannot serve this layer: no",
        "fallback": True,
        "rejected": [{"backend": "fa", "reasons": ["no", "nor this"]}],
        "calls": 5,
    }
    (detour,) = data["layers"][3]["detours"]
    assert (detour["asked"], detour["calls"]) == (None, 4)
    cross = data["layers"][4]
    assert (cross["component"], cross["role"], cross["layer"]) == (None, "cross", None)


@pytest.mark.parametrize(
    ("config", "backend", "expected"),
    [
        (None, FA, None),
        (BackendConfig(), FA, None),
        (
            SparseConfig(dense_steps="0-3"),
            FA,
            {
                "dense_steps": "0-3",
                "dense_sigma": None,
                "dense_layers": None,
                "refresh_every": 1,
                "dense_above": None,
                "skip_below": None,
            },
        ),
        (SparseConfig(dense_steps="0-3"), SDPA, None),
    ],
    ids=["defaults", "no parameters", "given", "fallback"],
)
def test_the_parameters_that_run_are_told_so_that_a_run_can_be_repeated(config, backend, expected):
    asked = BackendPreference(source=Source.SETTINGS, backend=FA, config=config)
    ran = Selection(backend=backend, variant="x", asked=asked, reason="asked for")
    told = json.loads(json.dumps(entry(ran).as_dict()))["config"]
    assert told == expected
    if told is not None:
        assert build_config(SparseConfig, told, backend="fa") == config


def test_calls_of_a_layer_count_its_detours(report):
    assert [each.calls for each in report.layers] == [2, 2, 6, 6, 1]


@pytest.mark.parametrize("method", ["sliding_tile_attn", "vmoba_attn"])
def test_the_kernel_of_the_backward_pass_is_named(method):
    backend = AttentionBackendEnum(method)
    cls = find_backend(backend, PlatformEnum.CPU)
    config = build_config(cls.config_cls, SMALL[method], backend=method)
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    layer = LocalAttention(
        2, 32, site=LayerSite(layer=0), scope=SelectionScope(default=asked, strict=True)
    )
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 192, 2, 32, dtype=torch.float32))
    with set_forward_context(0, latent_grid=(4, 6, 8), num_steps=1):
        out = layer(q, k, v)
    assert "backward" not in layer.report().entries[0].as_dict()
    out.sum().backward()
    (told,) = layer.report().as_dict()["entries"]
    assert (told["variant"], told["backward"]) == ("reference", ["reference"])
    (line,) = AttentionReport(layers=(layer.report(),)).summary().splitlines()
    assert ", gradients by reference, 1 call each; " in line


def test_kernels_of_backward_passes_are_in_lines_of_their_own():
    fused, two = (
        replace(entry(CHOSEN), backward=ran) for ran in (("gluon_fused",), ("gluon", "triton"))
    )
    lines = AttentionReport(layers=(layer(0, fused), layer(1, two), layer(2, fused))).summary()
    assert lines.splitlines() == [
        "transformer.self, layers 0,2: fa (fa3) [component (transformer)], gradients by "
        "gluon_fused, 2 calls each; asked for",
        "transformer.self, layers 1: fa (fa3) [component (transformer)], gradients by gluon and "
        "triton, 2 calls each; asked for",
    ]
