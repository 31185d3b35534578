"""Whole calls of denoisers as CUDA graphs: `apply(..., cuda_graph=True)`.

The first call of a kind runs as it comes, which compiles kernels and makes what is static. The
second runs on copies of its arguments, and is captured on them. From the third on arguments are
copied there, the graph is replayed, and its outputs are copied out. The pipeline's hooks run before
and after as ever; inside of a replay no Python runs, and what the layers would have counted is
counted again.

A kind is all that a replay repeats: shapes, strides and dtypes of tensors, arguments that are no
tensors, the latent grid and where text is, how the padding lies, what serves every layer at the
step, and how torch computes. What belongs to the model, its modules, the places of its weights, its
hooks and adapters, is looked at before every call: where it changed, all graphs are dropped.

What cannot be captured for certain is refused by `apply`, and what turns out so later runs without
a graph, with a warning and a line in the report; under strict, it is an error.
"""

import dataclasses
import functools
import gc
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_iter

from multimodal_gen.errors import UsageError, first_line
from multimodal_gen.integrations.denoiser_context import (
    DenoiserContext,
    current_denoiser_context,
)
from multimodal_gen.integrations.hooks import StandIn, own_method
from multimodal_gen.integrations.module_attention import ModuleAttention
from multimodal_gen.kernels.static_cache import being_captured, held_by_graph
from multimodal_gen.runtime.attention_report import DenoiserGraphs, GraphReport
from multimodal_gen.runtime.generator.cross_attention_cache import ADAPTER_STATE
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall, current_watch, watching
from multimodal_gen.runtime.layers.attention.scope import SelectionScope, forced_backend
from multimodal_gen.runtime.layers.attention.sparse.router import Densities
from multimodal_gen.runtime.managers.forward_context import TensorCache, use_forward_context

MOST_GRAPHS = 8
"""Graphs that a handle holds; the one that was not replayed for the longest is dropped first."""

_MOST_KINDS = 256  # that are remembered; a number among the arguments may make each call one

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class _CannotCaptureError(Exception):
    """A call runs without a graph; the message says why."""


class _Own(NamedTuple):
    """Memory for an argument of a graph.

    Attributes:
        tensor: like the argument.
        part: what of it is memory of its own: an expanded one repeats the rest.
        place: the same part of the argument.
    """

    tensor: torch.Tensor
    part: torch.Tensor
    place: tuple[slice, ...]

    @classmethod
    def like(cls, x: torch.Tensor) -> "_Own":
        place = tuple(
            slice(0, 1) if not stride and size > 1 else slice(None)
            for size, stride in zip(x.shape, x.stride(), strict=True)
        )
        sample = x[place]
        with torch.inference_mode(False):  # made under any mode, all may write to it
            part = torch.empty_strided(
                sample.shape, sample.stride(), dtype=x.dtype, device=x.device
            )
            return cls(part.expand(x.shape), part, place)

    def take(self, x: torch.Tensor) -> None:
        self.part.copy_(x[self.place])


class Recording(NamedTuple):
    """What a recorder made of a function.

    Attributes:
        result: what it returned, in memory that every replay writes.
        replay: does on the device what it did.
        free: lets go of it.
    """

    result: Any
    replay: Callable[[], None]
    free: Callable[[], None]


