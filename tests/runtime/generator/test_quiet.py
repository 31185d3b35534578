"""What libraries log that is said otherwise is dropped, and nothing else."""

import logging

from multimodal_gen.runtime.generator.quiet import without


def test_only_the_messages_that_are_said_otherwise_are_dropped(caplog) -> None:
    library = logging.getLogger("some_package")
    with without("some_package", lambda text: "known" in text):
        library.warning("this is known")
        library.warning("this is %s", "news")
    library.warning("known again")
    assert [record.getMessage() for record in caplog.records] == ["this is news", "known again"]
