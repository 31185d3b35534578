"""Worlds of processes, started once, shared by tests that leave them usable."""

import pytest

from multimodal_gen.testing.processes import World


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    with World(2, tmp_path_factory.mktemp("two")) as world:
        yield world


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory):
    with World(4, tmp_path_factory.mktemp("four")) as world:
        yield world
