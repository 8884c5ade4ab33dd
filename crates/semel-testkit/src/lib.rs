//! For Semel's own tests: throw-away databases, the conformance suite, and things that break.
//!
//! - [`Lab`]: a private database for one test, with a clock that the test moves
//! - [`conformance`]: the laws of a store; [`conformance_suite!`] runs them all on one more database
//! - [`statements`]: prepares SQL on the real databases
//! - [`faults`]: processes, servers, connections and disks that break

pub mod conformance;
pub mod faults;
mod lab;
pub mod smtp;
pub mod statements;

pub use lab::{Guest, Kind, Lab, key, postgres_server, request, scope, work, work_with};
