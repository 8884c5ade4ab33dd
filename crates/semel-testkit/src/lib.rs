//! For Semel's own tests: throw-away databases, the conformance suite, and things that break.
//!
//! - [`Lab`]: a database of its own for one test, with a clock that the test moves
//! - [`conformance`]: the laws of a store; [`conformance_suite!`] runs them all on one more database
//! - [`faults`]: processes, servers, connections and disks that break

pub mod conformance;
pub mod faults;
mod lab;

pub use lab::{Guest, Kind, Lab, key, postgres_server, request, scope, work, work_with};
