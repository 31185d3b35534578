"""Which tokens of a denoiser call this rank has.

S tokens of all ranks.
"""

from dataclasses import dataclass

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.managers.forward_context import TextSpan, current_forward_context

__all__ = ["TokenShare", "share_tokens"]

_SLOT = "multimodal_gen.token_share"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShare:
    """The split of one denoiser call.

    Attributes:
        lengths: tokens of each rank; they add up to S.
        index: this rank among them.
        front: text tokens in front of them in joint attention, on all ranks.
        back: such tokens behind them.
        exact: self-attention over anything else than these is an error.
    """

    lengths: tuple[int, ...]
    index: int
    front: int = 0
    back: int = 0
    exact: bool = False

    @property
    def total(self) -> int:
        """S."""
        return sum(self.lengths)

    @property
    def start(self) -> int:
        """The first token of this rank."""
        return sum(self.lengths[: self.index])

    @property
    def length(self) -> int:
        """How many tokens this rank has."""
        return self.lengths[self.index]

    @property
    def joint_length(self) -> int:
        """Rows of this rank in joint attention: its tokens and the text."""
        return self.front + self.length + self.back

    def of_leading(self, count: int) -> int:
        """Return how many of the first `count` tokens this rank has."""
        return min(max(count - self.start, 0), self.length)

    def take(self, x: torch.Tensor, dim: int, *, text: int = 0) -> torch.Tensor:
        """Return the tokens of this rank, with `text` positions in front of all tokens kept.

        A tensor may end before the last token: then this rank has what there is of its part.
        It is contiguous, as what blocks return is: a compiled block serves its own output too.
        """
        start = min(text + self.start, x.shape[dim])
        own = x.narrow(dim, start, min(self.length, x.shape[dim] - start))
        return torch.cat((x.narrow(dim, 0, text), own), dim) if text else own.contiguous()

    def store(self, cache: dict[object, object]) -> None:
        """Make it known to the layers of a denoiser call, through `ForwardContext.cache`."""
        cache[_SLOT] = self

    @staticmethod
    def current() -> "TokenShare | None":
        """Return the split of the running denoiser call, or None where there is none."""
        context = current_forward_context()
        share = None if context is None else context.cache.get(_SLOT)
        return share if isinstance(share, TokenShare) else None


def share_tokens(
    total: int, num_ranks: int, index: int, text: TextSpan | None, *, exact: bool = False
) -> TokenShare:
    """Split tokens over ranks as evenly as they can be, in order.

    Args:
        total: how many tokens there are.
        num_ranks: ranks to split them over.
        index: this rank.
        text: where text is in joint attention, or None when there is none.
        exact: see `TokenShare`.

    Raises:
        UsageError: a rank would have no token.
    """
    if total < num_ranks:
        raise UsageError(
            f"a denoiser call must have a token for each of the {num_ranks} ranks that share it, "
            f"got {total} tokens; use fewer ranks or a larger size"
        )
    size, larger = divmod(total, num_ranks)
    length = text.length if text else 0
    in_front = text is not None and text.start == 0
    return TokenShare(
        lengths=tuple(size + (rank < larger) for rank in range(num_ranks)),
        index=index,
        front=length if in_front else 0,
        back=0 if in_front else length,
        exact=exact,
    )
