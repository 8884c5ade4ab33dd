//! The services, each a folder: its routes, its rules and its tables.

pub mod proposals;
