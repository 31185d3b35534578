"""Implementations that carry something from one denoising step of a request to the next."""

from abc import ABC, abstractmethod

__all__ = ["RememberingImpl"]


class RememberingImpl(ABC):
    """What an implementation has that keeps tensors for a request while it runs.

    It drops them by itself in the last step of a request whose number of steps is known, if the
    request gets there on this layer.
    """

    @abstractmethod
    def end_request(self, request_id: str) -> None:
        """Drop what is kept for a request that is over; others may still run.

        Args:
            request_id: as the contexts of its calls have it.
        """
