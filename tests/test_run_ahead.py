"""The next step launched before the last one is read: nothing of a run may change by it but its speed."""

import json

import pytest
import torch
from test_trainer import UNEQUAL, batch, rows, trainer

from dflash.target.features import SickFeatures
from dflash.target.link import Interrupted, PeerLost
from dflash.train.log import TIMING_KEYS, MetricsLog
from dflash.train.trainer import NonFiniteStep

STEPS = 9


def made(folder, run_ahead, every=10**9):
    folder.mkdir(exist_ok=True)
    t = trainer(folder, rows(UNEQUAL), [[batch(i, [1, 2, 3], [12, 6, 4])] for i in range(STEPS)], noise=(0.1, 0.0))
    t.run_ahead, t.config.checkpoint.every = run_ahead, every
    t.events = []
    launch, finish = t.launch, t.finish

    def launched(step):
        t.events.append(f"launch {step}")
        return launch(step)

    def finished(step):
        t.events.append(f"read {step.step}")
        return finish(step)

    t.launch, t.finish = launched, finished
    return t


def run(t, interrupted=lambda: False):
    """The run's lines without what the clock says, and the error that ended it."""
    path, error = t.run_dir / "metrics.jsonl", None
    try:
        t.run(MetricsLog(path), interrupted)
    except (PeerLost, SickFeatures, NonFiniteStep) as raised:
        error = raised
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{k: v for k, v in line.items() if k not in TIMING_KEYS} for line in lines], error


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.drafter.parameters(), b.drafter.parameters(), strict=True))


def test_a_cpu_does_not_run_ahead(tmp_path):
    assert not trainer(tmp_path, rows(UNEQUAL), [[batch(0, [1], [4])]]).run_ahead


def test_the_same_run_with_steps_at_rest_read_first(tmp_path):
    ahead, plain = made(tmp_path / "a", True, every=4), made(tmp_path / "b", False, every=4)
    assert run(ahead) == run(plain) and same_weights(ahead, plain)
    assert ahead.events == [
        "launch 1", "launch 2", "read 1", "launch 3", "read 2", "launch 4", "read 3", "read 4",
        "launch 5", "launch 6", "read 5", "launch 7", "read 6", "launch 8", "read 7", "read 8", "launch 9", "read 9",
    ]  # fmt: skip
    assert plain.events == [f"{what} {step}" for step in range(1, STEPS + 1) for what in ("launch", "read")]
    kept = [sorted(path.name for path in t.checkpoints.folder.iterdir()) for t in (ahead, plain)]
    assert kept[0] == kept[1] and len(kept[0]) == 2  # of 4, 8 and 9, the last two


@pytest.mark.parametrize(
    "error", [Interrupted("stop"), PeerLost("replica 0 is lost"), SickFeatures("sample 3 is sick")]
)
def test_what_stops_the_next_step_loses_nothing_of_the_last(tmp_path, error):
    ahead, plain = made(tmp_path / "a", True), made(tmp_path / "b", False)
    for t in (ahead, plain):
        original = t.features_of

        def features_of(b, original=original):
            if b.index == 5:  # of step 6
                raise error
            return original(b)

        t.features_of = features_of
    (lines, stopped), (expected, _) = run(ahead), run(plain)
    assert lines == expected and [line["step"] for line in lines] == [1, 2, 3, 4, 5] and same_weights(ahead, plain)
    assert ahead.progress.step == 5 and isinstance(
        stopped, type(error) if type(error) is not Interrupted else type(None)
    )
    saved = [t.checkpoints.newest() for t in (ahead, plain)]
    assert (saved[0] is None) == (saved[1] is None) == isinstance(error, SickFeatures)
    if saved[0] is not None:
        again = made(tmp_path / "c", True)
        again.resume(saved[0])
        assert again.progress.step == 5 and same_weights(again, ahead)


def test_an_interrupt_saves_the_last_launched_step(tmp_path):
    t = made(tmp_path / "a", True)
    lines, _ = run(t, lambda: len(t.events) >= 6)  # launch 1, launch 2, read 1, launch 3, read 2, launch 4
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and t.progress.step == 4
    again = made(tmp_path / "b", False)
    again.resume(t.checkpoints.newest())
    assert again.progress.step == 4 and same_weights(again, t)
    whole = made(tmp_path / "c", False)
    run(whole)
    run(again)
    assert same_weights(again, whole)


def test_a_refused_step_ends_the_run_without_a_checkpoint_of_what_came_after(tmp_path):
    t = made(tmp_path / "a", True, every=2)
    original = t.features_of

    def poisoned(b):
        features = original(b)
        if b.index == 4:  # of step 5
            features.context[:] = float("nan")
        return features

    t.features_of = poisoned
    lines, error = run(t)
    assert isinstance(error, NonFiniteStep | SickFeatures)
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and t.events[-2:] == ["launch 6", "read 5"]
    again = made(tmp_path / "b", False)
    again.resume(t.checkpoints.newest())
    assert again.progress.step == 4
