//! The SQL of suppressed addresses.

use semel::Result;
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

statements!(ADD, REMOVE, PAGE);
