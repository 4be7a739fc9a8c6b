#!/bin/sh
# Creates .venv with all packages that `make demo` and `make test` need. If this fails, the script prints the reason in
# one line. The Makefile runs the script at the top of the repository. PYTHON=python3.12 selects the Python interpreter.
set -u

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

log=.venv/setup.log
minimum_disk_gb=${ALMA_MINIMUM_DISK_GB:-9}

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }

if [ -n "${PYTHON:-}" ]; then
    suits "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 | tail -n 1); Python 3.11 or 3.12 is needed"
    python=$PYTHON
else
    python=
    for candidate in python3 python3.12 python3.11 python; do
        if suits "$candidate"; then python=$candidate; break; fi
    done
    [ -n "$python" ] || fail "Python 3.11 or 3.12 is needed, found $(python3 --version 2>&1 | tail -n 1); install one of them, or run make PYTHON=/path/to/python3.12"
fi

command -v "${CXX:-c++}" >/dev/null 2>&1 || fail "no C++ compiler found; fairseq needs one to compile its extensions (Debian: apt-get install g++)"
"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || fail "$python has no venv module (Debian: apt-get install python3-venv)"
include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
[ -f "$include/Python.h" ] || fail "Python headers not found ($include/Python.h); fairseq needs them to compile its extensions (Debian: apt-get install python3-dev)"

# Keep an existing .venv if it works and has the requested Python version.
wanted=$("$python" -c 'import sys; print(*sys.version_info[:2])')
found=$(.venv/bin/python -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null)
if { [ -n "${PYTHON:-}" ] && [ "$found" != "$wanted" ]; } || ! suits .venv/bin/python ||
    ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free_gb" -ge "$minimum_disk_gb" ] || fail "$free_gb GB of disk space are free, but $minimum_disk_gb GB are needed (5 GB for torch alone): free some space"
    rm -rf .venv
    "$python" -m venv .venv >/dev/null 2>&1 || fail "$python -m venv .venv failed: run this command to see the error"
fi

# Installs packages with pip. If pip fails, prints one line with the cause, which is taken from the pip log.
install() {
    .venv/bin/python -m pip install --no-input --disable-pip-version-check -c constraints.txt "$@" >>"$log" 2>&1 && return
    if grep -q 'No space left' "$log"; then
        fail "the disk is full: free some space (about $minimum_disk_gb GB) and run make again; details in $log"
    elif grep -qiE 'temporary failure in name resolution|connection (refused|reset|error|broken)|network is unreachable|failed to establish|timed out|no route to host|name or service not known' "$log"; then
        fail "no connection to a package index: check the network or pip's index settings, and run make again; details in $log"
    else
        fail "pip could not install: $(grep -iE '^ *(error|fatal)' "$log" | tail -n 1); details in $log"
    fi
}

: >"$log"
say "1/3 installing torch ($($python --version), into .venv; downloads several GB, only once)"
install --upgrade pip setuptools wheel
install torch torchvision numpy cython ninja
# Disable build isolation, so that fairseq is compiled with the torch installed above. Otherwise pip would download
# torch a second time.
say "2/3 installing fairseq and the other packages (compiles for some minutes, only once)"
install --no-build-isolation -e '.[test,corpora,docs]'
# fairseq lists torchaudio as a requirement, but never imports it here. transformers imports it if it is there, and fails
# if it was built for another version of CUDA than torch.
.venv/bin/python -m pip uninstall --yes --disable-pip-version-check torchaudio >>"$log" 2>&1
say "3/3 checking the installation"
.venv/bin/python -c 'import torch, torchvision, fairseq, fairseq_alma.core, data_prep' >>"$log" 2>&1 ||
    fail "the installed packages cannot be imported: see the end of $log"
touch .venv/installed
say "ready"
