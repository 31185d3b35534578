"""When dense attention is faster than a sparse method: what calls teach of it."""

import torch

from multimodal_gen.kernels.static_cache import being_captured
from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = ["KeptTooMuch"]

# Steps that are dense after one that kept too much, before the method is tried again; each further
# one doubles it. Of 50 steps two are then tried, 0 and 17: the first one is dear, because clusters
# are sought from nothing.
_FIRST_PAUSE = 16


class KeptTooMuch:
    """What a layer learns of its calls whose share of pairs the data decide.

    Where all calls of a step kept more than the limit, the steps that follow are dense; then the
    method is tried again. The device is asked in a later step, when it has long answered, and what
    is dense depends on the data alone. Calls in a CUDA graph neither learn nor change.
    """

    def __init__(self) -> None:
        self._tried: tuple[str | None, int] | None = None  # request, step
        self._limit = 1.0
        self._answers: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._pause, self._dense_until = _FIRST_PAUSE, -1

    def learn(self, above: torch.Tensor, limit: float, context: ForwardContext) -> None:
        """Note whether a call kept too much; does not wait for the device.

        Args:
            above: bool [], on any device.
            limit: the share that it is about.
            context: the running denoiser call.
        """
        if being_captured() or torch.are_deterministic_algorithms_enabled():
            return
        tried = context.request_id, context.current_timestep
        if tried != self._tried:
            if self._tried is None or tried[0] != self._tried[0] or tried[1] < self._tried[1]:
                self._pause = _FIRST_PAUSE  # another generation
            self._tried, self._limit, self._dense_until = tried, limit, tried[1]
            self._answers = []
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
        if self._answers:
            self._settle(step)
        return self._limit if context.current_timestep <= self._dense_until else None

    def _settle(self, step: int) -> None:
        """Read the answers of a step that is over."""
        above = True
        for answer, event in self._answers:
            if event is not None:
                event.synchronize()
            above = above and bool(answer)
        self._answers = []
        if above:
            self._dense_until = step + self._pause
            self._pause *= 2
        else:
            self._pause = _FIRST_PAUSE
