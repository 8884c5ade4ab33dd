//! SQLite and PostgreSQL behind Semel's [`Store`](semel::Store) trait.
//!
//! - [`Database`]: the store; `sqlite:PATH` or `postgres://…`
//! - [`Tx`] and [`Conn`]: callers' transactions, and one way to run a statement on either database
//! - `apply`: the general path: load, step, save
//! - `sql`: the statements both share; `postgres` and `sqlite`: what differs, and why
//! - `again`: what has completed, to be run once more
//! - `sweep`: lapsed leases, expiry, archive, counters, and what was set aside
//! - `rows`, `codec`, `counters`: how things are stored; `audit`: what people did

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
mod from_row;
mod hints;
mod look;
mod messaging;
mod postgres;
#[cfg(test)]
mod prepared;
mod repeats;
mod rows;
mod sql;
mod sqlite;
mod sweep;
mod take;
mod tx;

pub use again::Passed;
pub use clock::Clock;
pub use condition::{Repaired, repair_clock};
pub use connection::{AWAY, Conn, DISK_FULL, FILE_HELD, FILE_LOST, NO_CONNECTION, READ_ONLY, broken, is_held};
pub use database::{Database, Reader, Settings};
pub use from_row::{all_listed, migrator};
pub use messaging::EmbeddedBroker;
pub use tx::{Tx, TxConnection};
