"""The mask a token refiner or joint attention builds from key padding, without building it.

HunyuanVideo-1.5 spells out `keep[b, i] & keep[b, j]` as a dense bool [B, 1, N, N] in every layer.
Handed a `PairMask` instead of the padding, its code walks through the same steps and the N x N
values never exist.
"""

from typing import Any

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError


class PairMask:
    """A mask in the making; it offers only the operations of the code it is made for.

    Args:
        keep: [B, N], non-zero for tokens that take part.
        axis: what a 4-D mask varies over: "keys", "queries" or "both"; "" for the plain padding.
    """

    def __init__(self, keep: torch.Tensor, axis: str = "") -> None:
        self.keep = keep
        self.axis = axis

    def bool(self) -> "PairMask":
        """Return the mask as bool."""
        return PairMask(self.keep.bool(), self.axis)

    def view(self, *shape: int) -> "PairMask":
        """Return [B, N] as [B, 1, 1, N]."""
        batch, length = self.keep.shape
        self._expect(not self.axis and shape == (batch, 1, 1, length), f"view{shape}")
        return PairMask(self.keep, "keys")

    def repeat(self, *repeats: int) -> "PairMask":
        """Return [B, 1, 1, N] repeated to [B, 1, N, N]."""
        wanted = (1, 1, self.keep.shape[1], 1)
        self._expect(self.axis == "keys" and repeats == wanted, f"repeat{repeats}")
        return self

    def transpose(self, first: int, second: int) -> "PairMask":
        """Return [B, 1, N, N] with its last two axes swapped."""
        self._expect(self.axis == "keys" and (first, second) == (2, 3), "transpose")
        return PairMask(self.keep, "queries")

    def __and__(self, other: "PairMask") -> "PairMask":
        self._expect({self.axis, other.axis} == {"keys", "queries"}, "&")
        return PairMask(self.keep, "both")

    def dense(self) -> torch.Tensor:
        """Return the mask as bool [B, 1, N, N]."""
        return self.keep[:, None, None, :] & self.keep[:, None, :, None]

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
