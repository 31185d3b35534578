"""Many generations of one command: prompts, files of prompts, configuration files."""

import json

import pytest

from multimodal_gen.cli.batch import as_config, asked_for, jobs_of
from multimodal_gen.errors import ConfigError

SIZE = ("--height", "32", "--width", "32", "--num-inference-steps", "1")


def test_a_file_gives_one_generation_a_line(tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('a fox\n\n{"prompt": "a cat", "num-frames": 9, "height": 64}\n')
    typed = {"model_path": "m", "prompt": ["first"], "prompt_file": str(file), "height": 32}
    assert asked_for(typed).generations == (
        {"model_path": "m", "height": 32, "prompt": "first"},
        {"model_path": "m", "height": 32, "prompt": "a fox"},
        {"model_path": "m", "height": 64, "prompt": "a cat", "num_frames": 9},
    )


def test_lines_end_where_editors_end_them(tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('\ufeff{"prompt": "a\u2028b"}\r\nc\x0cd\re\u0085f', newline="")
    found = asked_for({"model_path": "m", "prompt_file": str(file)}).generations
    assert [each["prompt"] for each in found] == ["a\u2028b", "c\x0cd", "e\u0085f"]


@pytest.mark.parametrize("flag", ["config", "prompt_file"])
def test_a_file_without_a_name_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} must be a file or folder"):
        asked_for({"model_path": "m", "prompt": ["a"], flag: ""})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "higth": 1}', r"line 1, must name flags of `sgl.*'higth', did you mean"),
        ('{"prompt": "a", "dtype": "float16"}', r"line 1, must leave --dtype .* got 'float16' ins"),
        ('{"prompt": "a", "config": "x"}', r"line 1, must name flags of `sglang generate`, got 'c"),
        ('{"prompt": "a", "resume": true}', r"line 1, must not give --resume, which is for the wh"),
        ('{"seed": 1}', r'line 1, must have a "prompt" that is text, got'),
        ('{"prompt": "a"', r"line 1, must be a prompt or a JSON object: cannot read JSON near"),
        ('{"prompt": "a", "seed": 1, "seed": 2}', r"line 1, must be .* 'seed' must be given once"),
    ],
)
def test_a_line_that_cannot_be_is_named(line: str, message: str, tmp_path) -> None:
    (tmp_path / "p").write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        asked_for({"model_path": "m", "prompt_file": str(tmp_path / "p")})


def test_flags_win_over_a_configuration_file(tmp_path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model-path: m\nprompt: [a fox, a cat]\nheight: 32\nstrict_attention: true\n"
        "attention-backend: sliding_tile_attn\nattention_backend_config: {window: [1, 1, 1]}\n"
    )
    asked = asked_for({"config": str(config), "height": 64, "strict_attention": False})
    assert [each["prompt"] for each in asked.generations] == ["a fox", "a cat"]
    first = jobs_of(asked)[0].args
    assert (first.height, first.strict_attention) == (64, False)
    assert first.attention_backend_config == {"window": (1, 1, 1)}


