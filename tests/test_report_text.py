"""What ``dflash report`` prints and writes."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash import cli
from dflash.report.series import ReportError
from dflash.report.status import screen
from dflash.report.text import (
    WIDTH,
    accepted_lengths,
    as_json,
    load,
    load_references,
    milestones,
    render,
    report,
    sparkline,
)

FIRST_RUN = """
step   loss  accuracy avg_streak top4_acc top8_acc ddtree_streak4 ddtree_streak8
2000  1.874 0.134 0.596 0.271 0.351 1.347 1.827
4000  2.078 0.175 0.811 0.334 0.420 1.811 2.416
6000  1.699 0.198 0.931 0.367 0.454 2.081 2.759
8000  1.548 0.213 1.009 0.386 0.475 2.254 2.975
10000 1.555 0.222 1.060 0.398 0.488 2.364 3.120
12000 1.571 0.232 1.111 - - - -
16000 - 0.264 - 0.458 0.550 - 3.799
21000 - 0.259 - 0.445 0.533 - 3.646
"""
HEAD, *ROWS = [line.split() for line in FIRST_RUN.strip().splitlines()]
REFERENCE = Path(__file__).parent.parent / "docs/reference/qwen3.6-27b-first-run.jsonl"


def first_run_log(path: Path) -> Path:
    """A log to step 21,000 with the table's rolling means: steps of AR(1) noise whose mean over each 200 entries is
    zero, on a level that is the next milestone's."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((len(HEAD), 105, 200)) * 0.02
    for i in range(1, 200):
        noise[:, :, i] += 0.6 * noise[:, :, i - 1]
    noise = (noise - noise.mean(axis=2, keepdims=True)).reshape(len(HEAD), -1)
    with open(path, "w", encoding="utf-8") as file:
        for step in range(1, 21_001):
            row = next(row for row in ROWS if step <= int(row[0]))
            line: dict[str, Any] = {"step": step, "epoch": step / 11_672, "lr": 6e-4 * min(step / 2801, 1.0)}
            for i, (key, value) in enumerate(zip(HEAD[1:], row[1:], strict=True)):
                if value != "-":
                    line[key] = float(value) + noise[i, step - 1]
            file.write(json.dumps(line) + "\n")
    return path


def test_the_table_of_the_first_run_is_reproduced_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    first_run_log(tmp_path / "run/metrics.jsonl")
    assert report([str(tmp_path / "run")], json_out=tmp_path / "out.json") == 0
    printed = capsys.readouterr().out.splitlines()
    head = next(i for i, line in enumerate(printed) if line.split() == HEAD)
    edges = [printed[head].index(key) + len(key) for key in HEAD]  # columns are set flush right
    table = {}
    for line in printed[head + 1 :]:
        if not line.strip():
            break
        cells = [line[:end].rpartition("  ")[2].strip() for end in edges]
        table[cells[0]] = [cell or "-" for cell in cells]
    for row in ROWS:
        assert table[row[0]] == row
    means = json.loads((tmp_path / "out.json").read_text())["runs"][0]["means"]
    for row in ROWS:
        at = means["step"].index(int(row[0]))
        for key, value in zip(HEAD[1:], row[1:], strict=True):
            expected = None if value == "-" else pytest.approx(float(value), abs=1e-12)
            assert means[key][at] == expected


def test_the_reference_file_is_that_table() -> None:
    lines = [json.loads(line) for line in REFERENCE.read_text().splitlines()]
    wanted = [{k: float(v) for k, v in zip(HEAD, row, strict=True) if v != "-"} for row in ROWS]
    assert lines == wanted


def log(path: Path, n: int, slope: float, **more: Any) -> Path:
    path.mkdir()
    rng = np.random.default_rng(n)
    noise = rng.standard_normal(n) * 0.02
    with open(path / "metrics.jsonl", "w", encoding="utf-8") as file:
        for i in range(n):
            accuracy = 0.25 + slope * i / 1000 + noise[i]
            line = {"step": i + 1, "loss": 3 - 4 * accuracy, "accuracy": accuracy, "avg_streak": 4 * accuracy}
            file.write(json.dumps(line | more) + "\n")
    return path


