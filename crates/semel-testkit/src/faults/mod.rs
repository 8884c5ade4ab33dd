//! Things that break: processes, servers, connections, disks.
//!
//! - [`Process`]: a worker process (`semel-worker`) that takes orders, tells what it was answered,
//!   and can be killed or stopped in the middle of it
//! - [`Order`] and [`Told`]: what is said between it and the test
//! - [`Bank`]: effects, counted outside the database under test, or by rows inside it
//! - [`Server`]: a PostgreSQL of the test's own, to be killed and started again
//! - [`PgBouncer`]: a pooler in front of it
//! - [`Proxy`]: cuts, swallows or slows down what goes between a node and PostgreSQL
//! - [`Rabbit`]: a RabbitMQ of the test's own, to be stopped, starved and killed
//! - [`Vhost`]: a virtual host of the test's own on the shared RabbitMQ
//! - [`Wire`]: cuts, deafens or mutes what goes between a node and any server
//! - [`worker`]: the worker's own side; [`scenario`]: what it does until it is killed

mod bank;
mod order;
mod pgbouncer;
mod process;
mod proxy;
mod rabbit;
pub mod scenario;
mod server;
mod wire;
pub mod worker;

pub use bank::{Bank, Effect, effect_rows, make_effect_table, states, strays, take_in};
pub use order::{Mode, Order, Told, WriteKind};
pub use pgbouncer::PgBouncer;
pub use process::Process;
pub use proxy::{Fault, On, Proxy};
pub use rabbit::{Rabbit, Vhost, rabbitmq_server};
pub use server::Server;
pub use wire::{Flow, Wire};

/// Whether the long versions of the tests were asked for (`make torture`).
#[must_use]
pub fn torture() -> bool {
    std::env::var_os("SEMEL_TORTURE").is_some_and(|value| value == "1")
}
