"""Choices of blocks that are kept for some denoising steps (`refresh_every`).

What a router chose for a layer in one step of a request serves the steps after it, of the same
branch of guidance and the same kind of call, until it is `refresh_every` steps old. Statistics of
later steps are then made for tails, gates and linear branches alone. What is kept is bounded: bits
of maps, and lists of 16 bits where they can be, of 8 branches at most; it goes with the last step
and with the request. A call without a request's name keeps nothing, and chooses anew; so does one
whose mask is another tensor, or was written to, for what it leaves of a block may be another.

Shapes: B batch, H heads, R and N blocks of queries and of keys, K kept blocks.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.static_cache import being_captured
from multimodal_gen.runtime.layers.attention.sparse.kept_steps import MAX_BRANCHES, KeptSteps
from multimodal_gen.runtime.layers.attention.sparse.router import ANY_GRID, Router, SparseLayer
from multimodal_gen.runtime.layers.attention.sparse.tiles import ENGINE, SparseCall
from multimodal_gen.runtime.managers.forward_context import ForwardContext

RING = "`refresh_every` keeps what one process chose, and ranks choose by means that they exchange"
CACHE = "`refresh_every` keeps choices among the blocks of one call"


def reason_against(router: Router[Any], settings: Any) -> str | None:
    """Return why nothing that a router chooses can be kept, or None."""
    kernel = router.layer.kernel.name
    if router.chooses == "pattern":
        return "its patterns are known before the calls"
    if router.chooses == "rows":
        return "its queries choose one by one, and choices of blocks are kept"
    if router.defines("group"):
        return "its groups are others in every step"
    if not (router.defines("choose") or router.defines("budget")):
        return "it has no router that chooses"
    if kernel not in ENGINE and router.blocks(settings, ANY_GRID).key_tile is not None:
        return f"kernel {kernel} chooses by itself; or name another `kernel`"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """What was chosen: a map in bits, or lists."""

    data: torch.Tensor
    num: int | None  # of blocks, in a map

    @classmethod
    def of(cls, chosen: torch.Tensor) -> "_Packed":
        if chosen.dtype != torch.bool:
            return cls(chosen, None)
        num = chosen.shape[3]
        padded = F.pad(chosen, (0, -num % 8)).to(torch.uint8)
        bits = padded.view(*chosen.shape[:3], -1, 8)
        return cls((bits << _eight(chosen.device)).sum(-1, dtype=torch.uint8), num)

    def unpacked(self) -> torch.Tensor:
        if self.num is None:
            return self.data.int()
        bits = (self.data.unsqueeze(4) >> _eight(self.data.device)) & 1
        return bits.bool().flatten(3)[..., : self.num]


def _eight(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


@dataclass(slots=True, eq=False)
class Chosen:
    """What a call's router chose.

    Attributes:
        step: denoising step that it was chosen in.
        kind: what calls must have in common, the identity of their mask last.
        mask: theirs, which is held, so that no other one takes its place in memory; or None.
    """

    step: int
    kind: tuple[Hashable, ...]
    mask: torch.Tensor | None = None
    _packed: _Packed | None = None

    def get(self) -> torch.Tensor | None:
        """Return what heads keep, bool or int32 [B, H, R, N or K], if it is known."""
        return None if self._packed is None else self._packed.unpacked()

    def set(self, chosen: torch.Tensor, num_blocks: int) -> None:
        """Keep what was chosen among so many blocks."""
        small = chosen.dtype != torch.bool and num_blocks <= torch.iinfo(torch.int16).max
        self._packed = _Packed.of(chosen.to(torch.int16) if small else chosen)


def _identity(mask: torch.Tensor | None) -> Hashable:
    """Return what two masks have in common that are the same tensor, as it was."""
    if mask is None:
        return None
    if mask.is_inference():  # whose writes PyTorch does not count
        return object()
    return mask.data_ptr(), mask.stride(), mask._version


class KeptChoices(KeptSteps[Chosen]):
    """What a layer's router chose in earlier steps.

    Args:
        every: for how many steps a choice serves.
        layer: the layer, whose user is told of calls that it serves nothing.
    """

    def __init__(self, every: int, layer: SparseLayer) -> None:
        super().__init__()
        self._every, self._layer, self._label = every, layer, layer.label

    def of_call(self, settings: Hashable, call: SparseCall, context: ForwardContext) -> Chosen:
        """Return what serves a call, to which is added what it has to choose; asked once a call.

        Raises:
            UnsupportedBackendError: the call is captured in a CUDA graph.
        """
        branch, step = self.branch(context), context.current_timestep
        if branch is not None and being_captured():
            raise UnsupportedBackendError(
                f"{self._label} with `refresh_every` cannot be captured in a CUDA graph, which "
                f"would choose in every step as in the one that was captured; leave it out of the "
                f'graph, as torch.compile(mode="reduce-overhead") does'
            )
        shapes = tuple(call.query.shape), tuple(call.key.shape)
        device, mask = call.query.device, _identity(call.mask)
        kind = (settings, call.layout, shapes, call.first_head, device, mask)
        found = self.find(branch, step)
        if branch is None:
            self._tell_of("have no `request_id`; give `set_forward_context` one")
        elif step and self.has_lost(branch):
            self._tell_of(
                f"had {MAX_BRANCHES} others, of requests and of branches of guidance, since the "
                f"step before, and no more are kept; run fewer at a time"
            )
        elif found is not None and found.kind[:-1] == kind[:-1] and found.kind != kind:
            self._tell_of(
                "have another mask than the step before, by its memory and version; give all steps "
                "one bool tensor that is not written to, nor made in torch.inference_mode"
            )
        if found is None or found.kind != kind or step - found.step >= self._every:
            found = Chosen(step, kind, call.mask)
        if context.is_last_step:
            self.drop(branch)
        else:
            self.store(branch, found, context.num_steps)
        return found

    def _tell_of(self, what: str) -> None:
        """Warn, once, of calls that choose anew whatever was chosen before."""
        self._layer.warnings.warn(
            f"`refresh_every` of {self._label} of {self._layer.component or 'a layer'} is "
            f"{self._every}, and calls choose blocks anew that {what}"
        )
