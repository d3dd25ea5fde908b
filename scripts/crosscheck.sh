#!/usr/bin/env bash
# Lets other trainers and engines read what `dflash export` writes: SpecForge's and speculators' drafter classes load the
# folders strictly and must give our hidden states, and vLLM's and SGLang's own config code must read what was trained.
# Their wheels (about 250 MB, vLLM's most of it) go into build/crosscheck, beside the torch of .venv; nothing of them is
# needed for anything else. May be run again, from anywhere.
#
#     scripts/crosscheck.sh
#     scripts/crosscheck.sh -k speculators      # further arguments go to pytest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

peers=build/crosscheck
# Their pins of torch and transformers are older than ours and their servers are not run, so nothing is resolved. The
# small packages are those that their drafter classes import.
wanted="specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 sglang==0.5.14 vllm==0.34.0 \
    loguru==0.7.3 pydantic-settings==2.15.0 python-dotenv openai distro jiter sniffio httpx httpcore protobuf"
if [ "$(stamp "$peers/wanted")" != "$wanted" ]; then
    echo "Installing the peers into $peers (once) ..."
    .venv/bin/python -m venv --clear "$peers"
    site="$("$peers/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    ours="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "import site; site.addsitedir('$ours')" > "$site/ours.pth"
    # shellcheck disable=SC2086
    "$peers/bin/python" -m pip install --quiet --no-deps $wanted
    printf '%s' "$wanted" > "$peers/wanted"
fi
HF_HUB_OFFLINE=1 "$peers/bin/python" -m pytest tests/test_crosscheck.py "$@"
