//! The engine under every order of events: the state machine in a model checker, the lanes under
//! a scheduler that tries many interleavings.

mod lanes;
mod model;
