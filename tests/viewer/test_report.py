"""The report: its numbers, its figures, and that it needs nothing but itself."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recordings import UNITS, known_recording

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.report import write_report

CHROMIUM = shutil.which("chromium")


class Page(HTMLParser):
    """What a report says and what it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: dict[str, list[dict[str, float]]] = {}
        """By id, for each row the exact values by name."""
        self.loads: list[str] = []
        self.policy = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "table":
            self.rows = self.tables.setdefault(given["id"], [])
        elif tag == "tr":
            self.rows.append({})
        elif "data-name" in given:
            self.rows[-1][given["data-name"]] = float(given["data-value"])
        elif tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        self.loads += [given[name] for name in ("src", "href", "srcset", "data", "action") if name in given]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "new" / "odin_report.html"
    write_report(known_recording(), path, "fox <on> two ranks")
    return path


def test_tables_hold_the_numbers_of_the_recording(path: Path) -> None:
    tables = Page(path).tables
    run = {name: value for row in tables["run"] for name, value in row.items()}
    mean_unit = sum(UNITS) / len(UNITS)
    assert run == pytest.approx(
        {
            "early_share": (700 + mean_unit) / 1000,
            "late_share": (300 - mean_unit) / 1000,
            "delayed_share": 0.02,
            "fallback_share": 0.05,
            "hidden_fraction": 0.5,
            "exposed_wait_ms": 1.5,
            "bytes": 3_000_000,
            "bytes_total": 12_000_000,
        }
    )
    ranks = [row for row in tables["ranks"] if row]
    assert ranks == [
        pytest.approx(
            {
                "rank": rank,
                "exposed_wait_ms": 1 + rank,
                "bytes": (1 + rank) * 1_000_000,
                "primitives": 5000 + 100 * rank + UNITS[-1],
                "memory": (2 + rank) * 2**30,
            }
        )
        for rank in (0, 1)
    ]
    text = path.read_text(encoding="utf-8")
    for shown in (">2.0%<", "1.50 ms", "12.0 MB", "5,110", "3.2 GB", "4 recorded units: 7 to 10"):
        assert shown in text


def test_it_is_one_file_that_loads_nothing(path: Path) -> None:
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    page = Page(path)
    assert page.loads == []
    assert "default-src 'none'" in page.policy and "http" not in page.policy
    text = path.read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    assert not re.search(r"@import|url\(\s*['\"]?http", text.partition("<script>")[0])


def test_a_title_is_text(path: Path) -> None:
    assert "fox &lt;on&gt; two ranks" in path.read_text(encoding="utf-8")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
@pytest.mark.parametrize("size", [(1280, 800), (1920, 1080), (390, 844)])
def test_a_browser_draws_it_offline(path: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        wrong: list[str] = []
        requests: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 9")
        page.screenshot(path=tmp_path / "report.png", full_page=True)
        raw = page.evaluate(
            "[...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => plot.data)"
            ".filter(trace => trace.type == 'heatmap').map(trace => trace.z)[0]"
        )
        waits = page.evaluate(
            "[...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => plot.data)"
            ".filter(trace => trace.name == 'exposed wait').flatMap(trace => trace.x)"
        )
        widths = page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].map(plot => plot.clientWidth)")
        assert min(widths) > 0.15 * size[0]  # three beside each other, on a page that is not as wide as any screen
        assert max(widths) > 0.55 * size[0]
        wide = page.evaluate("document.documentElement.scrollWidth")
        browser.close()
    assert wrong == [] and requests == [path.as_uri()]
    assert raw == known_recording().rank_conflicts("raw", list(UNITS)).tolist()
    assert sorted(waits) == pytest.approx([1.0] * 4 + [2.0] * 4)
    assert wide <= size[0]


def test_a_run_of_which_nothing_is_known_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"odin_report\.html: not written, as no unit was recorded"):
        write_report(Recording([Timeline()]), tmp_path / "odin_report.html", "run")
    assert list(tmp_path.iterdir()) == []
