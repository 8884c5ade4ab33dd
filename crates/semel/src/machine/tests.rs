//! The laws of an operation's life.
//!
//! The tables tell them one by one, each in a life of its own. [`every_pair`] then tries every
//! event on a grid of rows, and [`histories`] random lives; both ask for what [`invariants`] holds
//! true of every row and every step, which is also what the databases' constraints say.

mod claims;
mod due;
mod every_pair;
mod fences;
mod histories;
mod invariants;
mod life;
mod newer_data;
mod settles;
mod situations;
mod tending;
mod verdicts;
