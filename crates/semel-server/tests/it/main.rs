//! What the command `semel` promises, tried on the real program.

// In a test a broken expectation is a failed test; clippy knows that only of the test functions themselves.
#![allow(clippy::unwrap_used)]

mod config;
mod dead_letters;
mod deliveries;
mod desk;
mod endpoint;
mod fleet;
mod fleet_count;
mod fleet_queues;
mod gateway;
mod gateway_passing;
mod guard;
mod jobs;
mod notifications;
mod notifications_crash;
mod notifications_crash_broker;
mod notifications_crash_chaos;
mod notifications_crash_copies;
mod notifications_crash_pauses;
mod notifications_crash_poison;
mod notifications_fanout;
mod notifications_stream;
mod notifications_tenants;
mod once;
mod once_kill;
mod openapi;
mod operations;
mod outbox_routes;
mod place;
mod proposals;
mod proposals_kill;
mod proposals_rules;
mod proposals_tenants;
mod serve;
mod serve_ledger;
mod support;
mod upstream;
mod why;
mod wire;
