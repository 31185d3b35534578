"""Whole calls of denoisers as CUDA graphs: `apply(..., cuda_graph=True)`.

The first call of a kind (see `graph_kinds`) runs as it comes, which compiles kernels and makes what
is static. The second runs on copies of its arguments, and is captured on them. From the third on
arguments are copied there, the graph is replayed, and its outputs are copied out. The pipeline's
hooks run before and after as ever; inside of a replay no Python runs, and what the layers would
have counted is counted again.

What cannot be captured for certain is refused by `apply`, and what turns out so later runs without
a graph, with a warning and a line in the report; under strict, it is an error.
"""

import functools
import gc
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._pytree import tree_iter, tree_map_only, tree_unflatten

from multimodal_gen.errors import UsageError, first_line
from multimodal_gen.integrations.denoiser_context import (
    DenoiserContext,
    current_denoiser_context,
)
from multimodal_gen.integrations.graph_kinds import (
    CannotCaptureError,
    ModelFacts,
    device_of,
    has_other_forward,
    kind_of_call,
    parts_of,
    reason_of_call,
    reason_of_layers,
    reason_of_model,
    require_copyable,
    taken_apart,
    varying_layers,
)
from multimodal_gen.integrations.hooks import own_method, replace_method
from multimodal_gen.integrations.module_attention import ModuleAttention
from multimodal_gen.kernels.static_cache import being_captured, held_by_graph
from multimodal_gen.runtime.attention_report import DenoiserGraphs, GraphReport
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import watching
from multimodal_gen.runtime.layers.attention.scope import SelectionScope, forced_backend
from multimodal_gen.runtime.layers.attention.sparse.router import Densities
from multimodal_gen.runtime.managers.forward_context import TensorCache, use_forward_context

MOST_GRAPHS = 8
"""Graphs that a denoiser has; the one that was not replayed for the longest is dropped first."""

_MOST_KINDS = 256  # that are remembered; a number among the arguments may make each call one


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """A captured call.

    Attributes:
        graph: repeats it, a `torch.cuda.CUDAGraph`.
        result: what it returns, which every replay writes.
        inputs: memory of its arguments.
        held: what it reads, and what the caches of this package made for it.
        count: each counts what layers count in it, for a step.
        ran: names of the attention modules that run in it.
    """

    graph: Any
    result: Any
    inputs: tuple[torch.Tensor, ...]
    held: list[object]
    count: list[Callable[[int], None]]
    ran: frozenset[str]


