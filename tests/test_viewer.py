"""The live viewer in a real browser: while training, and on a finished run."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

BIN = Path(sys.executable).parent
CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(cwd: Path, port: int, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a tool that serves a viewer; interrupts it at the end and expects it to leave."""
    log = cwd / "log.txt"
    with log.open("wb") as output:
        tool = subprocess.Popen(
            [str(BIN / command[0]), *map(str, command[1:])],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 240
        while True:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert tool.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
            time.sleep(0.5)
        yield tool
    finally:
        tool.send_signal(signal.SIGINT)
        try:
            tool.wait(60)
        except subprocess.TimeoutExpired:
            tool.kill()
            tool.wait()


@contextmanager
def page_at(port: int, screenshot: Path):
    """A browser page on the viewer; a picture of it is kept."""
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*flags, "--enable-unsafe-swiftshader"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"http://127.0.0.1:{port}")
        yield page
        page.screenshot(path=screenshot)
        browser.close()


def picture(page) -> np.ndarray:
    """(H, W, 3) what the canvas of the scene shows."""
    from io import BytesIO

    from PIL import Image

    return np.asarray(Image.open(BytesIO(page.locator("canvas").first.screenshot())).convert("RGB"), float)


def wait_for_render(page) -> np.ndarray:
    """Waits until the scene shows more than its flat background."""
    page.wait_for_selector("canvas", timeout=120_000)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        shown = picture(page)
        if shown.std() > 10:
            return shown
        page.wait_for_timeout(1000)
    raise AssertionError("the viewer showed nothing but its background")


def shown_step(page) -> int:
    """The training step that the control panel shows."""
    text = page.get_by_text(re.compile(r"Step: \d+")).first.inner_text(timeout=60_000)
    return int(re.findall(r"Step: (\d+)", text)[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_viewer_while_training_and_afterwards(demo_capture: Path, tmp_path: Path, ranks: int) -> None:
    port = free_port()
    tool = ("ns-train",) if ranks == 1 else ("odin-train",)
    arguments = ("--max-num-iterations", "100000", "--vis", "viewer", "--viewer.websocket-port", str(port))
    arguments += () if ranks == 1 else ("--nproc-per-node", str(ranks))
    model = ("--pipeline.model.num-downscales", "0", "--experiment-name", "demo", "--timestamp", "run")
    parser = ("colmap", "--data", demo_capture, "--colmap-path", "sparse/0", "--downscale-factor", "1")
    with serving(tmp_path, port, *tool, "odin-splatfacto", *arguments, *model, *parser) as training:
        with page_at(port, tmp_path / "training.png") as page:
            wait_for_render(page)
            page.get_by_text("Pause Training").click(timeout=60_000)
            page.wait_for_timeout(5_000)  # in which the other ranks wait
            page.get_by_text("Resume Training").click(timeout=60_000)
            before = shown_step(page)
            deadline = time.monotonic() + 120
            while shown_step(page) <= before:
                assert time.monotonic() < deadline, "training did not go on after the pause"
                page.wait_for_timeout(500)
        assert training.poll() is None  # a client that leaves ends nothing
    run = tmp_path / "outputs" / "demo" / "odin-splatfacto" / "run"
    assert list((run / "nerfstudio_models").glob("step-*.ckpt"))  # the interrupted run was saved

    port = free_port()
    viewer = ("ns-viewer", "--load-config", run / "config.yml", "--viewer.websocket-port", str(port))
    with serving(tmp_path, port, *viewer), page_at(port, tmp_path / "finished.png") as page:
        wait_for_render(page)


def test_viewer_after_the_end_of_training_on_two_ranks(demo_capture: Path, tmp_path: Path) -> None:
    """Rank 0 goes on showing the scene; the other rank is done and not missed."""
    port = free_port()
    arguments = ("--max-num-iterations", "12", "--vis", "viewer", "--viewer.websocket-port", str(port))
    parser = ("colmap", "--data", demo_capture, "--colmap-path", "sparse/0", "--downscale-factor", "1")
    training = ("odin-train", "odin-splatfacto", "--nproc-per-node", "2", *arguments, *parser)
    with serving(tmp_path, port, *training) as tool, page_at(port, tmp_path / "completed.png") as page:
        wait_for_render(page)
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("outputs/**/step-000000011.ckpt")):
            assert time.monotonic() < deadline, "the run did not end"
            page.wait_for_timeout(500)
        page.reload()
        wait_for_render(page)
        assert tool.poll() is None


def figures(page) -> dict[str, list[dict]]:
    """The figures of the tab Odin by the title of their first axis or their place: what plotly was given to draw."""
    script = "() => [...document.querySelectorAll('.js-plotly-plot')].map(plot => JSON.stringify(plot.data))"
    return [json.loads(data) for data in page.evaluate(script)]


def choose(page, label: str, option: str) -> None:
    """Picks an option of a dropdown of the control panel."""
    page.get_by_label(label, exact=True).first.click()
    page.get_by_role("option", name=option, exact=True).first.click()
