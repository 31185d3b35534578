"""Kernels meet a release of Triton that nobody has tried: they are checked before they run."""

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.kernels import engine, gluon_check
from multimodal_gen.kernels.block_sparse.api import gradient_kernel
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import (
    BLOCK_SPARSE,
    POOLED_TAIL,
    QUANTIZED,
    TRITON_WITH_GLUON,
    Operation,
    choose,
)
from multimodal_gen.kernels.launch import self_check as checks
from multimodal_gen.kernels.launch.self_check import self_checks
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.binding import Demand, bind_schedule, plannable_dtype
from multimodal_gen.runtime.layers.attention.call import LayerGeometry
from multimodal_gen.runtime.layers.attention.config import BackendConfig
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, Feature
from multimodal_gen.runtime.layers.attention.scope import (
    AUTO,
    BackendPreference,
    LayerSite,
    Source,
)
from multimodal_gen.runtime.layers.attention.selector import (
    Selection,
    after_self_checks,
    resolve,
    trainable,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sol import SolConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.fakes import H100, FakeDevice, machine_with, simulated_environment

UNTRIED = "3.10.0"
ASKED = H100._replace(device=0)
GEOMETRY = LayerGeometry(
    num_heads=24,
    head_size=128,
    num_kv_heads=24,
    softmax_scale=1.0,
    causal=False,
    site=LayerSite(),
)
Check = Callable[[torch.device], str | None]
SayWhat = Callable[[str | Exception | None], list[torch.device]]


class CompilationError(Exception):
    """Is named like that of Triton."""


class CompileTimeAssertionFailure(CompilationError):  # noqa: N818
    """Is derived from it, as one of Triton's is."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class Impatient:
    """A lock that is not waited for in vain."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        assert self._lock.acquire(timeout=5), "waits for itself"

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def on_an_h100(**changes: Any) -> AttentionRequest:
    """Return the request of a layer on a GPU with an untried release."""
    device = FakeDevice(
        platform=PlatformEnum.CUDA,
        capability=(9, 0),
        packages=frozenset({("triton", "triton", UNTRIED)}),
    )
    layer = {"head_size": 128, "num_heads": 24, "num_kv_heads": 24, "dtype": torch.bfloat16}
    return AttentionRequest(environment=simulated_environment(device), **layer | changes)


def asking_for(name: str, config: BackendConfig | None = None) -> BackendPreference:
    backend = AttentionBackendEnum.parse(name)
    return BackendPreference(source=Source.SETTINGS, backend=backend, config=config)


def selected(request: AttentionRequest, asked: BackendPreference) -> Selection:
    return after_self_checks(lambda known: resolve(known, asked), request)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it seem as if there were a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def untried() -> Iterator[None]:
    with machine_with({"triton": UNTRIED}):
        yield


@pytest.fixture
def let_checks_say(monkeypatch: pytest.MonkeyPatch, gpu: None, untried: None) -> SayWhat:
    """Let the self-checks find this, and note the devices that they are asked about."""

    def say(what: str | Exception | None) -> list[torch.device]:
        asked: list[torch.device] = []

        def check(device: torch.device) -> str | None:
            asked.append(device)
            if isinstance(what, Exception):
                raise what
            return what

        monkeypatch.setattr(gluon_check, "block_sparse", check)
        monkeypatch.setattr(gluon_check, "quantized", check)
        return asked

    return say


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("version", ["3.6.1", "3.9.0"])
@pytest.mark.parametrize(
    ("operation", "check"),
    [(BLOCK_SPARSE, "block_sparse"), (POOLED_TAIL, "pooled_tail"), (QUANTIZED, "quantized")],
    ids=["block-sparse", "pooled tail", "8-bit"],
)
def test_a_release_that_was_tried_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, operation: Operation, check: str, version: str
) -> None:
    monkeypatch.delattr(gluon_check, check)
    with machine_with({"triton": version}):
        assert choose(operation, "auto", ASKED) == "gluon"
        assert self_checks() == ()


@pytest.mark.parametrize(
    ("version", "tried"),
    [
        ("3.6", True),
        ("3.6.0", True),
        ("3.6.2+git1", True),
        ("3.7.0", False),
        ("3.8.1", False),
        ("3.9.0", True),
        ("3.10.0", False),
        ("3.60.0", False),
        ("4.0.0", False),
    ],
)
def test_releases_are_compared_as_numbers(version: str, tried: bool) -> None:
    assert TRITON_WITH_GLUON.was_tried(version) is tried
    assert TRITON_WITH_GLUON.unsupported_reason(version) is None


