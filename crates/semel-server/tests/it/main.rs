//! What the command `semel` promises, tried on the real program.

// In a test a broken expectation is a failed test; clippy knows that only of the test functions themselves.
#![allow(clippy::unwrap_used)]

mod config;
mod gateway;
mod gateway_passing;
mod guard;
mod once;
mod once_kill;
mod openapi;
mod operations;
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
