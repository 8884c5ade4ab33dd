//! What breaks here breaks for real: processes are killed and frozen, servers are crashed,
//! connections are cut, disks are full. Effects are counted by somebody else than the ledger.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod crash_failover;
mod cuts;
mod deadlocks;
mod disks;
mod heavy;
mod kill_postgres;
mod kill_processes;
mod messaging;
mod one_file;
mod pgbouncer;
mod settings;
mod support;
mod zombies;
