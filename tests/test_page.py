"""``dflash report --html``: one page that needs nothing else, with every figure of the report in it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_plot import REFERENCE, write_log

from dflash import cli
from dflash.report import page
from dflash.report.series import ReportError
from dflash.report.text import at_milestones, load, load_references, milestones, number

pytest.importorskip("matplotlib")
VOID = {"meta", "br", "link", "img"}


class Checker(HTMLParser):
    """Every tag closed in order; collects text of table cells and all attribute values."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    runs = [str(write_log(tmp_path / "a")), str(write_log(tmp_path / "b <i>", n=700, seed=1))]
    out = tmp_path / "out.html"
    assert cli.main(["report", *runs, "--html", str(out), "--reference", str(REFERENCE)]) == 0
    text = out.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == [] and text.startswith("<!DOCTYPE html>")
    assert checker.count["svg"] == 1 and "script" not in checker.count and "link" not in checker.count
    # Names of XML namespaces are no addresses that a browser would fetch.
    fetched = [(key, value) for tag, key, value in checker.attributes if key in ("src", "href", "xlink:href", "data")]
    assert all(value.startswith("#") for _, value in fetched)
    assert not re.findall(r"url\((?!#)|@import|<img", text)
    assert set(re.findall(r"https?://[^/\"]+", text)) <= {"http://www.w3.org"}
    assert "b &lt;i&gt;" in text and "<i>" not in text and "flat &lt;b&gt;" in text
    ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])


def test_every_figure_of_the_report_is_on_it(tmp_path: Path) -> None:
    (run,) = runs = load([str(write_log(tmp_path / "a"))])
    references = load_references([str(REFERENCE)])
    checker = Checker()
    text = page.page(runs, references, 200)
    checker.feed(text)
    steps = milestones([run.series])
    for key in run.means:
        assert key in checker.cells
        for value in at_milestones(run, key, steps, 200):
            assert number(value) in checker.cells
    for one in run.verdict.metrics.values():
        assert f"{one.slope:+.4f}" in checker.cells
    for words in ("Evaluations", "2.200", "Alerts", "Side by side", "[qwen3.6-27b-first-run]", run.verdict.sentence):
        assert words in text


def test_a_log_without_steps_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("")
    assert "No steps yet" in page.page(load([str(tmp_path / "run")]), {}, 200)
    with pytest.raises(ReportError, match="cannot be written"):
        page.save(load([str(tmp_path / "run")]), {}, 200, tmp_path / "nowhere" / "x.html")
