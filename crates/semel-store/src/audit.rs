//! The audit: who did what, when and why, and the state before and after.

use semel::{
    Operation, Result, Timestamp, Verdict,
    machine::Answer,
    store::{Applied, Decision},
};
use serde_json::{Value, json};

use crate::{
    Conn, Database, Tx,
    connection::{broken, read_failed},
    on,
    sql::Sql,
};

/// The most actions that are returned for one operation: the latest.
const MOST_TOLD: i64 = 100;

/// The prefix of actions on operations. A number may also be that of a dead letter.
const ABOUT_OPERATIONS: &str = "operations.";

/// An action of a person, for the audit. It contains no addresses, secrets or payloads: the audit is kept longer than
/// those.
#[derive(Clone, Copy, Debug)]
pub struct Audit<'a> {
    /// The tenant; `*` for all tenants.
    pub tenant: &'a str,
    /// The actor: the subject of a principal, or a user of this host.
    pub actor: &'a str,
    /// The action, as `noun.verb`: `work.pause`.
    pub action: &'static str,
    /// The id or name of its object.
    pub subject: &'a str,
    /// The person's reason; empty if none is required.
    pub reason: &'a str,
}

impl Audit<'_> {
    /// Stores it in the transaction of the action. `at` is the value of `{now}`.
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

/// An action of a person, as stored in the audit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audited {
    /// When.
    pub at: Timestamp,
    /// The actor.
    pub actor: String,
    /// The action: `operations.retry`, for example.
    pub action: String,
    /// The reason.
    pub reason: String,
    /// The state before and after; `None` if there was none.
    pub stood: [Option<Value>; 2],
}

type AuditedRow = (i64, String, String, String, Option<String>, Option<String>);

impl Database {
    /// Stores an action of a person in the audit, in the transaction of the action: both commit, or neither. `before`
    /// and `after` are the parts of the subject that the action changes.
    ///
    /// ```
    /// # use semel::Ledger;
    /// # use semel_store::{Audit, Database};
    /// # use serde_json::json;
    /// # async fn pause_mailing(ledger: &Ledger<Database>) -> semel::Result<()> {
    /// let database = ledger.store().clone();
    /// ledger
    ///     .transact(|tx| async move {
    ///         // … the change itself, on tx …
    ///         let audit = Audit { tenant: "acme", actor: "ann", action: "mailing.pause", subject: "42", reason: "typo" };
    ///         database.audit_in(&tx, audit, Some(json!({"state": "sending"})), Some(json!({"state": "paused"}))).await
    ///     })
    ///     .await
    /// # }
    /// ```
    ///
    /// # Errors
    /// The database refuses; roll back then.
    pub async fn audit_in(&self, tx: &Tx, audit: Audit<'_>, before: Option<Value>, after: Option<Value>) -> Result<()> {
        self.answered(async {
            let mut held = tx.connection().await?;
            self.audit(&mut held.get()?, audit, before, after).await
        })
        .await
    }

    /// The latest hundred actions on an operation, oldest first. Also for a deleted operation.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn audited(&self, tenant: &str, operation: i64) -> Result<Vec<Audited>> {
        let (sql, subject) = (self.look_sql().audited, operation.to_string());
        let rows: Vec<AuditedRow> = self
            .read(async |conn| {
                on!(conn, c => sqlx::query_as(sql)
                    .bind(tenant).bind(&subject).bind(ABOUT_OPERATIONS).bind(MOST_TOLD)
                    .fetch_all(&mut **c).await.map_err(read_failed))
            })
            .await?;
        // Text that is not JSON was written by hand, and is returned as it is.
        let read = |text: Option<String>| text.map(|text| serde_json::from_str(&text).unwrap_or(Value::String(text)));
        let audited = |(at, actor, action, reason, before, after): AuditedRow| {
            let stood = [before, after].map(read);
            Audited { at: Timestamp::from_micros(at), actor, action, reason, stood }
        };
        Ok(rows.into_iter().rev().map(audited).collect())
    }

    /// Stores an action on messages.
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

/// The name of a decision. A probe is not a person: only the journal records its findings.
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

/// Stores a person's decision about an operation, if it was applied.
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

/// Stores that a person has purged an unreadable operation.
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

/// The state of an operation, with its key: after a purge, only the audit has it. Without payload, outcome and error,
/// which may be encrypted elsewhere.
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
