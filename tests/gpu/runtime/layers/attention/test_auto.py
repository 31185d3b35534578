"""`auto` by shape on a GPU: measured there, saved, and gone by."""

import pytest
import torch

from multimodal_gen.runtime.benchmark import measure, table_of
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.auto_table import (
    CallShape,
    committed_table,
    table_for,
    write_tables,
)
from multimodal_gen.runtime.layers.attention.backends.registry import current_environment
from multimodal_gen.runtime.layers.attention.scope import SelectionScope
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.tolerance import assert_within_error_budget

CUDA = torch.device("cuda")
# FlexAttention would be compiled for every shape.
BACKENDS = [
    AttentionBackendEnum(name) for name in ("triton_attn", "fa", "torch_sdpa", "torch_cudnn_sdpa")
]


def draw(shape: CallShape) -> tuple[torch.Tensor, ...]:
    return make_qkv(
        shape.batch,
        shape.queries,
        shape.heads,
        shape.head_size,
        num_keys=shape.keys,
        num_kv_heads=shape.kv_heads,
        dtype=torch.bfloat16,
        device="cuda",
    )


@pytest.mark.parametrize(
    "text", ["1x256x24x128", "2x1024x16x72", "1x1024x24x128:keys=77", "1x1024x24x128:kv_heads=8"]
)
def test_what_was_measured_is_what_auto_runs(text: str, tmp_path) -> None:
    shape = CallShape.parse(text)
    found = measure(shape, dtype=torch.bfloat16, device=CUDA, backends=BACKENDS, rounds=3)
    assert {"torch_sdpa"} <= {each.timing.backend for each in found.times}
    for each in found.times:
        assert each.timing.host_ms is not None
        assert each.timing.host_ms > 0
    file = tmp_path / "table.json"
    write_tables(file, [table_of([found], CUDA, source="a test")])
    table = table_for(file, [current_environment()], name="it")
    layer = LocalAttention(
        shape.heads,
        shape.head_size,
        shape.kv_heads,
        is_cross_attention=shape.queries != shape.keys,
        scope=SelectionScope(auto_table=table),
    )
    q, k, v = draw(shape)
    assert_within_error_budget(layer(q, k, v), q, k, v, scale=shape.head_size**-0.5)
    (entry,) = layer.report().entries
    best = next(each for each in found.times if not each.never_unasked)
    if sum(not each.never_unasked for each in found.times) > 1:
        assert str(entry.selection.backend) == best.timing.backend
        assert entry.selection.reason.startswith("fastest of ")


def test_the_packages_own_table_serves_this_gpu_if_it_was_measured() -> None:
    table = committed_table(current_environment())
    if table is None:
        pytest.skip("the package has no table for this compute capability")
    shape = CallShape.parse("1x32760x12x128")
    layer = LocalAttention(shape.heads, shape.head_size)
    q, k, v = draw(shape)
    layer(q, k, v)
    (entry,) = layer.report().entries
    assert entry.shapes == ("1x32760x12x128",)
    assert table.name in entry.selection.reason
