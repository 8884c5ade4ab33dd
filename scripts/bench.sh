#!/usr/bin/env bash
# The benchmarks, on a private PostgreSQL and a private RabbitMQ. Arguments go to semel-bench.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# pgbench measures the limit of this machine's PostgreSQL, with which our numbers are compared.
bin=$(scripts/postgres.sh bin)
if [[ -x $bin/pgbench ]]; then
    SEMEL_BENCH_PGBENCH=$bin/pgbench
elif ! SEMEL_BENCH_PGBENCH=$(command -v pgbench); then
    echo "bench.sh: no pgbench in $bin or PATH; Debian has it in the package postgresql, or postgresql-contrib" >&2
    exit 1
fi
export SEMEL_BENCH_PGBENCH

# Built before the servers start: idle ones would only take memory from the compiler.
cargo build --release -p semel-bench -p semel-server
# The worker's peer is a separate package: nothing else has to build the crate that it measures.
if [[ " $* " == *" worker "* || ! " $* " =~ \ (pairs|replays|http|gateway|messages|webhooks|mailings|operations|growth)\  ]]; then
    cargo build --release --manifest-path crates/semel-bench/peers/graphile/Cargo.toml --target-dir target/peers
    export SEMEL_BENCH_GRAPHILE=$PWD/target/peers/release/graphile-peer
fi
exec scripts/postgres.sh run scripts/rabbitmq.sh run cargo run --release -p semel-bench -- "$@"
