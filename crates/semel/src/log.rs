//! The log: one line for each run that failed, was released with a reason, was lost, or ended in doubt.
//!
//! A line names the operation by its scope and by a hash of its key, which `semel why` accepts. Keys, payloads and
//! outcomes are never in it. Fields of a service (a webhook's source, a request's route) come from the span of the run.

use std::borrow::Cow;

use crate::{
    Operation, State,
    machine::{Failure, Retry, Write},
};

/// How much of an error is logged, in bytes. The operation has all of it.
const LONGEST_ERROR: usize = 512;

/// A run was settled, durably. Completions and releases without a reason are not logged.
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
            line(op, why, "a run was released; it runs again, and no attempt is counted")
        }
        Write::Complete(_)
        | Write::Release { why: None, .. }
        | Write::PutOff { .. }
        | Write::HandOver(_)
        | Write::Withdraw
        | Write::Checkpoint(_)
        | Write::Progress(_)
        | Write::Renew => {}
    }
}

/// A run lost its lease while its process lives.
pub(crate) fn lost(op: &Operation, what: &str) {
    line(op, what, "a run lost its lease; its later writes are refused");
}

/// A run was ended by the stop of its node. It is released without a reason, because the operation is not at fault.
pub(crate) fn stopped(op: &Operation, why: &str) {
    line(op, why, "a run was ended and is released; it runs again, and no attempt is counted");
}

/// The end of a run could not be stored: the lease expires, and the policy decides.
pub(crate) fn not_stored(op: &Operation, error: &crate::Error) {
    line(op, &error.to_string(), "the end of a run could not be stored; its lease will expire");
}

/// A transient commit failure: the run is released.
pub(crate) fn not_committed(op: &Operation, why: &str) {
    line(op, why, "a run could not be committed and is released; no attempt is counted");
}

/// The run of a successor ended with an error. It is logged here, because the caller of the first run already has its
/// answer.
pub(crate) fn newer_data_not_run(op: &Operation, error: &crate::Error) {
    line(op, &error.to_string(), "newer data could not be run to its end");
}

/// A lease expired. Called by stores, which find this out: `held` is the operation of that run, `now` the operation
/// afterwards.
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

/// `op` is the operation of the run.
fn line(op: &Operation, error: &str, message: &'static str) {
    // The message is formatted: as a field called `message` it would come after the other fields, not before them.
    // The error is a string field, so that the subscriber escapes line breaks: it may contain text from outside.
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
