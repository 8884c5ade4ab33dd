//! RabbitMQ, tested on a real server.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod answers;
mod away;
mod by_sql;
mod kill_rabbitmq;
mod lab;
mod silence;
mod wires;

semel_testkit::broker_suite!(rabbitmq, lab::RabbitLab::new());
