#!/usr/bin/env bash
# The main job on a real language model, from nothing but Python: makes a .venv of pinned versions, then trains a small
# drafter for SmolLM2-135M on the conversations in configs/quickstart, and compares it with the untrained one.
# Two CPU cores take about 9 minutes after installation, and 2.5 GB of memory. May be run again, from anywhere.
#
#     scripts/quickstart.sh
#     scripts/quickstart.sh train.epochs=1       # with overrides, as dflash train takes them
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

# A run is never overwritten: the next one gets a folder of its own.
run=runs/quickstart number=2
while [ -e "$run" ]; do
    echo "$run holds an earlier run; 'dflash resume $run' would continue it."
    run="runs/quickstart-$number" number=$((number + 1))
done

echo "Training a drafter for SmolLM2-135M into $run (about 9 minutes on two cores) ..."
.venv/bin/dflash train configs/quickstart.yaml "run_dir=$run" "$@"

.venv/bin/python - "$run/metrics.jsonl" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    evals = [line for line in map(json.loads, file) if line.get("kind") == "eval"]
if not evals:
    sys.exit("no evaluation in this run: data.eval names no prompts")
before, after = evals[0], evals[-1]
print("\nAccepted length on held-out prompts (tokens per verification of the target; 1.0 is plain decoding):")
print(f"  before training  {before['accepted_length']:.2f}")
print(f"  after step {after['step']:<5}  {after['accepted_length']:.2f}")
PYTHON
echo "The drafter: $run/checkpoints; every step: $run/metrics.jsonl"
