"""The guard on several GPUs: they decide together, and nothing in a layer waits for a device."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.generator.attention_guard import AttentionGuard
from multimodal_gen.runtime.guard_bounds import GuardBounds
from multimodal_gen.runtime.layers.attention import USPAttention
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.gpu.runtime.generator.test_attention_guard import HEADS, SIZE, exact, inputs, no_waiting
from tests.helpers.processes import World, own

pytestmark = pytest.mark.multi_gpu

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
MESHES = [Mesh(ulysses=RANKS), Mesh(ring=RANKS)]
if RANKS == 4:
    MESHES.append(Mesh(ulysses=2, ring=2))
LENGTHS = (612, 412, 512, 512) if RANKS == 4 else (1124, 924)


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("gpus")
    with World(RANKS, folder, device_type="cuda", timeout=120.0) as world:
        yield world


def guarded() -> tuple[USPAttention, AttentionGuard]:
    site = LayerSite(name="blocks.0", component="transformer", layer=0, num_layers=1)
    scope = scope_from(attention_backend="sage_attn")
    layer = USPAttention(HEADS, SIZE, compute_dtype=torch.bfloat16, site=site, scope=scope)
    layer.guard = guard = AttentionGuard(GuardBounds())
    return layer, guard


def saved(overflows: bool) -> tuple[object, float, float]:
    """Return what missed, and the errors of this rank at its first call and at the second."""
    whole = inputs()
    given = [own(x, LENGTHS) for x in whole]
    layer, guard = guarded()
    found = []
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        if overflows:
            cls: type[AttentionImpl] = type(layer.attn_impl)
            for name in ("forward", "forward_lse"):
                patch.setattr(cls, name, overflowing(getattr(cls, name)))
        with set_forward_context(0):
            layer(*given)  # compiles, and ranks tell each other how they call
        layer.guard = guard = AttentionGuard(GuardBounds())
        for step in (1, 2):
            guard.settle()
            # The first exact call compiles, and makes what is static.
            with no_waiting() if step == 1 else nullcontext(), set_forward_context(step):
                found.append(layer(*given))
            torch.cuda.synchronize()
    truth = own(exact(*whole), LENGTHS)
    errors = [float((out - truth).norm() / truth.norm()) for out in found]
    return guard.report().missed, errors[0], errors[1]


def overflowing(serve):
    """Return what serves a call as `serve` does, with one number that is not finite."""

    def wrong(*args, **kwargs):
        out = serve(*args, **kwargs)
        (out[0] if isinstance(out, tuple) else out)[0, -1, 0, 0].fill_(torch.inf)
        return out

    return wrong


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gpus_save_the_same_layer_from_the_same_call_on(gpus: World, mesh: Mesh) -> None:
    results = gpus.run(mesh, saved, False)
    for missed, wrong, right in results:
        assert missed == results[0][0]
        assert [(miss.layer, miss.step) for miss in missed] == [(0, 1)]
        assert wrong > 0.05
        assert right < 0.01


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_is_not_finite_is_computed_again_at_once(gpus: World, mesh: Mesh) -> None:
    for missed, first, second in gpus.run(mesh, saved, True):
        assert [(miss.error, miss.step) for miss in missed] == [(None, 1)]
        assert first < 0.01
        assert second < 0.01
