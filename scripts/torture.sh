#!/usr/bin/env bash
# The same tests as `make test`, in their long versions: more rounds, more crashes, more load. Arguments go to nextest,
# e.g. a part of a test's name to run that one only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export SEMEL_TORTURE=1
scripts/postgres.sh pooler >/dev/null
exec scripts/python.sh run scripts/postgres.sh run scripts/rabbitmq.sh run cargo nextest run --workspace --profile torture "$@"
