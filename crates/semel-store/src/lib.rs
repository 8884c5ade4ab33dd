//! SQLite and PostgreSQL behind the traits of Semel's [`store`](semel::store).
//!
//! - [`Database`]: the store; `sqlite:PATH` or `postgres://…`
//! - [`Tx`] and [`Conn`]: callers' transactions, and one way to run a statement on either database
//! - `apply`: the general path: load, step, save
//! - `take`: claims due operations for workers; `wakes`: tasks that wait for new rows
//! - `sql`: the statements both share; `postgres` and `sqlite`: what differs, and why
//! - [`Projection`]: rows of a service that follow its operations
//! - `fleet`: marks of schedules, signs of life, counts of work
//! - `again`: completed operations, to be run once more
//! - `sweep`: lease expiry, retention, archive, counters, and rows set aside
//! - `rows`, `codec`, `counters`: stored forms; `audit`: actions of people

mod again;
mod apply;
mod audit;
mod batch;
mod clock;
pub mod codec;
mod condition;
mod connection;
mod counters;
mod database;
mod fleet;
mod from_row;
mod fronts;
mod hints;
mod look;
mod messaging;
mod migrations;
mod postgres;
#[cfg(test)]
mod prepared;
mod project;
mod repeats;
mod rows;
mod sql;
mod sqlite;
mod sweep;
mod take;
mod tx;
mod wakes;

pub use again::Passed;
pub use audit::{Audit, Audited};
pub use clock::Clock;
pub use condition::{Repaired, repair_clock};
pub use connection::{AWAY, Conn, DISK_FULL, FILE_HELD, FILE_LOST, NO_CONNECTION, READ_ONLY, broken, is_held};
pub use database::{Database, Reader, Settings};
pub use fleet::{KindOfWork, Paused};
pub use messaging::{EmbeddedBroker, HeldMessage};
pub use migrations::{all_as_released, all_listed, migrator};
pub use project::Projection;
pub use tx::{Tx, TxConnection};
