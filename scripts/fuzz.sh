#!/usr/bin/env bash
# Fuzz and property tests with many more cases than `make test` tries. Arguments go to nextest.
#   PROPTEST_CASES       cases per property
#   SEMEL_FUZZ_SECONDS   how long a test that fuzzes by time, not by cases, goes on
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PROPTEST_CASES=${PROPTEST_CASES:-20000}
export SEMEL_FUZZ_SECONDS=${SEMEL_FUZZ_SECONDS:-300}
# "prop_…" and "property", but not "proposals", which is a service.
exec scripts/postgres.sh run scripts/rabbitmq.sh run cargo nextest run --workspace --profile fuzz -E 'test(/fuzz|prop_|propert/)' "$@"