class Recorder:
    """Records functions as CUDA graphs, in one pool of memory.

    Graphs may share it because none runs while another does, and results are copied out.
    """

    def __init__(self) -> None:
        # By device: the pool, and the stream that is captured.
        self._pools: dict[torch.device, tuple[Any, torch.cuda.Stream]] = {}
        self._last: dict[torch.device, torch.cuda.Stream] = {}

    @staticmethod
    def reason_against(device: torch.device) -> str | None:
        """Return why nothing can be recorded on a device, or None."""
        return None if device.type == "cuda" else f"it is on {device}, and graphs are of CUDA"

    def begin(self, device: torch.device) -> None:
        """Let what follows come after all replays and copies so far, on whichever stream."""
        current = torch.cuda.current_stream(device)
        last = self._last.setdefault(device, current)
        if last != current:
            current.wait_stream(last)
            self._last[device] = current

    def record(self, function: Callable[[], Any], device: torch.device) -> Recording:
        """Record what a function does, which ran before, without doing it.

        Raises:
            Exception: of the function, or of CUDA, which cannot record what it did.
        """
        with torch.cuda.device(device):
            if device not in self._pools:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._pools[device] = torch.cuda.graph_pool_handle(), stream
            pool, stream = self._pools[device]
            torch.cuda.synchronize()
            gc.collect()  # nothing is to be freed by chance while the stream is captured
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream), held_by_graph() as held:
                # Other threads go on: they may wait for the device.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = function()
                    graph.capture_end()
                except BaseException:
                    _abandon(graph, device, pool)
                    raise

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        def free() -> None:
            graph.reset()
            held.clear()

        return Recording(result, replay, free)

    def spans(self) -> list[tuple[int, int]]:
        """Return where the memory of the pools begins, and how many bytes it has."""
        pools = {tuple(pool) for pool, _ in self._pools.values()}
        segments: Any = torch.cuda.memory_snapshot() if pools else []  # type: ignore[no-untyped-call]
        mine = (s for s in segments if tuple(s.get("segment_pool_id", ())) in pools)
        return [(segment["address"], segment["total_size"]) for segment in mine]

    def settle(self) -> None:
        """Wait for replays, before graphs are freed."""
        for device in self._pools:
            torch.cuda.synchronize(device)

    def give_back(self) -> None:
        """Give the memory of graphs that were freed to others."""
        if self._pools:
            torch.cuda.empty_cache()


def _abandon(graph: Any, device: torch.device, pool: Any) -> None:
    """End a capture that failed, and put right what torch leaves as it was during one."""
    with suppress(Exception):
        graph.capture_end()
        graph.reset()
        return
    cuda: Any = torch._C
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with suppress(Exception):
            getattr(cuda, name)(device.index, pool)
    # The generator of random numbers counts as captured until a capture ends well.
    with suppress(Exception):
        x, again = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
        again.capture_begin(capture_error_mode="thread_local")
        x.add_(1)
        again.capture_end()
        again.reset()


