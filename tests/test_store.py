"""Features on disk: captured, resumed, verified, and refused where they are others."""

import json
import logging
import resource
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_run import dflash, finish, outcome, write_run
from tiny import save_target, tiny_llama, tiny_tokenizer

from dflash.cli import main
from dflash.data.tokenize import load_data, tokenizer_digests
from dflash.target import store as store_module
from dflash.target.model import Target
from dflash.target.store import FeatureStore, StoreError
from dflash.train.build import read_ahead

CONTRACT = {"target": "tiny", "context_layers": [0, 2], "data": "d"}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Forty conversations over several shards."""
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 256)
    monkeypatch.setattr(store_module, "CHECKED_ROWS", 50)
    g = np.random.default_rng(0)

    def row():
        text = " ".join(g.choice(["one", "two", "three"], int(g.integers(2, 30))))
        return {"messages": [{"role": "user", "content": "ten"}, {"role": "assistant", "content": text}]}

    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row()) + "\n" for _ in range(40)))
    return load_data([str(path)], tiny_tokenizer(), max_length=64, chat_template_kwargs={}, cache_dir=None)


@pytest.fixture
def target():
    return Target(tiny_llama(0), tiny_tokenizer(), [0, 2], "final")


def filled(folder, data, target):
    store = FeatureStore(folder, data, CONTRACT)
    store.capture(target, 128)
    return FeatureStore(folder, data, CONTRACT)


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def read(store, samples):
    return store.features(samples, None, torch.device("cpu"))


def test_what_is_read_is_what_the_target_gives(tmp_path, data, target):
    store = filled(tmp_path / "f", data, target)
    assert len(shards(store.folder)) >= 4
    for samples in ([0, 1], [39, 3, 20], list(range(40))):
        rows, masks = zip(*(data.sample(i) for i in samples), strict=True)
        online, stored = target.capture(rows, masks, samples), read(store, samples)
        assert torch.allclose(online.context, stored.context, atol=1e-5)
        for name in ("ids", "labels", "loss_mask", "seq", "pos"):
            assert torch.equal(getattr(online, name), getattr(stored, name)), name
        assert (online.bounds, online.sample_ids) == (stored.bounds, stored.sample_ids)


def test_an_interrupted_capture_goes_on_to_the_same_bits(tmp_path, data, target, caplog):
    whole = filled(tmp_path / "whole", data, target)
    calls = []

    class Dies(Exception):
        pass

    class Mortal:
        def __getattr__(self, name):
            return getattr(target, name)

        def capture(self, *args):
            calls.append(1)
            if len(calls) == 8:
                raise Dies
            return target.capture(*args)

    store = FeatureStore(tmp_path / "cut", data, CONTRACT)
    with pytest.raises(Dies):
        store.capture(Mortal(), 128)
    done = {path: path.stat().st_mtime_ns for path in shards(store.folder)}
    assert 0 < len(done) < len(shards(whole.folder))
    with caplog.at_level(logging.INFO, "dflash"):
        again = filled(tmp_path / "cut", data, target)
    assert f"{len(again.first_sample) - len(done)} of {len(again.first_sample)} shards to capture" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in done} == done
    for a, b in zip(shards(whole.folder), shards(again.folder), strict=True):
        assert a.read_bytes() == b.read_bytes()
    assert sorted(p.name for p in again.folder.iterdir() if p.suffix != ".safetensors") == [".lock", "manifest.json"]


def flip(path, where):
    raw = bytearray(path.read_bytes())
    raw[where] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("fault", ["first", "middle", "last", "cut", "empty", "gone", "header"])
def test_a_damaged_shard_is_named_and_refused_and_captured_again(tmp_path, data, target, fault):
    store = filled(tmp_path / "f", data, target)
    path = shards(store.folder)[2]
    good, size = path.read_bytes(), path.stat().st_size
    begin = 8 + int.from_bytes(good[:8], "little")
    if fault in ("first", "middle", "last"):
        flip(path, {"first": begin, "middle": (begin + size) // 2, "last": size - 1}[fault])
    elif fault == "header":
        flip(path, 3)
    elif fault == "gone":
        path.unlink()
    else:
        path.write_bytes(good[: 0 if fault == "empty" else size - 1])
    sample = int(store.first_sample[2])
    assert len(read(store, [0]).ids)  # others are fine
    with pytest.raises(StoreError, match=r"data\.features: .*00002\.safetensors is damaged .*delete it, and it is"):
        read(store, [sample])
    path.unlink(missing_ok=True)
    assert len(read(filled(tmp_path / "f", data, target), [sample]).ids)
    assert path.read_bytes() == good


def test_a_foreign_shard_is_named_and_refused(tmp_path, data, target):
    store = filled(tmp_path / "f", data, target)
    other = FeatureStore(tmp_path / "other", data, CONTRACT | {"target": "another"})
    other.capture(target, 128)
    shutil.copy(shards(other.folder)[1], shards(store.folder)[1])
    with pytest.raises(StoreError, match=r"00001\.safetensors is no shard of this folder \(store is"):
        read(store, [int(store.first_sample[1])])
    shutil.copy(shards(store.folder)[3], shards(store.folder)[1])  # one of its own, in another's place
    with pytest.raises(StoreError, match=r"00001\.safetensors is no shard of this folder \(shard is 3, not 1\)"):
        read(filled(tmp_path / "f", data, target), [int(store.first_sample[1])])
    save_file(load_file(shards(store.folder)[0]), shards(store.folder)[0])  # by other hands, without a word of whose
    with pytest.raises(StoreError, match=r"00000\.safetensors is no shard of this folder \(store is None"):
        read(filled(tmp_path / "f", data, target), [0])


def test_folders_of_other_features_are_refused_with_the_difference(tmp_path, data, target):
    store = filled(tmp_path / "f", data, target)
    with pytest.raises(StoreError, match=r"context_layers \(\[0, 2\] there, \[0, 1\] here\), data \(d there, e here\)"):
        FeatureStore(store.folder, data, CONTRACT | {"context_layers": [0, 1], "data": "e"})
    fewer = {key: value for key, value in CONTRACT.items() if key != "data"}
    with pytest.raises(StoreError, match=r"data \(d there, None here\)"):
        FeatureStore(store.folder, data, fewer)
    (store.folder / "manifest.json").write_text("[")
    with pytest.raises(StoreError, match="is no manifest"):
        FeatureStore(store.folder, data, CONTRACT)
    (store.folder / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"holds files but no manifest\.json"):
        FeatureStore(store.folder, data, CONTRACT)


def test_the_size_comes_first_and_is_refused_above_the_free_space(tmp_path, data, target, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    needed = len(data.ids) * (2 * target.hidden_size * 4 + 4)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(StoreError, match=rf"data\.features: {len(data.ids):,} tokens need 0\.00 GiB in .*make room"):
        FeatureStore(tmp_path / "f", data, CONTRACT).capture(target, 128)
    assert not shards(tmp_path / "f")
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: usage._replace(free=needed))
    filled(tmp_path / "f", data, target)


def test_a_disk_that_fills_up_keeps_finished_shards(tmp_path, data, target):
    store = FeatureStore(tmp_path / "f", data, CONTRACT)
    needed = max(path.stat().st_size for path in shards(filled(tmp_path / "whole", data, target).folder))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (needed - 1, before[1]))  # of any one file: the largest does not fit
    try:
        with pytest.raises(StoreError, match=r"cannot be written .*make room"):
            store.capture(target, 128)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(store.folder.glob("*.tmp"))
    store.capture(target, 128)
    for a, b in zip(shards(tmp_path / "whole"), shards(store.folder), strict=True):
        assert a.read_bytes() == b.read_bytes()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file cannot be written"):
        FeatureStore(tmp_path / "file", data, CONTRACT).capture(target, 128)


def test_shards_cut_at_other_borders_are_refused(tmp_path, data, target, monkeypatch):
    store = filled(tmp_path / "f", data, target)
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 512)
    with pytest.raises(StoreError, match=r"00000\.safetensors is no shard of this folder \(tokens is"):
        read(FeatureStore(store.folder, data, CONTRACT), [0])


def test_two_captures_into_one_folder(tmp_path, data, target):
    store = FeatureStore(tmp_path / "f", data, CONTRACT)
    store.folder.mkdir()
    with store._locked(), pytest.raises(StoreError, match="another process is capturing into"):
        FeatureStore(tmp_path / "f", data, CONTRACT).capture(target, 128)
    late = FeatureStore(store.folder, data, CONTRACT | {"target": "another"})  # the folder is still empty
    store.capture(target, 128)
    with pytest.raises(StoreError, match=r"holds other features: target \(tiny there, another here\)"):
        late.capture(target, 128)
    read(FeatureStore(store.folder, data, CONTRACT), [0])


def test_digests_tell_tokenizer_and_template_apart():
    one, other = tiny_tokenizer(), tiny_tokenizer()
    assert tokenizer_digests(one) == tokenizer_digests(other)
    one("one two", truncation=True, max_length=1)
    assert tokenizer_digests(one) == tokenizer_digests(other)
    other.chat_template = other.chat_template + " "
    a, b = tokenizer_digests(one), tokenizer_digests(other)
    assert a["tokenizer"] == b["tokenizer"] and a["template"] != b["template"]


def test_captured_by_the_command_line(tmp_path, capfd):
    """Twice the same folder; another template is another target."""
    config, features = write_run(tmp_path), tmp_path / "features"
    assert main(["data", "capture", str(config), "--out", str(features)]) == 0
    assert "tokens need" in capfd.readouterr().err
    manifest = json.loads((features / "manifest.json").read_text())
    assert set(manifest) == {
        "target", "revision", "weights", "dtype", "context_layers", "label_layer", "tokenizer", "template", "data",
    }  # fmt: skip
    before = {path: path.stat().st_mtime_ns for path in shards(features)}
    assert main(["data", "capture", str(config), "--out", str(features)]) == 0
    assert before and before == {path: path.stat().st_mtime_ns for path in shards(features)}
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{# another #}"
    save_target(tmp_path / "target", tiny_llama(0), tokenizer)
    assert main(["data", "capture", str(config), "--out", str(features)]) == 1
    err = capfd.readouterr().err
    assert "template (" in err and "data (" in err and "tokenizer (" not in err
    assert main(["data", "capture", str(config), "placement.target=[cuda:77]", "--out", str(tmp_path / "g")]) == 2
    assert "placement.target names cuda:77, which is not here" in capfd.readouterr().err


@pytest.mark.slow
def test_training_from_a_capture_gives_the_loss_curve_of_one_that_asks_its_target(tmp_path):
    config, features = write_run(tmp_path, eval__every=100), tmp_path / "features"
    finish(dflash("data", "capture", config, "--out", features))
    before = {path: path.stat().st_mtime_ns for path in shards(features)}
    finish(dflash("train", config))
    finish(dflash("train", config, f"data.features={features}", f"run_dir={tmp_path / 'offline'}"))
    assert before == {path: path.stat().st_mtime_ns for path in shards(features)}
    online, offline = outcome(tmp_path / "run")[0], outcome(tmp_path / "offline")[0]
    pairs = [(a["loss"], b["loss"]) for a, b in zip(online, offline, strict=True) if "loss" in a]
    assert len(pairs) > 8 and all(a == pytest.approx(b, rel=1e-4) for a, b in pairs)


def test_a_shard_that_is_gone_again_is_named_by_the_process_that_wrote_it(tmp_path, data, target):
    store = FeatureStore(tmp_path / "f", data, CONTRACT)
    store.capture(target, 128)
    shards(tmp_path / "f")[1].unlink()
    with pytest.raises(StoreError, match=r"data\.features: .*00001\.safetensors is damaged .*it is captured again"):
        read(store, range(len(data)))


def test_one_batch_is_read_ahead_and_no_more():
    batches = [SimpleNamespace(epoch=0, index=i) for i in range(6)]
    plan = SimpleNamespace(total=6, batches=lambda step: [batches[step - 1]])
    begun = []

    def read(batch):
        begun.append(batch.index)
        return batch.index

    features_of = read_ahead(plan, read)
    for i, batch in enumerate(batches):
        assert features_of(batch) == i
        deadline = time.monotonic() + 10
        while len(begun) < min(i + 2, 6) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)  # for one too many
        assert begun == list(range(min(i + 2, 6)))


def test_the_next_batch_is_read_ahead_and_each_batch_is_its_own():
    batches = [SimpleNamespace(epoch=e, index=i) for e in range(2) for i in range(3)]
    plan = SimpleNamespace(total=3, batches=lambda step: batches[2 * step - 2 : 2 * step])
    begun = []

    def read(batch):
        begun.append((batch.epoch, batch.index))
        if batch.index == 2:
            raise StoreError(f"batch {batch.epoch}.{batch.index} is damaged")
        return begun[-1]

    features_of = read_ahead(plan, read)
    assert features_of(batches[0]) == (0, 0) and features_of(batches[1]) == (0, 1)
    with pytest.raises(StoreError, match=r"batch 0\.2 is damaged"):  # in its own turn, not when it was read
        features_of(batches[2])
    assert features_of(batches[0]) == (0, 0)  # out of the plan's order, as a resume begins
    assert features_of(batches[4]) == (1, 1)
    with pytest.raises(StoreError, match=r"batch 1\.2"):
        features_of(batches[5])
    assert begun[:3] == [(0, 0), (0, 1), (0, 2)] and set(begun) == {(b.epoch, b.index) for b in batches} - {(1, 0)}
