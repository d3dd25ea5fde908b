#!/usr/bin/env bash
# Lint, types and tests, in a .venv of pinned versions that it makes itself. May be run again, from anywhere.
#
#     scripts/test.sh                       # everything but the slow tests
#     scripts/test.sh -m slow               # the slow tests; further arguments go to pytest too
#     scripts/test.sh tests/test_config.py -k override
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

echo "Lint and types (seconds), then tests (about 8 minutes on two cores) ..."
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# No test may reach a model hub.
HF_HUB_OFFLINE=1 .venv/bin/python -m pytest "$@"