def test_an_untried_release_runs_once_its_check_passes_on_each_device(
    let_checks_say: SayWhat, caplog: pytest.LogCaptureFixture
) -> None:
    asked = let_checks_say(None)
    for dtype in (torch.bfloat16, torch.float16):
        for device in (0, 1, None):
            request = ASKED._replace(dtype=dtype, device=device)
            assert choose(BLOCK_SPARSE, "auto", request) == "gluon"
    assert [device.index for device in asked] == [0, 1]
    assert list(map(str, self_checks())) == [
        f"kernel gluon (block_sparse) has not been tried with triton {UNTRIED}; its self-check on "
        f"GPU {index} passed"
        for index in (0, 1)
    ]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("relative error 0.3", "relative error 0.3"),
        (RuntimeError("no such layout\nTraceback"), "RuntimeError: no such layout"),
        (RuntimeError(), "RuntimeError"),
        (CompilationError("at 2:4:\ndef f(x):\n    ^\nno foo"), "CompilationError: no foo"),
        (
            caused(CompilationError("at 1:0:\n  g(x)"), CompilationError("at 9:0:\n^\nno bar")),
            "CompilationError: no bar",
        ),
        (
            CompileTimeAssertionFailure("at 2:4:\n    ^\nmust be 1"),
            "CompileTimeAssertionFailure: must be 1",
        ),
    ],
)
def test_where_the_check_fails_the_triton_kernels_run_with_one_warning(
    let_checks_say: SayWhat,
    caplog: pytest.LogCaptureFixture,
    found: str | Exception,
    said: str,
) -> None:
    asked = let_checks_say(found)
    with caplog.at_level(logging.WARNING):
        for device in (0, 1):
            for size in (64, 128):
                request = ASKED._replace(head_size=size, device=device)
                assert choose(BLOCK_SPARSE, "auto", request) == "triton"
    assert len(asked) == 2
    (message,) = caplog.messages
    assert message == (
        f"kernel gluon (block_sparse) does not work with triton {UNTRIED}, so other kernels run: "
        f"{said}"
    )
    with pytest.raises(
        UnsupportedBackendError, match=f"failed its self-check with triton .*{said}"
    ):
        choose(BLOCK_SPARSE, "gluon", ASKED)
    assert choose(QUANTIZED, "auto", ASKED) == "triton"
    assert len(self_checks()) == 3
    of_others = message.replace("(block_sparse)", "(quantized)")
    assert caplog.messages == [message, of_others]


@pytest.mark.usefixtures("gpu", "untried")
def test_what_differs_from_gpu_to_gpu_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, off in (("block_sparse", 0.3), ("quantized", 0.5)):
        monkeypatch.setattr(gluon_check, name, lambda on, off=off: f"error {off + on.index / 100}")
    for device in range(3):
        for operation in (BLOCK_SPARSE, QUANTIZED):
            assert choose(operation, "auto", ASKED._replace(device=device)) == "triton"
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [
        "error 0.3",
        "error 0.5",
    ]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 2 MiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["of torch", "of the driver"],
)
def test_a_check_without_memory_is_repeated(let_checks_say: SayWhat, error: Exception) -> None:
    let_checks_say(error)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"^the self-check of kernel gluon \(block_sparse\) must have .* on GPU 0, found none "
        rf"\({re.escape(str(error))}\); free memory and call again$",
    ):
        choose(BLOCK_SPARSE, "auto", ASKED)
    assert self_checks() == ()
    let_checks_say(None)
    assert choose(BLOCK_SPARSE, "auto", ASKED) == "gluon"


