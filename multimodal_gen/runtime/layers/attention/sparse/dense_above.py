"""When dense attention is faster than a sparse method: what was measured, and what calls teach."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from multimodal_gen.kernels.static_cache import being_captured
from multimodal_gen.runtime.managers.forward_context import ForwardContext

# Steps that are dense after one that kept too much, before the method is tried again; each further
# one doubles it. Of 50 steps two are then tried, 0 and 17: the first one is dear, because clusters
# are sought from nothing.
_FIRST_PAUSE = 16


@dataclass(slots=True, eq=False)
class KeptTooMuch:
    """What a layer learns of its calls whose share of pairs the data decide.

    Where all calls of a step kept more than the limit, the steps that follow are dense; then the
    method is tried again. The device is asked in a later step, when it has long answered, and what
    is dense depends on the data alone. Calls in a CUDA graph neither learn nor change.
    """

    _tried: tuple[str | None, int] | None = None  # request, step
    _limit: float = 1.0
    _answers: list[tuple[torch.Tensor, torch.cuda.Event | None]] = field(default_factory=list)
    _above: bool | None = None  # all calls of the step whose answers were read; None once settled
    _pause: int = _FIRST_PAUSE
    _dense_until: int = -1

    @property
    def has_learnt(self) -> bool:
        """Whether a call was noted."""
        return self._tried is not None

    def learn(self, share: torch.Tensor, limit: float, context: ForwardContext) -> None:
        """Note whether a call kept too much; does not wait for the device.

        Args:
            share: what it kept, [], on any device.
            limit: the share from which on that is too much.
            context: the running denoiser call.
        """
        if being_captured() or torch.are_deterministic_algorithms_enabled():
            return
        tried = context.request_id, context.current_timestep
        if tried != self._tried:
            if self._tried is None or tried[0] != self._tried[0] or tried[1] < self._tried[1]:
                self._pause = _FIRST_PAUSE  # another generation
            self._tried, self._limit, self._dense_until = tried, limit, tried[1]
            self._answers, self._above = [], None
        self._read(wait=False)
        if not self._above:  # a call that kept less settles the step
            return
        above = share > limit
        if above.device.type != "cuda":
            self._answers.append((above, None))
            return
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(above, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(above.device))
        self._answers.append((answer, event))

    def limit_passed(self, context: ForwardContext) -> float | None:
        """Return the share that was passed if the running step is dense for it, else None."""
        if self._tried is None or being_captured():
            return None
        request, step = self._tried
        if context.request_id != request or context.current_timestep <= step:
            return None
        if self._above is not None:
            self._settle(step)
        return self._limit if context.current_timestep <= self._dense_until else None

    def _settle(self, step: int) -> None:
        """Read the answers of a step that is over."""
        self._read(wait=True)
        above, self._above = self._above, None
        if above:
            self._dense_until = step + self._pause
            self._pause *= 2
        else:
            self._pause = _FIRST_PAUSE

    def _read(self, *, wait: bool) -> None:
        """Read the answers that are there, or all; a step may have any number of calls."""
        left, self._above = [], self._above is not False
        for answer, event in self._answers:
            if event is not None and wait:
                event.synchronize()
            if wait or (answer.is_cpu if event is None else event.query()):  # type: ignore[no-untyped-call]
                self._above = self._above and bool(answer)
            else:
                left.append((answer, event))
        self._answers = left


# Runs of a layer that are remembered; a run has one grid and one length of text.
_MOST_RUNS = 256


@dataclass(eq=False)
class DenseAbove:
    """Which calls of a layer are dense because its method keeps too much.

    Attributes:
        label: the method's name, for reasons.
        given: the parameter `dense_above`: the share of pairs from which on calls are dense; None
            for what was measured.
        measured: that share by the tokens of a block of keys from which on it holds.
    """

    label: str = ""
    given: float | None = None
    measured: tuple[tuple[int, float], ...] = ()
    _reasons: dict[Hashable, str | None] = field(default_factory=dict)
    _kept_too_much: KeptTooMuch = field(default_factory=KeptTooMuch)

    @cached_property
    def never(self) -> bool:
        """Whether no call ever is."""
        return self.limit(0) is None

    def limit(self, block: int) -> float | None:
        """Return the share of pairs above which a call is dense, by tokens of a block of keys."""
        given = self.given
        if given is None:
            fits = (limit for least, limit in reversed(self.measured) if block >= least)
            given = next(fits, None)
        return None if given is None or given >= 1 else given

    @property
    def learns(self) -> bool:
        """Whether calls have taught it anything: the data decide how much they keep."""
        return self._kept_too_much.has_learnt

    def reason(
        self,
        run: Hashable,
        known: Callable[[], tuple[float, int] | None],
        context: ForwardContext,
    ) -> str | None:
        """Return why a call is dense, or None.

        Args:
            run: what the share of a call depends on, where it is known before.
            known: gives that share, and the tokens of a block of keys; None where data decide.
            context: the running denoiser call.
        """
        if run not in self._reasons:
            if len(self._reasons) >= _MOST_RUNS:
                self._reasons.clear()
            self._reasons[run] = self._known_reason(known())
        if found := self._reasons[run]:
            return found
        limit = self._kept_too_much.limit_passed(context)
        if limit is None:
            return None
        return f"{self.label} kept more than {limit:g} of the pairs when last tried (`dense_above`)"

    def _known_reason(self, known: tuple[float, int] | None) -> str | None:
        limit = None if known is None else self.limit(known[1])
        if known is None or limit is None or known[0] <= limit:
            return None
        return f"{self.label} would keep more than {limit:g} of the pairs (`dense_above`)"

    def learn(self, share: torch.Tensor, block: int, context: ForwardContext) -> None:
        """Note the share [] that a call keeps where data decide; see `KeptTooMuch`."""
        limit = self.limit(block)
        if limit is not None:
            self._kept_too_much.learn(share, limit, context)