class _Reads(TorchDispatchMode):
    """Notes which memory a captured call reads, so that the graph can hold what is not its own.

    Modules keep tensors in attributes and caches, from where others may push them. Dynamo compiles
    nothing under a mode: compiled blocks, and the package's layers, which have what they read
    held, run outside of it.

    Args:
        model: what is captured.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        impls = ((module, module._compiled_call_impl) for module in model.modules())
        self._compiled: list[Any] = [each for each in impls if each[1] is not None]
        self._is_out = False
        weights = itertools.chain(model.parameters(), model.buffers())
        self._weights = {_place(x) for x in weights}
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        self._note((args, kwargs))
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> "_Reads":
        """Look at what runs from now on."""
        for module, impl in self._compiled:
            module._compiled_call_impl = functools.partial(self._outside, impl)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Look at nothing any more."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for module, impl in self._compiled:
            module._compiled_call_impl = impl

    def watch(self, layer: object, call: AttentionCall, serve: Any) -> torch.Tensor:
        """Let a layer serve a call outside of the mode."""
        del layer
        return self._outside(serve, call)

    def held(self, owns: Callable[[int], bool]) -> list[torch.UntypedStorage]:
        """Return what was read and is there still, besides weights and what the graph owns."""
        places = [x for x in self._seen if x not in self._weights and not owns(x)]
        found = (torch.UntypedStorage._new_with_weak_ptr(self._seen[x].cdata) for x in places)
        return [storage for storage in found if storage is not None]

    def _outside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_out:  # a layer in a compiled block
            return function(*args, **kwargs)
        self._note((args, kwargs))
        self._is_out = True
        try:
            with _pop_mode_temporarily():
                return function(*args, **kwargs)
        finally:
            self._is_out = False

    def _note(self, values: Any) -> None:
        for x in tree_iter(values):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided:
                storage = x.untyped_storage()
                place = storage.data_ptr()
                if place not in self._seen:
                    self._seen[place] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]


class _Counts:
    """What layers count in a call that is captured: taken back, and counted with every replay.

    Args:
        bindings: yields what serves the layers' calls.
    """

    def __init__(self, bindings: Callable[[], Iterator[Binding]]) -> None:
        self._bindings = bindings
        self._before = {bound: bound.tally() for bound in bindings()}
        self._apart = ExitStack()
        methods = (bound.method for bound in self._before)
        notes = {id(m.layer.densities): m.layer.densities for m in methods if m is not None}
        self._notes = [(each, self._apart.enter_context(each.apart())) for each in notes.values()]
        self._counted: list[tuple[Binding, Counter[Hashable]]] = []
        self._known: list[tuple[Densities, float, int]] = []
        self._decided: list[tuple[Densities, int]] = []
        self._shares: torch.Tensor | None = None

    def gather(self) -> None:
        """Take the densities that were noted; those that data decide in one tensor."""
        shares = []
        for densities, noted in self._notes:
            for share, heads in noted():
                if isinstance(share, torch.Tensor):
                    shares.append(share.double())
                    self._decided.append((densities, heads))
                else:
                    self._known.append((densities, share, heads))
        self._shares = torch.stack(shares) if shares else None

    def take_back(self) -> None:
        """Count nothing that was only captured."""
        self._apart.close()
        for bound in self._bindings():
            added = bound.tally() - self._before.get(bound, Counter())
            if added:
                bound.count_again(added, -1)
                self._counted.append((bound, added))

    def count(self, step: int) -> None:
        """Count what was captured once more, for a denoising step."""
        for bound, added in self._counted:
            bound.count_again(added)
        for densities, share, heads in self._known:
            densities.note(step, share, heads)
        if self._shares is not None:
            shares = self._shares.clone()  # which the next replay writes
            for (densities, heads), found in zip(self._decided, shares, strict=True):
                densities.note(step, found, heads)


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """A captured call.

    Attributes:
        inputs: memory of its arguments.
        held: other memory that it reads.
        recording: the graph, and its outputs.
        counts: what its layers count.
        ran: names of the attention modules that run in it.
    """

    inputs: tuple[_Own, ...]
    held: list[torch.UntypedStorage]
    recording: Recording
    counts: _Counts
    ran: frozenset[str]

    def num_bytes(self) -> int:
        inputs = sum(own.part.numel() * own.part.element_size() for own in self.inputs)
        return inputs + sum(storage.nbytes() for storage in self.held)


class CudaGraphs:
    """The graphs of a handle; its denoisers share their memory, and run one at a time.

    Args:
        scope: what is warned of, and whether it is an error.
    """

    def __init__(self, scope: SelectionScope) -> None:
        self.scope = scope
        self.recorder = Recorder()
        self.lock = threading.RLock()
        # Kinds: seen once, why they cannot be captured, or their graph; the last used last.
        self._kinds: OrderedDict[Any, _Graph | str | None] = OrderedDict()
        self._denoisers: list[GraphedDenoiser] = []

    def add(self, denoiser: "GraphedDenoiser") -> None:
        """Report on a denoiser, too."""
        self._denoisers.append(denoiser)

    def knows(self, key: Hashable) -> bool:
        """Tell whether a call of a kind was seen; from now on it was."""
        known = key in self._kinds
        self._kinds.setdefault(key, None)
        self._kinds.move_to_end(key)
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(k for k, kind in self._kinds.items() if not _is_graph(kind))]
        return known

    def found(self, key: Hashable) -> _Graph | str | None:
        """Return the graph of a kind, why it has none, or None where none was tried."""
        return self._kinds.get(key)

    def keep(self, key: Hashable, found: _Graph | str) -> int:
        """Keep the graph of a kind, or why it has none; return how many were dropped for it."""
        self._kinds[key] = found
        graphs = [each for each, kind in self._kinds.items() if _is_graph(kind)]
        spare = graphs[: max(0, len(graphs) - MOST_GRAPHS)]
        return self.drop(lambda each: each in spare)

    def drop(self, chosen: Callable[[Any], bool]) -> int:
        """Forget kinds by their keys, and free their graphs; return how many these were."""
        kinds = [self._kinds.pop(key) for key in list(self._kinds) if chosen(key)]
        graphs = [kind for kind in kinds if isinstance(kind, _Graph)]
        num = len(graphs)
        kinds.clear()
        if graphs:
            self.recorder.settle()
            while graphs:  # and nothing else refers to their memory
                graphs.pop().recording.free()
            self.recorder.give_back()
        return num

    def report(self) -> GraphReport:
        """Return how often graphs were replayed, why not, and what they hold."""
        with self.lock:
            graphs = [kind for kind in self._kinds.values() if isinstance(kind, _Graph)]
            inputs = sum(graph.num_bytes() for graph in graphs)
            return GraphReport(
                num_graphs=len(graphs),
                num_bytes=inputs + sum(size for _, size in self.recorder.spans()) if graphs else 0,
                denoisers=tuple(denoiser.report() for denoiser in self._denoisers),
            )


def _is_graph(kind: object) -> bool:
    return isinstance(kind, _Graph)


class _Forward(StandIn):
    """In place of a denoiser's `forward`.

    Attributes:
        own: the denoiser's.
        graphed: what calls it; None once it was detached.
    """

    def __init__(self, own: Callable[..., Any], graphed: "GraphedDenoiser") -> None:
        functools.update_wrapper(self, own)
        self.own = own
        self.graphed: GraphedDenoiser | None = graphed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.graphed is None or torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        return self.graphed.call(self.own, args, kwargs)

    def in_copies(self) -> Any:
        own: Any = self.own
        return MethodType(own.__func__, own.__self__) if isinstance(own, MethodType) else own


@dataclass(slots=True)
class _Tally:
    """How the calls of a denoiser went."""

    calls: int = 0
    replays: int = 0
    learning: int = 0  # the first two of a kind
    dropped: int = 0
    plain: Counter[str] = field(default_factory=Counter)


class GraphedDenoiser:
    """A denoiser whose calls are replayed.

    Args:
        graphs: those of the handle.
        model: the denoiser.
        component: its name in the pipeline.
        modules: returns its attention modules.
        finished: returns how many calls its hooks saw; Dynamo compiles what is between them.
    """

    def __init__(
        self,
        graphs: CudaGraphs,
        model: nn.Module,
        component: str,
        modules: Callable[[], Sequence[ModuleAttention]],
        finished: Callable[[], int],
    ) -> None:
        self._graphs, self._model, self._component = graphs, model, component
        self._modules, self._finished = modules, finished
        self._device = _device_of(model)
        self._facts: _Facts | None = None
        self._against: str | None = None
        self._tally = _Tally()

    def refuse(self) -> None:
        """Refuse a model that can be seen not to be capturable.

        Raises:
            UsageError: says why.
        """
        reason = self._reason_of_model() or self._reason_of_layers()
        if reason is not None:
            raise UsageError(
                f"cuda_graph (--cuda-graph) must be given for a denoiser whose calls a CUDA graph "
                f"can repeat, got {self._component} ({type(self._model).__name__}): {reason}; "
                f"leave it out, or change that"
            )

    def install(self, undo: ExitStack) -> None:
        """Replay the model's calls until `undo` ends."""
        attributes = vars(self._model)
        before = attributes.get("forward")
        forward = attributes["forward"] = _Forward(before or self._model.forward, self)
        self._graphs.add(self)

        def detach() -> None:
            forward.graphed = None  # somebody may have wrapped it
            if attributes.get("forward") is not forward:
                return
            if before is None:
                del attributes["forward"]
            else:
                attributes["forward"] = before

        undo.callback(detach)
        undo.callback(self._end)

    def report(self) -> DenoiserGraphs:
        """Return how its calls went."""
        tally = self._tally
        plain, unseen = tally.plain.copy(), max(0, self._finished() - tally.calls)
        if unseen:
            plain["it was compiled as a whole"] += unseen
        return DenoiserGraphs(
            component=self._component,
            calls=tally.calls + unseen,
            replays=tally.replays,
            learning=tally.learning,
            dropped=tally.dropped,
            plain=tuple(plain.items()),
        )

    def call(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model's own forward returns, from a graph where there is one."""
        if being_captured():  # the caller has a graph of its own
            return own(*args, **kwargs)
        with self._graphs.lock:
            self._tally.calls += 1
            try:
                context = self._expected_context()
                tensors: list[torch.Tensor] = []
                key = (id(self), self._kind((args, kwargs), context, tensors))
            except _CannotCaptureError as reason:
                return self._plainly(str(reason), own, args, kwargs)
            if not self._graphs.knows(key):
                self._tally.learning += 1
                return own(*args, **kwargs)
            found = self._graphs.found(key)
            if isinstance(found, _Graph):
                return self._replay(found, tensors, context)
            if found is not None:
                return self._plainly(found, own, args, kwargs)
            return self._capture(key, own, (args, kwargs), tensors, context)

    def _plainly(
        self, reason: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call without a graph, which the report tells."""
        self._tell(reason)
        self._tally.plain[reason] += 1
        return own(*args, **kwargs)

    def _tell(self, reason: str) -> None:
        """Warn that calls have no graph; under strict, refuse that."""
        scope, told = self._graphs.scope, f"calls of {self._component} have no CUDA graph: {reason}"
        if scope.strict:
            raise UsageError(f"{told}, which --strict-attention refuses; leave cuda_graph out")
        scope.warnings.warn(told)

    def _replay(
        self, graph: _Graph, tensors: Sequence[torch.Tensor], context: DenoiserContext
    ) -> Any:
        self._graphs.recorder.begin(self._device)
        for own, x in zip(graph.inputs, tensors, strict=True):
            own.take(x)
        graph.recording.replay()
        self._tally.replays += 1
        graph.counts.count(context.current_timestep)
        context.ran.update(graph.ran)
        return _mapped(graph.recording.result, torch.Tensor.clone)

    def _capture(
        self,
        key: Hashable,
        own: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        tensors: Sequence[torch.Tensor],
        context: DenoiserContext,
    ) -> Any:
        """Run a call on memory of its own, capture it there, and return what it gave."""
        reason = self._reason_of_layers()
        if reason is not None:
            self._graphs.keep(key, reason)
            return self._plainly(reason, own, *given)
        self._graphs.recorder.begin(self._device)
        inputs = tuple(map(_Own.like, tensors))
        for memory, x in zip(inputs, tensors, strict=True):
            memory.take(x)
        versions = [memory.part._version for memory in inputs]
        rest = iter(memory.tensor for memory in inputs)
        args, kwargs = _mapped(given, lambda x: next(rest))
        before = self._arguments((args, kwargs))
        padding = None if context.padding is None else context.padding.over(next(rest))
        with use_forward_context(dataclasses.replace(context, padding=padding)):
            out = own(*args, **kwargs)
        self._tally.learning += 1
        captured = dataclasses.replace(
            context,
            padding=None if padding is None else padding.over(padding.text),
            ran=set(),
            cache=TensorCache(),
            exchanges=itertools.count(),
        )
        counts, reads = _Counts(self._bindings), _Reads(self._model)

        def run() -> Any:
            with watching(reads.watch), reads:
                result = own(*args, **kwargs)
            counts.gather()
            return result

        try:
            _require_copyable(out)
            written = versions != [memory.part._version for memory in inputs]
            if written or before != self._arguments((args, kwargs)):
                raise _CannotCaptureError("it writes to its arguments")
            with use_forward_context(captured):
                recording = self._graphs.recorder.record(run, self._device)
        except Exception as error:  # whatever it is, the call was computed
            reason = first_line(error)
        finally:
            counts.take_back()
        if reason is not None:
            self._graphs.keep(key, reason)
            self._tell(reason)
            return out
        spans = self._graphs.recorder.spans()
        held = reads.held(lambda place: any(0 <= place - start < size for start, size in spans))
        graph = _Graph(inputs, held, recording, counts, frozenset(captured.ran))
        self._tally.dropped += self._graphs.keep(key, graph)
        return out

    def _arguments(self, given: Any) -> tuple[Hashable, list[int]]:
        """Return what tells whether a call changed the lists and mappings it was given."""
        tensors: list[torch.Tensor] = []
        return _kind_of(given, "its arguments", self._device, tensors), [id(x) for x in tensors]

    def _bindings(self) -> Iterator[Binding]:
        for module in self._modules():
            for layer in module.built():
                yield from layer.bindings()

    def _end(self) -> None:
        """Drop the graphs at the end."""
        with self._graphs.lock:
            self._facts = None
            self._graphs.drop(self._is_mine)

    def _is_mine(self, key: Any) -> bool:
        return bool(key[0] == id(self))

    def _forget(self) -> None:
        """Drop the graphs, and what kinds there were."""
        self._facts = None
        self._tally.dropped += self._graphs.drop(self._is_mine)

    def _expected_context(self) -> DenoiserContext:
        """Return the context of the running call, if it may be captured or replayed."""
        context = current_denoiser_context()
        if context is None or context.component != self._component:
            raise _CannotCaptureError("it was called without its hooks")
        reason = _reason_now(self._device) or self._reason_of_cache()
        if reason is None and (context.kv_cache is not None or context.lists is not None):
            reason = "it works chunk by chunk"
        if reason is None:
            self._look_at_model()
            reason = self._against
        if reason is not None:
            raise _CannotCaptureError(reason)
        return context

    def _look_at_model(self) -> None:
        """Drop all graphs where the model is not what it was."""
        if self._facts is not None and self._facts.now() == self._facts.taken:
            return
        self._forget()
        self._facts, self._device = _Facts(self._model), _device_of(self._model)
        self._against = self._reason_of_model()

    def _kind(
        self,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        context: DenoiserContext,
        tensors: list[torch.Tensor],
    ) -> Hashable:
        """Return what calls that one graph serves have in common; collect their tensors."""
        arguments = _kind_of(given, "its arguments", self._device, tensors)
        padding = context.padding
        if padding is not None:
            _kind_of(padding.text, "its mask of text", self._device, tensors)
        layers = (layer for module in self._modules() for layer in module.built())
        return (
            arguments,
            None if padding is None else padding.kind(),
            (context.latent_grid, context.text_span, context.described, context.no_grid),
            (context.batch, context.cfg_branch == "both"),
            tuple(layer.step_kind(context) for layer in layers),
            _how_torch_computes(),
        )

    def _reason_of_cache(self) -> str | None:
        cached = getattr(self._model, "_cache_config", None) is not None
        if cached or getattr(self._model, "_is_cached", False):
            return "a step cache is enabled, which decides in every step"
        return None

    def _reason_of_layers(self) -> str | None:
        """Return why what the layers do in one step would not do for another, or None."""
        layers = (layer for module in self._modules() for layer in module.built())
        return next(filter(None, (layer.uncapturable() for layer in layers)), None)

    def _reason_of_model(self) -> str | None:
        """Return why no call of the model as it is can be captured, or None."""
        model = self._model
        reason = self._reason_of_cache() or self._graphs.recorder.reason_against(self._device)
        if reason is not None:
            return reason
        if "_hf_hook" in vars(model):
            return "it is offloaded by accelerate"
        if getattr(model, "_compiled_call_impl", None) is not None:
            return "it is compiled as a whole (compile_repeated_blocks() compiles its blocks)"
        for name, module in model.named_modules():
            if module is not model:
                reason = _reason_of_module(name, module)
                if reason is not None:
                    return reason
        devices = {parameter.device for parameter in model.parameters()}
        return "its weights are on several devices" if len(devices) > 1 else None


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _reason_of_module(name: str, module: nn.Module) -> str | None:
    if module._forward_hooks or module._forward_pre_hooks:
        return f"{name} has hooks, which a replay would not call"
    forward = vars(module).get("forward")
    if forward is not None and forward != own_method(module, "forward"):
        return f"{name} has a forward of its own, as step caches and offloading set"
    return None


def _reason_now(device: torch.device) -> str | None:
    """Return why calls as they are made now have no graph, or None."""
    if torch.is_grad_enabled():
        return "gradients may be recorded; call it under torch.no_grad()"
    if torch.is_autocast_enabled(device.type):
        return "autocast keeps copies of weights that no graph may read"
    if current_watch() is not None:
        return "its attention is checked or recorded"
    modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if modes or _get_current_dispatch_mode_stack():
        return "a mode of torch looks at every operation"
    return None


def _how_torch_computes() -> Hashable:
    """Return the settings of the process that decide which kernels run."""
    backends: Any = torch.backends
    return (
        forced_backend(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
    )


class _Facts:
    """What a graph of a model goes by; taken before every call, so that it is flat and short.

    The modules, which are held, so that no other one takes the identity of one; where their weights
    lie; their hooks and processors, and what adapters add how strongly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = [vars(module) for module in model.modules()]
        self._inner = inner = self._own[1:]  # hooks of the model itself run around every call
        self._adapters = [own for own in inner if "scaling" in own or "merged_adapters" in own]
        self.taken = self.now()

    def now(self) -> tuple[list[object], ...]:
        """Return all that, to be compared."""
        own, inner = self._own, self._inner
        weights = [x for each in own for x in each["_parameters"].values() if x is not None]
        weights += [x for each in own for x in each["_buffers"].values() if x is not None]
        processors = [each["processor"] for each in inner if "processor" in each]
        return (
            [child for each in own for child in each["_modules"].values()],
            [_place(x) for x in weights],
            [x.numel() for x in weights],
            [each["training"] for each in own],
            [hook for each in inner for hook in each["_forward_hooks"].values()],
            [hook for each in inner for hook in each["_forward_pre_hooks"].values()],
            [each["forward"] for each in inner if "forward" in each],
            [each["_compiled_call_impl"] for each in inner if "_compiled_call_impl" in each],
            [*processors],
            [repr(each.scale) for each in processors if hasattr(each, "scale")],
            [repr(each.get(name)) for each in self._adapters for name in ADAPTER_STATE],
        )


def _place(x: torch.Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:  # a quantised weight, which wraps others
        return id(x)


def _kind_of(value: Any, where: str, device: torch.device, tensors: list[torch.Tensor]) -> Hashable:
    """Return what a graph repeats of an argument; collect its tensors, whose values it does not.

    Raises:
        _CannotCaptureError: that is not known of it.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
            raise _CannotCaptureError(f"{where} has a {type(value).__name__} of its own kind")
        if value.device != device:
            raise _CannotCaptureError(f"{where} has a tensor on {value.device}, not {device}")
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype)
    if type(value) is float:
        return (float, value.hex())
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if type(value) in (list, tuple, torch.Size):
        return (type(value), tuple(_kind_of(each, where, device, tensors) for each in value))
    if type(value) is dict:
        return (
            dict,
            tuple((k, _kind_of(each, f"`{k}`", device, tensors)) for k, each in value.items()),
        )
    raise _CannotCaptureError(f"{where} has a {type(value).__name__}, whose tensors are not known")


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with other tensors in its lists, tuples, mappings and outputs of diffusers."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, change) for each in value)
    if type(value) is dict:
        return {name: _mapped(each, change) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and isinstance(value, dict):
        names = (each.name for each in dataclasses.fields(value))
        return type(value)(**{name: _mapped(getattr(value, name), change) for name in names})
    return value


def _require_copyable(out: Any) -> None:
    """Refuse what a model returns where it is not known how to copy it."""
    known = isinstance(out, (torch.Tensor, *_PLAIN))
    if isinstance(out, dict):
        known = type(out) is dict or dataclasses.is_dataclass(out)
    parts = out.values() if isinstance(out, dict) else out if type(out) in (list, tuple) else ()
    if not known and type(out) not in (list, tuple):
        raise _CannotCaptureError(f"it returns a {type(out).__name__}")
    for part in parts:
        _require_copyable(part)
