//! Problems that come from the ledger's answers and errors.

use std::time::Duration;

use semel::{Error, Operation};

use crate::{
    Problem,
    problem::{self, Kind},
};

/// The `Retry-After` for a key in flight: most requests take less than this.
pub(crate) const SOON: Duration = Duration::from_secs(1);

/// A problem with the time at which the key was first seen.
pub(crate) fn problem_of(kind: &'static Kind, operation: &Operation) -> Problem {
    Problem::new(kind).with("first_seen", operation.created_at.to_string())
}

/// The problem for a claim that failed. Only here it is certain that nothing was done, and that the unreadable row is
/// that of the key.
pub(crate) fn claim_problem(error: &Error, key: &str) -> Problem {
    if !matches!(error, Error::Corrupt(_)) {
        return store_problem(error);
    }
    tracing::warn!(%error, problem = problem::ROW_UNREADABLE.name, "the row of a request's key cannot be read");
    Problem::new(&problem::ROW_UNREADABLE).about(key)
}

/// The problem for a run that failed. A row that is unreadable now was readable at the claim, and the work was done
/// since: the problem must not say that nothing was done.
pub(crate) fn run_problem(error: &Error) -> Problem {
    if !matches!(error, Error::Corrupt(_)) {
        return store_problem(error);
    }
    tracing::warn!(%error, problem = problem::OUTCOME_UNKNOWN.name, "the outcome of a keyed request could not be stored");
    Problem::new(&problem::OUTCOME_UNKNOWN)
        .detail(
            "The request was executed, but its outcome could not be stored: the row of its key cannot be read. It may \
             or may not have taken effect.",
        )
        .retry_after(SOON)
}

/// The problem for an error of the store.
pub(crate) fn store_problem(error: &Error) -> Problem {
    let kind = match error {
        Error::Unavailable(_) | Error::Stopping => &problem::STORE_UNAVAILABLE,
        Error::OutcomeUnknown(_) => &problem::OUTCOME_UNKNOWN,
        _ => &problem::INTERNAL,
    };
    tracing::warn!(%error, problem = kind.name, "a keyed request could not be executed");
    let problem = match error.reason() {
        Some(reason) if *kind == problem::STORE_UNAVAILABLE => {
            Problem::new(kind).detail(format!("Nothing was done: {reason}."))
        }
        _ => Problem::new(kind),
    };
    if kind.retryable { problem.retry_after(SOON) } else { problem }
}
