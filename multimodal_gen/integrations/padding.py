"""Which keys of a denoiser call are padding, and the masks that say so without being built.

The padding is found out once per call instead of once per layer.

B batch, S or N tokens; k suffix = key side.
"""

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.request import AttentionRole


class KeyPadding:
    """The padding of the keys that attention modules of one role see.

    Args:
        role: role of those modules.
        text: [B, L], non-zero for text tokens that may be attended to.
        before: number of keys in front of the text, all valid.
        after: number of keys behind the text, all valid.
        valid_first: the model moves valid text tokens before padded ones.

    Attributes:
        text: bool [B, L], the same.
        valid: the number of leading keys to attend to, once `resolve` found it.
    """

    def __init__(
        self,
        role: AttentionRole,
        text: torch.Tensor,
        *,
        before: int = 0,
        after: int = 0,
        valid_first: bool = False,
    ) -> None:
        self.role = role
        self.valid: int | None = None
        self.text = text != 0
        self._before = before
        self._after = after
        self._valid_first = valid_first
        self._usable = False
        self._counts: tuple[int, ...] = ()
        self._mask: torch.Tensor | None = None
        self._key_mask: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, Sk)."""
        return self.text.shape[0], self._before + self.text.shape[1] + self._after

    def facts(self) -> torch.Tensor:
        """Return what the host has to know: float32 [2 B], for `resolve`."""
        text = self.text
        ordered = (text[:, :-1] >= text[:, 1:]).all(1)
        return torch.cat((text.sum(1), ordered)).float()

    def resolve(self, facts: Sequence[float]) -> None:
        """Take the values of `facts` and find `valid`.

        `valid` is the number of leading keys to attend to, where that says everything: the same
        in every sample, with only padding behind it. It is None where a mask is needed.
        """
        batch, length = self.text.shape
        counts = [int(count) for count in facts[:batch]]
        ordered = self._valid_first or all(facts[batch:])
        if all(count == length for count in counts):
            self.valid = self.shape[1]
        elif len(set(counts)) == 1 and ordered and not self._after:
            self.valid = self._before + counts[0]
        # What a sample without any key gives is the model's own matter: its mask is left alone.
        self._usable = self._before + self._after + min(counts) > 0
        self._counts = tuple(counts)

    def kind(self) -> Hashable:
        """Return all that it is besides `text`."""
        counts = self._counts if self._valid_first and self.valid is None else ()
        sizes = (self.role, self.shape, self._before, self._valid_first)
        return (*sizes, self.valid, self._usable, counts)

    def over(self, text: torch.Tensor) -> "KeyPadding":
        """Return one of this kind whose `text` lies in other memory."""
        found = copy.copy(self)
        found.text, found._mask, found._key_mask = text, None, None
        return found

    def mask(self) -> torch.Tensor:
        """Return bool [B, Sk], True for keys to attend to; built on first use."""
        if self._mask is None:
            text = self.text
            if self._valid_first:
                counts = torch.tensor(self._counts, device=text.device)
                text = torch.arange(text.shape[1], device=text.device) < counts[:, None]
            before, after = (text.new_ones(text.shape[0], n) for n in (self._before, self._after))
            self._mask = torch.cat((before, text, after), dim=1)
        return self._mask

    def key_mask(self) -> torch.Tensor:
        """Return `mask` as [B, 1, 1, Sk]; the same tensor for every layer of the call."""
        if self._key_mask is None:
            self._key_mask = self.mask()[:, None, None, :]
        return self._key_mask

    def describes(self, role: AttentionRole, keys: tuple[int, int], device: torch.device) -> bool:
        """Whether it tells the padding of (B, Sk) keys on a device, in modules of a role."""
        if self.role is not role or not self._usable or self.shape != keys:
            return False
        # An offloaded pipeline may keep its masks elsewhere; the model brought its own along.
        return self.valid is not None or self.text.device == device


class PairMask:
    """A mask in the making; it offers only the operations of the code it is made for.

    Args:
        mask: [B, N], non-zero for tokens that take part.
        axis: what a 4-D mask varies over: "keys", "queries" or "both"; "" for the plain padding.
    """

    def __init__(self, mask: torch.Tensor, axis: str = "") -> None:
        self.mask = mask
        self.axis = axis

    def bool(self) -> "PairMask":
        """Return the mask as bool."""
        return PairMask(self.mask.bool(), self.axis)

    def view(self, *shape: int) -> "PairMask":
        """Return [B, N] as [B, 1, 1, N]."""
        batch, length = self.mask.shape
        self._expect(not self.axis and shape == (batch, 1, 1, length), f"view{shape}")
        return PairMask(self.mask, "keys")

    def repeat(self, *repeats: int) -> "PairMask":
        """Return [B, 1, 1, N] repeated to [B, 1, N, N]."""
        wanted = (1, 1, self.mask.shape[1], 1)
        self._expect(self.axis == "keys" and repeats == wanted, f"repeat{repeats}")
        return self

    def transpose(self, first: int, second: int) -> "PairMask":
        """Return [B, 1, N, N] with its last two axes swapped."""
        self._expect(self.axis == "keys" and (first, second) == (2, 3), "transpose")
        return PairMask(self.mask, "queries")

    def __and__(self, other: "PairMask") -> "PairMask":
        self._expect({self.axis, other.axis} == {"keys", "queries"}, "&")
        return PairMask(self.mask, "both")

    def dense(self) -> torch.Tensor:
        """Return the mask as bool [B, 1, N, N]."""
        return self.mask[:, None, None, :] & self.mask[:, None, :, None]

    def _expect(self, condition: Any, operation: str) -> None:
        if not condition:
            raise UsageError(
                f"the installed diffusers must build its attention mask as 0.40 to 0.42 do, got "
                f"{operation} on a mask over {self.axis or 'padding'}; install one of those"
            )


class FunctionalWithPairMask:
    """Stands in for `torch.nn.functional` in a processor that only pads its mask with it."""

    @staticmethod
    def pad(mask: torch.Tensor, pad: tuple[int, int], value: Any = None) -> PairMask:
        """Return the padded mask as the start of a `PairMask`."""
        return PairMask(F.pad(mask, pad, value=value))
