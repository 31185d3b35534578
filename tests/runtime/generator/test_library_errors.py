"""Errors of libraries are told in a line, those of a caller's own functions are not."""

import pytest

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.library_errors import not_told, told


class ClosedError(Exception):
    """An error that takes no attributes of others."""

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("__"):
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("error", [ValueError("no"), ClosedError("no")])
def test_what_a_function_of_the_callers_raises_passes_as_it_is(error: Exception) -> None:
    with (
        pytest.raises(UsageError, match="it failed: no"),
        told(lambda found: f"it failed: {found}"),
    ):
        raise error
    with pytest.raises(type(error)) as raised, told(lambda found: "it failed"), not_told():
        raise error
    assert raised.value is error
