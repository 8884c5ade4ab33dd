//! Things that break: processes, servers, connections, disks.
//!
//! - [`Process`]: a worker process (`semel-worker`) that takes orders, reports answers, and can be killed or stopped
//!   meanwhile
//! - [`Order`] and [`Report`]: the messages between it and the test
//! - [`Bank`]: effects, counted outside the database under test, or by rows inside it
//! - [`FOLLOWERS`]: rows that follow operations, and [`disagreements`] between the two
//! - [`Server`]: a private PostgreSQL, to be killed and started again
//! - [`PgBouncer`]: a pooler in front of it
//! - [`Proxy`]: cuts, swallows or slows down the traffic between a node and PostgreSQL
//! - [`Rabbit`]: a private RabbitMQ, to be stopped, starved and killed
//! - [`Vhost`]: a private virtual host on the shared RabbitMQ
//! - [`Wire`]: cuts or blocks the traffic between a node and any server
//! - [`worker`]: the worker's own side; [`scenario`]: what it does until it is killed

mod bank;
mod followers;
mod order;
mod pgbouncer;
mod process;
mod proxy;
mod queues;
mod rabbit;
pub mod scenario;
mod server;
mod wire;
pub mod worker;

pub use bank::{Bank, Effect, effect_rows, make_effect_table, states, strays, take_in};
pub use followers::{FOLLOWERS, disagreements, make_followers};
pub use order::{Mode, Open, Order, Report, WriteKind};
pub use pgbouncer::PgBouncer;
pub use process::Process;
pub use proxy::{Fault, On, Proxy};
pub use rabbit::{Rabbit, Vhost, rabbitmq_server};
pub use server::Server;
pub use wire::{Flow, Wire};

/// Whether the long versions of the tests were requested (`make torture`).
#[must_use]
pub fn torture() -> bool {
    std::env::var_os("SEMEL_TORTURE").is_some_and(|value| value == "1")
}
