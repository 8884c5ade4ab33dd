//! What people did: who, when, what, why, and what it was before and after.

use semel::Result;
use serde_json::Value;

use crate::{Conn, Database, connection::broken, on};

/// An action of a person.
pub(super) struct Audit<'a> {
    pub(super) tenant: &'a str,
    pub(super) actor: &'a str,
    pub(super) action: &'static str,
    pub(super) subject: &'a str,
    pub(super) reason: &'a str,
}

impl Database {
    /// Writes it down, in the transaction of the action.
    pub(super) async fn audit(
        &self,
        conn: &mut Conn<'_>,
        audit: Audit<'_>,
        before: Option<Value>,
        after: Option<Value>,
    ) -> Result<()> {
        let sql = self.messages().sql.audit;
        let text = |value: Option<Value>| value.map(|value| value.to_string());
        on!(conn, c => sqlx::query(sql)
            .bind(audit.tenant)
            .bind(audit.actor.replace(char::is_control, " "))
            .bind(audit.action)
            .bind(audit.subject)
            .bind(audit.reason)
            .bind(text(before))
            .bind(text(after))
            .bind(self.clock())
            .execute(&mut **c).await.map(drop).map_err(broken))
    }
}
