//! Tests of the layer, over real HTTP, on both databases.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod atomic;
mod bodies;
mod client;
mod credentials;
mod flight;
mod keys;
mod kill_store;
mod logs;
mod replays;
mod sameness;
mod scopes;
mod shop;
mod trouble;
mod verdicts;
mod webhooks;
mod webhooks_fuzz;
mod webhooks_headers;
mod webhooks_naive;
mod webhooks_properties;
mod webhooks_settings;
