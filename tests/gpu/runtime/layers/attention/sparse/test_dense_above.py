"""`dense_above` on a GPU, where the data decide: what is learnt is not waited for in the call."""

import pytest
import torch

from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.runtime.layers.attention.sparse.test_dense_above import (
    BY_DATA,
    GRID,
    inputs,
    make_layer,
)


@pytest.mark.parametrize("method", BY_DATA)
def test_calls_of_a_step_are_learnt_from_without_waiting(method: str) -> None:
    given = {"dense_above": 0.2, "dtype": torch.bfloat16}
    layer = make_layer(method, BY_DATA[method], **given).to("cuda")
    qkv = [x.to("cuda", torch.bfloat16) for x in inputs()]
    known = {"latent_grid": GRID, "num_steps": 9, "request_id": "a"}
    for step, mode in ((0, "default"), (0, "error"), (1, "default")):
        with torch.no_grad(), set_forward_context(step, **known):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                layer(*qkv)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert sum(part.calls for part in layer.report().detours) == step
        torch.cuda.synchronize()
    kept = layer.attn_impl.layer.dense_above._kept_too_much
    assert not kept._answers
