//! Running once more what has completed: events that were only stored, and others if that is asked for by name.

use semel::{
    Ledger, Operation, Result, State,
    machine::{Answer, NotNow},
};
use semel_store::Database;

use super::process::Done;

/// How an event was processed that has completed.
pub(crate) fn result_of(operation: &Operation) -> Option<&'static str> {
    let outcome = operation.outcome.as_ref().filter(|_| operation.state == State::Completed)?;
    Done::read(outcome).map(|done| done.word())
}

/// What became of the wish to have an event run once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Again {
    /// It runs.
    Yes,
    /// It has completed, with another result than was named.
    Otherwise(&'static str),
    /// It is not there any more.
    Gone,
    /// It runs already, or has moved on since it was looked at.
    MovedOn,
}

/// Has an event run once more that has completed with this result, as it was when it was looked at: two who ask at the
/// same time have it run once. Who asked and why is in the journal and in the audit, in the same commit.
pub(crate) async fn rerun(
    ledger: &Ledger<Database>,
    operation: &Operation,
    result: &str,
    (actor, reason): (&str, &str),
) -> Result<Again> {
    match result_of(operation) {
        Some(was) if was == result => {}
        Some(was) => return Ok(Again::Otherwise(was)),
        None => return Ok(Again::Otherwise("unknown")),
    }
    let (store, id, fence) = (ledger.store().clone(), operation.id, operation.fence);
    let (actor, reason) = (actor.to_owned(), reason.to_owned());
    let applied = ledger.transact(move |tx| async move {
        let applied = store.rerun_in(&tx, id, fence, (&actor, &reason)).await;
        if applied.is_ok() { Ok(applied) } else { Err(applied) }
    });
    Ok(match applied.await??.answer {
        Answer::Resolved => Again::Yes,
        Answer::NotNow(NotNow::Absent) => Again::Gone,
        _ => Again::MovedOn,
    })
}
