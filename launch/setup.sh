#!/bin/sh
# Makes .venv with everything that `make demo` and `make test` need, or prints one line that says why it cannot.
# The Makefile calls it from the top of the repository. PYTHON=python3.12 chooses the interpreter.
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
    [ -n "$python" ] || fail "Python 3.11 or 3.12 is needed, found $(python3 --version 2>&1 | tail -n 1); install one, or call make PYTHON=/path/to/python3.12"
fi

command -v "${CXX:-c++}" >/dev/null 2>&1 || fail "no C++ compiler: fairseq's extensions are compiled here; install one (Debian: apt-get install g++)"
"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || fail "$python has no venv module (Debian: apt-get install python3-venv)"
include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
[ -f "$include/Python.h" ] || fail "no Python headers ($include/Python.h): fairseq's extensions need them (Debian: apt-get install python3-dev)"

# A .venv is kept if it works and has the requested version of Python.
wanted=$("$python" -c 'import sys; print(*sys.version_info[:2])')
found=$(.venv/bin/python -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null)
if { [ -n "${PYTHON:-}" ] && [ "$found" != "$wanted" ]; } || ! suits .venv/bin/python ||
    ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free_gb" -ge "$minimum_disk_gb" ] || fail "$free_gb GB are free here, $minimum_disk_gb GB are needed (torch alone takes 5): make room"
    rm -rf .venv
    "$python" -m venv .venv >/dev/null 2>&1 || fail "$python -m venv .venv failed: run it by hand to see why"
fi

# Installs packages. If pip fails, prints one line with the cause that the log of pip shows.
install() {
    .venv/bin/python -m pip install --no-input --disable-pip-version-check -c constraints.txt "$@" >>"$log" 2>&1 && return
    if grep -q 'No space left' "$log"; then
        fail "the disk is full: free some space (about $minimum_disk_gb GB) and call make again; details in $log"
    elif grep -qiE 'temporary failure in name resolution|connection (refused|reset|error|broken)|network is unreachable|failed to establish|timed out|no route to host|name or service not known' "$log"; then
        fail "no connection to a package index: check the network (or pip's index settings) and call make again; details in $log"
    else
        fail "pip could not install: $(grep -iE '^ *(error|fatal)' "$log" | tail -n 1); details in $log"
    fi
}

: >"$log"
say "1/3 torch ($($python --version), into .venv; several GB, once)"
install --upgrade pip setuptools wheel
install torch torchvision numpy cython ninja
# Without build isolation, fairseq is compiled against the torch above; otherwise pip would download a second torch.
say "2/3 fairseq and the rest (compiles for some minutes, once)"
install --no-build-isolation -e '.[test,corpora,docs]'
say "3/3 checking"
.venv/bin/python -c 'import torch, torchvision, fairseq, fairseq_alma.core, data_prep' >>"$log" 2>&1 ||
    fail "the installed packages cannot be imported: see the end of $log"
touch .venv/installed
say "ready"
