"""Health checks: every fault that a hidden-state source can have is refused, with the sample named."""

import math
from dataclasses import replace

import pytest
import torch

from dflash.target.features import SickFeatures, TargetFeatures

L, D = 3, 8
SAMPLES = [70, 71, 72]
LENGTHS = [4, 6, 3]


def features(padding=5, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    rows = total + padding
    context = torch.zeros(rows, L * D, dtype=dtype)
    context[:total] = torch.randn(total, L * D, generator=g).to(dtype)
    seq = [b for b, n in enumerate(LENGTHS) for _ in range(n)] + [-1] * padding
    return TargetFeatures(
        ids=torch.arange(rows),
        context=context,
        labels=torch.arange(rows, dtype=torch.int32),
        loss_mask=torch.ones(rows, dtype=torch.bool),
        seq=torch.tensor(seq, dtype=torch.int32),
        pos=torch.tensor([p for n in LENGTHS for p in range(n)] + [0] * padding),
        bounds=[0, 4, 10, 13],
        sample_ids=list(SAMPLES),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [0, 5])
def test_healthy_features_pass_and_padding_is_not_looked_at(dtype, padding):
    got = features(padding, dtype)
    got.check(D)
    assert not got.sick(D)
    if padding:
        got.context[13:] = float("nan")
        got.check(D)
        assert not got.sick(D)
    got.context[2] *= 1e-3  # small is not sick
    got.context[3, ::2] = 0  # nor are some zeros
    got.context[4, :D] = torch.arange(D).to(dtype) - (D - 1)  # nor a largest value of zero
    got.check(D)


FAULTS = {
    "all zero": lambda part: part.zero_(),
    "constant": lambda part: part.fill_(1.5),
    "not finite": lambda part: part[:, 3:4].fill_(math.nan),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", range(L))
@pytest.mark.parametrize("kind", FAULTS)
def test_one_layer_of_one_sample_is_found(kind, layer, dtype):
    got = features(dtype=dtype)
    FAULTS[kind](got.context[4:10, layer * D : (layer + 1) * D])
    assert got.sick(D)
    with pytest.raises(
        SickFeatures, match=rf"sample 71, token 0: context layer number {layer} is {kind} \(6 such rows"
    ):
        got.check(D)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("row", [0, 12])
def test_one_number_that_is_not_finite_is_found(value, row):
    got = features()
    got.context[row, 2 * D + 1] = value
    assert got.sick(D)
    sample, token = (70, 0) if row == 0 else (72, 2)
    with pytest.raises(
        SickFeatures, match=rf"sample {sample}, token {token}: context layer number 2 is not finite \(1 such"
    ):
        got.check(D)


def test_one_row_of_zeros_is_found():
    got = features()
    got.context[7, D : 2 * D] = 0
    with pytest.raises(SickFeatures, match="sample 71, token 3: context layer number 1 is all zero"):
        got.check(D)


def test_rows_that_are_missing_or_anothers_are_found():
    got = features()
    for changed, message in (
        (replace(got, bounds=[0, 4, 10, 14]), "sample 72: 4 rows announced, 3 arrived"),
        (replace(got, bounds=[0, 5, 10, 13]), "sample 70: 5 rows announced, 4 arrived"),
        (replace(got, bounds=[0, 4, 10, 19]), r"samples \[70, 71, 72\]: 19 rows announced, 18 tokens"),
        (replace(got, context=got.context[:-1]), "18 tokens and 17 features"),
        (replace(got, labels=got.labels[:-1]), "18 tokens and 18 features"),
        (replace(got, sample_ids=[70, 71]), r"samples \[70, 71\]"),
        (replace(got, seq=got.seq.roll(1)), "sample 70|sample 72"),
    ):
        if changed.seq is not got.seq:
            changed.seq[0] = 0
        with pytest.raises(SickFeatures, match=message):
            changed.check(D)


def test_moving_keeps_everything():
    got = features()
    moved = got.to("meta")
    assert moved.context.device.type == "meta" and moved.bounds == got.bounds and moved.sample_ids == got.sample_ids
    assert got.context.device.type == "cpu" and moved.seq.dtype == torch.int32
