from multimodal_gen.runtime.managers.generation import (
    Generation,
    current_generation,
    describe_generation,
)


def test_a_generation_is_known_inside_its_block_only() -> None:
    outer = Generation(prompt="a fox", width=96, height=64)
    inner = Generation(prompt="a cat", width="default", height="default")
    with describe_generation(outer):
        with describe_generation(inner):
            assert current_generation() is inner
        assert current_generation() is outer
    assert current_generation() is None
