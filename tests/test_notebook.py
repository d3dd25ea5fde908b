"""The notebook of docs/: kept without outputs, and run cell by cell on a run trained here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_run import dflash, finish, write_run

NOTEBOOK = Path(__file__).parent.parent / "docs" / "notebooks" / "drafter.ipynb"
RUN = """
import json, sys
names = {}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
streaks, table, best = names["streaks"].tolist(), names["table"], names["best"]
bars = [bar.get_height() for bar in names["bars"]]
masks = {kind: mask[0, 0].sum(-1).tolist() for kind, mask in names["masks"].items()}
images = [axis.images[0].get_array().shape for axis in names["axes"]]
print(json.dumps([streaks, table, best.streak, bars, masks, images]))
"""


def code_cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_nothing_of_a_machine_is_stored():
    assert len(code_cells()) >= 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells())


@pytest.mark.slow
def test_every_cell_runs_and_shows_what_decoding_did(tmp_path):
    pytest.importorskip("matplotlib")
    finish(dflash("train", write_run(tmp_path, train__epochs=6, train__learning_rate=3e-3)))
    env = os.environ | {
        "MPLBACKEND": "Agg", "DFLASH_RUN": str(tmp_path / "run"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    streaks, table, best, bars, masks, images = json.loads(done.stdout.splitlines()[-1])
    # One bar per drafted slot, each counted here by a loop.
    assert bars == pytest.approx([sum(s >= k for s in streaks) / len(streaks) for k in (1, 2, 3)])
    # The block drafted by hand is accepted exactly as far as decoding accepted it.
    assert best == max(streaks) > 0
    assert [ok for *_, ok in table][:best] == [True] * best and sum(ok for *_, ok in table) == best
    assert all(drafted == chosen for _, drafted, chosen, _, ok in table if ok)
    assert all(0 < p <= 1 for _, _, _, p, _ in table)
    # Two blocks of 4 anchored at 6 and 15: everything before and the block; or the window of 8 and what came before.
    assert masks["full_attention"] == [6 + 4] * 4 + [15 + 4] * 4
    assert masks["sliding_attention"] == [6 + 1, 6 + 2, 5 + 3, 4 + 4] + [8] * 4
    assert images == [[8, 28], [8, 28]]
