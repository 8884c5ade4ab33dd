#!/usr/bin/env bash
# The benchmarks, on a private PostgreSQL and a private RabbitMQ. Arguments go to semel-bench.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# pgbench measures what the machine's PostgreSQL can do at all, which is what our numbers are compared with.
bin=$(scripts/postgres.sh bin)
if [[ -x $bin/pgbench ]]; then
    SEMEL_BENCH_PGBENCH=$bin/pgbench
elif ! SEMEL_BENCH_PGBENCH=$(command -v pgbench); then
    echo "bench.sh: no pgbench in $bin or PATH; Debian has it in the package postgresql, or postgresql-contrib" >&2
    exit 1
fi
export SEMEL_BENCH_PGBENCH

# Built before the servers start: idle ones would only take memory from the compiler.
cargo build --release -p semel-bench
exec scripts/postgres.sh run scripts/rabbitmq.sh run cargo run --release -p semel-bench -- "$@"
