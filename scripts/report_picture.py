#!/usr/bin/env python3
"""Draws the picture of a report in the documentation, one with made-up figures.

    python scripts/report_picture.py docs/pages/guides/report.png

Needs a chromium, and what `scripts/test` installs.
"""

import argparse
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

# A checkout works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal_gen.runtime.comparison.page import write_page
from tests.helpers.reports import make_report

COLOURS = 200  # a palette keeps the picture small
# Width and height of a window, its scheme, and the section that is shown.
VIEWS = (
    (1240, 1000, "light", "summary"),
    (1240, 1000, "light", "clips"),
    (400, 1000, "dark", "masks"),
)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, help="PNG file to write")
    target = parser.parse_args().picture
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = make_report(Path(folder), size=(17, 180, 312), measured=True)
        page_file = Path(folder, "report.html")
        write_page(report, page_file.parent, page_file)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        shots = []
        for width, height, scheme, section in VIEWS:
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                reduced_motion="reduce",  # scrolls at once
            )
            page.goto(page_file.as_uri())
            if section == "clips":
                page.get_by_role("combobox", name="Run").select_option("video_sparse_attn")
                page.get_by_role("slider", name="Frame").fill("8")
            if section != "summary":
                page.evaluate(f"document.getElementById('{section}').scrollIntoView()")
            page.wait_for_timeout(500)  # every clip has been sought
            shots.append(Image.open(io.BytesIO(page.screenshot())))
        browser.close()
    picture = Image.new("RGB", (sum(shot.width for shot in shots), shots[0].height))
    left = 0
    for shot in shots:
        picture.paste(shot, (left, 0))
        left += shot.width
    size = (picture.width * 2 // 3, picture.height * 2 // 3)
    small = picture.resize(size, Image.Resampling.LANCZOS)
    small.quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)


if __name__ == "__main__":
    main()
