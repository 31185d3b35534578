"""Layers over several GPUs and NCCL against float64, against one GPU, and against themselves."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

from multimodal_gen.errors import RankError, UsageError
from multimodal_gen.runtime.distributed.groups import parallel_groups, use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import USPAttention
from multimodal_gen.runtime.layers.attention.scope import scope_from_args
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.server_args import ServerArgs
from tests.helpers.inputs import make_qkv, make_video_qkv
from tests.helpers.processes import World, own
from tests.helpers.tolerance import (
    assert_gradients_within_error_budget,
    assert_within_error_budget,
)

RANKS = 4 if torch.cuda.device_count() >= 4 else 2

pytestmark = pytest.mark.multi_gpu

SIZE = 128
SCALE = SIZE**-0.5
MESHES = [Mesh(ulysses=RANKS), Mesh(ring=RANKS)]
if RANKS == 4:
    MESHES.append(Mesh(ulysses=2, ring=2))
# As even as can be, and not; on two GPUs the first two numbers.
LENGTHS = [(256, 256, 256, 256)[:RANKS], (301, 128, 77, 260)[:RANKS]]
GRID = (8, 12, 16)
SPARSE = {
    "sliding_tile_attn": {
        "window": [1, 2, 2],
        "tile_size": [4, 4, 4],
        "skip_time_steps": 0,
        "dense_above": 1.0,
    },
    "video_sparse_attn": {"sparsity": 0.7, "dense_above": 1.0},
    "sla_attn": {"topk_ratio": 0.3, "dense_above": 1.0},
}


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    with World(RANKS, folder, device_type="cuda", timeout=45.0) as world:
        yield world


def layer_of(backend, heads, kv_heads=None, config=None):
    args = ServerArgs(model_path="none", attention_backend=backend, attention_backend_config=config)
    scope = scope_from_args(args)
    return USPAttention(heads, SIZE, kv_heads, prefix="blocks.1.attn", scope=scope)


def inputs(tokens, heads, kv_heads=None, dtype=torch.bfloat16):
    return make_qkv(1, tokens, heads, SIZE, num_kv_heads=kv_heads, dtype=dtype, device="cuda")


def in_groups(count):
    return use_parallel_groups(replace(parallel_groups(), head_groups=count))


def check_dense(backend, lengths, heads, kv_heads, text, chunks):
    whole = inputs(text + sum(lengths), heads, kv_heads)
    local = [own(x, lengths, text) for x in whole]
    layer = layer_of(backend, heads, kv_heads)
    with in_groups(chunks), torch.inference_mode():
        out = layer(*local, num_replicated_prefix=text)
        # Streams that do not wait for each other differ from call to call.
        for _ in range(5):
            again = layer(*local, num_replicated_prefix=text)
            assert (again - out).norm() <= torch.finfo(out.dtype).eps * out.norm()
    assert_within_error_budget(out, local[0], *whole[1:], scale=SCALE)
    times = layer.report().times
    assert times.attention_ms > 0
    assert times.communication_ms > 0


def check_mask(lengths):
    whole = inputs(sum(lengths), 8)
    keep = torch.arange(sum(lengths), device="cuda")[None] % 5 != 1
    local, mask = [own(x, lengths) for x in whole], own(keep, lengths)
    with torch.inference_mode():
        out = layer_of(None, 8)(*local, mask)
    assert not out[~mask].any()
    kept = (out[:, mask[0]], local[0][:, mask[0]], *(x[:, keep[0]] for x in whole[1:]))
    assert_within_error_budget(*kept, scale=SCALE)


def check_gradients(lengths):
    """Every rank has the gradients of its own tokens: gathered, they are those of one process."""
    whole = inputs(sum(lengths), 8)
    layer, groups = layer_of("torch_sdpa", 8), parallel_groups()

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return own(x, lengths).clone()

        @staticmethod
        def backward(ctx, grad):
            return gathered(grad)

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return gathered(x)

        @staticmethod
        def backward(ctx, grad):
            return own(grad, lengths)

    def gathered(x):
        longest = torch.zeros(x.shape[0], max(lengths), *x.shape[2:], dtype=x.dtype, device="cuda")
        longest[:, : x.shape[1]] = x
        parts = [torch.empty_like(longest) for _ in lengths]
        torch.distributed.all_gather(parts, longest, group=groups.sequence.handle)
        cut = [part[:, :length] for part, length in zip(parts, lengths, strict=True)]
        return torch.cat(cut, dim=1)

    def attend(q, k, v):
        return Gathered.apply(layer(*(Whole.apply(x) for x in (q, k, v))))

    assert_gradients_within_error_budget(attend, *whole, scale=SCALE)


def check_sparse(backend, lengths, heads, chunks):
    """Heads do not see each other, so that ranks choose what one GPU chooses."""
    text = 64
    q, k, v = make_video_qkv(GRID, heads, SIZE, dtype=torch.bfloat16, device="cuda")
    words = inputs(text, heads)
    whole = [torch.cat(pair, dim=1) for pair in zip(words, (q, k, v), strict=True)]
    layer = layer_of(backend, heads, config=SPARSE[backend])
    known = {"latent_grid": GRID, "num_steps": 2, "text_span": TextSpan(start=0, length=text)}
    outs = []
    with torch.inference_mode():
        for groups in (None, replace(parallel_groups(), head_groups=chunks)):
            with use_parallel_groups(groups), set_forward_context(0, **known):
                local = [x if groups is None else own(x, lengths, text) for x in whole]
                outs.append(layer(*local, num_replicated_prefix=text))
        with use_parallel_groups(None):
            dense = layer_of("torch_sdpa", heads)(*whole)
    want = own(outs[0], lengths, text)
    error = (outs[1].double() - want.double()).norm() / want.double().norm()
    # The same numbers in the same blocks; only the order of sums may differ.
    assert error <= torch.finfo(torch.bfloat16).eps
    assert (outs[0].double() - dense.double()).norm() / dense.double().norm() > 0.02


def check_sparse_queue(backend, lengths):
    """Plans are at hand, or made on the GPU: known windows and selections wait for nothing."""
    whole = make_video_qkv(GRID, 8, SIZE, dtype=torch.bfloat16, device="cuda")
    local = [own(x, lengths) for x in whole]
    layer = layer_of(backend, 8, config=SPARSE[backend])
    with torch.inference_mode(), set_forward_context(0, latent_grid=GRID, num_steps=2):
        for _ in range(2):
            layer(*local)
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)
        busy = torch.cuda.Event()
        for _ in range(3):
            layer(*local)
        busy.record()
        assert not busy.query()
        torch.cuda.synchronize()


def check_compiled(lengths):
    whole = inputs(sum(lengths), 8)
    local = [own(x, lengths) for x in whole]
    layer = layer_of(None, 8)

    @torch.compile(fullgraph=True)
    def block(q, k, v):
        return 2 * layer(q + 0, k, v)

    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = block(*local)
    assert_within_error_budget(out / 2, local[0], *whole[1:], scale=SCALE)


def disagreement(lengths, heads):
    """Return what a mask on one rank alone ends in, then what the next call does.

    Args:
        lengths: tokens of each rank.
        heads: ranks that made such calls before do not wait for each other.
    """
    local = [own(x, lengths) for x in inputs(sum(lengths), heads)]
    mask = torch.ones(local[0].shape[:2], dtype=torch.bool, device="cuda")
    layer, told = layer_of("torch_sdpa", heads), []
    for given in (mask if parallel_groups().rank == 1 else None, None):
        try:
            with torch.inference_mode():
                layer(*local, given)
            told.append("ran")
        except (UsageError, RankError) as error:
            told.append(type(error).__name__)
    return told


def first_calls(lengths, heads):
    """Make calls that all ranks agree on."""
    with torch.inference_mode():
        layer_of("torch_sdpa", heads)(*(own(x, lengths) for x in inputs(sum(lengths), heads)))


def check_queue(lengths):
    """Calls of a kind that is known wait for nothing: the GPU may be seconds behind."""
    local = [own(x, lengths) for x in inputs(sum(lengths), 8)]
    layer = layer_of("torch_sdpa", 8)
    with torch.inference_mode():
        layer(*local)
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)
        busy = torch.cuda.Event()
        for _ in range(3):
            layer(*local)
        busy.record()
        assert not busy.query()
        torch.cuda.synchronize()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("backend", ["torch_sdpa", "triton_attn", "fa", None], ids=str)
def test_dense_backends_err_no_more_over_several_gpus(gpus, mesh, backend):
    gpus.run(mesh, check_dense, backend, LENGTHS[0], 8, 8, 0, 1)
    gpus.run(mesh, check_dense, backend, LENGTHS[1], 5, 5, 32, 1)
    gpus.run(mesh, check_dense, backend, LENGTHS[1], 8, 2, 0, 1)


@pytest.mark.parametrize("backend", ["torch_sdpa", "triton_attn", None], ids=str)
def test_chunks_of_heads_err_no_more_than_whole_calls(gpus, backend):
    gpus.run(Mesh(ulysses=RANKS), check_dense, backend, LENGTHS[0], 8, 8, 0, 2)
    gpus.run(Mesh(ulysses=RANKS), check_dense, backend, LENGTHS[1], 13, 13, 32, 4)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_padding_is_left_out(gpus, mesh):
    gpus.run(mesh, check_mask, LENGTHS[1])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_are_those_of_one_gpu(gpus, mesh):
    gpus.run(mesh, check_gradients, LENGTHS[1])


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("backend", SPARSE)
def test_sparse_backends_compute_what_one_gpu_does(gpus, backend, chunks):
    total = math.prod(GRID)
    each = total // RANKS
    uneven = (each - 35, *(each for _ in range(RANKS - 2)), each + 35)
    for lengths, heads in (((each,) * RANKS, 8), (uneven, 9)):
        gpus.run(Mesh(ulysses=RANKS), check_sparse, backend, lengths, heads, chunks)


@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
@pytest.mark.parametrize("backend", SPARSE)
def test_plans_that_ride_a_ring_compute_what_one_gpu_does(gpus, backend, mesh):
    each = math.prod(GRID) // RANKS
    uneven = (each - 35, *(each for _ in range(RANKS - 2)), each + 35)
    for lengths, heads in (((each,) * RANKS, 8), (uneven, 9)):
        gpus.run(mesh, check_sparse, backend, lengths, heads, 1)
    gpus.run(mesh, check_sparse_queue, backend, uneven)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_compiled_block_is_one_graph(gpus, mesh):
    gpus.run(mesh, check_compiled, LENGTHS[0])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_that_disagree_in_a_first_call_all_raise_and_go_on(gpus, mesh):
    for told in gpus.run(mesh, disagreement, LENGTHS[0], 9):
        assert told == ["UsageError", "ran"]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_later_calls_do_not_wait_for_the_gpu(gpus, mesh):
    gpus.run(mesh, check_queue, LENGTHS[0])


def test_ranks_that_disagree_later_all_raise_before_their_next_exchange(tmp_path):
    """The ranks that did not wait hear of it in their next call, while what they sent waits.

    That may never be received, so these processes do nothing else and are killed.
    """
    bounds = {"timeout": 40.0, "exchange_timeout": 30.0, "control_timeout": 20.0}
    with World(2, tmp_path, device_type="cuda", **bounds) as world:
        mesh = Mesh(ulysses=2)
        world.run(mesh, first_calls, (256, 256), 8)
        sent, wrong = world.run(mesh, disagreement, (256, 256), 8)
    assert sent == ["ran", "UsageError"]
    assert wrong[0] == "UsageError"
