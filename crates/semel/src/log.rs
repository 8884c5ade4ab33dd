//! The log: one line for each run that failed, was put back for a reason, was lost, or ended in doubt.
//!
//! A line names the operation by its scope and by a hash of its key, which `semel why` accepts. Keys, payloads and
//! outcomes are never in it. What a service knows beside that (a webhook's source, a request's route) comes from the
//! span that the run is in.

use std::borrow::Cow;

use crate::{
    Operation, State,
    machine::{Failure, Retry, Write},
};

/// How much of an error is logged, in bytes. The operation has all of it.
const LONGEST_ERROR: usize = 512;

/// A lease was ended by its holder, and that is durable. What completed, and what was put back without a reason, is no
/// news.
pub(crate) fn settled(op: &Operation, write: &Write) {
    match write {
        Write::Fail(failure) if gives_up(op, failure) => {
            line(op, &failure.error, "a run failed for the last time; only a person can have it run again");
        }
        Write::Fail(failure) => line(op, &failure.error, "a run failed; it may run again"),
        Write::Doubt { reason } => {
            line(op, reason, "a run ended in doubt; a probe or a person decides whether it took effect");
        }
        Write::Release { why: Some(why), .. } => {
            line(op, why, "a run was put back; it runs again, at no cost of an attempt")
        }
        Write::Complete(_)
        | Write::Release { why: None, .. }
        | Write::Withdraw
        | Write::Checkpoint(_)
        | Write::Progress(_)
        | Write::Renew => {}
    }
}

/// A run lost its lease while its process lives.
pub(crate) fn lost(op: &Operation, what: &str) {
    line(op, what, "a run lost its lease; what it still writes is refused");
}

/// The end of a run could not be stored: the lease lapses, and the policy decides.
pub(crate) fn not_stored(op: &Operation, error: &crate::Error) {
    line(op, &error.to_string(), "the end of a run could not be stored; its lease will lapse");
}

/// The store could not commit a run, for trouble of its own: it is put back.
pub(crate) fn not_committed(op: &Operation, why: &str) {
    line(op, why, "a run could not be committed and is put back, at no cost of an attempt");
}

/// Newer data that waited for a run was claimed, and its own run broke off with an error: nobody else hears of that, since
/// the caller of the first run has had its answer.
pub(crate) fn newer_data_not_run(op: &Operation, error: &crate::Error) {
    line(op, &error.to_string(), "newer data could not be run to its end");
}

/// The lease of a run that was not heard of again has lapsed. For stores, which are where that is found out: `held` is
/// the operation as that run had it, `now` as it has become.
pub fn lapsed(held: &Operation, now: &Operation, error: &str) {
    line(
        held,
        error,
        match now.state {
            State::InDoubt => "a lease was lost, in doubt; a probe or a person decides whether it took effect",
            _ if now.parked => "a lease was lost for the last time; only a person can have it run again",
            _ => "a lease was lost; it may run again",
        },
    );
}

/// Whether no attempt is left after this failure, by the terms of the lease.
fn gives_up(op: &Operation, failure: &Failure) -> bool {
    let most = op.lease.as_ref().and_then(|lease| lease.terms.max_attempts);
    failure.retry == Retry::Never || most.is_some_and(|most| op.failures + 1 >= most)
}

/// `op` is the operation as its run had it.
fn line(op: &Operation, error: &str, message: &'static str) {
    // The message is formatted: as a field called `message` it would come after the other fields, not before them.
    // The error is a string field, so that the subscriber escapes line breaks: it may hold what others sent.
    tracing::warn!(scope = %op.scope, key = op.short_hash(), attempt = op.attempt(), error = &*cut(error), "{message}");
}

fn cut(error: &str) -> Cow<'_, str> {
    match error.len() {
        0..=LONGEST_ERROR => error.into(),
        all => format!("{}… ({all} bytes)", &error[..error.floor_char_boundary(LONGEST_ERROR)]).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_error_is_cut_between_characters() {
        assert_eq!(cut("short"), "short");
        let long = "é".repeat(400);
        assert_eq!(cut(&long), format!("{}… (800 bytes)", "é".repeat(256)));
        let odd = format!("x{long}");
        assert_eq!(cut(&odd), format!("x{}… (801 bytes)", "é".repeat(255)));
    }
}
