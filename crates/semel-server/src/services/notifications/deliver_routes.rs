//! `POST /notifications/{id}/resolve`: a person says what became of a delivery.

use std::time::Duration;

use axum::{Router, extract::State, response::Response, routing::post};
use semel::{
    Claim, Operation, Outcome, State as OperationState, Store as _, Verdict,
    machine::{Answer, NotNow},
    store::Decision,
};
use serde_json::json;

use super::{
    deliver::{Deliverer, delivery, in_transaction, key, scope, without_a_call},
    deliver_tables::{self as tables, Mark},
};
use crate::http::{
    answers::{missing, patiently, shown},
    fields::{Fields, reason, text},
    path::Id,
    principal::Actor,
    problem::{DELIVERY_RUNNING, DELIVERY_SETTLED, Problem, of_store},
    query::number,
};

/// The part of `/openapi.json` that is of deliveries.
pub const OPENAPI: &str = include_str!("deliver_openapi.json");

impl Deliverer {
    /// The routes of deliveries.
    pub fn routes(&self) -> Router {
        Router::new().route("/notifications/{id}/resolve", post(resolve)).with_state(self.clone())
    }
}

/// The channel that is read from the stream: what is pending there gets its place by itself.
const IN_APP: &str = "IN_APP";

/// How long a delivery that was entered waits for the decision about it.
const UNTIL_DECIDED: Duration = Duration::from_secs(5);

/// What a person may say.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Said {
    Sent,
    Failed,
    Pending,
}

impl Said {
    fn read(raw: &str) -> Result<Self, String> {
        match text(raw)?.as_str() {
            "SENT" => Ok(Self::Sent),
            "FAILED" => Ok(Self::Failed),
            "PENDING" => Ok(Self::Pending),
            _ => Err("must be SENT, FAILED or PENDING".to_owned()),
        }
    }

    fn verdict(self) -> Verdict {
        match self {
            Self::Sent => Verdict::Completed(Outcome::not_kept("a person said that it was sent")),
            Self::Failed => Verdict::Failed,
            Self::Pending => Verdict::Retry,
        }
    }

    const fn status(self) -> &'static str {
        match self {
            Self::Sent => "SENT",
            Self::Failed => "FAILED",
            Self::Pending => "PENDING",
        }
    }
}

async fn resolve(
    State(deliverer): State<Deliverer>,
    Actor(principal): Actor,
    Id(id): Id,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let (said, why) = (fields.must("status", Said::read), fields.must("reason", reason));
    fields.finish()?;
    let (Some(said), Some(why)) = (said, why) else { return Err(missing()) };
    let id = number(&id).ok_or_else(missing)?;
    let tenant = principal.tenant.as_str();

    let (channel, status) = patiently(find(&deliverer, tenant, id)).await?.ok_or_else(missing)?;
    let settled = |status: &str| {
        let detail = match status {
            "PENDING" if channel == IN_APP => {
                "This notification is PENDING, and gets its place in the stream by itself."
            }
            "PENDING" => "This notification is PENDING already, and is delivered without a decision.",
            _ => "The delivery of this notification is settled.",
        };
        Problem::new(&DELIVERY_SETTLED).detail(detail).with("notificationStatus", status)
    };
    let mut found = patiently(find_operation(&deliverer, tenant, &channel, id)).await?;
    if found.is_none() && status == "PENDING" && said != Said::Pending && channel != IN_APP {
        patiently(enter(&deliverer, tenant, &channel, id)).await?;
        found = patiently(find_operation(&deliverer, tenant, &channel, id)).await?;
    }
    // Nobody has tried to deliver it, and so it stands.
    let Some(operation) = found else { return Err(settled(&status)) };
    let decision = Decision::Resolve { verdict: said.verdict(), expected: Some(operation.fence) };
    let decided = deliverer.ledger().decide(operation.id, decision, &principal.subject, &why);
    let answer = patiently(decided).await?.answer;
    if let Answer::NotNow(NotNow::Running | NotNow::MovedOn) = answer {
        return Err(Problem::new(&DELIVERY_RUNNING));
    }

    // Whatever was decided, now or before, the notification follows: a node may have died between the two.
    let stands = patiently(find_operation(&deliverer, tenant, &channel, id)).await?;
    let now = patiently(deliverer.ledger().store().now()).await?;
    let stands = stands.as_ref().map_or(Said::Pending, stands_by);
    let mark = Mark {
        tenant: tenant.to_owned(),
        id,
        status: stands.status(),
        error: (stands == Said::Failed).then(|| why.clone()),
        attempt: None,
        due_at: 0,
        sent_at: (stands == Said::Sent).then(|| now.as_micros()),
    };
    let marked = in_transaction(deliverer.ledger(), move |tx| async move {
        let mut held = tx.connection().await?;
        tables::resolve(&mut held.get()?, &mark).await
    });
    marked.await.map_err(of_store)?;
    if stands == Said::Pending {
        deliverer.wake();
    }
    if !matches!(answer, Answer::Resolved) && stands != said {
        return Err(settled(stands.status()));
    }
    Ok(shown(&json!({ "id": id, "status": stands.status() })))
}

/// The status of a notification whose delivery stands like this and does not run.
fn stands_by(operation: &Operation) -> Said {
    match operation.state {
        OperationState::Completed => Said::Sent,
        OperationState::Failed if operation.parked => Said::Failed,
        _ => Said::Pending,
    }
}

/// Enters a delivery that nobody has tried into the ledger, so that it can be decided about like any other: the person
/// who asks has sent it, or never will. If a deliverer is faster, the ledger has its run instead. If this node dies
/// before the decision, nothing was said, and the delivery is as free as it was.
async fn enter(deliverer: &Deliverer, tenant: &str, channel: &str, id: i64) -> semel::Result<()> {
    let work = delivery(tenant, channel, id, without_a_call())?;
    if let Claim::Acquired(lease) = deliverer.ledger().claim(work).await? {
        // Without a delay, what was put back would leave no row; and until then no deliverer takes it.
        let _ = lease.release(UNTIL_DECIDED).await?;
    }
    Ok(())
}

async fn find(deliverer: &Deliverer, tenant: &str, id: i64) -> semel::Result<Option<(String, String)>> {
    let mut reader = deliverer.ledger().store().reader().await?;
    let found = tables::find(&mut reader.conn(), tenant, id).await?;
    reader.leave();
    Ok(found)
}

async fn find_operation(
    deliverer: &Deliverer,
    tenant: &str,
    channel: &str,
    id: i64,
) -> semel::Result<Option<Operation>> {
    deliverer.ledger().store().by_key(&scope(tenant, channel)?, &key(id)?).await
}