class Recorder:
    """Records functions as CUDA graphs, in one pool of memory.

    Graphs may share it because none runs while another does, and results are copied out.
    """

    def __init__(self) -> None:
        # Graphs are recorded in the last pool. One that no graph holds any more cannot be taken up.
        self._pools: list[Any] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # that are captured
        self._last: dict[torch.device, torch.cuda.Stream] = {}
        self._failed: list[Any] = []
        self._num_graphs = 0

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

    def record(self, function: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
        """Record what a function does, which ran before, without doing it.

        Returns:
            What the function returned, in memory that every replay writes, and the graph.

        Raises:
            Exception: of the function, or of CUDA, which cannot record what it did.
        """
        cuda: Any = torch._C
        with torch.cuda.device(device):
            if not self._pools:
                self._pools.append(torch.cuda.graph_pool_handle())
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            graph, pool = torch.cuda.CUDAGraph(), self._pools[-1]
            torch.cuda.synchronize()
            gc.collect()  # nothing is to be freed by chance while the stream is captured
            torch.cuda.empty_cache()
            with torch.cuda.stream(self._streams[device]):
                # A workspace of cuBLAS would outlive the pool, or be that of work outside.
                cuda._cuda_clearCublasWorkspaces()
                # Other threads go on: they may wait for the device.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = function()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph, device, pool)
                    raise
                finally:
                    cuda._cuda_clearCublasWorkspaces()

        self._num_graphs += 1
        return result, graph

    def free(self, graphs: list[_Graph]) -> None:
        """Let go of graphs, and of the list, where nothing else refers to their memory."""
        if not graphs:
            return
        for device in self._streams:
            torch.cuda.synchronize(device)
        self._num_graphs -= len(graphs)
        while graphs:
            graphs.pop().graph.reset()
        if not self._num_graphs:
            self._pools.clear()
        if self._streams:
            torch.cuda.empty_cache()

    def _abandon(self, graph: Any, device: torch.device, pool: Any) -> None:
        """End a capture that failed, and put right what torch leaves as it was during one."""
        self._failed.append(graph)  # which allocators may still ask
        self._pools.append(torch.cuda.graph_pool_handle())
        with suppress(Exception):
            graph.capture_end()
            graph.reset()
            return
        cuda: Any = torch._C
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with suppress(Exception):
                getattr(cuda, name)(device.index, pool)
        # The generator of random numbers counts as captured until its graph lets go of it, or, as
        # older versions of torch have it, until a capture ends well.
        with suppress(Exception):
            graph.reset()
            x, again = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
            again.capture_begin(capture_error_mode="thread_local")
            x.add_(1)
            again.capture_end()
            again.reset()

    def num_bytes(self) -> int:
        """Return how large the pools are."""
        pools = {tuple(pool) for pool in self._pools}
        segments: Any = torch.cuda.memory_snapshot() if pools else []  # type: ignore[no-untyped-call]
        mine = (s for s in segments if tuple(s.get("segment_pool_id", ())) in pools)
        return sum(segment["total_size"] for segment in mine)


class _Reads(TorchDispatchMode):
    """Holds the memory that a captured call reads, besides weights and what it makes itself.

    Modules keep tensors in attributes and caches, from where others may push them. Dynamo compiles
    nothing under a mode: compiled blocks, and the package's layers, which have what they read
    held, run outside of it.

    Args:
        model: what is captured.

    Attributes:
        held: the memory.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        impls = ((module, module._compiled_call_impl) for module in model.modules())
        self._compiled: list[Any] = [each for each in impls if each[1] is not None]
        self._is_out = False
        self.held: list[torch.UntypedStorage] = []
        self._known: set[int] = set()  # where it begins; what is held or made stays there
        self._look_at((*model.parameters(), *model.buffers()))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        self.held += self._look_at((args, kwargs))
        made = function(*args, **(kwargs or {}))
        self._look_at(made)
        return made

    def __enter__(self) -> "_Reads":
        """Look at what runs from now on."""
        for module, impl in self._compiled:
            module._compiled_call_impl = functools.partial(self.outside, impl)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Look at nothing any more."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for module, impl in self._compiled:
            module._compiled_call_impl = impl

    def outside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run what is compiled, or may be, outside of the mode."""
        if self._is_out:  # a layer in a compiled block
            return function(*args, **kwargs)
        self.held += self._look_at((args, kwargs))
        self._is_out = True
        try:
            with _pop_mode_temporarily():
                made = function(*args, **kwargs)
        finally:
            self._is_out = False
        self._look_at(made)
        return made

    def _look_at(self, values: Any) -> list[torch.UntypedStorage]:
        """Return memory that was not known; from now on it is."""
        found = []
        tensors = (x for x in tree_iter(values) if isinstance(x, torch.Tensor))
        for x in itertools.chain.from_iterable(map(parts_of, tensors)):
            if x.layout is torch.strided:
                storage = x.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._known.add(storage.data_ptr())
                    found.append(storage)
        return found


@contextmanager
def _counted_apart(
    bindings: Callable[[], Iterator[Binding]],
) -> Iterator[list[Callable[[int], None]]]:
    """Take back what layers count in the block; yield what then counts it again, for a step."""
    before = {bound: bound.tally() for bound in bindings()}
    methods = (bound.method for bound in before)
    densities = {id(m.layer.densities): m.layer.densities for m in methods if m is not None}
    again: list[Callable[[int], None]] = []
    with ExitStack() as apart:
        noted = [(each, apart.enter_context(each.apart())) for each in densities.values()]
        try:
            yield again
        finally:
            for each, found in noted:
                again += [functools.partial(_note, each, *share) for share in found()]
            for bound in bindings():
                if added := bound.tally() - before.get(bound, Counter()):
                    bound.count_again(added, -1)
                    again.append(functools.partial(_count, bound, added))


def _note(densities: Densities, share: float | torch.Tensor, heads: int, step: int) -> None:
    # The next replay writes to a share that data decide.
    densities.note(step, share.clone() if isinstance(share, torch.Tensor) else share, heads)


def _count(bound: Binding, added: "Counter[Hashable]", step: int) -> None:
    del step
    bound.count_again(added)


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor)]


def _fill(inputs: Sequence[torch.Tensor], values: list[Any]) -> None:
    for memory, x in zip(inputs, _tensors(values), strict=True):
        memory.copy_(x)


