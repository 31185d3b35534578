"""Files that a pipeline starts from, read before its weights are."""

import diffusers
import pytest

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.inputs import read_inputs
from multimodal_gen.runtime.server_args import ServerArgs


# imageio leaves the pipes of ffmpeg to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("setting", "name", "problem"),
    [
        ("image_path", "absent.png", "--image-path must be a readable image, got .*: there is no"),
        ("image_path", "folder.png", "--image-path must be a readable image, got .*: this is no"),
        ("image_path", "text.png", "--image-path must be a readable image, got .*: cannot ident"),
        ("video_path", "text.mp4", "--video-path must be a readable video, got .*"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(setting, name, problem, tmp_path) -> None:
    (tmp_path / "folder.png").mkdir()
    for text in ("text.png", "text.mp4"):
        (tmp_path / text).write_text("nothing")
    pipeline = diffusers.WanVideoToVideoPipeline
    index = PipelineIndex(model_path="m", pipeline_class=pipeline, components={})
    args = ServerArgs(model_path="m", prompt="a", **{setting: tmp_path / name})
    with pytest.raises(UsageError, match=f"^{problem}"):
        read_inputs(index, args)
