"""Kernels compile in other processes while a pipeline loads or runs, which end when it is let go.

A shell stands in for the process, and the CPU for a GPU; tests/kernels/launch/test_compile.py
rehearses and compiles what is handed over here.
"""

import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import multimodal_gen
from multimodal_gen import DiffGenerator
from multimodal_gen.errors import UsageError
from multimodal_gen.integrations import ahead as ahead_module
from multimodal_gen.integrations import diffusers as attaching
from multimodal_gen.integrations.ahead import Ahead
from multimodal_gen.runtime.server_args import ServerArgs

CPU = torch.device("cpu")
SIZE = {"height": 32, "width": 48, "num_frames": 5}


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any device pass for a GPU of NVIDIA."""
    monkeypatch.setattr(ahead_module, "place_of_gpu", lambda device: None)


@pytest.fixture
def stand_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, any_device: None
) -> Callable[[str], Callable[[], list[Any]]]:
    """Return a function that sets a process up, and gives one that returns what it was given.

    The process keeps that, says lines with `say`, and does what the script says.
    """

    def use(script: str) -> Callable[[], list[Any]]:
        file = tmp_path / "python"
        said = 'fd=${2##*serve(}; fd=${fd%)*}; say() { echo "$1" >>/proc/$$/fd/$fd; }'
        file.write_text(f"#!/bin/bash\n{said}\ncat >{tmp_path}/given\n{script}\n")
        file.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(file))
        return given

    def given() -> list[Any]:
        with (tmp_path / "given").open("rb") as stream:
            return [pickle.load(stream), pickle.load(stream)]

    return use


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_refused_without_a_gpu(tiny_pipeline, fresh) -> None:
    message = (
        r"^compile_ahead \(.*compile.ahead\): kernels must be .* NVIDIA GPU, .*; leave it out here$"
    )
    with pytest.raises(UsageError, match=message):
        DiffGenerator.from_pretrained(tiny_pipeline("wan"), device="cpu", compile_ahead=True)
    pipe = fresh("wan")
    with pytest.raises(UsageError, match=message):
        multimodal_gen.apply(pipe, compile_ahead=True)
    assert multimodal_gen.applied(pipe) is None


def test_the_process_gets_the_generation_and_ends_with_all_it_started(
    stand_in, tmp_path: Path
) -> None:
    given = stand_in(f"sleep 100 & echo $! > {tmp_path}/pid; wait")
    args = ServerArgs(model_path="M", prompt="a fox", height=480)
    ahead = Ahead(args, CPU)
    file = tmp_path / "pid"
    until(lambda: file.exists() and file.read_text())
    assert given() == [sys.path, args]
    started = int(file.read_text())
    os.kill(started, 0)
    ahead.stop()
    ahead.stop()
    until(lambda: not is_running(started))


def test_a_process_that_cannot_serve_ends_by_itself(tiny_pipeline, any_device: None) -> None:
    args = ServerArgs(model_path=str(tiny_pipeline("wan")), prompt="a fox", device="cpu")
    ahead = Ahead(args, CPU)
    assert ahead.wait() != 0
    assert "kernels must be compiled ahead for an NVIDIA GPU" in str(ahead.report().failed)
    ahead.stop()


def test_a_loaded_pipeline_is_handed_over_without_its_weights(
    stand_in, fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers import PreTrainedModel

    given = stand_in("")
    pipe = fresh("wan")
    pipe.transformer.blocks[0].compile(backend="eager")
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    with multimodal_gen.apply(pipe, attention_backend="torch_sdpa", compile_ahead=SIZE) as handle:
        until(lambda: handle.ahead.wait() == 0)
        # Transformers notes which outputs its models can give where they are made.
        made, make = [], PreTrainedModel.__init__
        monkeypatch.setattr(
            PreTrainedModel,
            "__init__",
            lambda self, *given, **named: (made.append(type(self)), make(self, *given, **named))[1],
        )
        _, generation = given()
    again = generation.pipe
    assert type(again) is type(pipe)
    assert isinstance(again.scheduler, FlowMatchEulerDiscreteScheduler)
    assert again.scheduler.config.shift == 3.0
    assert str(generation.scope.default.backend) == "torch_sdpa"
    assert generation.arguments.items() >= SIZE.items()
    assert generation.arguments["prompt"]
    for name, model in pipe.components.items():
        if isinstance(model, nn.Module):
            copied = dict(getattr(again, name).named_parameters())
            for key, parameter in model.named_parameters():
                assert (copied[key].shape, copied[key].dtype) == (parameter.shape, parameter.dtype)
            assert all(x.is_meta for x in copied.values())
            assert not any(x.is_meta for x in model.parameters())
    assert type(pipe.text_encoder) in made
    assert multimodal_gen.applied(again) is None


def test_what_offloading_puts_into_models_stays_here(stand_in, fresh) -> None:
    from accelerate.hooks import CpuOffload, add_hook_to_module

    given = stand_in("")
    pipe = fresh("wan")
    for model in (pipe.transformer, pipe.text_encoder):
        add_hook_to_module(model, CpuOffload(execution_device=CPU))
    pipe._all_hooks = [SimpleNamespace(unpicklable=lambda: None)]
    with multimodal_gen.apply(pipe, compile_ahead=SIZE) as handle:
        until(lambda: handle.ahead.wait() == 0)
    again = given()[1].pipe
    assert type(again.transformer).forward == again.transformer.forward.__func__
    assert hasattr(pipe.transformer, "_hf_hook")


def test_the_report_says_what_is_compiled_and_what_was(stand_in, fresh, tmp_path: Path) -> None:
    go = tmp_path / "go"
    noted = {"kernels": ["pool_kernel", "attention_kernel", "attention_kernel"]}
    first, last = json.dumps(noted), json.dumps({**noted, "seconds": 7.25})
    stand_in(f"say '{first}'; while [ ! -e {go} ]; do sleep 0.01; done; say '{last}'")
    with multimodal_gen.apply(fresh("wan"), compile_ahead=SIZE) as handle:
        until(lambda: handle.report().ahead.kernels)
        named = "3 kernels (attention_kernel x2, pool_kernel)"
        assert f"compiled ahead: {named} being compiled" in handle.report().summary()
        go.touch()
        handle.ahead.wait()
        for _ in range(2):
            assert f"compiled ahead: {named}, in 7.2 s" in handle.report().summary()
            document = handle.report().as_dict()["compile_ahead"]
            assert (document["seconds"], document["failed"]) == (7.25, None)
            handle.remove()


def test_removing_ends_it_and_the_report_says_so(stand_in, fresh) -> None:
    stand_in("sleep 100")
    handle = multimodal_gen.apply(fresh("wan"), compile_ahead=True)
    process = handle.ahead._process
    assert "what the pipeline needs is being found" in handle.report().summary()
    handle.remove()
    assert process.poll() is not None
    assert "not all of what the pipeline needs: it was ended" in handle.report().summary()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('say \'{"failed": "no such thing"}\'; exit 1', "no such thing"),
        ("kill -9 $$", "its process ended with status -9"),
    ],
    ids=["told", "killed"],
)
def test_what_failed_is_in_the_report_and_stops_nothing(
    script: str, why: str, stand_in, fresh
) -> None:
    stand_in(script)
    with multimodal_gen.apply(fresh("wan"), compile_ahead=True) as handle:
        handle.ahead.wait()
        assert f"compiled ahead: not all of what the pipeline needs: {why}" in (
            handle.report().summary()
        )


def test_a_generator_compiles_for_its_first_generation_and_says_so(stand_in, tiny_pipeline) -> None:
    """From its loading on nothing is known of what will be made."""
    given = stand_in('say \'{"kernels": ["pool_kernel"], "seconds": 7.25}\'')
    settings: dict[str, Any] = {"attention_backend": "torch_sdpa", "device": "cpu"}
    folder = tiny_pipeline("wan")
    with DiffGenerator.from_pretrained(folder, compile_ahead=True, **settings) as generator:
        assert generator._ahead is None
        for prompt in ("a fox", "a cat"):
            made = generator.generate(prompt=prompt, num_inference_steps=1, seed=0, **SIZE)
            assert made is not None
            if prompt == "a fox":
                generator._ahead.wait()
        _, args = given()
    assert (args.prompt, args.height, str(args.attention_backend)) == ("a fox", 32, "torch_sdpa")
    assert "compiled ahead: 1 kernel (pool_kernel), in 7.2 s" in made.report.summary()
    attention: Any = made.record["attention"]
    assert attention["compile_ahead"]["kernels"] == ["pool_kernel"]


def test_a_generator_that_knows_what_it_will_make_compiles_beside_its_loading(
    stand_in, tiny_pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """As the command line does; what failed is warned of at the end."""
    given = stand_in('say \'{"failed": "no such thing"}\'; exit 1')
    path = str(tiny_pipeline("wan"))
    args = ServerArgs(model_path=path, prompt="a fox", compile_ahead=True, device="cpu")
    with DiffGenerator(args) as generator:
        assert generator._ahead.wait() == 1
    assert given()[1] == args
    assert "compiled ahead: not all of what the pipeline needs: no such thing" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compile_ahead": {"hight": 480}}, r"called with, got 'hight', did you mean 'height'\?"),
        ({"compile_ahead": 480}, "compile_ahead must be True, False or a mapping"),
        (
            {"compile_ahead": {"height": 127}},
            r"^height must be a multiple of 16 for WanPipeline, got 127: .*; try 112 or 128$",
        ),
        ({"compile_ahead": {"num_frames": "5"}}, "^num_frames must be an integer >= 1, got '5'$"),
        ({"compile_ahead": {"callback_on_step_end": lambda: 0}}, "can be pickled without"),
        ({"compile_ahead": True, "train": True}, "must be left out where train is True"),
    ],
    ids=["name", "type", "size", "type of a size", "callback", "training"],
)
def test_what_cannot_be_rehearsed_is_refused_before_anything_changes(
    given: dict[str, Any], message: str, stand_in, fresh
) -> None:
    stand_in("")
    pipe = fresh("wan")
    with pytest.raises(UsageError, match=message):
        multimodal_gen.apply(pipe, **given)
    assert multimodal_gen.applied(pipe) is None


def test_a_bare_model_has_no_call_to_rehearse(fresh) -> None:
    with pytest.raises(UsageError, match="compile_ahead must be given for a pipeline"):
        multimodal_gen.apply(fresh("wan").transformer, compile_ahead=True)


def test_ranks_are_refused(fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "parallel_groups", object)
    scope = attaching.scope_from()
    message = (
        r"^compile_ahead \(.*compile.ahead\) must be given to a single process, got several ranks"
    )
    with pytest.raises(UsageError, match=message):
        attaching._ahead(fresh("wan"), {}, scope, None, train=False)
    with pytest.raises(UsageError, match=message):
        DiffGenerator(ServerArgs(model_path="M", compile_ahead=True, device="cpu"))


def test_what_the_call_needs_must_be_there(stand_in, fresh) -> None:
    stand_in("")
    pipe = fresh("wan")

    class Framed(type(pipe)):  # type: ignore[misc]
        def __call__(self, image: object, prompt: str | None = None) -> None:
            """Take an image."""

    pipe.__class__ = Framed
    with pytest.raises(UsageError, match=r"Framed cannot be called without, image is not there"):
        multimodal_gen.apply(pipe, compile_ahead={"prompt": "a fox"})


def is_running(pid: int) -> bool:
    """Whether there is a process that has not ended; who ended may be waited for by nobody."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
