//! For Semel's own tests: throw-away databases, the conformance suite, and things that break.
//!
//! - [`Lab`]: a database of its own for one test, with a clock that the test moves
//! - [`conformance`]: the laws of a store; [`conformance_suite!`] runs them all on one more database

pub mod conformance;
mod lab;

pub use lab::{Kind, Lab, key, postgres_server, request, scope, work};
