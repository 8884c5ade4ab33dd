//! The laws of the state machine.
//!
//! The tables test them one by one. [`every_pair`] then tries every event on a grid of rows, and [`histories`] tries
//! random histories; both check the [`invariants`] of every row and every step, which are also the databases'
//! constraints.

mod callers;
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
