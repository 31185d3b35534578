"""What every architecture test looks at."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def package(repository: Path) -> Path:
    return repository / "multimodal_gen"
