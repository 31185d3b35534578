"""The node in a real ComfyUI: `pytest --comfyui=CHECKOUT --comfyui-python=PYTHON`.

CHECKOUT is a clone of ComfyUI, and PYTHON has its requirements and those of this package.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multimodal_gen.integrations import comfyui

REPOSITORY = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkout(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--comfyui")
    if given is None:
        pytest.skip("no ComfyUI: give the path of a checkout by --comfyui=PATH")
    folder = Path(given).resolve()
    assert (folder / "main.py").is_file(), f"--comfyui must be a clone of ComfyUI, got {folder}"
    return folder


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--comfyui-python") or sys.executable


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


@pytest.fixture(scope="module")
def models(checkout: Path, python: str) -> dict[str, Any]:
    """What the tiny models of ComfyUI did, by name."""
    ran = subprocess.run(
        [python, str(HERE / "real_models.py"), str(checkout)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment(),
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


MODELS = (
    "wan",
    "wan with a reference",
    "wan vace",
    "hunyuan video",
    "ltx video",
    "ltx 2",
    "flux",
    "qwen image",
    "minimax h3",
)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_runs_dense_as_stock_and_sparse_on_its_own_grid(models, name):
    found = models[name]
    assert found["dense"] < 1e-5
    assert found["dense again"] < 1e-5
    assert all(backend.endswith(": torch_sdpa, True") for backend in found["backends"])
    # With a window over everything, and with one over few tiles.
    assert found["whole"] < 1e-5
    assert found["sparse"] > 1e-3
    assert "sliding_tile_attn (reference) [settings], density" in found["summary"]
    assert "(sigma >0.8: 1 to 1): torch_sdpa" in found["summary"]
    # A change of the latent at one place reaches the rows of that place alone.
    assert found["grid"] == found["expected grid"]
    assert found["front"] == found["expected front"]
    assert found["changed"] == found["expected changed"]
    assert found["removed"] == 0
    assert found["hooks left"] == found["options left"] == []


def test_two_models_run_at_once(models):
    found = models["two at once"]
    assert found["first"] < 1e-5
    assert found["second"] == 0
    dense, sparse = found["reports"]
    assert "sliding_tile_attn" not in dense
    assert "sliding_tile_attn (reference)" in sparse


class Server:
    """A ComfyUI that runs, asked through its HTTP API."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(
            self.address + path, body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def run(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Queue a workflow, wait for its end, and return its history."""
        queued = self.get("/prompt", {"prompt": prompt})["prompt_id"]
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            history = self.get(f"/history/{queued}").get(queued, {})
            if history.get("status", {}).get("status_str") in ("success", "error"):
                return history
            time.sleep(0.2)
        raise TimeoutError("the workflow did not end within 300 s")


@pytest.fixture(scope="module")
def server(
    checkout: Path, python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("comfyui")
    subprocess.run(
        [python, str(HERE / "tiny_files.py"), str(checkout), str(folder)],
        capture_output=True,
        timeout=300,
        check=True,
        env=environment(),
    )
    (folder / "custom_nodes" / "attention_backend").symlink_to(Path(comfyui.__file__).parent)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = ["--cpu", "--port", str(port), "--base-directory", str(folder), "--disable-api-nodes"]
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, str(checkout / "main.py"), *given],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment(),
        )
    found = Server(f"http://127.0.0.1:{port}")
    try:
        _wait_for(found, process, log)
        yield found
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        try:
            server.get("/system_stats")
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def workflow(backend: str, config: str, *, strict: bool, start_percent: float = 0.0) -> Any:
    def node(class_type: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": class_type, "inputs": inputs}

    return {
        "model": node("UNETLoader", unet_name="tiny.safetensors", weight_dtype="default"),
        "attention": node(
            "MultimodalGenAttentionBackend",
            model=["model", 0],
            backend=backend,
            config=config,
            start_percent=start_percent,
            end_percent=1.0,
            strict=strict,
        ),
        "positive": node("TinyPrompt", seed=1),
        "negative": node("TinyPrompt", seed=2),
        "latent": node("EmptyHunyuanLatentVideo", width=64, height=64, length=1, batch_size=1),
        "sampler": node(
            "KSampler",
            model=["attention", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            seed=0,
            steps=3,
            cfg=5.0,
            sampler_name="euler",
            scheduler="simple",
            denoise=1.0,
        ),
        "vae": node("VAELoader", vae_name="tiny.safetensors"),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="tiny"),
        "report": node(
            "MultimodalGenAttentionReport", model=["attention", 0], after=["sampler", 0]
        ),
        "plan": node("PreviewAny", source=["attention", 1]),
    }


def test_a_workflow_is_queued_and_an_image_and_the_report_come_out(server):
    history = server.run(workflow("torch_sdpa", "", strict=True))
    assert history["status"]["status_str"] == "success", history["status"]["messages"]
    image = history["outputs"]["save"]["images"][0]["filename"]
    view = f"{server.address}/view?filename={image}"
    with urllib.request.urlopen(view, timeout=60) as answer:
        assert answer.read(8) == b"\x89PNG\r\n\x1a\n"
    said = history["outputs"]["report"]["text"][0].splitlines()
    assert [line.partition(", 3 calls each")[0] for line in said] == [
        "diffusion_model.self, layers 0-1: torch_sdpa [settings]",
        "diffusion_model.cross, layers 0-1: torch_sdpa [settings]",
    ]
    planned = history["outputs"]["plan"]["text"][0]
    assert planned.count("torch_sdpa [settings], 0 calls each") == 2


def test_a_sparse_backend_serves_its_share_of_the_steps(server):
    config = "window=[1,1,1],tile_size=[1,2,2],dense_above=1.0,skip_time_steps=0"
    history = server.run(workflow("sliding_tile_attn", config, strict=True, start_percent=0.2))
    assert history["status"]["status_str"] == "success", history["status"]["messages"]
    said = history["outputs"]["report"]["text"][0]
    assert "self, layers 0-1, steps other: sliding_tile_attn (reference) [settings]" in said
    assert "density 25.0 %, 2 calls each" in said


def test_a_wrong_parameter_ends_the_workflow_with_the_reason(server):
    history = server.run(workflow("video_sparse_attn", "sparsety=0.5", strict=False))
    assert history["status"]["status_str"] == "error"
    name, message = history["status"]["messages"][-1]
    assert name == "execution_error"
    assert "did you mean 'sparsity'?" in message["exception_message"]