def test_several_runs_and_a_reference_on_the_same_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = log(tmp_path / "good", 6000, 0.01)
    bad = log(tmp_path / "a_name_that_is_far_too_long_for_a_table", 4000, -0.01, tokens_per_s=26100.0)
    assert report([str(good), str(bad)], reference=[str(REFERENCE)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= WIDTH
    side = text[text.index("side by side") :]
    runs, references = load([str(good), str(bad)]), load_references([str(REFERENCE)])
    steps = milestones([run.series for run in runs])
    assert steps == list(range(500, 6001, 500))
    accuracy = runs[0].series.columns["accuracy"]
    row = next(line.split() for line in side.splitlines() if line.split()[:1] == ["3000"])
    assert row[1] == f"{accuracy[2800:3000].mean():.3f}" and row[3] == "0.154"  # between .134 and .175
    assert "good: improving" in side and "a_name_that_is_far_too_long_for_a_table: regressing" in side
    assert "26,100 tokens/s" in text and "what usually causes it" in text
    content = as_json(runs, references, 200)
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    both = content["side_by_side"]
    assert both["runs"]["good"]["accuracy"][5] == pytest.approx(accuracy[2800:3000].mean())
    assert both["references"]["qwen3.6-27b-first-run"]["accuracy"][:4] == [None, None, None, 0.134]
    assert both["runs"][bad.name]["accuracy"][-1] is None  # it ended before
    assert [run["verdict"]["state"] for run in content["runs"]] == ["improving", "regressing"]


def test_runs_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [str(log(tmp_path / one / "run", 300, 0.0)) for one in "ab"]
    assert [run.label for run in load(paths)] == paths


def test_what_is_odd_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path / "run", 3000, 0.0) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[1500] = '{"step": 1501, "loss": NaN, "accuracy": 0.25, "avg_streak": 1.0}'
    lines[2000] = "junk"
    lines += ['{"kind": "eval", "step": 3000, "accepted_length": 2.31}', '{"kind": "alert", "step": 2750}']
    lines += [lines[i] for i in range(2900, 3000)] + ['{"step": 30']
    path.write_text("\n".join(lines))
    assert report([str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "restarts 1, gaps 1, NaN 1" in text
    assert "steps go back once, as after a resume: at step 2,901 (replacing 100 entries)" in text
    assert "2,000 to 2,002" in text and "loss in 1 entries" in text and "line 2001" in text and "half written" in text
    assert "alerts: 1, the last at step 2,750" in text


def test_short_and_empty_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report([str(log(tmp_path / "short", 30, 0.0))])
    text = capsys.readouterr().out
    assert "rolling mean of 30 entries" in text and "too short to say: 30 of 2,500 entries" in text
    report([str(log(tmp_path / "one", 1, 0.0))])
    assert "1 of 2,500" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/metrics.jsonl").touch()
    report([str(tmp_path / "empty"), str(tmp_path / "short")], json_out=tmp_path / "out.json")
    assert "no steps yet" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["runs"][0]["last_step"] is None


def test_evaluations_without_a_number_are_left_out_everywhere(tmp_path: Path) -> None:
    path = log(tmp_path / "run", 300, 0.0) / "metrics.jsonl"
    with open(path, "a") as file:
        for value in ('"none"', "null", "2.5", "NaN"):
            file.write(f'{{"kind": "eval", "step": 300, "accepted_length": {value}}}\n')
    (run,) = load([str(path)])
    assert accepted_lengths(run.series) == [(300, 2.5)]
    assert "evaluations: 1, accepted length 2.500 at step 300, best 2.500" in render([run], {}, 200)
    assert "accepted length 2.500 at step 300; best 2.500" in screen(tmp_path / "run", 0.0)


def test_a_log_with_none_of_the_metrics_says_so(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {i}, "train_loss": 2.0}}\n' for i in range(50)))
    (run,) = load([str(tmp_path / "log.jsonl")])
    assert "too short to say: none of loss, accuracy, " in " ".join(render([run], {}, 200).split())


def test_a_shorter_trend_window_judges_a_shorter_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report([str(log(tmp_path / "run", 600, -0.5))], trend_window=300, window=50)
    assert "verdict: regressing over steps 1 to 600" in capsys.readouterr().out


def test_faults_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"holds no metrics\.jsonl"):
        report([str(tmp_path)])
    run = log(tmp_path / "run", 300, 0.0)
    with pytest.raises(ReportError, match="cannot be written"):
        report([str(run)], json_out=tmp_path / "nowhere/out.json")


def test_terminals_without_bars_get_plain_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    report([str(log(tmp_path / "run", 3000, 0.01))])
    sys.stdout.flush()
    assert b"accuracy" in raw.getvalue() and b" ~ " in raw.getvalue()


def test_sparkline_spans_its_values() -> None:
    assert sparkline(np.arange(8.0), 8) == "▁▁▂▃▅▆▇█"  # the first fifth is clipped to the scale of the rest
    assert sparkline(np.array([9.0, 1, 1, math.nan, 2]), 5) == "█▁▁ █"
    assert sparkline(np.full(5, 3.0), 5) == "▁▁▁▁▁" and sparkline(np.full(2, math.nan), 9) == "  "


@pytest.mark.parametrize(
    ("last", "every", "count"), [(1, 1, 1), (7, 1, 7), (21_800, 2000, 11), (130, 20, 7), (70_036, 10_000, 8)]
)
def test_milestones_are_round_and_few(last: int, every: int, count: int) -> None:
    from dflash.report.series import Series

    steps = milestones([Series("", np.arange(1, last + 1), {})])
    assert len(steps) == count and steps[-1] == last and all(step % every == 0 for step in steps[:-1])


def test_render_needs_no_terminal(tmp_path: Path) -> None:
    runs = load([str(log(tmp_path / "run", 3000, 0.01))])
    assert "== run ==" in render(runs, {}, 200) and "side by side" not in render(runs, {}, 200)


def test_the_command(tmp_path, capsys):
    log = tmp_path / "metrics.jsonl"
    log.write_text(
        "".join(json.dumps({"step": s, "loss": 5 - s / 100, "accuracy": s / 400}) + "\n" for s in range(1, 81))
    )
    out = tmp_path / "report.json"
    argv = ["report", str(log), "--window", "20", "--trend-window", "30", "--json", str(out)]
    assert cli.main(argv) == 0
    assert "improving" in capsys.readouterr().out and json.loads(out.read_text())
    assert cli.main(["report", str(tmp_path / "gone")]) == 1
    assert "gone" in capsys.readouterr().err
