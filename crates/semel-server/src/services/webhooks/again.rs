//! Running an event again because a person asks for it: `POST …/events/{id}/retry` and `semel webhooks rerun`.

use semel::{
    Operation, State, Verdict,
    machine::{Answer, NotNow},
    store::Decision,
};

use super::{
    Receiver,
    event::Event,
    named::Named,
    process::{Done, STORED},
};
use crate::http::{
    answers::{missing, patiently},
    problem::{EVENT_COMPLETED, EVENT_RUNNING, EVENT_WITHOUT_RULE, Problem},
};

/// How an event was processed that has completed.
pub(crate) fn result_of(operation: &Operation) -> Option<&'static str> {
    let outcome = operation.outcome.as_ref().filter(|_| operation.state == State::Completed)?;
    Done::read(outcome).map(|done| done.word())
}

/// Has an event run again: one that has not completed as it is, one that has completed through the present rules and
/// only if it did so with the `result` that was named (`stored` unless another is). Both as the event was when it was
/// looked at: of two who ask at the same time, one is refused. Who asked, and why, is in the journal and in the audit, in
/// the same commit. Returns how it stands then.
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
    tracing::info!(source, event, operation = operation.id, by = actor, "a person has an event run again");
    receiver.wake();
    Ok(decided.operation.map_or(State::Pending, |operation| operation.state))
}

/// Has an event run through the present rules that has completed, if it did so with this result.
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
    let applied = ledger.transact(move |tx| async move {
        let applied = store.rerun_in(&tx, id, fence, (&by, &why)).await;
        if applied.is_ok() { Ok(applied) } else { Err(applied) }
    });
    match patiently(async { applied.await? }).await?.answer {
        Answer::Resolved => {
            let (source, event) = (source.name.as_str(), operation.key.as_str());
            tracing::info!(source, event, operation = id, by = actor, "a person has an event run once more");
            receiver.wake();
            Ok(State::Pending)
        }
        Answer::NotNow(NotNow::Absent) => Err(missing()),
        _ => Err(Problem::new(&EVENT_RUNNING)),
    }
}

/// The problem of an event that has completed, with another result than was named.
fn completed(was: Option<&'static str>) -> Problem {
    let was = was.unwrap_or("unknown");
    Problem::new(&EVENT_COMPLETED).with("result", was).detail(format!(
        "This event was processed, with the result {was}, and what took effect is not done again by mistake. To have \
         that happen once more, name this result."
    ))
}
