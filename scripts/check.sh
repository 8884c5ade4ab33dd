#!/usr/bin/env bash
# The quick checks: format, lints, documentation, dependencies. Needs no server. A warning is a failure.
# scripts/test.sh sources this file: its steps go on from here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Standard input is empty: a step that asks for input fails at once instead of hanging.
exec </dev/null

current=
finished=

# step NAME CMD…: runs one step, with its name before and its duration after.
step() {
    local before=$SECONDS
    current=$1
    shift
    echo "==> $current"
    # setpriv ends the step when this script is killed, even with -9: no build or test goes on without its parent.
    setpriv --pdeathsig TERM "$@"
    echo "    $current: $((SECONDS - before)) s"
    current=
}

# Success has to be said (`finished=yes`, the last line): on a signal, bash comes here with an exit code of 0.
total() {
    if [[ -n $finished ]]; then
        echo "==> all passed, total time $SECONDS s"
    else
        echo "==> FAILED${current:+ at: $current}, total time $SECONDS s"
    fi
}
trap total EXIT

step "format" cargo fmt --all --check
# A mutant whose pattern no longer matches the code would pass for a tested guarantee.
step "mutants can be made" scripts/mutants.sh --check
step "clippy" cargo clippy --workspace --all-targets -- -D warnings
# The server's program and the engine's library are both called semel, and rustdoc would write both to one place at
# once.
export RUSTDOCFLAGS="-D warnings"
step "rustdoc, server" cargo doc --no-deps --package semel-server
step "rustdoc, libraries" cargo doc --no-deps --workspace --exclude semel-server
unset RUSTDOCFLAGS
# Building cargo-deny takes minutes, too much to ask of everyone. The licences change only when a dependency does.
if cargo deny --version >/dev/null 2>&1; then
    step "dependencies" cargo deny check licenses bans sources
else
    echo "==> dependencies: not checked, cargo-deny is not installed (cargo install --locked cargo-deny)"
fi

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    finished=yes
fi
