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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from odin_nerfstudio.viewer.colors import rank_color
from odin_nerfstudio.viewer.panel import FINISHED
from odin_nerfstudio.viewer.trace import read_trace

BIN = Path(sys.executable).parent
CHROMIUM = shutil.which("chromium")
SHARES = 3
"""The first of the tab's figures with curves over units; before it come the timeline and two matrices."""

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
        open_tab(page, "Odin")  # reads the trace beside the checkpoints
        wait_until(page, "units of the finished run", lambda: len(trace_of(page, "early")) > 3)
        recorded = read_trace(run / "odin_trace.json")
        assert list(trace_of(page, "early")) == recorded.steps(240)


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
        open_tab(page, "Odin")
        page.get_by_text(FINISHED).wait_for(timeout=60_000)
        assert list(trace_of(page, "early")) == list(range(12))
        assert tool.poll() is None


def figures(page) -> list[list[dict]]:
    """What plotly was given to draw in the tab Odin: of each figure its traces, and of each trace its data."""
    script = "() => [...document.querySelectorAll('.js-plotly-plot')].map(plot => JSON.stringify(plot.data))"
    return [json.loads(data) for data in page.evaluate(script)]


def trace_of(page, name: str) -> dict[int, float]:
    """A curve of the tab's figures over units, by its name."""
    found = [trace for traces in figures(page)[SHARES:] for trace in traces if trace.get("name") == name]
    return {int(unit): value for unit, value in zip(found[0]["x"], found[0]["y"], strict=True)} if found else {}


