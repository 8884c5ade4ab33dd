//! What the command `semel` promises, tried on the real program.

// In a test a broken expectation is a failed test; clippy knows that only of the test functions themselves.
#![allow(clippy::unwrap_used)]

mod config;
mod gateway;
mod guard;
mod once;
mod once_kill;
mod operations;
mod place;
mod proposals;
mod serve;
mod serve_ledger;
mod support;
mod why;
mod wire;
