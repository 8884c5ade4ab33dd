#!/usr/bin/env bash
# A Python with the libraries that the tests compare Semel with, in a directory of its own: target/python. It changes
# nothing in the Python of this machine.
#
#   python.sh run CMD…   make it if need be, run CMD with SEMEL_TEST_PYTHON set, exit as CMD did
#   python.sh bin        make it if need be, print the path of its interpreter
set -euo pipefail

# shellcheck disable=SC2034 # they are for servers.sh
kind=python product=Python url_variable=SEMEL_TEST_PYTHON
# shellcheck source=scripts/servers.sh
source "$(dirname "${BASH_SOURCE[0]}")/servers.sh"

# One version, so that a failing test has found a change of ours.
libraries=(stripe==16.1.0 "psycopg[binary]==3.3.9")

venv=$root/target/python

# Prints an interpreter that can create such a directory. Debian has the parts for that in a separate package.
find_python() {
    local python
    for python in python3 /usr/bin/python3; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    return 1
}

make_venv() {
    local python
    if ! python=$(find_python); then
        install_packages python3 python3-venv
        python=$(find_python) || die "the packages are installed, but no Python from 3.9 on has venv and ensurepip"
    fi
    rm -rf "$venv"
    "$python" -m venv "$venv" >&2 || die "a Python of the tests' own could not be made in target/python"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${libraries[@]}" >&2 ||
        die "could not install ${libraries[*]}: the tests need it, and pip's usual index"
    # Written last: an incomplete directory is made again.
    echo "${libraries[*]}" >"$venv/made"
}

# Sets `python`. SEMEL_TEST_PYTHON names an existing one.
need_python() {
    python=${SEMEL_TEST_PYTHON:-$venv/bin/python}
    if [[ -z ${SEMEL_TEST_PYTHON:-} ]]; then
        lock_servers
        [[ $(cat "$venv/made" 2>/dev/null) == "${libraries[*]}" ]] || make_venv
        unlock_servers
    fi
    "$python" -c "import stripe, psycopg" || die "$python lacks the library stripe or psycopg"
}

case ${1:-} in
    run)
        shift
        [[ $# -gt 0 ]] || die "run what? usage: python.sh run CMD…"
        need_python
        export SEMEL_TEST_PYTHON=$python
        exec "$@"
        ;;
    bin) need_python && echo "$python" ;;
    *)
        sed -n '/^# A Python/,/^#$/p; /^#   python.sh/p' "$0" | cut -c 3- >&2
        exit 2
        ;;
esac
