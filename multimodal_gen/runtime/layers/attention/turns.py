"""Numbers the exchanges of layers, so that ranks notice when one of them left a call out.

A number counts from the beginning of the denoiser call that runs, never for longer: a rank that
leaves out its last exchange is found at the first one of the next call. Outside of denoiser calls,
as in layers that are called on their own, there is nothing to count from.
"""

from multimodal_gen.runtime.distributed.agreement import Turn
from multimodal_gen.runtime.managers.forward_context import current_forward_context

__all__ = ["next_turn", "number_call"]

_CALL = "multimodal_gen.denoiser_call"
_EXCHANGES = "multimodal_gen.exchanges"


def number_call(cache: dict[object, object], number: int) -> None:
    """Make known which call of its request a denoiser call is, through `ForwardContext.cache`."""
    cache[_CALL] = number


def next_turn() -> Turn:
    """Return where this rank is, and count one exchange of the denoiser call that runs."""
    context = current_forward_context()
    if context is None:
        return Turn()
    exchange: int = context.cache.get(_EXCHANGES, 0)
    context.cache[_EXCHANGES] = exchange + 1
    call: int = context.cache.get(_CALL, Turn().call)
    return Turn(step=context.current_timestep, call=call, exchange=exchange)