@pytest.mark.parametrize("fault", [None, "gradients are wrong"])
def test_gradients_have_a_check_of_their_own(
    let_checks_say: SayWhat, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    asked = let_checks_say(None)
    monkeypatch.setattr(gluon_check, "gradients", lambda device: asked.append(device) or fault)
    plan = BlockPlan.dense(Blocks.regular(64, 64), Blocks.regular(64, 64), "cpu")
    q = torch.zeros(1, 64, 2, 64)

    def chosen(k: torch.Tensor = q) -> str:
        return gradient_kernel("gluon", q, k, plan, ASKED._replace(backward=True), fixed=True)

    for _ in range(2):
        assert chosen() == ("gluon" if fault is None else "triton")
    assert chosen(q[:, :, :1]) == "triton"
    assert len(asked) == 1
    with machine_with({"triton": "3.6.0"}):
        assert chosen() == "gluon"
    assert len(asked) == 1


def test_gradients_are_warned_of_beside_the_kernel_itself(
    let_checks_say: SayWhat, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_checks_say("no such layout")
    monkeypatch.setattr(gluon_check, "gradients", lambda device: "no such layout")
    q = torch.zeros(1, 64, 2, 64)
    plan = BlockPlan.dense(Blocks.regular(64, 64), Blocks.regular(64, 64), "cpu")
    assert choose(BLOCK_SPARSE, "auto", ASKED) == "triton"
    asked = ASKED._replace(backward=True)
    assert gradient_kernel("gluon", q, q, plan, asked, fixed=False) == "triton"
    forward, backward = caplog.messages
    assert forward.endswith(": no such layout")
    assert backward.endswith(": no such layout")
    assert forward != backward


def test_what_a_kernel_cannot_serve_anyway_is_not_checked(let_checks_say: SayWhat) -> None:
    asked = let_checks_say(None)
    for changes in ({"capability": (8, 0)}, {"causal": True}, {"platform": "rocm"}):
        assert choose(BLOCK_SPARSE, "auto", ASKED._replace(**changes)) == "triton"
    assert asked == []


def test_a_check_runs_without_the_modes_of_its_caller(
    let_checks_say: SayWhat, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_checks_say(None)
    seen = []
    monkeypatch.setattr(
        gluon_check,
        "block_sparse",
        lambda _: seen.append((torch.is_inference_mode_enabled(), torch.zeros(1).device.type)),
    )
    with torch.inference_mode(), torch.device("meta"):
        assert choose(BLOCK_SPARSE, "auto", ASKED) == "gluon"
    assert seen == [(False, "cpu")]


@pytest.mark.parametrize("operation", [BLOCK_SPARSE, QUANTIZED])
def test_a_check_that_chooses_a_kernel_is_at_fault_and_does_not_wait_for_itself(
    let_checks_say: SayWhat, monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    let_checks_say(None)
    monkeypatch.setattr(checks, "_LOCK", Impatient())
    monkeypatch.setattr(gluon_check, "block_sparse", lambda _: choose(operation, "gluon", ASKED))
    assert choose(BLOCK_SPARSE, "auto", ASKED) == "triton"
    (found,) = self_checks()
    assert "gluon_check:block_sparse chose a kernel that needs" in str(found)
    assert choose(QUANTIZED, "auto", ASKED) == "gluon"


def test_nothing_is_checked_while_a_graph_is_captured(
    let_checks_say: SayWhat, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = let_checks_say(None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="must be checked before a CUDA graph is captured"):
        choose(BLOCK_SPARSE, "auto", ASKED)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert choose(BLOCK_SPARSE, "auto", ASKED) == "gluon"
    assert len(asked) == 1


@pytest.mark.parametrize(("fault", "variant"), [(None, "gluon"), ("all wrong", "triton")])
def test_selection_heeds_the_check_and_says_so(
    let_checks_say: SayWhat, fault: str | None, variant: str
) -> None:
    let_checks_say(fault)
    request = on_an_h100()
    asked = asking_for("video_sparse_attn")
    assert selected(request, asked).variant == variant
    selection = selected(request, AUTO)
    assert (selection.variant == "gluon") is (fault is None)
    said = str(self_checks()[0])
    assert said.endswith("failed: all wrong" if fault else "passed")
    assert said in selection.reason


@pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 1), (torch.float16, 0)])
def test_selection_says_what_became_of_the_tail(
    let_checks_say: SayWhat, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, times: int
) -> None:
    let_checks_say(None)
    monkeypatch.setattr(gluon_check, "pooled_tail", lambda device: "the means are wrong")
    request = on_an_h100(dtype=dtype)
    said = f"kernel gluon (pooled_tail) has not been tried with triton {UNTRIED}; its self-check"
    for backend, config, pools in (
        ("sol_attn", None, True),
        ("sol_attn", SolConfig(tail="none"), False),
        ("video_sparse_attn", None, False),
        ("video_sparse_attn", VideoSparseConfig(tail="pooled"), True),
    ):
        selection = selected(request, asking_for(backend, config))
        assert selection.label == f"{backend} (gluon)"
        assert (
            selection.reason.count(f"{said} on GPU 0 failed: the means are wrong") == times * pools
        )


@pytest.mark.parametrize(
    ("changes", "checked"),
    [({}, True), ({"head_size": 512}, False), ({"dtype": torch.float64}, False)],
)
def test_a_variant_checks_nothing_for_a_call_that_it_does_not_serve(
    let_checks_say: SayWhat, monkeypatch: pytest.MonkeyPatch, changes: dict, checked: bool
) -> None:
    asked = let_checks_say(None)
    monkeypatch.setattr(gluon_check, "pooled_tail", lambda device: asked.append(device))
    request = on_an_h100(**changes)
    cls = find_backend(AttentionBackendEnum.SOL_ATTN, PlatformEnum.CUDA)
    for variant in cls.variants:
        known = variant.after_self_checks(request, tail=True)
        own = variant.name in ("gluon", "gluon_sage")
        assert bool(known.environment.checked) is (checked and own)
    assert bool(asked) is checked


def test_a_kernel_that_was_named_is_refused_with_what_its_check_found(
    let_checks_say: SayWhat, caplog: pytest.LogCaptureFixture
) -> None:
    let_checks_say("all wrong")
    asked = asking_for("video_sparse_attn", VideoSparseConfig(kernel="gluon"))
    for _ in range(2):
        with pytest.raises(
            UnsupportedBackendError,
            match=rf"video_sparse_attn \(settings\) with kernel=gluon cannot serve .*"
            rf"failed its self-check with triton {UNTRIED}: all wrong.*leave kernel out",
        ):
            selected(on_an_h100(), asked)
    assert len(caplog.messages) == 1


def test_where_a_kernel_fails_nothing_that_would_run_with_it_is_checked(
    let_checks_say: SayWhat, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_checks_say("all wrong")
    monkeypatch.delattr(gluon_check, "pooled_tail")
    selection = selected(on_an_h100(), asking_for("sol_attn"))
    assert selection.label == "sol_attn (triton)"
    assert selection.reason.count("self-check") == 1


def test_what_a_check_said_depends_on_no_other_layer(let_checks_say: SayWhat) -> None:
    asked = let_checks_say(None)
    named = asking_for("video_sparse_attn", VideoSparseConfig(kernel="triton"))
    before = selected(on_an_h100(), named)
    assert asked == []
    assert "gluon" in selected(on_an_h100(), asking_for("video_sparse_attn")).reason
    assert len(asked) == 1
    assert selected(on_an_h100(), named) == before


@pytest.mark.parametrize(("fault", "variant"), [(None, "gluon"), ("all wrong", "triton")])
def test_a_layer_is_bound_to_what_the_check_leaves(
    let_checks_say: SayWhat, fault: str | None, variant: str
) -> None:
    asked = let_checks_say(fault)
    schedule = ((None, asking_for("video_sparse_attn")),)
    (entry,) = bind_schedule(schedule, Demand(request=on_an_h100(), geometry=GEOMETRY, strict=True))
    assert entry.primary.impl.variant == variant
    ((ran,), _) = entry.entries()
    assert ran.selection.variant == variant
    assert str(self_checks()[0]) in ran.selection.reason
    assert len(asked) == 1


def test_a_kernel_that_fails_its_check_is_refused_when_its_layer_is_planned(
    let_checks_say: SayWhat,
) -> None:
    let_checks_say("all wrong")
    schedule = ((None, asking_for("video_sparse_attn", VideoSparseConfig(kernel="gluon"))),)
    request = on_an_h100()
    with pytest.raises(UnsupportedBackendError, match="failed its self-check"):
        plannable_dtype(schedule, Demand(request=request, geometry=GEOMETRY, strict=False))


@pytest.mark.parametrize("name", [str(name) for name in AttentionBackendEnum])
def test_to_resolve_runs_no_check(
    let_checks_say: SayWhat, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a check ran")

    let_checks_say(None)
    monkeypatch.setattr(engine, "self_check", refuse)
    request = on_an_h100()
    for asked in (AUTO, asking_for(name)):
        with contextlib.suppress(UnsupportedBackendError):
            selection = resolve(request, asked)
            assert "self-check" not in selection.reason
            masked = request.with_needs(Feature.KEY_MASK)
            resolve(masked, replace(asked, dense_reason="a mask"))
            trainable(selection, request, Feature.BACKWARD)
