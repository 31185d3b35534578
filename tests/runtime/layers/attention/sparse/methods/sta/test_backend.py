"""Sliding tile attention through the layer, against masks written down token by token."""

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.config import build_config
from multimodal_gen.runtime.layers.attention.scope import (
    global_force_attn_backend_context_manager,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.router import (
    SlidingTileBackend,
    SlidingTileConfig,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    NEGATIVE,
    POSITIVE,
    LossRecorder,
    SearchFile,
    find_searches,
    record_into,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.strategy import Strategy
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.inputs import make_qkv
from tests.helpers.sparse import SparseMethod, joint_mask, video_tokens
from tests.helpers.tolerance import (
    assert_within_error_budget,
)

GRID, TILE = (4, 6, 10), (2, 2, 2)
TILES = (2, 3, 5)
RAGGED = (3, 5, 7)  # tiles of 2 leave one of 1 along every axis
METHOD = SparseMethod(
    backend=AttentionBackendEnum.SLIDING_TILE_ATTN,
    given={"tile_size": TILE, "skip_time_steps": 0},  # no step is dense unless asked for
    heads=2,
)
HEADS, HEAD_SIZE = METHOD.heads, METHOD.head_size


def layer(*, heads: int = HEADS, **options):
    return METHOD.layer(geometry={"num_heads": heads}, **options)


def pair_mask(grid, tile, window, text: TextSpan | None = None) -> torch.Tensor:
    """Return which token attends to which, [S, S], by going through all pairs."""
    tiles = [(length + edge - 1) // edge for length, edge in zip(grid, tile, strict=True)]

    def sees(axis: int, query: int, key: int) -> bool:
        count, edge, wanted = tiles[axis], tile[axis], window[axis]
        half = wanted // 2
        centre = sorted((half, query // edge, count - 1 - half))[1]
        return wanted >= count or abs(key // edge - centre) <= half

    t, h, w = (
        torch.tensor([[sees(axis, query, key) for key in range(size)] for query in range(size)])
        for axis, size in enumerate(grid)
    )
    pairs = torch.einsum("aA,bB,cC->abcABC", t.int(), h.int(), w.int()).bool()
    video = video_tokens(grid, text)
    size = len(video) + (text.length if text else 0)
    mask = torch.ones(size, size, dtype=torch.bool)
    rows = torch.tensor(video)
    mask[rows[:, None], rows] = pairs.view(len(rows), len(rows))
    return joint_mask(mask, video)


def qkv(grid=GRID, text: int = 0, **sizes):
    length = grid[0] * grid[1] * grid[2] + text
    return make_qkv(sizes.pop("batch", 1), length, HEADS, HEAD_SIZE, **sizes)


def step_strategy(tmp_path, *steps, layers=1) -> str:
    """Write a strategy with these windows of the two heads at each step."""
    path = tmp_path / "mask_strategy.json"
    Strategy(windows=tuple((heads,) * layers for heads in steps)).write(path)
    return str(path)


def check(attention, *windows, grid=GRID, step=0, inputs=None, text=None, **known) -> None:
    """Raise AssertionError unless heads attend in these windows, or everywhere where none is given.

    Args:
        attention: the layer.
        *windows: one for all heads, or one of each.
        grid: of the video.
        step: denoising step.
        inputs: q, k and v; drawn when None.
        text: where it lies.
        **known: further fields of the context.
    """
    q, k, v = inputs or qkv(grid)
    with set_forward_context(step, latent_grid=grid, text_span=text, **known):
        out = attention(q, k, v)
    masks = [pair_mask(grid, TILE, window, text) for window in windows]
    mask = torch.stack(masks) if masks else None
    assert_within_error_budget(out, q, k, v, scale=HEAD_SIZE**-0.5, mask=mask)


# Every window and every place of the text on either grid.
WINDOWS = [(1, 1, 1), (1, 3, 3), (2, 2, 2), (1, 2, 4), (9, 1, 3), (1, 3, 1), (2, 3, 4)]
PLACES = [None, TextSpan(start=0, length=5), TextSpan(start=1, length=11)]  # 1: behind


@pytest.mark.slow_cases(
    "(4, 6, 10)-(1, 2, 4)-TextSpan(start=0, length=5)",
    "(4, 6, 10)-(1, 3, 3)-TextSpan(start=0, length=5)",
    "(4, 6, 10)-(2, 2, 2)-None",
    "(4, 6, 10)-(2, 2, 2)-TextSpan(start=1, length=11)",
    "(4, 6, 10)-(2, 3, 4)-None",
)
@pytest.mark.parametrize(
    ("grid", "window", "text"),
    [
        ((GRID, RAGGED)[(i + j) % 2], window, text)
        for i, window in enumerate(WINDOWS)
        for j, text in enumerate(PLACES)
    ],
    ids=str,
)
def test_attention_is_that_of_the_mask_of_tokens(grid, window, text) -> None:
    if text is not None and text.start:
        text = TextSpan(start=grid[0] * grid[1] * grid[2], length=text.length)
    inputs = qkv(grid, text.length if text else 0, batch=2)
    check(layer(window=window), window, grid=grid, text=text, inputs=inputs)


@pytest.mark.parametrize("grid", [GRID, RAGGED], ids=["divides", "ragged"])
@pytest.mark.parametrize("window", [(2, 3, 5), (100, 100, 100)])
def test_a_window_of_the_whole_grid_or_more_is_dense(grid, window) -> None:
    check(layer(window=window), grid=grid)


def test_an_even_window_below_the_axis_is_the_next_odd_one() -> None:
    q, k, v = qkv()
    with set_forward_context(0, latent_grid=GRID):
        even, odd = (layer(window=(1, 1, w))(q, k, v) for w in (2, 3))
    assert torch.equal(even, odd)


def test_a_tile_larger_than_the_grid_is_one_tile() -> None:
    check(layer(window=(1, 1, 1), tile_size=(6, 8, 16)))


def test_grouped_heads_take_the_windows_of_their_query_heads(tmp_path) -> None:
    path = step_strategy(tmp_path, (TILES, (1, 1, 3)))
    attention = layer(mask_strategy_file_path=path, kv_heads=1)
    check(attention, TILES, (1, 1, 3), inputs=qkv(num_kv_heads=1))


def test_every_step_has_the_windows_of_its_heads(tmp_path) -> None:
    steps = ((TILES, TILES), ((1, 1, 3), (2, 3, 1)), ((1, 3, 5), (1, 1, 1)))
    attention = layer(mask_strategy_file_path=step_strategy(tmp_path, *steps))
    for step, windows in enumerate(steps):
        check(attention, *windows, step=step, num_steps=3)


def test_every_layer_has_windows_of_its_own(tmp_path) -> None:
    path = tmp_path / "s.json"
    windows = ((1, 1, 1), (1, 3, 3))
    Strategy(windows=(tuple((w, w) for w in windows),)).write(path)
    for index, window in enumerate(windows):
        check(layer(mask_strategy_file_path=str(path), index=index), window)


def test_first_steps_run_on_a_dense_backend() -> None:
    attention = layer(window=(1, 1, 1), skip_time_steps=2, dense_steps="4")
    for step in range(5):
        check(attention, *([] if step in (0, 1, 4) else [(1, 1, 1)]), step=step)
    found = [(e.steps, str(e.selection.backend), e.calls) for e in attention.report().entries]
    assert found == [
        ("0-1", "torch_sdpa", 2),
        ("4", "torch_sdpa", 1),
        (None, "sliding_tile_attn", 2),
    ]


@pytest.mark.parametrize(
    ("raw", "schedule"),
    [
        ({}, (["0-14"], [])),
        ({"skip_time_steps": 0}, ([], [])),
        ({"skip_time_steps": 0, "dense_steps": "7"}, (["7"], [])),
        ({"skip_time_steps": 2, "dense_steps": "7", "dense_layers": "0"}, (["0-1", "7"], ["0"])),
        ({"sta_mode": "STA_searching", "window": None, "search_path": "s"}, ([], [])),
    ],
)
def test_the_first_steps_are_dense_unless_searching(raw, schedule) -> None:
    config = build_config(SlidingTileConfig, {"window": [3, 3, 3], **raw}, backend="b")
    parts = (config.dense_parts(axis) for axis in ("steps", "layers"))
    assert tuple([str(part.indices) for part in found] for found in parts) == schedule


def test_a_strategy_for_another_run_is_refused_with_numbers(tmp_path) -> None:
    path = step_strategy(tmp_path, (TILES, TILES), ((1, 1, 1), (1, 1, 1)))
    with pytest.raises(ConfigError, match="it is for 2 heads per layer, the run has 4"):
        layer(mask_strategy_file_path=path, heads=4)
    with pytest.raises(ConfigError, match="it is for 1 layers, the run has at least 6"):
        layer(mask_strategy_file_path=path, index=5)
    attention = layer(mask_strategy_file_path=path)
    q, k, v = qkv()
    message = "it is for 2 steps, the run has 30; give retarget=true"
    with set_forward_context(0, latent_grid=GRID, num_steps=30) as context:
        with pytest.raises(ConfigError, match=message):
            attention(q, k, v)
        with pytest.raises(ConfigError, match=message):
            attention.attn_impl.check_run(context)
    q, k, v = qkv(RAGGED)
    with (
        set_forward_context(0, latent_grid=RAGGED, num_steps=2),
        pytest.raises(ConfigError, match="has windows of up to 2x3x5 tiles, the run has 2x3x4"),
    ):
        attention(q, k, v)


def test_the_first_dense_step_refuses_a_strategy_for_another_run(tmp_path) -> None:
    full = ((TILES,) * HEADS,) * 4
    attention = layer(mask_strategy_file_path=step_strategy(tmp_path, *full), skip_time_steps=2)
    with (
        set_forward_context(0, latent_grid=GRID, num_steps=6),
        pytest.raises(ConfigError, match=r"4 .*6|6 .*4"),
    ):
        attention(*qkv())
    with set_forward_context(0, latent_grid=GRID, num_steps=4):
        assert attention(*qkv()).isfinite().all()


def test_a_retargeted_strategy_is_rescaled_to_the_run(tmp_path) -> None:
    path = step_strategy(tmp_path, (TILES, TILES), ((1, 1, 3), (2, 1, 5)))
    attention = layer(mask_strategy_file_path=path, retarget=True)
    rescaled = {0: ((2, 3, 4),) * 2, 3: ((1, 1, 3), (2, 1, 4))}
    for step, windows in rescaled.items():
        check(attention, *windows, grid=RAGGED, step=step, num_steps=4)


def test_no_window_is_an_error_that_names_the_search() -> None:
    remedy = r"`window` must give one window such as \[3, 3, 3\]; `sglang attention sta search`"
    with pytest.raises(ConfigError, match=remedy):
        layer()
    plain = LocalAttention(HEADS, HEAD_SIZE, compute_dtype=torch.float32)
    with (
        global_force_attn_backend_context_manager("sliding_tile_attn"),
        set_forward_context(0, latent_grid=GRID),
        pytest.raises(ConfigError, match=remedy),
    ):
        plain(*qkv())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"sta_mode": "STA_searching"},
            "`search_path` .* must name a folder for sta_mode STA_sear",
        ),
        (
            {"sta_mode": "STA_tuning", "search_path": "s"},
            "`mask_strategy_file_path` .* must name the file that STA_tuning writes, got None",
        ),
        (
            {"sta_mode": "STA_searching", "search_path": "s", "window": [3, 3, 3]},
            r"`window` .* must not be given with `sta_mode STA_searching`, got \[3, 3, 3\]",
        ),
        (
            {"sta_mode": "STA_searching", "search_path": "s", "dense_steps": "0-3"},
            "`dense_steps` .* must not be given with sta_mode STA_searching, .* got 0-3",
        ),
    ],
)
def test_modes_name_what_they_need_and_what_they_cannot_use(raw, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(SlidingTileConfig, raw, backend="sliding_tile_attn")


def test_a_search_goes_on_with_full_attention_and_records_every_head() -> None:
    windows = ((1, 1, 1), (1, 3, 5))
    recorder = LossRecorder(windows)
    attention = layer(sta_mode="STA_searching", search_path="unused")
    q, k, v = qkv(batch=2)
    with record_into(recorder), set_forward_context(0, latent_grid=GRID, cfg_branch="both"):
        full = attention(q, k, v)
    assert_within_error_budget(full, q, k, v, scale=HEAD_SIZE**-0.5)
    found = recorder.losses()
    for half, branch in enumerate((NEGATIVE, POSITIVE)):
        for candidate, window in enumerate(windows):
            with set_forward_context(0, latent_grid=GRID):
                out = layer(window=window)(q, k, v)
            difference = (out - full)[half].double()
            assert found[branch].l2[candidate, 0, 0] == pytest.approx(
                difference.square().mean((0, 2)), rel=1e-4
            )
            assert found[branch].l1[candidate, 0, 0] == pytest.approx(
                difference.abs().mean((0, 2)), rel=1e-4
            )


def test_a_search_a_tuning_and_an_inference_read_each_others_files(tmp_path) -> None:
    q, k, v = qkv()
    folder, path = str(tmp_path / "searches"), str(tmp_path / "mask_strategy.json")
    searching = [layer(sta_mode="STA_searching", search_path=folder, index=i) for i in (0, 1)]
    for step in range(2):
        for attention in searching:
            known = {"num_steps": 2, "request_id": "r", "cfg_branch": "cond"}
            with set_forward_context(step, latent_grid=GRID, **known):
                attention(q, k, v)
    (file,) = find_searches(tmp_path / "searches")
    best = SearchFile.read(file)
    tuning = layer(
        sta_mode="STA_tuning",
        search_path=folder,
        mask_strategy_file_path=path,
        skip_time_steps=1,
    )
    inference = layer(mask_strategy_file_path=path, skip_time_steps=1)
    with set_forward_context(1, latent_grid=GRID, num_steps=2):
        tuned, read = tuning(q, k, v), inference(q, k, v)
    assert torch.equal(tuned, read)
    windows = [best.windows[int(best.l2[:, 1, 0, head].argmin())] for head in range(HEADS)]
    mask = torch.stack([pair_mask(GRID, TILE, window) for window in windows])
    assert_within_error_budget(tuned, q, k, v, scale=HEAD_SIZE**-0.5, mask=mask)


def test_a_search_in_a_layer_without_an_index_is_refused() -> None:
    attention = layer(sta_mode="STA_searching", search_path="unused", index=None)
    with (
        set_forward_context(0, latent_grid=GRID),
        pytest.raises(UsageError, match="STA_searching must know the layer's index, got a layer"),
    ):
        attention(*qkv())


def test_a_named_kernel_of_the_authors_refuses_with_its_reasons() -> None:
    config = SlidingTileConfig(window=(1, 1, 3), kernel="st_attn")
    impl = SlidingTileBackend.get_impl_cls()(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, config=config)
    with (
        set_forward_context(0, latent_grid=GRID) as context,
        pytest.raises(UnsupportedBackendError, match=r"needs a latent grid of 30x48x80, .*4x6x10"),
    ):
        impl.forward(*qkv(), context)


def test_plans_made_in_inference_mode_serve_later_calls() -> None:
    attention = layer(window=(1, 1, 3))
    q, k, v = qkv()
    with set_forward_context(0, latent_grid=GRID):
        with torch.inference_mode():
            first = attention(q, k, v).clone()
        assert torch.equal(attention(q, k, v), first)
