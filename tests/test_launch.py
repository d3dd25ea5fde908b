"""Placement to roles, and what the launcher says of a death."""

import json
import signal
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing import PContext

from dflash.config import Config, ConfigError, DataConfig, DrafterConfig, PlacementConfig, TargetConfig
from dflash.train import launch
from dflash.train.log import drop_lines_after
from dflash.train.placement import local_roles, roles, transport


def config(target, drafter, each=1, features=None):
    return Config(
        run_dir="run", target=TargetConfig(model="x"), drafter=DrafterConfig(mask_token_id=5),
        data=DataConfig(train=["x"], features=features),
        placement=PlacementConfig(target=target, drafter=drafter, gpus_per_replica=each),
    )  # fmt: skip


SIX = [f"cuda:{i}" for i in range(6)]


@pytest.mark.parametrize("each,replicas", [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_six_gpus_serve_and_the_seventh_trains(each, replicas):
    made = roles(config(SIX, ["cuda:6"], each))
    assert [r.kind for r in made] == ["replica"] * replicas + ["drafter"]
    assert [r.rank for r in made] == list(range(replicas + 1))
    assert [d for r in made for d in r.devices] == [*SIX, "cuda:6"]
    assert all(len(r.devices) == each for r in made[:-1])


def test_one_device_for_both_is_one_process():
    (only,) = roles(config(["cuda:3"], ["cuda:3"]))
    assert (only.kind, only.devices) == ("both", ("cuda:3",))
    assert [r.kind for r in roles(config(["cpu", "cpu"], ["cpu"]))] == ["replica", "replica", "drafter"]


def test_roles_follow_from_the_machine_and_the_local_rank():
    whole = config(["1/cuda:0", "1/cuda:1", "0/cuda:1"], ["0/cuda:0"])
    assert [str(r) for r in local_roles(whole, 0, 2)] == ["replica 2 (rank 2, cuda:1)", "drafter 0 (rank 3, cuda:0)"]
    assert [r.rank for r in local_roles(whole, 1, 2)] == [0, 1]
    for odd, words in (
        ((config(["2/cpu"], ["0/cpu"]), 0, 2), "names machine 2 and the run has 2"),
        ((config(["0/cpu", "0/cpu"], ["0/cpu"]), 1, 2), "no entry for machine 1"),
        ((config(["cpu", "cpu"], ["0/cpu", "1/cpu"]), 0, 2), "spans machines"),
        ((config(["cpu", "cpu"], ["cpu"], features="f"), 0, 1), "data.features is read by one process"),
    ):
        with pytest.raises(ConfigError, match=words):
            local_roles(*odd)


def test_nccl_only_where_every_process_has_gpus_of_its_own():
    assert transport(roles(config(SIX, ["cuda:6"], 2))) == "nccl"
    assert transport(roles(config(["cuda:0", "cuda:0"], ["cuda:0"]))) == "gloo"
    assert transport(roles(config(["cuda:0", "cuda:1"], ["cuda:1"]))) == "gloo"
    assert transport(roles(config(["cpu", "cpu"], ["cpu"]))) == "gloo"
    assert transport(roles(config(["0/cuda:0", "1/cuda:0"], ["1/cuda:1"]))) == "nccl"


def test_only_a_signal_buys_workers_time_to_save(monkeypatch):
    """torch 2.11 and later alike: those left when one died are killed after 30 s, as ever."""
    got = []
    monkeypatch.setattr(PContext, "close", lambda self, death_sig=None, timeout=30: got.append((death_sig, timeout)))
    before = PContext.close
    with launch._patience(77):
        PContext.close(None, signal.SIGTERM)
        PContext.close(None)
    assert got == [(signal.SIGTERM, 77), (None, 30)] and PContext.close is before


def test_nohup_keeps_its_promise():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert launch._handled() == ["SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP"]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert launch._handled() == ["SIGTERM", "SIGINT", "SIGQUIT"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_evaluation_that_comes_again_is_in_the_log_once(tmp_path):
    """Saved by a signal before its evaluation, evaluated by the next attempt, killed before the next checkpoint."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 4}, {"kind": "eval", "step": 4}, {"step": 5}, {"kind": "start", "step": 5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"kind": "eval", "step": 5}]))
    assert drop_lines_after(path, 5) == 0
    assert drop_lines_after(path, 5, owes_eval=True) == 1
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines


def test_the_obituary_names_who_died_first_and_shows_its_last_lines(tmp_path, capsys):
    here = roles(config(["cpu", "cpu"], ["cpu"]))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").write_text("\n".join(f"line {i}" for i in range(40)))

    def failed(local_rank, code, at):
        return SimpleNamespace(local_rank=local_rank, exitcode=code, timestamp=at)

    # The drafter that lost its peer ended before the launcher looked; the one killed is the cause.
    error = SimpleNamespace(failures={0: failed(2, 1, 5), 1: failed(1, -9, 6)})
    text = launch._obituary(error, here, tmp_path, 3)
    assert text.startswith("replica 1 (rank 1, cpu) was killed by SIGKILL after 3 restarts")
    shown = capsys.readouterr().err
    assert "line 39" in shown and "line 28" in shown and "line 27" not in shown
    error = SimpleNamespace(failures={0: failed(2, 1, 5), 1: failed(0, 1, 6)})
    assert launch._obituary(error, here, tmp_path, 0).startswith("drafter 0 (rank 2, cpu) ended with exit code 1 (")