def wait_until(page, what: str, condition: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        page.wait_for_timeout(500)


def choose(page, label: str, option: str) -> None:
    """Picks an option of a dropdown of the control panel."""
    page.get_by_label(label, exact=True).first.click()
    page.get_by_role("option", name=option, exact=True).first.click()


def open_tab(page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def photograph(page, folder: Path, name: str) -> None:
    """Pictures at two sizes of a screen, for people to look at."""
    for width, height in ((1920, 1080), (1280, 800)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(3000)
        page.screenshot(path=folder / f"{name}-{width}x{height}.png")


def annotate(path: Path, marks: list[tuple[float, float]]) -> None:
    """Draws numbers in circles, from 1 on, into a picture."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.open(path).convert("RGB")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    for number, (x, y) in enumerate(marks, start=1):
        draw.ellipse((x - 10, y - 10, x + 10, y + 10), fill="white", outline="black")
        draw.text((x, y), str(number), fill="black", font=font, anchor="mm")
    image.quantize(128).save(path, optimize=True)


def photograph_timeline(page, path: Path) -> None:
    """The timeline as it opens when it is clicked, its four lanes numbered."""
    page.locator(".js-plotly-plot").first.click(force=True)  # what lies over it opens the larger one
    page.wait_for_timeout(2000)
    large = page.get_by_role("dialog").locator(".js-plotly-plot")
    large.screenshot(path=path)
    lanes = """plot => ["compute", "communication", "exposed wait", "hidden"].map(name => {
        const layout = plot._fullLayout, lane = Math.min(...plot.data.find(trace => trace.name == name).y);
        return [layout.xaxis._offset - 12, layout.yaxis._offset + layout.yaxis.l2p(lane)];
    })"""
    annotate(path, large.evaluate(lanes))
    page.keyboard.press("Escape")
    page.wait_for_timeout(500)


def photograph_conflict(page, path: Path) -> None:
    """The middle of the scene; numbered are where it is contended most, and where least."""
    from PIL import Image
    from scipy.ndimage import uniform_filter

    height, width, _ = (shown := picture(page)).shape
    middle = shown[height // 5 : -height // 5, width // 5 : -width // 5]
    Image.fromarray(middle.astype(np.uint8)).save(path)
    red, blue = (uniform_filter(middle[..., channel], 9) for channel in (0, 2))  # the map goes from blue to yellow
    seen = uniform_filter(middle.max(2), 9) > 90  # brighter than what lies behind the scene
    places = (np.where(seen, red - blue, -255).argmax(), np.where(seen, blue - red, -255).argmax())
    annotate(path, [(float(x), float(y)) for y, x in (np.unravel_index(place, red.shape) for place in places)])


def test_the_tab_odin_on_two_ranks(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    """The page follows the run, its controls act on it, and what it draws is what the trace says."""
    port, fox = free_port(), shared_data("fox")
    run = tmp_path / "outputs" / "fox" / "odin-splatfacto" / "run"
    arguments = ("--max-num-iterations", "100000", "--vis", "viewer", "--viewer.websocket-port", str(port))
    model = ("--pipeline.model.num-downscales", "0", "--experiment-name", "fox", "--timestamp", "run")
    device = ("--nproc-per-node", "2", "--machine.device-type", "cpu")
    parser = ("colmap", "--data", fox, "--colmap-path", "sparse/0", "--downscale-factor", "2")
    training = ("odin-train", "odin-splatfacto", *device, *arguments, *model, *parser)
    with serving(tmp_path, port, *training) as tool, page_at(port, tmp_path / "end.png") as page:
        page.get_by_text("Pause Training").wait_for(timeout=120_000)
        page.wait_for_timeout(3000)
        page.mouse.move(400, 400)
        for _ in range(3):  # away from the middle of the scene
            page.mouse.wheel(0, 2000)
            page.wait_for_timeout(300)
        wait_for_render(page)

        open_tab(page, "Odin")
        wait_until(page, "units in the timeline", lambda: len(trace_of(page, "early")) > 3)
        first = figures(page)[0]
        wait_until(page, "another timeline", lambda: figures(page)[0] != first)
        photograph(page, tmp_path, "timeline")
        photograph_timeline(page, tmp_path / "viewer-timeline.png")

        open_tab(page, "Control")
        colours = picture(page)
        choose(page, "Output type", "conflict")
        wait_until(page, "another picture", lambda: abs(picture(page) - colours).mean() > 2)
        photograph(page, tmp_path, "conflict")
        photograph_conflict(page, tmp_path / "viewer-conflict.png")
        choose(page, "Output type", "rgb")

        page.get_by_text("Pause Training").click()
        page.wait_for_timeout(90_000)  # in which the other rank waits
        paused_at = shown_step(page)
        page.get_by_text("Resume Training").click()
        wait_until(page, "training after the pause", lambda: shown_step(page) > paused_at)

        open_tab(page, "Odin")
        early = trace_of(page, "early")
        assert max(early.values()) > 0.05  # fox's views overlap much
        choose(page, "Policy", "barrier")
        wait_until(page, "barrier in force", lambda: list(trace_of(page, "early").values())[-1] == 0)

        page.get_by_text("Pause Training").click()
        trace, early, hidden = run / "odin_trace.json", {}, {}

        def is_shown() -> bool:
            """Whether the page has come to the last unit of the run, which it does some time after the pause."""
            nonlocal early, hidden
            trace.unlink(missing_ok=True)
            page.get_by_text("Save trace").click()
            wait_until(page, "the trace", trace.exists)
            early, hidden = trace_of(page, "early"), trace_of(page, "hidden")
            return max(early) == read_trace(trace).steps()[-1]

        wait_until(page, "the last figures", is_shown)
        recording = read_trace(trace)
        steps = recording.steps()
        assert steps == list(range(steps[-1] + 1))  # nothing was lost in the pause
        assert early.keys() <= set(steps)
        assert early == pytest.approx({step: recording.unit(step).early_share for step in early})
        assert hidden == pytest.approx({step: recording.unit(step).hidden for step in hidden})
        page.get_by_text("Resume Training").click()
        assert tool.poll() is None


def test_the_tab_of_nerfxl_on_two_ranks(demo_capture: Path, tmp_path: Path) -> None:
    """Each rank has a tile; the page shows what both cost, and rank 0's viewer shows both."""
    port = free_port()
    arguments = ("--max-num-iterations", "100000", "--vis", "viewer", "--viewer.websocket-port", str(port))
    sizes = ("--pipeline.model.log2-table-size", "12", "--pipeline.model.samples-per-ray", "48")
    rays = ("--pipeline.datamanager.train-num-rays-per-batch", "256", "--machine.device-type", "cpu")
    parser = ("colmap", "--data", demo_capture, "--colmap-path", "sparse/0", "--downscale-factor", "1")
    training = ("odin-train", "nerfxl", "--nproc-per-node", "2", *arguments, *sizes, *rays, *parser)
    with serving(tmp_path, port, *training) as tool, page_at(port, tmp_path / "end.png") as page:
        open_tab(page, "Odin")

        def samples(tile: int) -> list[float]:
            curves = [trace for traces in figures(page)[1:] for trace in traces if trace.get("name") == f"tile {tile}"]
            return curves[0]["y"] if curves else []

        wait_until(page, "samples of both tiles", lambda: len(samples(0)) > 3 and len(samples(1)) > 3)
        assert min(samples(0)) >= 0 and max(samples(1)) > 0
        page.get_by_text("Tiles", exact=True).click()
        photograph(page, tmp_path, "tiles")
        open_tab(page, "Control")
        choose(page, "Output type", "tile")

        def both_tiles() -> bool:
            shown = picture(page)[::4, ::4].reshape(-1, 3)
            tiles = [np.abs(shown / 255 - rank_color(tile)).max(1) < 0.2 for tile in (0, 1)]
            return all(tile.mean() > 0.05 for tile in tiles)

        wait_until(page, "the tiles of both ranks", both_tiles)
        assert tool.poll() is None
