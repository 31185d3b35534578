"""`sglang attention compare` on several ranks, as people start it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multimodal_gen.runtime.comparison.record import Report, read_record
from multimodal_gen.runtime.comparison.store import noted_failures

SMALL = "sliding_tile_attn:window=[1,1,1],skip_time_steps=0,tile_size=[1,2,2]"
WIDE = "sliding_tile_attn:window=[1,3,1],skip_time_steps=0,tile_size=[1,2,2]"

# The second rank runs out of memory while the first one waits for its heads, where it hears of
# nothing. Ranks import this file under another name.
FAULTY = """
import sys

def patch():
    import torch
    from multimodal_gen.runtime.distributed.groups import parallel_groups
    from multimodal_gen.runtime.layers.attention.sparse import method

    attend = method.attend_locally

    def failing(router, settings, call, context):
        groups = parallel_groups()
        fails = groups is not None and groups.rank == 1
        if fails and getattr(settings, "window", None) == (1, 1, 1):
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return attend(router, settings, call, context)

    method.attend_locally = failing

if __name__ == "__main__":
    from multimodal_gen.cli.main import main
    sys.exit(main(sys.argv[1:]))
patch()
"""


@pytest.mark.slow
def test_a_backend_that_ends_the_ranks_is_a_row_and_the_others_run(tiny_pipeline, tmp_path) -> None:
    script, out = tmp_path / "faulty.py", tmp_path / "out"
    script.write_text(FAULTY)
    line = (
        *("attention", "compare", "--model-path", tiny_pipeline("wan"), "--prompt", "a fox"),
        *("--steps", 1, "--height", 64, "--width", 96, "--num-frames", 5, "--device", "cpu"),
        *("--dtype", "float32", "--num-gpus", 2, "--replayed-steps", 0, "--output", out),
        *("--backends", f"{SMALL};{WIDE}", "--floor", "video_sparse_attn:sparsity=0", "--no-page"),
    )
    done = subprocess.run(
        [sys.executable, script, *map(str, line)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert "starting again without it" in done.stderr
    assert "out of memory: tried to allocate 2 GiB" in done.stdout
    report = read_record(Report, out / "report.json")
    failed, ran = report.candidates
    assert (failed.status, failed.message) == (
        "out of memory",
        "out of memory: tried to allocate 2 GiB",
    )
    assert (ran.status, len(ran.generations)) == ("done", 1)
    assert report.environment.num_ranks == 2
    (note,) = noted_failures(out)
    assert note.mesh == {"cfg": 1, "ring": 1, "ulysses": 2}
