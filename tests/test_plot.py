"""The curves of ``dflash report --plot``: files of both kinds, every metric drawn, references and alerts in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash import cli
from dflash.report import plot
from dflash.report.series import ReportError, Series, rolling_mean
from dflash.report.text import load, load_references

pytest.importorskip("matplotlib")
REFERENCE = Path(__file__).parent.parent / "docs/reference/qwen3.6-27b-first-run.jsonl"
LEVEL = dict(
    loss=2.0, accuracy=0.2, top4_acc=0.4, top8_acc=0.5, avg_streak=1.0, ddtree_streak4=2.0, ddtree_streak8=3.0,
    tokens_per_s=25_000.0, lr=6e-4, noise_std=0.01, step_s=2.0, feature_wait_s=0.5,
)  # fmt: skip


def write_log(folder: Path, n: int = 3000, seed: int = 0, leave_out: tuple[str, ...] = ()) -> Path:
    """A run's folder with a log of noisy constants, two evaluations and an alert."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, n + 1):
            line: dict[str, Any] = {"step": step, "epoch": step / n, "samples": 30 * step}
            for key, level in LEVEL.items():
                if key not in leave_out:
                    line[key] = level * (1 + 0.05 * rng.standard_normal())
            file.write(json.dumps(line) + "\n")
            if step in (1000, 2000):
                file.write(json.dumps({"kind": "eval", "step": step, "accepted_length": 2.0 + step / 1e4}) + "\n")
        file.write(json.dumps({"kind": "alert", "step": n, "verdict": "flat", "sentence": "flat <b>"}) + "\n")
    return folder


def panels(figure: Any) -> dict[str, Any]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}


def test_both_kinds_of_file_are_written(tmp_path: Path) -> None:
    run = write_log(tmp_path / "run")
    for name, head in (("out.png", b"\x89PNG\r\n\x1a\n"), ("out.svg", b"<?xml"), ("OUT.PNG", b"\x89PNG")):
        assert cli.main(["report", str(run), "--plot", str(tmp_path / name), "--reference", str(REFERENCE)]) == 0
        content = (tmp_path / name).read_bytes()
        assert content.startswith(head) and len(content) > 20_000
    first = (tmp_path / "out.svg").read_bytes()
    assert cli.main(["report", str(run), "--plot", str(tmp_path / "out.svg"), "--reference", str(REFERENCE)]) == 0
    assert (tmp_path / "out.svg").read_bytes() == first  # the same log gives the same file


def test_every_metric_of_every_run_is_drawn_with_references_evaluations_and_alerts(tmp_path: Path) -> None:
    runs = load([str(write_log(tmp_path / "a")), str(write_log(tmp_path / "b", n=500, seed=1))])
    drawn = panels(plot.figure(runs, load_references([str(REFERENCE)]), 200))
    assert set(drawn) == {panel.title for panel in plot.PANELS}
    for panel in plot.PANELS:
        axes = drawn[panel.title]
        if panel.along in plot.COSTS:
            continue
        for i in range(2):
            own = [line for line in axes.lines if line.get_color() == plot.COLOURS[i] and line.get_linestyle() == "-"]
            assert len(own) == len(panel.metrics)
            for line, (key, _) in zip(own, panel.metrics, strict=True):
                assert len(line.get_xdata()) > 100 and np.isfinite(line.get_ydata()).all()
                level = LEVEL.get(key, 0.25)
                assert np.mean(line.get_ydata()) == pytest.approx(level, rel=0.05)
                assert line.get_xdata()[-1] == len(runs[i].series)
        dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
        has_reference = panel.metrics[0][0] in ("loss", "accuracy", "top8_acc", "avg_streak", "ddtree_streak8")
        assert len(dashed) == (len(panel.metrics) if has_reference else 0), panel.title
        dotted = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert len(dotted) == (2 if panel.is_smooth else 0)
    points = [line for line in drawn["streak (points: evaluation's)"].lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in points] == [pytest.approx([1.1, 1.2]), []][: len(points)]
    legend = [text.get_text() for text in plot.figure(runs, load_references([str(REFERENCE)]), 200).legends[0].texts]
    assert any("a: " in text for text in legend) and any("reference" in text for text in legend) and "alert" in legend