class CudaGraphs:
    """The graphs of a handle; its denoisers share their memory, and run one at a time.

    Args:
        scope: what is warned of, and whether it is an error.

    Attributes:
        denoisers: who has them.
    """

    def __init__(self, scope: SelectionScope) -> None:
        self.scope = scope
        self.recorder = Recorder()
        self.lock = threading.RLock()
        self.denoisers: list[GraphedDenoiser] = []

    def report(self) -> GraphReport:
        """Return how often graphs were replayed, why not, and what they hold."""
        with self.lock:
            graphs = [each for denoiser in self.denoisers for each in denoiser.graphs()]
            held = (x for each in graphs for x in each.held if isinstance(x, torch.UntypedStorage))
            sizes = {x.data_ptr(): x.nbytes() for x in held}
            return GraphReport(
                num_graphs=len(graphs),
                num_bytes=sum(sizes.values()) + self.recorder.num_bytes(),
                denoisers=tuple(denoiser.report() for denoiser in self.denoisers),
            )


class GraphedDenoiser:
    """A denoiser whose calls are replayed.

    Args:
        owner: the graphs of the handle.
        model: the denoiser.
        component: its name in the pipeline.
        modules: returns its attention modules.
        finished: returns how many calls its hooks saw; Dynamo compiles what is between them.

    Raises:
        UsageError: it can be seen that no call of the model can be captured.
    """

    def __init__(
        self,
        owner: CudaGraphs,
        model: nn.Module,
        component: str,
        modules: Callable[[], Sequence[ModuleAttention]],
        finished: Callable[[], int],
    ) -> None:
        self._owner, self._model, self._component = owner, model, component
        self._modules, self._finished = modules, finished
        # Kinds: seen once, why they cannot be captured, or their graph; the last used last.
        self._kinds: OrderedDict[Hashable, _Graph | str | None] = OrderedDict()
        self._facts: ModelFacts | None = None
        # Layers that steps may change, and under which forced backend; kept from replay to replay.
        self._varying: tuple[object, list[AttentionLayer]] | None = None
        self._tally: Counter[str] = Counter(calls=0, replays=0, learning=0, dropped=0)
        self._plain: Counter[str] = Counter()
        reason = self._look_at_model() or reason_of_layers(self._layers())
        if reason is None and has_other_forward(model):
            reason = "it has a forward of its own"
        if reason is not None:
            raise UsageError(
                f"cuda_graph (--cuda-graph) must be given for a denoiser whose calls a CUDA graph "
                f"can repeat, got {component} ({type(model).__name__}): {reason}; leave it out, "
                f"or change that"
            )

    def install(self, undo: ExitStack) -> None:
        """Replay the model's calls until `undo` ends."""
        own = own_method(self._model, "forward")

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or being_captured():
                return own(*args, **kwargs)
            with self._owner.lock:
                return self._call(own, args, kwargs)

        self._owner.denoisers.append(self)
        undo.callback(self._end)  # once no call comes here any more
        replace_method(self._model, "forward", forward, undo)

    def graphs(self) -> list[_Graph]:
        """Return those there are."""
        return [kind for kind in self._kinds.values() if isinstance(kind, _Graph)]

    def report(self) -> DenoiserGraphs:
        """Return how its calls went."""
        tally, plain = self._tally.copy(), self._plain.copy()
        unseen = max(0, self._finished() - tally["calls"])
        if unseen:
            tally["calls"] += unseen
            plain["it was compiled as a whole"] += unseen
        return DenoiserGraphs(component=self._component, plain=dict(plain), **tally)

    def _call(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model's own forward returns, from a graph where there is one."""
        self._tally["calls"] += 1
        context, forced = current_denoiser_context(), forced_backend()
        varying, self._varying = self._varying, None
        try:
            if context is None or context.component != self._component:
                raise CannotCaptureError("it was called without its hooks")
            reason = reason_of_call(context, self._device) or self._look_at_model()
            if reason is not None:
                raise CannotCaptureError(reason)
            given = args, kwargs, None if context.padding is None else context.padding.text
            if varying is None or varying[0] is not forced:
                varying = (forced, varying_layers(self._layers()))
            kind = kind_of_call(given, context, varying[1], self._device)
        except CannotCaptureError as error:
            return self._run_plainly(str(error), own, args, kwargs)
        if kind not in self._kinds:
            self._keep(kind, None)
            self._tally["learning"] += 1
            return own(*args, **kwargs)
        self._kinds.move_to_end(kind)
        found = self._kinds[kind]
        if found is None:
            found = reason_of_layers(self._layers())
            if found is None:
                return self._run_and_capture(kind, own, given, context)
            self._keep(kind, found)
        if isinstance(found, str):
            return self._run_plainly(found, own, args, kwargs)
        self._varying = varying
        return self._replay(found, given, context)

    def _run_plainly(
        self, reason: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call without a graph, which the report tells."""
        self._tell(reason)
        self._plain[reason] += 1
        return own(*args, **kwargs)

    def _tell(self, reason: str) -> None:
        """Warn that calls have no graph; under strict, refuse that."""
        scope, told = self._owner.scope, f"calls of {self._component} have no CUDA graph: {reason}"
        if scope.strict:
            raise UsageError(f"{told}, which --strict-attention refuses; leave cuda_graph out")
        scope.warnings.warn(told)

    def _replay(self, found: _Graph, given: object, context: DenoiserContext) -> Any:
        self._owner.recorder.begin(self._device)
        _fill(found.inputs, taken_apart(given)[0])
        found.graph.replay()
        self._tally["replays"] += 1
        for count in found.count:
            count(context.current_timestep)
        context.ran.update(found.ran)
        return tree_map_only(torch.Tensor, torch.Tensor.clone, found.result)

    def _run_and_capture(
        self, kind: Hashable, own: Callable[..., Any], given: Any, context: DenoiserContext
    ) -> Any:
        """Run a call on memory of its own, capture it there, and return what it gave."""
        self._owner.recorder.begin(self._device)
        leaves, form = taken_apart(given)
        with torch.inference_mode(False):  # under any mode, all may write to them
            inputs = tuple(torch.empty_like(x) for x in _tensors(leaves))
        _fill(inputs, leaves)
        versions, rest = [x._version for x in inputs], iter(inputs)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs, text = copies = tree_unflatten(leaves, form)
        copied = replace(context, padding=context.padding and context.padding.over(text))
        with use_forward_context(copied):
            out = own(*args, **kwargs)
        self._tally["learning"] += 1
        after, form_after = taken_apart(copies)
        same = form == form_after and all(a is b for a, b in zip(leaves, after, strict=True))
        if not same or versions != [x._version for x in inputs]:
            reason = "it writes to its arguments"
            self._keep(kind, reason)
            self._tell(reason)
            # Those of the caller, too: the call was counted, and is not again.
            with use_forward_context(context), _counted_apart(self._bindings):
                return own(*given[0], **given[1])
        try:
            require_copyable(out)
            call = functools.partial(own, *args, **kwargs)
            found: _Graph | str = self._capture(call, inputs, copied)
        except Exception as error:  # whatever it is, the call was computed
            found = first_line(error)
        self._keep(kind, found)
        if isinstance(found, str):
            self._tell(found)
        return out

    def _capture(
        self, call: Callable[[], Any], inputs: tuple[torch.Tensor, ...], context: DenoiserContext
    ) -> _Graph:
        reads, ran = _Reads(self._model), set[str]()
        context = replace(
            context,
            padding=context.padding and context.padding.over(context.padding.text),
            ran=ran,
            cache=TensorCache(),
            exchanges=itertools.count(),
        )

        def run() -> Any:
            with watching(lambda layer, call, serve: reads.outside(serve, call)), reads:
                return call()

        with (
            use_forward_context(context),
            _counted_apart(self._bindings) as count,
            held_by_graph() as static,
        ):
            result, graph = self._owner.recorder.record(run, self._device)
        return _Graph(graph, result, inputs, [*reads.held, *static], count, frozenset(ran))

    def _keep(self, kind: Hashable, found: _Graph | str | None) -> None:
        """Keep the graph of a kind, or why it has none, and not too many of others."""
        self._kinds[kind] = found
        graphs = [each for each, kept in self._kinds.items() if isinstance(kept, _Graph)]
        spare = [*graphs[:-MOST_GRAPHS], *[*self._kinds][:-_MOST_KINDS]]
        self._tally["dropped"] += self._drop(spare)

    def _drop(self, kinds: list[Hashable]) -> int:
        """Forget kinds, and free their graphs; return how many these were."""
        kept = [self._kinds.pop(kind, None) for kind in kinds]
        graphs = [each for each in kept if isinstance(each, _Graph)]
        num = len(graphs)
        kept.clear()
        self._owner.recorder.free(graphs)
        return num

    def _layers(self) -> Iterator[AttentionLayer]:
        return (layer for module in self._modules() for layer in module.built())

    def _bindings(self) -> Iterator[Binding]:
        return (bound for layer in self._layers() for bound in layer.bindings())

    def _end(self) -> None:
        """Drop the graphs at the end."""
        with self._owner.lock:
            self._facts = None
            self._drop([*self._kinds])

    def _look_at_model(self) -> str | None:
        """Drop all graphs where the model is not what it was; return why none can be made."""
        if self._facts is None or not self._facts.hold():
            self._tally["dropped"] += self._drop([*self._kinds])
            self._facts, self._device = ModelFacts(self._model), device_of(self._model)
            reason = self._owner.recorder.reason_against(self._device)
            self._against = reason_of_model(self._model) or reason
        return self._against
