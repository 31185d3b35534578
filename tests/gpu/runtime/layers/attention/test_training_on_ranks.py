"""Gradients over two GPUs and NCCL, in shards of FSDP2 and of the sequence, against one GPU's."""

import math
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multimodal_gen.runtime.distributed.groups import use_parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention import UlyssesAttention_VSA, USPAttention
from multimodal_gen.runtime.layers.attention.scope import scope_from_args
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.server_args import ServerArgs
from tests.helpers.inputs import make_qkv, make_video_qkv
from tests.helpers.processes import World, own

pytestmark = pytest.mark.multi_gpu

GRID, HEADS, SIZE, TEXT = (8, 12, 16), 4, 128, 64
MESHES = {"ulysses": Mesh(ulysses=2), "ring": Mesh(ring=2)}
METHODS = {
    "triton_attn": None,
    "sliding_tile_attn": {
        "window": [1, 2, 2],
        "tile_size": [4, 4, 4],
        "skip_time_steps": 0,
        "dense_above": 1.0,
    },
    "video_sparse_attn": {"sparsity": 0.7, "dense_above": 1.0},
}
TRAINED = {**METHODS, "sla_attn": {"topk_ratio": 0.3, "dense_above": 1.0}}


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    with World(2, folder, device_type="cuda", timeout=90.0) as world:
        yield world


def error_of(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> float:
    """Return the norm of the differences as a share of that of what is wanted."""
    pairs = [(x.double(), y.double()) for x, y in zip(found, wanted, strict=True)]
    error = sum(float((x - y).square().sum()) for x, y in pairs)
    return math.sqrt(error / sum(float(y.square().sum()) for _, y in pairs))


def layer_of(backend, gated):
    args = ServerArgs(
        model_path="none", attention_backend=backend, attention_backend_config=METHODS[backend]
    )
    cls = UlyssesAttention_VSA if gated else USPAttention
    return cls(HEADS, SIZE, prefix="blocks.1.attn", scope=scope_from_args(args))


def attend(layer, inputs):
    """Call a layer, with a gate where there are four inputs, else with text behind the video."""
    gated = len(inputs) == 4
    span = None if gated else TextSpan(start=math.prod(GRID), length=TEXT)
    more = {"gate_compress": inputs[3]} if gated else {"num_replicated_suffix": TEXT}
    with set_forward_context(1, latent_grid=GRID, num_steps=2, text_span=span):
        return layer(*inputs[:3], **more)


def check_layer(backend, gated):
    """Compare the gradients of this rank; those of text, which all ranks hold, are sums."""
    half, text = math.prod(GRID) // 2, 0 if gated else TEXT
    lengths = (half - 35, half + 35)
    video = make_video_qkv(GRID, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    words = make_qkv(1, TEXT, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    whole = [torch.cat((x, y[:, :text]), dim=1) for x, y in zip(video, words, strict=True)]
    generator = torch.Generator("cuda").manual_seed(5)
    like = {"device": "cuda", "generator": generator}
    upstream = torch.randn(whole[0].shape, **like).bfloat16()
    if gated:
        whole.append(torch.randn(whole[0].shape, **like).bfloat16())
    leaves = [x.requires_grad_() for x in whole]
    with use_parallel_groups(None):
        wanted = torch.autograd.grad(attend(layer_of(backend, gated), leaves), leaves, upstream)
    local = [own(x, lengths, 0, text).detach().requires_grad_() for x in leaves]
    given = own(upstream, lengths, 0, text).clone()
    shared = slice(given.shape[1] - text, None)
    given[:, shared] /= 2
    layer = layer_of(backend, gated)
    found = torch.autograd.grad(attend(layer, local), local, given)
    ran = {str(entry.selection.backend) for entry in layer.report().entries}
    assert ran == {backend}
    for mine, theirs in zip(found, wanted, strict=True):
        sums = mine.float()
        if text:
            behind = sums[:, shared].contiguous()
            dist.all_reduce(behind)
            sums[:, shared] = behind
        error = error_of([sums], [own(theirs, lengths, 0, text)])
        # A ring rounds what each part of the keys gives to bfloat16, and adds that up.
        assert error < 2e-2, f"relative error {error:.2e}"


def tiny_model(device: str) -> nn.Module:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device(device):
        return WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=64,
            text_dim=32,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
        ).bfloat16()


def loss_of(model: nn.Module, sample: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sample)
    like = {"device": "cuda", "generator": generator}
    out = model(
        hidden_states=torch.randn(1, 16, 6, 32, 32, **like).bfloat16(),
        timestep=torch.tensor([900.0], device="cuda"),
        encoder_hidden_states=torch.randn(1, 7, 32, **like).bfloat16(),
    )[0]
    return out.float().square().mean()


def check_fsdp(method):
    """Every rank has a sample of its own; gradients are means over them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from multimodal_gen.integrations.diffusers import apply

    def applied(model):
        handle = apply(
            model,
            attention_backend=method,
            attention_backend_config=TRAINED[method],
            train=method != "triton_attn",
        )
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "proj_l" in name or "gate" in name:
                nn.init.normal_(parameter, std=0.1)
        model.bfloat16()  # a new projection is fp32, and FSDP2 shards weights of one dtype
        return handle

    rank, ranks = dist.get_rank(), dist.get_world_size()
    with use_parallel_groups(None):
        alone = tiny_model("cuda")
        with applied(alone):
            (sum(loss_of(alone, i) for i in range(ranks)) / ranks).backward()
        wanted = {n: x.grad for n, x in alone.named_parameters() if x.grad is not None}

        sharded = tiny_model("cuda")
        with applied(sharded) as handle:
            sharded.enable_gradient_checkpointing()
            mesh = init_device_mesh("cuda", (ranks,))
            for block in sharded.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(sharded, mesh=mesh)
            loss_of(sharded, rank).backward()
            ran = {str(e.selection.backend) for x in handle.report().layers for e in x.entries}
            # Removing takes the new parameters out.
            parameters = dict(sharded.named_parameters())
        assert method in ran
        assert len(wanted) > 30
        found = [parameters[name].grad.full_tensor() for name in wanted]
        error = error_of(found, wanted.values())
        assert error < 3e-2, f"relative error {error:.2e}"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("backend", "gated"), [*((name, False) for name in METHODS), ("video_sparse_attn", True)]
)
def test_two_gpus_have_the_gradients_of_one(gpus, backend, gated, mesh):
    gpus.run(MESHES[mesh], check_layer, backend, gated)


@pytest.mark.parametrize("method", TRAINED)
def test_shards_of_a_model_have_the_gradients_of_one_gpu(gpus, method):
    pytest.importorskip("diffusers")
    gpus.run(Mesh(ulysses=2), check_fsdp, method)