def test_accepted_length_is_drawn_against_what_it_cost(tmp_path: Path) -> None:
    """Samples and seconds up to the evaluation, counted line by line; the start has cost nothing."""
    run = write_log(tmp_path / "a")
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    zero = json.dumps({"kind": "eval", "step": 0, "accepted_length": 1.0})
    (run / "metrics.jsonl").write_text("\n".join([zero, *lines]) + "\n", "utf-8")
    thin = tmp_path / "thin.jsonl"  # as with log.every: 20
    kept = [line for line in map(json.loads, lines) if "kind" in line or line["step"] % 20 == 0]
    thin.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
    whole, thinned = load([str(run), str(thin)])
    seconds, want = 0.0, [(0.0, 0.0, 1.0)]
    for line in map(json.loads, lines):
        seconds += line.get("step_s", 0.0)
        if line.get("kind") == "eval":
            want.append((30.0 * line["step"], seconds / 60, line["accepted_length"]))
    drawn = panels(plot.figure([whole, thinned], {}, 200))
    samples = drawn["accepted length, by samples"].lines[0].get_xydata()
    minutes = drawn["accepted length, by time"].lines[0].get_xydata()
    np.testing.assert_allclose(samples, [(n, value) for n, _, value in want])
    np.testing.assert_allclose(minutes, [(m, value) for _, m, value in want])
    np.testing.assert_allclose(drawn["accepted length, by samples"].lines[1].get_xydata(), samples[1:])
    np.testing.assert_allclose(drawn["accepted length, by time"].lines[1].get_xydata(), minutes[1:], rtol=0.02)

    untimed = load([str(write_log(tmp_path / "b", leave_out=("step_s",)))])[0]
    drawn = panels(plot.figure([whole, untimed], {}, 200))
    assert [len(drawn[f"accepted length, by {cost}"].lines) for cost in ("samples", "time")] == [2, 1]


def test_each_column_of_panels_says_what_runs_to_the_right(tmp_path: Path) -> None:
    drawn = panels(plot.figure(load([str(write_log(tmp_path / "a"))]), {}, 200))
    said = {title: axes.get_xlabel() for title, axes in drawn.items() if axes.get_xlabel()}
    assert len(said) == 5 and sorted(said.values())[:2] == ["minutes of training", "optimizer step"]
    assert said["accepted length, by samples"] == "samples seen"


def test_what_a_log_lacks_has_no_panel(tmp_path: Path) -> None:
    runs = load([str(write_log(tmp_path / "a", leave_out=("noise_std", "feature_wait_s", "top4_acc", "top8_acc")))])
    titles = set(panels(plot.figure(runs, {}, 200)))
    assert not any(re.search("noise|waiting|first 4", title) for title in titles) and len(titles) == 8
    (tmp_path / "other").mkdir()
    (tmp_path / "other/metrics.jsonl").write_text('{"step": 1, "foo": 2}\n')
    assert list(panels(plot.figure(load([str(tmp_path / "other")]), {}, 200))) == ["accuracy"]


def test_curves_are_rolling_means_and_shares_are_of_sums() -> None:
    n = 5000
    rng = np.random.default_rng(0)
    spent = rng.uniform(1, 3, n)
    wait = spent * rng.uniform(0, 1, n)
    log = Series("", np.arange(1, n + 1), {"step_s": spent, "feature_wait_s": wait, "loss": rng.random(n)})
    step, values = plot.curve(log, "loss", 200)
    assert len(step) == plot.POINTS and step[0] == 200 and step[-1] == n
    assert values[-1] == pytest.approx(log.columns["loss"][-200:].mean())
    np.testing.assert_allclose(values, rolling_mean(log, "loss", 200)[1][step.astype(int) - 1])
    step, shares = plot.curve(log, "waiting", 200)
    assert shares[-1] == pytest.approx(wait[-200:].sum() / spent[-200:].sum())
    assert len(plot.curve(log, "accuracy", 200)[0]) == 0


def test_refusals_come_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReportError, match=r"--plot x.pdf: name a file that ends in .png or .svg"):
        plot.require(Path("x.pdf"))
    run = write_log(tmp_path / "run", n=50)
    with pytest.raises(ReportError, match="cannot be written: No such file"):
        plot.save(load([str(run)]), {}, 200, tmp_path / "nowhere" / "x.png")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(ReportError, match=r"pip install 'dflash-trainer\[plot\]'"):
        plot.require(Path("x.png"))
    assert cli.main(["report", str(tmp_path / "not there"), "--html", "x.html"]) == 1
