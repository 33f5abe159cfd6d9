"""The dashboard's pictures in docs/images: `python scripts/screenshots.py`, of the demo's runs; with a run of
conversations as argument, also that of a conversation. Needs playwright and a Chromium (RLLOOP_CHROMIUM)."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from rlloop.dashboard.demo import recorded_runs
from rlloop.dashboard.live import Dashboard
from rlloop.dashboard.server import make_app
from rlloop.web.server import BackgroundServer, Listen

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TOKEN = "a-token-for-pictures"
COLOURS = 160  # of a picture's palette, which makes it small


def main(runs: list[str]) -> int:
    chromium = os.environ.get("RLLOOP_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with ExitStack() as stack:
        root, _ = stack.enter_context(recorded_runs(pace=0.0))
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )

        def shoot(folder: Path, name: str, view: str, width: int, height: int, ready: str) -> None:
            dashboard = Dashboard(folder, cache=cache)
            server = BackgroundServer(make_app(dashboard), Listen(token=TOKEN, browser=True))
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
            page.goto(f"{server.url}/?token={TOKEN}")
            page.goto(f"{server.url}/{view}")
            page.locator(ready).first.wait_for()
            page.wait_for_timeout(1500)  # charts are drawn when they are seen
            _save(page, name)
            page.close()
            dashboard.close()
            server.close()

        canvas = ".card canvas"
        shoot(root, "dashboard.png", "#/charts?run=zero-kl", 1440, 900, canvas)
        shoot(root, "dashboard-mismatch.png", "#/charts?run=int4-from-step-51&run=zero-kl&parity=open&hide=truncated,"
              "gradient-norm,entropy", 1440, 900, canvas)  # fmt: skip
        shoot(root, "dashboard-phone.png", "#/charts?run=zero-kl", 400, 800, canvas)
        for run in map(Path, runs):
            view = f"#/rollouts?run={run.name}&order=reward_high"
            shoot(run.parent, "dashboard-conversation.png", view, 1440, 900, ".bubble .tok")
        browser.close()
    return 0


def _save(page: Page, name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)
    print(f"{IMAGES / name}: {(IMAGES / name).stat().st_size // 1000} kB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
