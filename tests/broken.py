"""Three ways to train a drafter wrongly, each applied to an otherwise right run from outside the product's code.

They are the faults of the run behind this project, whose metrics fell for 5,000 steps before anybody knew:

* ``noisy_labels``: noise meant for the drafter's side reaches the hidden states that the labels are read from;
* ``label_layer_in_fc``: ``fc`` reads, besides the context layers, the layer that the logits come from;
* ``soft_kl``: the loss mixes the hard cross-entropy with a divergence from the target's softened distribution.

Run one beside the right one, and let ``dflash report`` show whether and when it differs:

    python tests/broken.py none configs/quickstart.yaml run_dir=runs/right data.features=null
    python tests/broken.py soft_kl configs/quickstart.yaml run_dir=runs/soft_kl data.features=null
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from dflash import estimate
from dflash.config import load_config
from dflash.config_target import resolve
from dflash.score import draft_blocks, score_blocks
from dflash.train import build, trainer
from dflash.train.log import MetricsLog

STD = 0.5
"""Noise on the label's hidden state, in units of its RMS."""
MIXTURE, TEMPERATURE = 0.7, 4.0
"""Share of the divergence in the loss, and the softening of both distributions."""


def noisy_labels(t):
    right = t.target._choice
    generator = torch.Generator(t.device).manual_seed(0)

    def wrong(normed):
        noise = torch.randn(normed.shape, generator=generator, device=normed.device)
        rms = normed.float().square().mean(dim=-1, keepdim=True).sqrt()
        return right((normed + noise * rms * STD).to(normed.dtype))

    t.target._choice = wrong
    return t


def label_layer_in_fc(t):
    last = t.target.num_layers - 1
    t.target.context_layers.append(last)  # the constructor refuses this, and so does a config
    t.config.target.context_layers = [*t.target.context_layers]
    return replace(t, drafter=build.new_drafter(t.config, t.target.config).to(t.device))


def soft_kl(t):
    """As a subclass of nothing: the one call that a step makes is replaced."""
    kept = {}
    right = t.target._choice

    def keep(normed):
        kept["normed"] = normed
        return right(normed)

    t.target._choice = keep

    def scored_with_divergence(drafter, borrowed, features, context, anchors, counted=None):
        scored = score_blocks(drafter, borrowed, features, context, anchors, counted=counted)
        if not torch.is_grad_enabled():
            return scored
        blocks, slots = draft_blocks(drafter, borrowed, features, context, anchors)
        # Row of the kept states for every packed row: they are those of supervised positions, in order.
        at = features.loss_mask.long().cumsum(0) - 1
        rows = (anchors.clamp(min=0)[:, None] + torch.arange(slots.shape[1], device=anchors.device))[blocks.counted_NJ]
        with torch.no_grad():
            teacher = F.linear(kept["normed"][at[rows]], borrowed.head_weight).float() / TEMPERATURE
        student = F.linear(slots[blocks.counted_NJ].to(borrowed.head_weight.dtype), borrowed.head_weight).float()
        kl = F.kl_div(
            (student / TEMPERATURE).log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1) * TEMPERATURE**2  # fmt: skip
        soft = (scored.weight_NJ[blocks.counted_NJ] * kl).sum()
        mixed = (1 - MIXTURE) * scored.weighted_sum + MIXTURE * soft
        return replace(scored, weighted_sum=mixed)

    trainer.score_blocks = scored_with_divergence
    return t


FAULTS = {"none": lambda t: t, "noisy_labels": noisy_labels, "label_layer_in_fc": label_layer_in_fc, "soft_kl": soft_kl}


def run(fault: str, config_path: str, overrides: list[str]) -> Path:
    """Train with the fault; the evaluation stays right, so its accepted length is the truth."""
    config = load_config(config_path, overrides)
    config = resolve(config, estimate.find_target_config(config, weights_needed=True))
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True)
    before = trainer.score_blocks
    try:
        t = FAULTS[fault](build.build(config, run_dir))
        metrics = MetricsLog(run_dir / "metrics.jsonl")
        t.run(metrics, lambda: False)
        metrics.close()
    finally:
        trainer.score_blocks = before
    return run_dir


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
