//! Real faults: processes are killed and frozen, servers are crashed, connections are cut, disks are full. Effects are
//! counted outside of the ledger.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod crash_failover;
mod cuts;
mod deadlocks;
mod disks;
mod heavy;
mod kill_postgres;
mod kill_processes;
mod kill_schedules;
mod messaging;
mod one_file;
mod pgbouncer;
mod queues;
mod settings;
mod support;
mod zombies;
