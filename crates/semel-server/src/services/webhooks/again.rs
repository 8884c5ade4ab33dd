//! Runs an event again on a person's request: `POST …/events/{id}/retry` and `semel webhooks rerun`.

use semel::{
    Operation, State, Verdict,
    machine::{Answer, NotNow},
    store::Decision,
};

use super::{
    Receiver,
    event::Event,
    named::Named,
    problems::{EVENT_COMPLETED, EVENT_RUNNING, EVENT_WITHOUT_RULE},
    process::{Done, STORED},
};
use crate::http::{
    answers::{missing, patiently},
    problem::Problem,
};

/// The result of a completed event.
pub(crate) fn result_of(operation: &Operation) -> Option<&'static str> {
    let outcome = operation.outcome.as_ref().filter(|_| operation.state == State::Completed)?;
    Done::read(outcome).map(|done| done.word())
}

/// Runs an event again. One that has not completed runs as it is. A completed one runs through the present rules, and
/// only if its result is the named one (`stored` by default). Both only if the event has not changed since it was read:
/// of two requests at the same time, one is refused. Actor and reason go to the journal and the audit, in the same
/// commit. Returns the event's state afterwards.
pub(crate) async fn retry(
    receiver: &Receiver,
    named: &Named,
    result: Option<&str>,
    (actor, reason): (&str, &str),
) -> Result<State, Problem> {
    let Named { operation, .. } = named;
    if operation.state == State::Completed {
        return rerun(receiver, named, result.unwrap_or(STORED), (actor, reason)).await;
    }
    let decision = Decision::Resolve { verdict: Verdict::Retry, expected: Some(operation.fence) };
    let decided = patiently(receiver.ledger().decide(operation.id, decision, actor, reason)).await?;
    match decided.answer {
        Answer::Resolved => {}
        Answer::NotNow(NotNow::Absent) => return Err(missing()),
        Answer::NotNow(NotNow::Completed | NotNow::Pinned) => return Err(completed(result_of(operation))),
        _ => return Err(Problem::new(&EVENT_RUNNING)),
    }
    let (source, event) = (named.source.name.as_str(), operation.key.as_str());
    tracing::info!(source, event, operation = operation.id, by = actor, "an event runs again on a person's request");
    Ok(decided.operation.map_or(State::Pending, |operation| operation.state))
}

/// Runs a completed event through the present rules, if it has this result.
async fn rerun(
    receiver: &Receiver,
    Named { source, operation }: &Named,
    result: &str,
    (actor, reason): (&str, &str),
) -> Result<State, Problem> {
    let was = result_of(operation);
    if was != Some(result) {
        return Err(completed(was));
    }
    let kind = Event::of(operation, source).map(|event| event.kind).or_else(|| operation.labels.0[0].clone());
    if kind.is_some_and(|kind| source.stores(&kind)) {
        return Err(Problem::new(&EVENT_WITHOUT_RULE));
    }
    let (ledger, id, fence) = (receiver.ledger(), operation.id, operation.fence);
    let (store, by, why) = (ledger.store().clone(), actor.to_owned(), reason.to_owned());
    let applied = ledger.transact(move |tx| async move { store.rerun_in(&tx, id, fence, (&by, &why)).await });
    match patiently(applied).await?.answer {
        Answer::Resolved => {
            let (source, event) = (source.name.as_str(), operation.key.as_str());
            tracing::info!(
                source,
                event,
                operation = id,
                by = actor,
                "a completed event runs again on a person's request"
            );
            Ok(State::Pending)
        }
        Answer::NotNow(NotNow::Absent) => Err(missing()),
        _ => Err(Problem::new(&EVENT_RUNNING)),
    }
}

/// The problem of an event that completed with another result than the named one.
fn completed(was: Option<&'static str>) -> Problem {
    let was = was.unwrap_or("unknown");
    Problem::new(&EVENT_COMPLETED)
        .with("result", was)
        .detail(format!("This event completed with the result {was}. To repeat its effect, name this result."))
}
