//! What people did: who, when, what, why, and what it was before and after.

use semel::{
    Operation, Result, Timestamp, Verdict,
    machine::Answer,
    store::{Applied, Decision},
};
use serde_json::{Value, json};

use crate::{Conn, Database, connection::broken, on, sql::Sql};

/// An action of a person.
pub(crate) struct Audit<'a> {
    pub(crate) tenant: &'a str,
    pub(crate) actor: &'a str,
    pub(crate) action: &'static str,
    pub(crate) subject: &'a str,
    pub(crate) reason: &'a str,
}

impl Audit<'_> {
    /// Writes it down, in the transaction of the action. `at` is what `{now}` takes.
    pub(crate) async fn write(
        &self,
        conn: &mut Conn<'_>,
        sql: &Sql,
        before: Option<Value>,
        after: Option<Value>,
        at: Option<i64>,
    ) -> Result<()> {
        let text = |value: Option<Value>| value.map(|value| value.to_string());
        on!(conn, c => sqlx::query(sql.audit)
            .bind(self.tenant)
            .bind(self.actor.replace(char::is_control, " "))
            .bind(self.action)
            .bind(self.subject)
            // PostgreSQL cannot store it.
            .bind(self.reason.replace('\0', "\u{fffd}"))
            .bind(text(before))
            .bind(text(after))
            .bind(at)
            .execute(&mut **c).await.map(drop).map_err(broken))
    }
}

impl Database {
    /// Writes down an action on messages.
    pub(crate) async fn audit(
        &self,
        conn: &mut Conn<'_>,
        audit: Audit<'_>,
        before: Option<Value>,
        after: Option<Value>,
    ) -> Result<()> {
        audit.write(conn, self.sql(), before, after, self.clock()).await
    }
}

/// What a decision is called. A probe is no person, and what it finds is told by the journal alone.
pub(crate) fn action(decision: &Decision) -> Option<&'static str> {
    match decision {
        Decision::Resolve { verdict: Verdict::Completed(_), .. } => Some("operations.complete"),
        Decision::Resolve { verdict: Verdict::Failed, .. } => Some("operations.fail"),
        Decision::Resolve { verdict: Verdict::Retry, .. } => Some("operations.retry"),
        Decision::Resolve { verdict: Verdict::Rerun { .. }, .. } => Some("operations.rerun"),
        Decision::Cancel => Some("operations.cancel"),
        Decision::Purge => Some("operations.purge"),
        Decision::Found { .. } => None,
    }
}

/// Writes down what somebody decided about an operation, if it was carried out.
pub(crate) async fn decided(
    conn: &mut Conn<'_>,
    sql: &Sql,
    action: &'static str,
    (actor, reason): (&str, &str),
    before: &Operation,
    applied: &Applied,
) -> Result<()> {
    let after = match applied.answer {
        Answer::Resolved | Answer::Cancelled | Answer::CancelAsked => applied.operation.as_ref().map(stands),
        Answer::Purged => None,
        _ => return Ok(()),
    };
    let audit = Audit { tenant: before.scope.tenant(), actor, action, subject: &before.id.to_string(), reason };
    audit.write(conn, sql, Some(stands(before)), after, Some(applied.now.as_micros())).await
}

/// Writes down that somebody has purged an operation that cannot be read.
pub(crate) async fn purged_unreadable(
    conn: &mut Conn<'_>,
    sql: &Sql,
    (actor, reason): (&str, &str),
    (tenant, id): (&str, i64),
    before: Value,
    at: Timestamp,
) -> Result<()> {
    let audit = Audit { tenant, actor, action: "operations.purge", subject: &id.to_string(), reason };
    audit.write(conn, sql, Some(before), None, Some(at.as_micros())).await
}

/// How an operation stands, with its name: after a purge, nothing else has that. No payload, outcome or error, which may
/// be encrypted where they belong.
fn stands(operation: &Operation) -> Value {
    json!({
        "scope": operation.scope.to_string(),
        "key": operation.key.as_str(),
        "state": operation.state.as_str(),
        "failures": operation.failures,
        "crashes": operation.crashes,
        "parked": operation.parked,
        "fence": operation.fence.0,
    })
}
