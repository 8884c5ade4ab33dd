//! The SQL of uploaded files on PostgreSQL.

use semel::Result;
use semel_store::{Conn, broken, on};

use crate::sql::statements;

const PUT: &str = "INSERT INTO mailing_chunks (upload, part, data, created_at) VALUES ($1, $2, $3, $4)";

/// Stores a part of a file.
pub(in super::super) async fn put(conn: &mut Conn<'_>, upload: &str, part: i64, data: &[u8], now: i64) -> Result<()> {
    on!(conn, c => sqlx::query(PUT).bind(upload).bind(part).bind(data).bind(now)
        .execute(&mut **c).await.map(drop).map_err(broken))
}

const GET: &str = "SELECT data FROM mailing_chunks WHERE upload = $1 AND part = $2";

/// A part of a file.
pub(in super::super) async fn get(conn: &mut Conn<'_>, upload: &str, part: i64) -> Result<Option<Vec<u8>>> {
    on!(conn, c => sqlx::query_scalar(GET).bind(upload).bind(part).fetch_optional(&mut **c).await.map_err(broken))
}

const REMOVE: &str = "
    DELETE FROM mailing_chunks WHERE upload = $1
      AND part IN (SELECT part FROM mailing_chunks WHERE upload = $1 ORDER BY part DESC LIMIT $2)";

/// Removes parts of a file; returns their number. The first part is removed last: [`forgotten`] finds a file by it.
pub(in super::super) async fn remove(conn: &mut Conn<'_>, upload: &str, most: i64) -> Result<u64> {
    on!(conn, c => sqlx::query(REMOVE).bind(upload).bind(most)
        .execute(&mut **c).await.map(|done| done.rows_affected()).map_err(broken))
}

const FORGOTTEN: &str = "
    SELECT upload FROM mailing_chunks AS f
    WHERE part = 0 AND created_at < $1
      AND NOT EXISTS (SELECT 1 FROM mailing_chunks AS n WHERE n.upload = f.upload AND n.created_at >= $1)
      AND NOT EXISTS (SELECT 1 FROM mailings AS m WHERE m.storage_url = 'rows:' || f.upload AND m.deleted_at IS NULL)
      AND upload > $2
    ORDER BY upload LIMIT $3";

/// Files after one that belong to no mailing and got no part since `before`: their upload was cut off, or they are
/// imported.
pub(in super::super) async fn forgotten(
    conn: &mut Conn<'_>,
    before: i64,
    after: &str,
    most: i64,
) -> Result<Vec<String>> {
    on!(conn, c => sqlx::query_scalar(FORGOTTEN).bind(before).bind(after).bind(most)
        .fetch_all(&mut **c).await.map_err(broken))
}

const USED: &str = "SELECT count(*) FROM mailings WHERE storage_url = $1 AND deleted_at IS NULL";

/// Whether a mailing still needs a file.
pub(in super::super) async fn is_used(conn: &mut Conn<'_>, storage_url: &str) -> Result<bool> {
    let used: i64 =
        on!(conn, c => sqlx::query_scalar(USED).bind(storage_url).fetch_one(&mut **c).await.map_err(broken)?);
    Ok(used > 0)
}

const UNNEEDED: &str = "
    SELECT number, id, storage_url FROM mailings
    WHERE storage_url IS NOT NULL AND (deleted_at IS NOT NULL OR (status = 'CANCELLED' AND NOT active)) AND number > $1
    ORDER BY number LIMIT $2";

/// Mailings after one that were deleted, or cancelled before the import ended, and the URLs of their files.
pub(in super::super) async fn unneeded(
    conn: &mut Conn<'_>,
    after: i64,
    most: i64,
) -> Result<Vec<(i64, String, String)>> {
    on!(conn, c => sqlx::query_as(UNNEEDED).bind(after).bind(most).fetch_all(&mut **c).await.map_err(broken))
}

const RELEASE: &str = "
    UPDATE mailings SET storage_url = NULL
    WHERE storage_url = $1 AND (deleted_at IS NOT NULL OR (status = 'CANCELLED' AND NOT active))";

/// Records that such a file is removed.
pub(in super::super) async fn release(conn: &mut Conn<'_>, storage_url: &str) -> Result<()> {
    on!(conn, c => sqlx::query(RELEASE).bind(storage_url).execute(&mut **c).await.map(drop).map_err(broken))
}

statements!(PUT, GET, REMOVE, FORGOTTEN, USED, UNNEEDED, RELEASE);
