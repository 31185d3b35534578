"""Gates of Video Sparse Attention: found in the files, attached, used, and taken away again."""

import copy
import dataclasses
import shutil

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file, save_file
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.trained_layers import find_gates, stored_parameters
from multimodal_gen.runtime.comparison.layers import Replay
from multimodal_gen.runtime.generator.attention_check import exact_rows, row_errors, sample_rows
from multimodal_gen.runtime.layers.attention.call import watching
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import (
    global_force_attn_backend_context_manager,
    scope_from,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseBackend
from tests.helpers.denoisers import COMMON, SPLIT
from tests.helpers.fakes import PlainImpl
from tests.integrations.conftest import generate, load

FILE = "diffusion_pytorch_model.safetensors"
WIDTH = 128
VSA = "video_sparse_attn"


class MeanBranch(PlainImpl, VideoSparseBackend.get_impl_cls()):
    """Dense attention whose coarse branch is the mean of the values."""

    def forward(self, query, key, value, context=None, *, attn_mask=None, gate=None, **rest):
        out = super().forward(query, key, value, context, attn_mask=attn_mask)
        return out if gate is None else self.add_branch(out, query, key, value, gate, context)

    def add_branch(self, out, query, key, value, gate, context):
        return out + gate * value.mean(dim=1, keepdim=True)


class MeanBranchProcessor:
    """The same within diffusers, without this package."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None,
                 rotary_emb=None):  # fmt: skip
        from diffusers.models.transformers.transformer_wan import WanAttnProcessor

        gate = nn.functional.linear(hidden_states, self.weight, self.bias)
        value = attn.to_v(hidden_states).mean(dim=1, keepdim=True)
        to_out, attn.to_out = attn.to_out, nn.ModuleList([nn.Identity(), nn.Identity()])
        try:
            out = WanAttnProcessor()(attn, hidden_states, None, attention_mask, rotary_emb)
        finally:
            attn.to_out = to_out
        return to_out[0](out + gate * value)


@pytest.fixture
def coarse_branch(monkeypatch):
    """Give the backend a coarse branch that is easy to compute another way."""
    monkeypatch.setattr(VideoSparseBackend, "get_impl_cls", classmethod(lambda cls: MeanBranch))


def gates_for(folder, *, owner="blocks.{}", blocks=(0, 1), width=WIDTH, bias=True):
    """Add gates to the transformer's file; returns them by block."""
    path = folder / "transformer" / FILE
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(5)
    gates = {}
    for block in blocks:
        weight = torch.randn(width, width, generator=generator) * width**-0.5
        gates[block] = [weight, torch.randn(width, generator=generator) if bias else None]
        name = f"{owner.format(block)}.to_gate_compress"
        tensors[f"{name}.weight"] = weight
        if bias:
            tensors[f"{name}.bias"] = gates[block][1]
    save_file(tensors, path, metadata={"format": "pt"})
    return gates


@pytest.fixture
def folder(tiny_pipeline, tmp_path):
    """A pipeline folder of one's own."""
    return shutil.copytree(tiny_pipeline("wan"), tmp_path / "wan")


@pytest.mark.slow_cases("False-blocks.{}", "True-blocks.{}.attn1")
@pytest.mark.parametrize("owner", ["blocks.{}", "blocks.{}.attn1"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_gates_of_a_checkpoint_weigh_the_coarse_branch(folder, coarse_branch, owner, bias):
    gates = gates_for(folder, owner=owner, bias=bias)
    pipe = load(folder)
    stock = generate(pipe, "wan")
    with apply(pipe, attention_backend=VSA) as handle:
        found = generate(pipe, "wan")
        notes = handle.report().notes
    for block, gate in gates.items():
        pipe.transformer.blocks[block].attn1.processor = MeanBranchProcessor(*gate)
    wanted = generate(pipe, "wan")
    torch.testing.assert_close(found, wanted)
    assert (found - stock).abs().max() > 1e-2
    assert any("2 layers weigh the coarse branch by the gates of the checkp" in n for n in notes)


def test_remove_takes_the_gates_away(folder, coarse_branch):
    gates_for(folder)
    pipe = load(folder)
    before = list(pipe.transformer.state_dict())
    stock = generate(pipe, "wan")
    with apply(pipe, attention_backend=VSA):
        assert "blocks.0.attn1.to_gate_compress.weight" in pipe.transformer.state_dict()
    assert list(pipe.transformer.state_dict()) == before
    assert torch.equal(generate(pipe, "wan"), stock)


def test_only_layers_that_run_the_method_get_a_gate(folder, coarse_branch):
    gates_for(folder)
    pipe = load(folder)
    rules = {"rules": [{"backend": VSA, "component": "transformer", "layers": "1"}]}
    with apply(pipe, attention_config=rules):
        names = [n for n, _ in pipe.transformer.named_modules() if n.endswith("to_gate_compress")]
    assert names == ["blocks.1.attn1.to_gate_compress"]


def test_without_gates_in_the_checkpoint_there_is_no_coarse_branch(folder, coarse_branch):
    pipe = load(folder)
    stock = generate(pipe, "wan")
    with apply(pipe, attention_backend=VSA) as handle:
        torch.testing.assert_close(generate(pipe, "wan"), stock)
        assert not any("gates" in note for note in handle.report().notes)


def test_another_backend_reads_no_gates(folder):
    gates_for(folder)
    pipe = load(folder)
    with apply(pipe, attention_backend="torch_sdpa"):
        assert not any("to_gate" in name for name in pipe.transformer.state_dict())


def forced(pipe):
    with global_force_attn_backend_context_manager("torch_sdpa"):
        return generate(pipe, "wan")


def handed_to_diffusers(pipe):
    for block in pipe.transformer.blocks:
        block.attn1.processor._attention_backend = None
    return generate(pipe, "wan")


def copied(pipe):
    pipe.transformer = copy.deepcopy(pipe.transformer)
    return generate(pipe, "wan")


@pytest.mark.parametrize("run", [forced, handed_to_diffusers, copied])
def test_what_leaves_the_method_computes_as_the_stock_model(folder, coarse_branch, run):
    gates_for(folder)
    pipe = load(folder)
    stock = generate(pipe, "wan")
    with apply(pipe, attention_backend=VSA):
        torch.testing.assert_close(run(pipe), stock)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_blocks_with_gates_compile_into_one_graph(folder, coarse_branch):
    gates_for(folder)
    pipe = load(folder)
    torch._dynamo.reset()
    with apply(pipe, attention_backend=VSA):
        expected = generate(pipe, "wan")
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
        torch.testing.assert_close(generate(pipe, "wan"), expected)


def test_gates_have_the_dtype_the_model_computes_in(folder):
    gates_for(folder)
    model = load(folder).transformer.bfloat16()
    gates = find_gates(model, {"blocks.0.attn1": model.blocks[0].attn1}, stored_parameters(model))
    assert gates["blocks.0.attn1"].weight.dtype == torch.bfloat16
    assert not gates["blocks.0.attn1"].weight.requires_grad


def test_sharded_files_are_searched_too(folder):
    wanted = gates_for(folder)
    model = load(folder).transformer
    model.save_pretrained(folder / "transformer", max_shard_size="100KB")
    (folder / "transformer" / FILE).unlink(missing_ok=True)
    shards = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(shards) > 2
    tensors = load_file(shards[1])
    tensors["blocks.1.to_gate_compress.weight"] = wanted[1][0]
    save_file(tensors, shards[1], metadata={"format": "pt"})
    modules = {f"blocks.{i}.attn1": model.blocks[i].attn1 for i in range(2)}
    (name,) = gates = find_gates(model, modules, stored_parameters(model))
    assert name == "blocks.1.attn1"
    assert torch.equal(gates[name].weight, wanted[1][0])


def test_a_model_from_nowhere_has_no_gates():
    model, _ = COMMON["wan"].make()
    assert (
        find_gates(model, {"blocks.0.attn1": model.blocks[0].attn1}, stored_parameters(model)) == {}
    )


def test_gates_of_another_width_are_refused_before_anything_changes(folder, coarse_branch):
    gates_for(folder, width=64)
    pipe = load(folder)
    with pytest.raises(UsageError, match=r"to_gate_compress.weight in .* must be \[128, 128\], .*"):
        apply(pipe, attention_backend=VSA)
    assert not any("to_gate" in name for name in pipe.transformer.state_dict())
    apply(pipe, attention_backend="torch_sdpa").remove()


def test_a_replay_beside_a_dense_run_weighs_the_coarse_branch(folder):
    gates_for(folder)
    pipe = load(folder)
    before = list(pipe.transformer.state_dict())
    method = scope_from(attention_backend=VSA, attention_backend_config="sparsity=0.5")
    dense = scope_from(attention_backend="torch_sdpa")
    replay = Replay("torch_sdpa", {VSA: method}, num_steps=1)
    first = {}  # errors of the method's own first call, which has the inputs of the dense run's

    def watch(layer, call, serve):
        out = serve(call)
        if layer.site.role is AttentionRole.SELF and not first:
            rows = sample_rows(call.query.shape[1], seed=0)
            assert call.gate is not None
            (truth,) = exact_rows(layer, call, rows, (call.value,))
            first[layer.site.name] = row_errors(out[:, rows], truth)
        return out

    with apply(pipe, scope=dense):
        plain = generate(pipe, "wan", num_inference_steps=1)
    with apply(pipe, scope=dataclasses.replace(dense, spare=frozenset({"gate"}))), watching(replay):
        assert torch.equal(generate(pipe, "wan", num_inference_steps=1), plain)
    with apply(pipe, scope=method), watching(watch):
        generate(pipe, "wan", num_inference_steps=1)
    ((name, errors),) = first.items()
    found = next(x for x in replay.found[VSA].layers if x.name == name)
    assert found.relative_l2 == pytest.approx(errors[1].tolist(), rel=1e-4)
    assert found.kept_mass_source == "plan"
    assert list(pipe.transformer.state_dict()) == before


@pytest.fixture
def gated_h3(tmp_path):
    """A folder of MiniMax-H3 with gates as FastVideo's FastH3 has them, and inputs of the model."""
    model, inputs = SPLIT["minimax h3"].make()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / FILE)
    gates = {
        name.replace("to_q", "to_gate_compress"): torch.ones_like(weight)
        for name, weight in stored.items()
        if name.startswith("transformer_blocks.") and name.endswith("attn.to_q.weight")
    }
    assert len(gates) == 2
    save_file(stored | gates, tmp_path / FILE)
    return tmp_path, model, inputs


LOST = (
    "trained layers of its checkpoint (transformer_blocks.0.attn.to_gate_compress and 1 more) are "
    "not used, no layer of MiniMaxH3Transformer3DModel can be given them: the coarse branch that "
    "they were trained for is missing"
)


def test_gates_that_no_layer_can_be_given_are_warned_of(gated_h3, caplog):
    folder, model, inputs = gated_h3
    outs = []
    for each in (model, type(model).from_pretrained(folder)):
        caplog.clear()
        with torch.no_grad(), apply(each, attention_backend="video_sparse_attn_h3") as handle:
            outs.append(each(**inputs, return_dict=False)[0])
            notes = [n for n in handle.report().notes if "to_gate_compress" in n]
    assert torch.equal(*outs)
    (note,) = notes
    assert note.endswith(LOST)
    assert [r.getMessage() for r in caplog.records if "to_gate_compress" in r.getMessage()] == notes


def test_gates_that_no_method_asked_for_are_noted(gated_h3, caplog):
    folder, model, _ = gated_h3
    loaded = type(model).from_pretrained(folder)
    caplog.clear()
    with apply(loaded, attention_backend="torch_sdpa") as handle:
        (note,) = [n for n in handle.report().notes if "to_gate_compress" in n]
    assert note.endswith(LOST)
    assert "to_gate_compress" not in caplog.text


@pytest.mark.parametrize(
    ("rule", "unread"),
    [
        ({"backend": "torch_sdpa"}, "blocks.0.to_gate_compress and 1 more"),
        ({"backend": VSA, "layers": "1"}, "blocks.0.to_gate_compress"),
        ({"backend": VSA, "layers": "0-1"}, None),
    ],
)
def test_gates_of_layers_without_a_coarse_branch_are_noted(folder, coarse_branch, rule, unread):
    gates_for(folder)
    rules = {"rules": [{"component": "transformer", **rule}]}
    with apply(load(folder), attention_config=rules) as handle:
        found = [n for n in handle.report().notes if "are not used" in n]
    wanted = (
        f"transformer: trained layers of its checkpoint ({unread}) are not used, those layers run "
        f"no method with a coarse branch: the coarse branch that they were trained for is missing"
    )
    assert found == ([] if unread is None else [wanted])
