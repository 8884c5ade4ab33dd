//! The parts of the command `semel`, in reading order:
//!
//! - [`cli`]: the commands, one file each;
//! - [`config`]: one typed struct from flags, environment and file;
//! - [`serve`]: the server's life, from binding the port to draining; [`stop`]: how it ends;
//! - [`http`]: the common parts of all routes: health, principal, problems, the loopback rule;
//! - [`service`]: the shape of a service; [`services`]: all of them, each a folder; [`jobs`]: background jobs,
//!   which take longer than an answer may;
//! - `sql`: the test of every statement of a service; `unfinished`: how a run ends after an error of the database;
//! - [`view`]: shows an operation; [`monitor`]: rates, times and health of a service's operations;
//! - [`node`]: the tasks of a node besides answering: relay, consumers, readiness;
//! - [`gateway`]: a reverse proxy with the layer's semantics;
//! - [`once`]: a command once per key;
//! - [`guard`]: the process that keeps a command from outliving `semel once`.

pub mod cli;
pub mod config;
mod error;
pub mod gateway;
pub mod guard;
pub mod http;
pub mod jobs;
mod log;
pub mod monitor;
pub mod node;
pub mod once;
pub mod serve;
pub mod service;
pub mod services;
mod sql;
pub mod stop;
mod unfinished;
pub mod view;

pub use error::{Error, Result};
