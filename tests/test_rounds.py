"""Figures made from rounds: against plain loops, and the bootstrap interval against a known truth."""

import numpy as np
import pytest

from dflash.decode.rounds import Rounds, paired_difference

K = 6


def drawn(seed, prompts=12):
    g = np.random.default_rng(seed)
    listed = []
    for _ in range(prompts):
        position, rounds = int(g.integers(1, 200)), []
        for _ in range(int(g.integers(0, 9))):
            rounds.append((position, int(g.integers(0, K))))
            position += rounds[-1][1] + 1
        listed.append(rounds)
    return listed


def test_figures_equal_plain_loops():
    listed = drawn(0)
    rounds = Rounds.collect(listed, K)
    flat = [one for prompt in listed for one in prompt]
    out = rounds.summary()
    assert out["accepted_length"] == pytest.approx(sum(s + 1 for _, s in flat) / len(flat))
    own = [sum(s + 1 for _, s in prompt) / len(prompt) for prompt in listed if prompt]
    assert out["accepted_length_per_prompt"] == pytest.approx(sum(own) / len(own))
    assert (out["rounds"], out["prompts"]) == (len(flat), len(own)) and len(own) < len(listed)
    for slot in range(1, K):
        assert out[f"accepted_at{slot}"] == pytest.approx(sum(s >= slot for _, s in flat) / len(flat))
    assert rounds.rounds == [[s + 1 for _, s in prompt] for prompt in listed]


def test_the_two_means_differ_and_are_named():
    out = Rounds.collect([[(5, 0), (6, 0), (7, 3)], [(9, 1)], []], block_size=4).summary()
    assert out["accepted_length"] == pytest.approx(8 / 4) and out["accepted_length_per_prompt"] == pytest.approx(2.0)
    out = Rounds.collect([[(5, 0)] * 3, [(9, 3)]], block_size=4).summary()
    assert out["accepted_length"] == pytest.approx(7 / 4) and out["accepted_length_per_prompt"] == pytest.approx(2.5)


def test_buckets_of_context_length_hold_every_round_once():
    listed = [[(p, p % K) for p in (1, 31, 32, 63, 64, 127, 128, 5000)]]
    rows = Rounds.collect(listed, K).by_context()
    assert [(r["at_least"], r["below"], r["rounds"]) for r in rows] == [
        (0, 32, 2), (32, 64, 2), (64, 128, 2), (128, 256, 1), (4096, 8192, 1),
    ]  # fmt: skip
    for row in rows:
        inside = [s + 1 for p, s in listed[0] if row["at_least"] <= p < row["below"]]
        assert row["accepted_length"] == pytest.approx(sum(inside) / len(inside))


def test_categories():
    listed = drawn(1)
    names = [["maths", "code", None][i % 3] for i in range(len(listed))]
    rows = Rounds.collect(listed, K).by_category(names)
    assert [row["category"] for row in rows] == ["maths", "code", "none"]
    for row, name in zip(rows, ["maths", "code", None], strict=True):
        inside = [s + 1 for own, prompt in zip(names, listed, strict=True) if own == name for _, s in prompt]
        assert row["rounds"] == len(inside) and row["accepted_length"] == pytest.approx(sum(inside) / len(inside))
    assert Rounds.collect(listed, K).by_category([None] * len(listed)) == []


def test_nothing_decoded_gives_no_figure_and_no_failure():
    for listed in ([], [[], []]):
        rounds = Rounds.collect(listed, K)
        assert np.isnan(rounds.summary()["accepted_length"]) and rounds.summary()["rounds"] == 0
        assert rounds.by_context() == [] and rounds.rounds == listed
        assert paired_difference(rounds, rounds).interval is None


def test_identical_arms_differ_by_nothing_and_other_prompts_are_refused():
    rounds = Rounds.collect(drawn(2), K)
    out = paired_difference(rounds, rounds)
    assert out.difference == 0 and out.interval == (0, 0)
    with pytest.raises(ValueError, match="12 prompts against 3"):
        paired_difference(rounds, Rounds.collect(drawn(3, 3), K))
    one = Rounds.collect([[(4, 1)]], K)
    assert paired_difference(one, one).interval is None  # nothing to resample


def test_the_difference_is_one_of_pooled_ratios():
    a, b = drawn(4), drawn(5)
    out = paired_difference(Rounds.collect(a, K), Rounds.collect(b, K))
    paired = [(x, y) for x, y in zip(a, b, strict=True) if x and y]
    means = [
        sum(s + 1 for prompt in arm for _, s in prompt) / sum(len(prompt) for prompt in arm)
        for arm in zip(*paired, strict=True)
    ]
    assert out.difference == pytest.approx(means[0] - means[1]) and out.prompts == len(paired) < len(a)
    assert out.interval[0] < out.difference < out.interval[1]
    again = paired_difference(Rounds.collect(a, K), Rounds.collect(b, K))
    assert again == out


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Prompts differ in difficulty, shared by both arms; the truth is the ratio of expectations over prompts."""
    covered, widths = 0, []
    chance = {"a": 0.15, "b": 0.0}

    def arm(g, p_P, more):
        listed = []
        for p in p_P:
            hits = g.random((20, K - 1)) < p + more
            listed.append([(50, int(run)) for run in hits.cumprod(axis=1).sum(axis=1)])
        return Rounds.collect(listed, K)

    def expected(p):
        return 1 + sum(p**k for k in range(1, K))

    levels = np.array([0.2, 0.4, 0.6, 0.8])
    truth = np.mean([expected(p + chance["a"]) - expected(p) for p in levels])
    for seed in range(100):
        g = np.random.default_rng(seed)
        p_P = g.choice(levels, 40)
        out = paired_difference(arm(g, p_P, chance["a"]), arm(g, p_P, chance["b"]), seed)
        covered += out.interval[0] <= truth <= out.interval[1]
        widths.append(out.interval[1] - out.interval[0])
    assert 85 <= covered <= 100
    assert np.mean(widths) < 0.6  # not covering by being wide
