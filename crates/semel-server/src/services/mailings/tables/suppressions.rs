//! The SQL of suppressed addresses.

use semel::{Error, Result};
use semel_store::{Conn, broken, from_row, on};
use serde::Serialize;

use crate::{http::answers, sql::statements};

/// An address that gets no mail.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in super::super) struct Suppressed {
    pub(in super::super) email: String,
    pub(in super::super) reason: String,
    #[serde(serialize_with = "answers::time")]
    pub(in super::super) created_at: i64,
}

from_row!(Suppressed { email, reason, created_at });

const ADD: &str = "
    INSERT INTO mail_suppressions (tenant, email, reason, created_at) VALUES ($1, $2, $3, $4)
    ON CONFLICT (tenant, email) DO NOTHING";

/// Adds an address; false if it was there.
pub(in super::super) async fn add(
    conn: &mut Conn<'_>,
    tenant: &str,
    email: &str,
    reason: &str,
    now: i64,
) -> Result<bool> {
    on!(conn, c => sqlx::query(ADD).bind(tenant).bind(email).bind(reason).bind(now)
        .execute(&mut **c).await.map(|done| done.rows_affected() > 0).map_err(broken))
}

const REMOVE: &str = "DELETE FROM mail_suppressions WHERE tenant = $1 AND email = $2";

/// Removes an address; false if it was not there.
pub(in super::super) async fn remove(conn: &mut Conn<'_>, tenant: &str, email: &str) -> Result<bool> {
    on!(conn, c => sqlx::query(REMOVE).bind(tenant).bind(email)
        .execute(&mut **c).await.map(|done| done.rows_affected() > 0).map_err(broken))
}

// Differs because JSON texts become rows in another way.
const COUNT_POSTGRES: &str = "
    SELECT count(*) FROM mail_suppressions
    WHERE tenant = $1 AND email = ANY (ARRAY (SELECT json_array_elements_text($2::json)))";
const COUNT_SQLITE: &str = "
    SELECT count(*) FROM mail_suppressions WHERE tenant = $1 AND email IN (SELECT value FROM json_each($2))";

/// How many of these addresses are suppressed.
pub(in super::super) async fn count(conn: &mut Conn<'_>, tenant: &str, emails: &[String]) -> Result<i64> {
    let sql = match conn {
        Conn::Postgres(_) => COUNT_POSTGRES,
        Conn::Sqlite(_) => COUNT_SQLITE,
    };
    let emails = serde_json::to_string(emails).map_err(|error| Error::Invalid(error.to_string()))?;
    on!(conn, c => sqlx::query_scalar(sql).bind(tenant).bind(emails).fetch_one(&mut **c).await.map_err(broken))
}

const PAGE: &str = "
    SELECT email, reason, created_at FROM mail_suppressions
    WHERE tenant = $1 AND email > $2 AND ($3 = '' OR email = $3) ORDER BY email LIMIT $4";

/// The addresses after one, in their order.
pub(in super::super) async fn page(
    conn: &mut Conn<'_>,
    tenant: &str,
    after: &str,
    email: &str,
    most: i64,
) -> Result<Vec<Suppressed>> {
    on!(conn, c => sqlx::query_as(PAGE).bind(tenant).bind(after).bind(email).bind(most)
        .fetch_all(&mut **c).await.map_err(broken))
}

statements!(ADD, REMOVE, COUNT_POSTGRES, COUNT_SQLITE, PAGE);
