"""Trained layers of sparse methods, which diffusers drops when it loads a checkpoint.

They are read again from the files the model came from, or taken from the model itself where it came
from `--transformer-weights-path`, and live on the attention modules as long as the model is
attached. Video Sparse Attention has a linear layer `to_gate_compress` per block, from the input of
its self-attention to a weight per token and channel. Sparse-Linear Attention has a linear layer
`proj_l` per self-attention, from the channels of a head to themselves; where it hangs depends on
who trained it: on the attention module or on parts of it (`attn1.proj_l`, `attn1.attn_impl.proj_l`,
`attn1.local_attn.proj_l`, `attn1.attn_op.local_attn.proj_l`), which may carry the name of the
original Wan (`self_attn`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from multimodal_gen.errors import UsageError, listed
from multimodal_gen.integrations.checkpoint_files import find_checkpoint
from multimodal_gen.integrations.components import Component, compute_dtype
from multimodal_gen.integrations.gated_value import GATE, SpareGate
from multimodal_gen.integrations.module_attention import ModuleAttention
from multimodal_gen.runtime.generator.weights_file import TRAINED, weight_files
from multimodal_gen.runtime.layers.attention.scope import SelectionScope

PROJECTION = "proj_l"

Stored: TypeAlias = Mapping[str, Path | torch.Tensor]
"""Parameters by their keys: the file of each, or itself."""


class TrainedParts:
    """The gates and projections of a denoiser; making it changes nothing of the model.

    Args:
        component: the denoiser.
        scope: what the user configured.
        layers: its attention modules with their layers, by name.
        gated: names of those whose processors can hand a gate to their layer.
        train: let its parts be trained, and make those that it lacks.

    Attributes:
        notes: what a reader of the report should know.

    Raises:
        UsageError: a part does not fit its module; or, to be trained, a parameter of a sparse
            method is for calls without gradients.
        UnsupportedBackendError: it is to be trained, and a layer's backend has no backward pass.
    """

    def __init__(
        self,
        component: Component,
        scope: SelectionScope,
        layers: Mapping[str, tuple[nn.Module, ModuleAttention]],
        gated: Collection[str],
        *,
        train: bool,
    ) -> None:
        self._component, self._scope, self._layers = component, scope, layers
        self._weighing = {name for name, (_, layer) in layers.items() if layer.takes_gate}
        self._projecting = {name for name, (_, layer) in layers.items() if layer.takes_projection}
        modules = {name: layers[name][0] for name in gated}
        sizes = {name: layer.usual.head_size for name, (_, layer) in layers.items()}
        weighed = {name: x for name, x in modules.items() if name in self._weighing}
        projected = {name: x for name, x in sizes.items() if name in self._projecting}
        read_gates = modules if "gate" in scope.spare else weighed
        read_projections = sizes if "projection" in scope.spare else projected
        stored = stored_parameters(component.model) if layers else {}
        self._gates = find_gates(component.model, read_gates, stored)
        self._projections = find_projections(stored, read_projections)
        notes = [
            *self._lost({GATE: weighed, PROJECTION: projected}),
            *self._unread(stored, GATE, "coarse", modules, read_gates),
            *self._unread(stored, PROJECTION, "linear", sizes, read_projections),
        ]
        num_new = self._make_trainable(weighed, projected) if train else 0
        self.notes = (*notes, *self._used(num_new))

    def install(self, undo: ExitStack) -> None:
        """Put the parts on their modules; `undo` takes the steps that take them off."""
        for name, gate in self._gates.items():
            part = gate if name in self._weighing else SpareGate(gate)
            _attach_child(self._layers[name][0], GATE, part, undo)
        for name, projection in self._projections.items():
            module, layer = self._layers[name]
            if (hook := _offload_hook(module)) is None:
                _attach_child(module, PROJECTION, projection, undo)
            else:  # it is small, and its weights are used without a call that would fetch them
                projection.to(hook.execution_device)
            layer.project(projection, (module, PROJECTION))
            undo.callback(layer.project, None)

    def _make_trainable(
        self, weighed: Mapping[str, nn.Module], projected: Mapping[str, int]
    ) -> int:
        """Let all parts be trained, and make those that are missing; return how many."""
        for _, layer in self._layers.values():
            layer.layer.require_backward()
        model = self._component.model
        gates = {n: _new_gate(m, compute_dtype(m, model)) for n, m in weighed.items()}
        projections = {n: _zero(size, size, torch.float32) for n, size in projected.items()}
        new = (gates.keys() - self._gates) | (projections.keys() - self._projections)
        self._gates = gates | self._gates
        self._projections = projections | self._projections
        for part in (*self._gates.values(), *self._projections.values()):
            part.requires_grad_(True)
        return len(new)

    def _used(self, num_new: int) -> Iterator[str]:
        """Say what the parts do, where there are some."""
        name = self._component.name
        if num_new:
            yield (
                f"{name}: {num_new} layers got new gates or projections to train, which "
                f"are zero at first, are saved with the model, and leave it with remove()"
            )
            return
        if weighing := len(self._weighing & self._gates.keys()):
            yield (
                f"{name}: {weighing} layers weigh the coarse branch by the gates of the checkpoint"
            )
        if projecting := len(self._projecting & self._projections.keys()):
            yield f"{name}: {projecting} layers project the linear branch as the checkpoint does"

    def _lost(self, taken: Mapping[str, Collection[str]]) -> Iterator[str]:
        """Say which trained parts, of those taken, a checkpoint may have that cannot be read."""
        model = self._component.model
        parts = " and ".join(part for part, names in taken.items() if names)
        if not parts or hasattr(model, TRAINED):
            return
        files = find_checkpoint(model)
        if files.folder is not None:
            return
        start = (
            f"{self._component.name}: trained layers that its checkpoint may have ({parts}) are "
        )
        if next(model.parameters()).is_meta:
            yield f"{start}looked for when it is loaded"
            return
        lost = f"{start}not used, its files are unknown: {files.reason}"
        if files.source:
            self._scope.warnings.warn(lost)  # which the report has from there
        else:
            yield lost

    def _unread(
        self, stored: Stored, part: str, branch: str, places: Collection[str], read: Collection[str]
    ) -> Iterator[str]:
        """Say which parts of its checkpoint are not used, of modules that could be given them.

        What no layer can be given, though a layer's method takes it, is warned of.
        """
        came = _stored_layers(stored, part)
        lost = [x for x in came if _owner_of(x, places) is None]
        idle = [x for x in came if x not in lost and _owner_of(x, read) is None]
        cls = type(self._component.model).__name__
        for unread, why in (
            (lost, f"no layer of {cls} can be given them"),
            (idle, f"those layers run no method with a {branch} branch"),
        ):
            if not unread:
                continue
            sentence = (
                f"{self._component.name}: trained layers of its checkpoint ({listed(unread, 1)}) "
                f"are not used, {why}: the {branch} branch that they were trained for is missing"
            )
            taken = self._weighing if part == GATE else self._projecting
            if taken and unread is lost:
                self._scope.warnings.warn(sentence)  # which the report has from there
            else:
                yield sentence


def stored_parameters(model: nn.Module) -> Stored:
    """Return the parameters of gates and projections that came with a model.

    Only heads of files are read. Nothing is found where the model comes from no folder of this
    machine.
    """
    from safetensors import safe_open

    held = getattr(model, TRAINED, None)
    if held is not None:
        return {key: value for key, value in held.items() if _is_of(key, GATE, PROJECTION)}
    found: dict[str, Path] = {}
    folder = find_checkpoint(model).folder
    for path in () if folder is None else weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                if _is_of(key, GATE, PROJECTION):
                    found.setdefault(key, path)
    return found


def _is_of(key: str, *names: str) -> bool:
    return f".{key.rpartition('.')[0]}".endswith(tuple(f".{name}" for name in names))


def _stored_layers(stored: Stored, name: str) -> list[str]:
    """Return the dotted names of the layers called `name`, in order."""
    return [*dict.fromkeys(key.rpartition(".")[0] for key in stored if _is_of(key, name))]


def find_gates(
    model: nn.Module, modules: Mapping[str, nn.Module], stored: Stored
) -> dict[str, nn.Linear]:
    """Return the gates of attention modules that are stored, by the name of their module.

    Raises:
        UsageError: a gate does not fit its module.
    """
    gates = {}
    for name, module in modules.items():
        prefix = next((each for each in _gate_names(name) if f"{each}.weight" in stored), None)
        if prefix is not None:
            query = getattr(module, "to_q", None)
            shape = tuple(getattr(query, size, None) for size in ("out_features", "in_features"))
            dtype = compute_dtype(module, model)
            gates[name] = _read_linear(stored, prefix, dtype, shape, "as the query's projection")
    return gates


def _gate_names(module: str) -> tuple[str, str]:
    """Return what the gate of an attention module may be called."""
    # With the other projections, or in the block, as the method's own models have it.
    return f"{module}.{GATE}", f"{module.rpartition('.')[0]}.{GATE}"


def _new_gate(module: nn.Module, dtype: torch.dtype) -> nn.Linear:
    """Return a gate for an attention module.

    Raises:
        UsageError: the module has no projection of queries to take the sizes from.
    """
    reference = getattr(module, "to_q", None)
    if not isinstance(reference, nn.Linear):
        raise UsageError(
            f"a gate must have the sizes of the query's projection, and {type(module).__name__} "
            f"has no linear layer `to_q`; fuse its projections after apply(), not before"
        )
    return _zero(reference.in_features, reference.out_features, dtype)


def _zero(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    """Return a layer as training begins with it, on the CPU."""
    layer = nn.Linear(inputs, outputs, dtype=dtype)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def find_projections(stored: Stored, sizes: Mapping[str, int]) -> dict[str, nn.Linear]:
    """Return the projections that are stored and not zero, in fp32, by the name of their module.

    Args:
        stored: what came with the model.
        sizes: channels per head of its attention modules, by name.

    Raises:
        UsageError: a projection does not fit its module.
    """
    found: dict[str, nn.Linear] = {}
    for prefix in _stored_layers(stored, PROJECTION):
        name = _owner_of(prefix, sizes)
        if name is None or f"{prefix}.weight" not in stored:
            continue
        shape, meaning = (sizes[name],) * 2, "channels of a head to channels of a head"
        projection = _read_linear(stored, prefix, torch.float32, shape, meaning)
        # Zero is what training starts from: then there is nothing to add.
        if any(bool(p.any()) for p in projection.parameters()):
            found[name] = projection
    return found


def _owner_of(part: str, names: Iterable[str]) -> str | None:
    """Return which attention module a stored gate or projection belongs to, or None."""
    for name in names:
        original = f"{name.rpartition('.')[0]}.self_attn"  # what other code calls it
        if part.endswith(GATE):
            if part in _gate_names(name):
                return name
        elif part.startswith((f"{name}.", f"{original}.")):
            return name
    return None


def _read_linear(
    stored: Stored,
    prefix: str,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    meaning: str,
) -> nn.Linear:
    """Return a stored linear layer of a shape, on the CPU and without gradients.

    Raises:
        UsageError: it has another shape than `meaning` asks for.
    """
    from safetensors import safe_open

    tensors = {}
    for part in ("weight", "bias"):
        key = f"{prefix}.{part}"
        place = stored.get(key)
        if isinstance(place, torch.Tensor):
            tensors[part] = place.to(dtype)
        elif place is not None:
            with safe_open(place, framework="pt") as file:
                tensors[part] = file.get_tensor(key).to(dtype)
    found = tuple(tensors["weight"].shape)
    place = stored[f"{prefix}.weight"]
    origin = place if isinstance(place, Path) else "the file of its weights"
    if found != shape:
        raise UsageError(
            f"{prefix}.weight in {origin} must be {list(shape)}, {meaning}, got {list(found)}; the "
            f"file belongs to another model"
        )
    outputs, inputs = found
    layer = nn.Linear(inputs, outputs, bias="bias" in tensors, device="meta")
    layer.load_state_dict(tensors, assign=True)
    return layer.requires_grad_(False)


def _offload_hook(module: nn.Module) -> Any:
    """Return the hook by which accelerate offloads the layers of `module`, or None."""
    return next((h for m in module.children() if (h := getattr(m, "_hf_hook", None))), None)


def _attach_child(module: nn.Module, name: str, child: nn.Module, undo: ExitStack) -> None:
    """Make `child` part of `module`, on its device; `undo` takes the way back."""
    hook = _offload_hook(module)
    if hook is not None:
        from accelerate import cpu_offload

        cpu_offload(child, execution_device=hook.execution_device)
    else:
        child.to(next(module.parameters()).device)
    module.add_module(name, child)
    undo.callback(delattr, module, name)
