//! What breaks here breaks for real: processes are killed and frozen, servers are crashed,
//! connections are cut, disks are full. Effects are counted by somebody else than the ledger.

mod cuts;
mod deadlocks;
mod disks;
mod heavy;
mod kill_postgres;
mod kill_processes;
mod settings;
mod support;
mod zombies;
