#!/usr/bin/env bash
# Everything that must pass before a change goes in: the quick checks, then every test on real servers.
set -euo pipefail
# The checks come first, since they fail fastest. They bring `step` and the closing line with the total time along.
# shellcheck source=scripts/check.sh
source "$(dirname "${BASH_SOURCE[0]}")/check.sh"

if ! cargo nextest --version >/dev/null 2>&1; then
    step "install nextest" cargo install --locked cargo-nextest
fi

# The tests start it themselves, in front of PostgreSQL.
step "find PgBouncer" scripts/postgres.sh pooler
# Built before the servers start, so that the times below are those of the tests.
step "build tests" cargo nextest run --workspace --no-run
step "tests" scripts/python.sh run scripts/postgres.sh run scripts/rabbitmq.sh run cargo nextest run --workspace
step "doc tests" scripts/postgres.sh run cargo test --workspace --doc
finished=yes
