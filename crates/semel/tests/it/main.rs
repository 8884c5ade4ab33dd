//! The engine under every order of events: the state machine in a model checker, the lanes under a scheduler that tries
//! many interleavings, the relay with brokers that answer arbitrarily.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod lanes;
mod model;
mod relay;
