"""What tests of several packages share: tiny pipelines on disk, made once per session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

TinyPipeline = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> TinyPipeline:
    """Return the folder of a family's tiny pipeline; tests must not write to it."""
    from multimodal_gen.testing.tiny_models import make_tiny_model

    folder = tmp_path_factory.mktemp("tiny-pipelines")

    @cache
    def make(family: str) -> Path:
        return make_tiny_model(family, folder / family)

    return make
