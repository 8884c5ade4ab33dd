//! `POST /notifications/{id}/resolve`: a person resolves a delivery. The ledger decides; the status of the notification
//! follows in the same commit.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use semel::{
    Operation, Outcome, State as OperationState, Verdict,
    machine::{Answer, NotNow},
    prelude::*,
    store::Decision,
};
use serde_json::json;

use super::{
    Service,
    deliver::{delivery, key, scope},
    deliver_tables as tables,
    model::Channel,
    problems::{DELIVERY_RUNNING, DELIVERY_SETTLED},
};
use crate::http::{
    answers::{missing, patiently, shown},
    fields::{Fields, reason, text},
    path::Id,
    principal::Actor,
    problem::Problem,
    query::number,
};

/// The possible decisions.
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

pub(super) async fn resolve(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Id(id): Id,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let (said, why) = (fields.must("status", Said::read), fields.must("reason", reason));
    fields.finish()?;
    let (Some(said), Some(why)) = (said, why) else { return Err(missing()) };
    let id = number(&id).ok_or_else(missing)?;
    let tenant = principal.tenant.as_str();

    let (channel, status) = patiently(find(&service, tenant, id)).await?.ok_or_else(missing)?;
    let settled = |status: &str| {
        let detail = match status {
            // A pending IN_APP notification gets its position in the stream without a decision.
            "PENDING" if channel == Channel::InApp.name() => {
                "This notification is PENDING, and gets its place in the stream without a decision."
            }
            "PENDING" => "This notification is PENDING already, and is delivered without a decision.",
            _ => "The delivery of this notification is settled.",
        };
        Problem::new(&DELIVERY_SETTLED).detail(detail).with("notificationStatus", status)
    };
    if channel == Channel::InApp.name() {
        return Err(settled(&status));
    }
    let mut found = patiently(find_operation(&service, tenant, &channel, id)).await?;
    if found.is_none() && status == "PENDING" {
        // An earlier version created it, and it is not migrated yet.
        patiently(async { service.ledger.enqueue(delivery(tenant, &channel, id)?).await }).await?;
        found = patiently(find_operation(&service, tenant, &channel, id)).await?;
    }
    let Some(operation) = found else { return Err(settled(&status)) };
    if said == Said::Pending && operation.state == OperationState::Pending && !operation.was_claimed() {
        return Err(settled("PENDING"));
    }
    let decision = Decision::Resolve { verdict: said.verdict(), expected: Some(operation.fence) };
    let decided = service.ledger.decide(operation.id, decision, &principal.subject, &why);
    match patiently(decided).await?.answer {
        Answer::Resolved => {}
        Answer::NotNow(NotNow::Running | NotNow::MovedOn) => return Err(Problem::new(&DELIVERY_RUNNING)),
        _ => {
            let stands = patiently(find(&service, tenant, id)).await?.ok_or_else(missing)?.1;
            if stands != said.status() {
                return Err(settled(&stands));
            }
        }
    }
    Ok(shown(&json!({ "id": id, "status": said.status() })))
}

async fn find(service: &Service, tenant: &str, id: i64) -> semel::Result<Option<(String, String)>> {
    service.database.read(async |conn| tables::find(conn, tenant, id).await).await
}

async fn find_operation(service: &Service, tenant: &str, channel: &str, id: i64) -> semel::Result<Option<Operation>> {
    service.database.by_key(&scope(tenant, channel)?, &key(id)?).await
}
