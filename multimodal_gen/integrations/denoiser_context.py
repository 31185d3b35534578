"""What attention layers in a stock model may know of the denoiser call that runs.

S tokens of all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.padding import KeyPadding
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.runtime.described_tokens import DescribedTokens
from multimodal_gen.runtime.distributed.timing import Times
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.forward_context import (
    ForwardContext,
    TextSpan,
    current_forward_context,
    replace_forward_context,
)

WithText: TypeAlias = bool | Literal["front", "behind"]
"""Where a tensor has text as well as tokens: True for wherever joint attention has it, or on one
side alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShare:
    """The split of one denoiser call.

    Attributes:
        lengths: tokens of each rank; they add up to S.
        index: this rank among them.
        front: text tokens in front of them in joint attention, on all ranks.
        back: such tokens behind them.
        keys_alone: those in front have keys alone where the others attend to them.
        exact: self-attention over anything else than these is an error.
    """

    lengths: tuple[int, ...]
    index: int
    front: int = 0
    back: int = 0
    keys_alone: bool = False
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
    def joint_lengths(self) -> tuple[int, int]:
        """Queries and keys of this rank in joint attention: its tokens and the text."""
        keys = self.front + self.length + self.back
        return keys - self.front * self.keys_alone, keys

    @property
    def replicated(self) -> tuple[int, int, int]:
        """Tokens that all ranks hold in joint attention: in front, behind, keys in front."""
        return (0, self.back, self.front) if self.keys_alone else (self.front, self.back, 0)

    def text_rows(self, num_rows: int, own: int, where: WithText) -> tuple[int, int]:
        """Return how many rows of a tensor in front of and behind so many tokens are text.

        Args:
            num_rows: of the tensor, which may have no text after all.
            own: how many are tokens.
            where: where it may have text.
        """
        front = self.front if where in (True, "front") else 0
        back = self.back if where in (True, "behind") else 0
        return (front, back) if num_rows == front + own + back else (0, 0)

    def of_leading(self, count: int) -> int:
        """Return how many of the first `count` tokens this rank has."""
        return min(max(count - self.start, 0), self.length)

    def take(self, x: torch.Tensor, dim: int, *, front: int = 0, back: int = 0) -> torch.Tensor:
        """Return the tokens of this rank, and so many positions in front of and behind them all.

        A tensor may end before the last token: then this rank has what there is of its part.
        It is contiguous, as what blocks return is: a compiled block serves its own output too.
        """
        start = min(front + self.start, x.shape[dim])
        own = x.narrow(dim, start, min(self.length, x.shape[dim] - start))
        if not front and not back:
            return own.contiguous()
        text = x.narrow(dim, 0, front), x.narrow(dim, x.shape[dim] - back, back)
        return torch.cat((text[0], own, text[1]), dim)


def share_tokens(total: int, num_ranks: int, index: int, text: TextSpan | None) -> TokenShare:
    """Split tokens over ranks as evenly as they can be, in order.

    Args:
        total: how many tokens there are.
        num_ranks: ranks to split them over.
        index: this rank.
        text: where text is in joint attention, or None when there is none.

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
    )


@dataclass(kw_only=True, eq=False)
class TokenSplit:
    """How ranks share the tokens of one denoiser, call by call.

    Attributes:
        share: who has which tokens; None between calls, and until it is settled.
        settle: settles it for so many tokens; None between calls.
        whole: how names begin of modules that attend to all tokens on every rank.
        times: what gathering takes.
    """

    share: TokenShare | None = None
    settle: Callable[[int], TokenShare] | None = None
    whole: tuple[str, ...] = ()
    times: Times = field(default_factory=Times)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserContext(ForwardContext):
    """One call of a stock denoiser.

    Attributes:
        padding: which keys are padding, or None when there is none, or nothing tells.
        split: how ranks share the tokens, or None where they stay together.
        lists: the blocks of tokens that self-attention keeps, or None for all.
        batch: samples that the model was called with, or None when unknown.
        described: what the user said of its tokens, where the grid is known from that alone.
        no_grid: why the latent grid is unknown, where it is.
        ran: names of the attention modules that ran so far.
        elsewhere: whether another rank computes the call.
        hooks: the hooks that set this context.
        outer: the context around it, or None.
    """

    padding: KeyPadding | None = None
    split: TokenSplit | None = None
    lists: BlockPlan | None = None
    batch: int | None = None
    described: DescribedTokens | None = None
    no_grid: str = "this call of the model has none"
    ran: set[str] = field(default_factory=set, compare=False, repr=False)
    elsewhere: bool = False
    hooks: object = None
    outer: ForwardContext | None = None


def current_denoiser_context() -> DenoiserContext | None:
    """Return the context of the running call of a stock denoiser, or None outside of any."""
    context = current_forward_context()
    return context if isinstance(context, DenoiserContext) else None


def leave_to_another_rank() -> None:
    """Go on with the running call as one that is computed elsewhere."""
    context = current_denoiser_context()
    if context is not None:
        replace_forward_context(replace(context, elsewhere=True))


def conditional_half(context: DenoiserContext) -> DenoiserContext:
    """Go on with the running call as one of the second half of its batch, and return that.

    FasterCache drops the first half, of the unconditional branch, behind the hooks of the model.
    """
    assert context.batch is not None, "callers know"
    half = replace(
        context,
        batch=context.batch // 2,
        cfg_branch="cond",
        branch_key=("half", context.branch_key),
    )
    replace_forward_context(half)
    return half


def current_padding(
    role: AttentionRole, keys: tuple[int, int], device: torch.device
) -> KeyPadding | None:
    """Return the running call's padding where it describes (B, Sk) keys on a device."""
    context = current_denoiser_context()
    padding = None if context is None else context.padding
    known = padding is not None and padding.describes(role, keys, device)
    return padding if known else None
