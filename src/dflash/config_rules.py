"""What the keys of a config must hold together. A rule gets the values of its keys and returns the problem, if any."""

from __future__ import annotations

import re
from collections.abc import Callable

Rule = Callable[..., str | None]
RULES: list[tuple[tuple[str, ...], Rule]] = []


def _rule(*keys: str) -> Callable[[Rule], Rule]:
    """Register a check of the values at ``keys``; it runs only where each of them is sound by itself."""

    def register(check: Rule) -> Rule:
        RULES.append((keys, check))
        return check

    return register


@_rule("target.context_layers")
def layers_differ(layers: list[int] | None) -> str | None:
    twice = sorted({layer for layer in layers or () if (layers or []).count(layer) > 1})
    return f"target.context_layers lists {twice} twice; fc must see a layer once" if twice else None


@_rule("target.context_layers", "target.label_layer")
def labels_stay_apart(layers: list[int] | None, label: int | str) -> str | None:
    if label not in (layers or ()):
        return None
    return (
        f"target.context_layers lists {label}, which is target.label_layer; "
        "fc must never see the layer that makes the labels: remove it from the list"
    )


@_rule("drafter.layer_types", "drafter.num_hidden_layers")
def a_type_per_layer(kinds: list[str] | None, count: int) -> str | None:
    if kinds is None or len(kinds) == count:
        return None
    return f"drafter.layer_types has {len(kinds)} entries and drafter.num_hidden_layers is {count}; give one per layer"


@_rule("drafter.layer_types", "drafter.sliding_window")
def sliding_layers_have_a_window(kinds: list[str] | None, window: int | None) -> str | None:
    if window is not None or "sliding_attention" not in (kinds or ()):
        return None
    return "drafter.sliding_window is null and drafter.layer_types has sliding_attention; give the window in tokens"


@_rule("drafter.sliding_window", "drafter.block_size")
def window_holds_a_block(window: int | None, block: int) -> str | None:
    if window is None or window >= block:
        return None
    return f"drafter.sliding_window is {window}, under drafter.block_size {block}; a window must hold a block"


@_rule("drafter.num_attention_heads", "drafter.num_key_value_heads")
def heads_share_evenly(heads: int | None, kv_heads: int | None) -> str | None:
    if heads is None or kv_heads is None or heads % kv_heads == 0:
        return None
    return f"drafter.num_attention_heads {heads} is no multiple of drafter.num_key_value_heads {kv_heads}; make it one"


@_rule("drafter.head_dim")
def head_dim_is_even(size: int | None) -> str | None:
    if size is None or size % 2 == 0:
        return None
    return f"drafter.head_dim is {size}; the rotary embedding turns pairs, so make it even"


@_rule("data.max_length", "train.tokens_per_batch")
def a_sequence_fits_a_batch(length: int, budget: int) -> str | None:
    if length <= budget:
        return None
    return f"data.max_length {length} is above train.tokens_per_batch {budget}; a batch must hold the longest sequence"


@_rule("data.train", "data.eval")
def hub_sources_read_right(train: list[str], held_out: list[str]) -> str | None:
    pattern = r"hub:[\w.-]+(/[\w.-]+)?(:[\w.\[\]%:+-]+)?"
    wrong = [s for s in train + held_out if s.startswith("hub:") and not re.fullmatch(pattern, s)]
    return f"data.train or data.eval has {', '.join(wrong)}; write hub:NAME or hub:NAME:SPLIT" if wrong else None


@_rule("data.train", "data.eval")
def held_out_is_not_trained_on(train: list[str], held_out: list[str]) -> str | None:
    both = sorted(set(train) & set(held_out))
    return (
        f"data.eval has {', '.join(both)}, as data.train has; evaluation must be on held-out prompts" if both else None
    )


@_rule("placement.target", "placement.drafter")
def devices_read_right(target: list[str], drafter: list[str]) -> str | None:
    wrong = [device for device in target + drafter if not re.fullmatch(r"(\d+/)?(cpu|cuda:\d+)", device)]
    if not wrong:
        return None
    return f"placement has {', '.join(wrong)}; a device reads cpu, cuda:0 or, over several machines, 1/cuda:0"


@_rule("placement.target", "placement.gpus_per_replica")
def replicas_are_whole(target: list[str], each: int) -> str | None:
    count = len(target)
    if count % each:
        legal = [n for n in range(1, count + 1) if count % n == 0]
        return f"placement.gpus_per_replica {each} does not divide the {count} entries of placement.target; use {legal}"
    for start in range(0, count, each):
        group = target[start : start + each]
        if len(set(group)) < each or len({device.rpartition("/")[0] for device in group}) > 1:
            return f"placement.target gives a replica {group}; it needs {each} different devices of one machine"
    return None


@_rule("train.grad_accumulation", "placement.drafter")
def drafters_share_evenly(batches: int, drafters: list[str]) -> str | None:
    if batches % len(drafters) == 0:
        return None
    count = len(drafters)
    return f"train.grad_accumulation {batches} is no multiple of the {count} entries of placement.drafter; make it one"