def test_a_printed_configuration_is_the_same_run(tmp_path, sglang) -> None:
    flags = (
        *("--model-path", "m", "--prompt", "yes: a 'fox'", "--seed", "1", "--sigmas", "1.0,0.5"),
        *("--quantize", "transformer=torchao-int8", "--pipeline-arg", "strength=0.5"),
        *("--image-path", "a.png", "--image-path", "b.png", "--lora-path", "x.safetensors:0.5"),
        *("--transformer-weights-path", "a.pth", "--transformer-weights-path", "vae=b=c.pth"),
        *("-ac.backend", "fa", "--guidance-scale", "1e-3", "--overwrite"),
    )
    printed = sglang("generate", *flags, "--print-config")
    assert printed.code == 0, printed.err
    file = tmp_path / "run.yaml"
    file.write_text(printed.out)
    again = sglang("generate", "--config", file, "--print-config")
    assert again.out == printed.out
    asked = asked_for({"config": str(file)})
    assert as_config(asked) == printed.out
    args = jobs_of(asked)[0].args
    assert (args.prompt, args.seed, args.sigmas) == ("yes: a 'fox'", 1, (1.0, 0.5))
    assert args.lora_path == ("x.safetensors:0.5",)
    assert [path.name for path in args.image_path] == ["a.png", "b.png"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("higth: 1", r"--config '.*' must name flags of `sglang generate`, got 'higth', did you"),
        ("height: 1\n--height: 2", r"must give --height once, got it twice"),
        ("height: tall\nmodel_path: m\nprompt: x", r"--height must be an integer >= 1, got 'tall'"),
        ("[1]", r"must be a mapping"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(text: str, message: str, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        jobs_of(asked_for({"config": str(tmp_path / "run.yaml")}))


def test_an_interrupted_file_of_prompts_goes_on_where_it_was(
    tiny_pipeline, sglang, tmp_path, monkeypatch
) -> None:
    from multimodal_gen.runtime.generator import run

    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text('a fox\n{"prompt": "a cat", "seed": 5}\na fox\n')
    loads = []
    load, denoise = run.load_pipeline, run.denoise
    monkeypatch.setattr(run, "load_pipeline", lambda *a: loads.append(a) or load(*a))
    command = (
        *("generate", "--model-path", tiny_pipeline("flux"), "--prompt-file", prompts),
        *("--output-path", out, "--seed", "1", *SIZE),
    )
    left = [2]

    def interrupted(*args):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return denoise(*args)

    monkeypatch.setattr(run, "denoise", interrupted)
    first = sglang(*command)
    assert first.code == 130
    assert first.err.splitlines()[-1] == (
        "interrupted; 2 of 3 generations are written; the same command with --resume makes the "
        "others"
    )
    assert len(loads) == 1
    assert "[2/3] a cat\n" in first.out
    assert sorted(file.name for file in out.glob("*.png")) == ["flux-seed1.png", "flux-seed5.png"]

    monkeypatch.setattr(run, "denoise", denoise)
    second = sglang(*command, "--resume")
    assert second.code == 0, second.err
    assert "2 of 3 generations are done already\n" in second.out
    assert "[3/3] a fox\n" in second.out
    seeds = [json.loads(f.read_text())["arguments"]["seed"] for f in sorted(out.glob("*.json"))]
    assert seeds == [1, 1, 5]
    third = sglang(*command, "--resume")
    assert (third.code, third.out) == (0, "3 of 3 generations are done already\n")
    other = sglang(*command, "--resume", "--guidance-scale", "2.0")
    assert "done already" not in other.out
    assert "time: " in other.out.splitlines()[-1]
    assert other.out.splitlines()[-1].endswith(" s in all, 3 generations")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"--output-path": "x.png"},
            "--output-path must be a folder where several generations go to it",
        ),
        (
            {"--output-path": "out", "--record-attention": "r.json"},
            "--record-attention must be another file for each of several",
        ),
    ],
)
def test_generations_that_need_one_file_are_refused_before_the_first(
    tiny_pipeline, sglang, tmp_path, files: dict[str, str], said: str
) -> None:
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--prompt", "a", "--prompt", "b"),
        *(word for flag, name in files.items() for word in (flag, tmp_path / name)),
        *SIZE,
    )
    assert outcome.code == 2
    assert said in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_what_a_pipeline_refuses_of_a_line_is_said_to_be_of_that_line(
    tiny_pipeline, sglang, tmp_path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('a fox\n{"prompt": "a cat", "image_path": "x.png"}\n')
    outcome = sglang(
        *("generate", "--model-path", tiny_pipeline("flux"), "--prompt-file", prompts),
        *("--output-path", tmp_path / "out", *SIZE),
    )
    assert outcome.code == 2
    assert "error: the generation of 'a cat': --image-path must be left out" in outcome.err
