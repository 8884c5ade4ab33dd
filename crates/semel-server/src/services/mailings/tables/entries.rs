//! The SQL of entries: found, marked, settled, listed.

use semel::Result;
use semel_store::{Conn, broken, from_row, on};
use serde_json::{Value, json};

use crate::sql::statements;

/// An entry that may be sent.
#[derive(Clone, Debug)]
pub(in super::super) struct Entry {
    pub(in super::super) line: i64,
    pub(in super::super) email: String,
    pub(in super::super) token: Vec<u8>,
    pub(in super::super) cells: Vec<u8>,
    pub(in super::super) attempts: i64,
    pub(in super::super) last_attempt: Option<i64>,
    pub(in super::super) mail_date: Option<i64>,
    /// The transport that may have sent it on an earlier attempt.
    pub(in super::super) maybe_sent_by: Option<String>,
}

from_row!(Entry { line, email, token, cells, attempts, last_attempt, mail_date, maybe_sent_by });

const FRESH: &str = "
    SELECT line, email, token, cells, attempts, last_attempt, mail_date, maybe_sent_by FROM mailing_entries
    WHERE mailing = $1 AND line > $2 AND status = 'PENDING' AND next_attempt IS NULL ORDER BY line LIMIT $3";

/// Entries after a line that were never tried.
pub(in super::super) async fn fresh(conn: &mut Conn<'_>, mailing: i64, after: i64, most: i64) -> Result<Vec<Entry>> {
    on!(conn, c => sqlx::query_as(FRESH).bind(mailing).bind(after).bind(most)
        .fetch_all(&mut **c).await.map_err(broken))
}

const DUE: &str = "
    SELECT line, email, token, cells, attempts, last_attempt, mail_date, maybe_sent_by FROM mailing_entries
    WHERE mailing = $1 AND next_attempt IS NOT NULL AND next_attempt <= $2 AND status = 'PENDING'
    ORDER BY next_attempt, line LIMIT $3";

/// Entries whose next attempt is due.
pub(in super::super) async fn due(conn: &mut Conn<'_>, mailing: i64, now: i64, most: i64) -> Result<Vec<Entry>> {
    on!(conn, c => sqlx::query_as(DUE).bind(mailing).bind(now).bind(most).fetch_all(&mut **c).await.map_err(broken))
}

const FIRST: &str = "
    SELECT line, email, token, cells, attempts, last_attempt, mail_date, maybe_sent_by FROM mailing_entries
    WHERE mailing = $1 ORDER BY line LIMIT 1";

/// The first entry of a mailing, in whatever state.
pub(in super::super) async fn first(conn: &mut Conn<'_>, mailing: i64) -> Result<Option<Entry>> {
    on!(conn, c => sqlx::query_as(FIRST).bind(mailing).fetch_optional(&mut **c).await.map_err(broken))
}

const NEXT: &str = "
    SELECT min(next_attempt) FROM mailing_entries
    WHERE mailing = $1 AND next_attempt IS NOT NULL AND status = 'PENDING'";

/// When the next attempt of any entry is due.
pub(in super::super) async fn next(conn: &mut Conn<'_>, mailing: i64) -> Result<Option<i64>> {
    on!(conn, c => sqlx::query_scalar(NEXT).bind(mailing).fetch_one(&mut **c).await.map_err(broken))
}

// Differs because JSON texts become rows in another way.
const SENDING_POSTGRES: &str = "
    SELECT line, email, token, cells, attempts, last_attempt, mail_date, maybe_sent_by FROM mailing_entries
    WHERE mailing = $1 AND status = 'SENDING'
      AND line = ANY (ARRAY (SELECT CAST(value AS BIGINT) FROM json_array_elements_text($2::json))) ORDER BY line";
const SENDING_SQLITE: &str = "
    SELECT line, email, token, cells, attempts, last_attempt, mail_date, maybe_sent_by FROM mailing_entries
    WHERE mailing = $1 AND status = 'SENDING' AND line IN (SELECT value FROM json_each($2)) ORDER BY line";

/// Those of these lines that are being sent.
pub(in super::super) async fn sending(conn: &mut Conn<'_>, mailing: i64, lines: &str) -> Result<Vec<Entry>> {
    let sql = match conn {
        Conn::Postgres(_) => SENDING_POSTGRES,
        Conn::Sqlite(_) => SENDING_SQLITE,
    };
    on!(conn, c => sqlx::query_as(sql).bind(mailing).bind(lines).fetch_all(&mut **c).await.map_err(broken))
}

/// What a mark made of an entry.
#[derive(Clone, Debug)]
pub(in super::super) struct Marked {
    pub(in super::super) line: i64,
    pub(in super::super) status: String,
    pub(in super::super) attempts: i64,
    pub(in super::super) mail_date: i64,
    pub(in super::super) maybe_sent_by: Option<String>,
}

from_row!(Marked { line, status, attempts, mail_date, maybe_sent_by });

impl Marked {
    /// The mark of an entry that is being sent.
    pub(in super::super) fn again(entry: Entry) -> Self {
        let Entry { line, attempts, mail_date, last_attempt, maybe_sent_by, .. } = entry;
        let mail_date = mail_date.or(last_attempt).unwrap_or(0);
        Self { line, status: "SENDING".to_owned(), attempts, mail_date, maybe_sent_by }
    }
}

/// How an attempt ended.
#[derive(Clone, Debug)]
pub(in super::super) struct Settled {
    pub(in super::super) line: i64,
    pub(in super::super) status: &'static str,
    /// When to try again, if it is PENDING.
    pub(in super::super) next_attempt: Option<i64>,
    pub(in super::super) external_id: Option<String>,
    pub(in super::super) error: Option<String>,
    /// Whether nothing was sent: the attempt does not count.
    pub(in super::super) undone: bool,
    /// Whether the transport may have sent it.
    pub(in super::super) maybe_sent: bool,
    /// Whether the mail was not tried at all: its next attempt is the first, with a Date of its own. The window of its key
    /// begins then.
    pub(in super::super) untried: bool,
}

impl Settled {
    fn row(&self) -> Value {
        json!({ "line": self.line, "status": self.status, "next_attempt": self.next_attempt,
                "external_id": self.external_id, "error": self.error, "undone": i32::from(self.undone),
                "maybe": i32::from(self.maybe_sent), "untried": i32::from(self.untried) })
    }
}

// Differs because PostgreSQL does both in one round trip, and JSON texts become rows in another way. Lines are also given
// as arrays: joined with a JSON text alone, a large table without statistics would be read from end to end.
const TURN_POSTGRES: &str = "
    WITH settled AS (
        UPDATE mailing_entries AS e
        SET status = r.status, next_attempt = r.next_attempt, external_id = r.external_id, error = r.error,
            attempts = e.attempts - r.undone, updated_at = $3,
            maybe_sent_by = CASE WHEN r.maybe = 1 THEN $7 ELSE e.maybe_sent_by END,
            mail_date = CASE WHEN r.untried = 1 AND e.maybe_sent_by IS NULL THEN NULL ELSE e.mail_date END
        FROM json_to_recordset($4::json) AS r (line BIGINT, status TEXT, next_attempt BIGINT, external_id TEXT,
                                               error TEXT, undone BIGINT, maybe BIGINT, untried BIGINT)
        WHERE e.mailing = $1 AND e.line = ANY ($5) AND e.line = r.line AND e.status = 'SENDING'
        RETURNING e.line
    ), marked AS (
        UPDATE mailing_entries AS e
        SET status = CASE WHEN NOT EXISTS (SELECT 1 FROM mail_suppressions AS s
                                           WHERE s.tenant = $2 AND s.email = e.email) THEN 'SENDING'
                          WHEN maybe_sent_by IS NULL THEN 'SUPPRESSED' ELSE 'IN_DOUBT' END,
            attempts = attempts + 1, last_attempt = $3, mail_date = COALESCE(mail_date, $3), next_attempt = NULL,
            updated_at = $3
        WHERE mailing = $1 AND line = ANY ($6) AND status = 'PENDING'
        RETURNING line, status, attempts, mail_date, maybe_sent_by
    )
    SELECT line, '' AS status, CAST(0 AS BIGINT) AS attempts, CAST(0 AS BIGINT) AS mail_date,
           CAST(NULL AS TEXT) AS maybe_sent_by FROM settled
    UNION ALL SELECT line, status, attempts, mail_date, maybe_sent_by FROM marked";
const SETTLE_SQLITE: &str = "
    UPDATE mailing_entries AS e
    SET status = r.value ->> 'status', next_attempt = r.value ->> 'next_attempt',
        external_id = r.value ->> 'external_id', error = r.value ->> 'error',
        attempts = e.attempts - (r.value ->> 'undone'), updated_at = $2,
        maybe_sent_by = CASE WHEN r.value ->> 'maybe' = 1 THEN $4 ELSE e.maybe_sent_by END,
        mail_date = CASE WHEN r.value ->> 'untried' = 1 AND e.maybe_sent_by IS NULL THEN NULL ELSE e.mail_date END
    FROM json_each($3) AS r
    WHERE e.mailing = $1 AND e.line = r.value ->> 'line' AND e.status = 'SENDING'
      AND e.line IN (SELECT value ->> 'line' FROM json_each($3)) RETURNING line";
const MARK_SQLITE: &str = "
    UPDATE mailing_entries AS e
    SET status = CASE WHEN NOT EXISTS (SELECT 1 FROM mail_suppressions AS s WHERE s.tenant = $2 AND s.email = e.email)
                      THEN 'SENDING' WHEN maybe_sent_by IS NULL THEN 'SUPPRESSED' ELSE 'IN_DOUBT' END,
        attempts = attempts + 1, last_attempt = $3, mail_date = COALESCE(mail_date, $3), next_attempt = NULL,
        updated_at = $3
    WHERE mailing = $1 AND status = 'PENDING' AND line IN (SELECT value FROM json_each($4))
    RETURNING line, status, attempts, mail_date, maybe_sent_by";

/// What happens to the entries of a mailing in one step.
pub(in super::super) struct Turn<'a> {
    pub(in super::super) mailing: i64,
    pub(in super::super) tenant: &'a str,
    /// What the transport is recognised by.
    pub(in super::super) by: &'a str,
    pub(in super::super) now: i64,
    /// Attempts that have ended.
    pub(in super::super) settled: &'a [Settled],
    /// Pending entries to be marked as being sent, or as suppressed. None of them is in `settled`. A suppressed one that
    /// an earlier attempt may have sent is in doubt: "suppressed" would say that it got no mail.
    pub(in super::super) lines: &'a [i64],
}

impl Turn<'_> {
    /// Settles and marks. Returns the lines that were being sent until now, and the marks.
    pub(in super::super) async fn take(&self, conn: &mut Conn<'_>) -> Result<(Vec<i64>, Vec<Marked>)> {
        let Self { mailing, tenant, by, now, .. } = *self;
        let settled = Value::from_iter(self.settled.iter().map(Settled::row)).to_string();
        match conn {
            Conn::Postgres(c) => {
                let rows: Vec<Marked> = sqlx::query_as(TURN_POSTGRES)
                    .bind(mailing)
                    .bind(tenant)
                    .bind(now)
                    .bind(settled)
                    .bind(self.settled.iter().map(|settled| settled.line).collect::<Vec<i64>>())
                    .bind(self.lines)
                    .bind(by)
                    .fetch_all(&mut **c)
                    .await
                    .map_err(broken)?;
                let (marked, settled): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| !row.status.is_empty());
                Ok((settled.into_iter().map(|row| row.line).collect(), marked))
            }
            Conn::Sqlite(c) => {
                let settle = sqlx::query_scalar(SETTLE_SQLITE).bind(mailing).bind(now).bind(settled).bind(by);
                let settled = settle.fetch_all(&mut **c).await.map_err(broken)?;
                let lines = json!(self.lines).to_string();
                let mark = sqlx::query_as(MARK_SQLITE).bind(mailing).bind(tenant).bind(now).bind(lines);
                Ok((settled, mark.fetch_all(&mut **c).await.map_err(broken)?))
            }
        }
    }
}

// Differs because JSON texts become rows in another way. An id that another transaction has just taken is neither
// inserted nor visible.
const CLAIM_IDS_POSTGRES: &str = "
    WITH r AS MATERIALIZED (
        SELECT line, external_id FROM json_to_recordset($3::json) AS r (line BIGINT, external_id TEXT)
    ), claimed AS (
        INSERT INTO mailing_external_ids (transport, external_id, mailing, line)
        SELECT $1, r.external_id, $2, r.line FROM r ORDER BY r.external_id, r.line
        ON CONFLICT (transport, external_id) DO NOTHING RETURNING external_id, line
    )
    SELECT r.line FROM r
    WHERE NOT EXISTS (SELECT 1 FROM claimed AS c WHERE c.external_id = r.external_id AND c.line = r.line)
      AND NOT EXISTS (SELECT 1 FROM mailing_external_ids AS x
                      WHERE x.transport = $1 AND x.external_id = r.external_id AND x.mailing = $2 AND x.line = r.line)";
const CLAIM_IDS_SQLITE: &str = "
    INSERT INTO mailing_external_ids (transport, external_id, mailing, line)
    SELECT $1, value ->> 'external_id', $2, value ->> 'line' FROM json_each($3) WHERE TRUE
    ON CONFLICT (transport, external_id) DO NOTHING";
const KNOWN_SQLITE: &str = "
    SELECT r.value ->> 'line' FROM json_each($3) AS r
    CROSS JOIN mailing_external_ids AS x ON x.transport = $1 AND x.external_id = r.value ->> 'external_id'
    WHERE x.mailing <> $2 OR x.line <> r.value ->> 'line'";

/// Stores the ids that a transport gave; returns the lines whose id belongs to another entry.
pub(in super::super) async fn claim_ids(
    conn: &mut Conn<'_>,
    transport: &str,
    mailing: i64,
    ids: &[(i64, &str)],
) -> Result<Vec<i64>> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let rows = Value::from_iter(ids.iter().map(|(line, id)| json!({ "line": line, "external_id": id }))).to_string();
    match conn {
        Conn::Postgres(c) => {
            let claim = sqlx::query_scalar(CLAIM_IDS_POSTGRES).bind(transport).bind(mailing).bind(rows);
            claim.fetch_all(&mut **c).await.map_err(broken)
        }
        Conn::Sqlite(c) => {
            let claim = sqlx::query(CLAIM_IDS_SQLITE).bind(transport).bind(mailing).bind(&rows);
            claim.execute(&mut **c).await.map_err(broken)?;
            let known = sqlx::query_scalar(KNOWN_SQLITE).bind(transport).bind(mailing).bind(&rows);
            known.fetch_all(&mut **c).await.map_err(broken)
        }
    }
}

const PAGE_END: &str = "
    SELECT max(line) FROM (SELECT line FROM mailing_entries WHERE mailing = $1 AND line > $2 ORDER BY line LIMIT $3) AS p";

/// The last line of the next entries after a line.
pub(in super::super) async fn page_end(
    conn: &mut Conn<'_>,
    mailing: i64,
    after: i64,
    most: i64,
) -> Result<Option<i64>> {
    on!(conn, c => sqlx::query_scalar(PAGE_END).bind(mailing).bind(after).bind(most)
        .fetch_one(&mut **c).await.map_err(broken))
}

const CANCEL: &str = "
    UPDATE mailing_entries SET status = 'CANCELLED', next_attempt = NULL, updated_at = $4
    WHERE mailing = $1 AND line > $2 AND line <= $3 AND status = 'PENDING' AND maybe_sent_by IS NULL";
const CANCEL_UNKNOWN: &str = "
    UPDATE mailing_entries SET status = 'IN_DOUBT', next_attempt = NULL, updated_at = $4
    WHERE mailing = $1 AND line > $2 AND line <= $3 AND status = 'PENDING'";

/// Cancels the pending entries of some lines. Those that an earlier attempt may have sent are in doubt instead. Returns
/// the numbers of both.
pub(in super::super) async fn cancel(
    conn: &mut Conn<'_>,
    mailing: i64,
    (after, to): (i64, i64),
    now: i64,
) -> Result<(i64, i64)> {
    let mut changed = [0; 2];
    for (changed, text) in changed.iter_mut().zip([CANCEL, CANCEL_UNKNOWN]) {
        let rows = on!(&mut *conn, c => sqlx::query(text).bind(mailing).bind(after).bind(to).bind(now)
            .execute(&mut **c).await.map(|done| done.rows_affected()).map_err(broken)?);
        *changed = i64::try_from(rows).unwrap_or(i64::MAX);
    }
    Ok(changed.into())
}

const RESET: &str = "
    UPDATE mailing_entries SET status = 'PENDING', attempts = 0, next_attempt = $4, error = NULL, updated_at = $4
    WHERE mailing = $1 AND line > $2 AND line <= $3 AND status = $5";

/// Resets entries of some lines with this status to PENDING; returns their number.
pub(in super::super) async fn reset(
    conn: &mut Conn<'_>,
    mailing: i64,
    (after, to): (i64, i64),
    now: i64,
    status: &str,
) -> Result<i64> {
    let changed = on!(conn, c => sqlx::query(RESET).bind(mailing).bind(after).bind(to).bind(now).bind(status)
        .execute(&mut **c).await.map(|done| done.rows_affected()).map_err(broken)?);
    Ok(i64::try_from(changed).unwrap_or(i64::MAX))
}

const RESOLVE: &str = "
    UPDATE mailing_entries SET status = $3, next_attempt = $4, updated_at = $5, maybe_sent_by = NULL
    WHERE mailing = $1 AND line = $2 AND status = 'IN_DOUBT'";

/// Decides about an entry in doubt; false if it is none.
pub(in super::super) async fn resolve(
    conn: &mut Conn<'_>,
    mailing: i64,
    line: i64,
    (status, next_attempt): (&str, Option<i64>),
    now: i64,
) -> Result<bool> {
    on!(conn, c => sqlx::query(RESOLVE).bind(mailing).bind(line).bind(status).bind(next_attempt).bind(now)
        .execute(&mut **c).await.map(|done| done.rows_affected() > 0).map_err(broken))
}

/// An entry as it is shown.
#[derive(Clone, Debug)]
pub(in super::super) struct Shown {
    pub(in super::super) line: i64,
    pub(in super::super) email: String,
    pub(in super::super) original: Option<String>,
    pub(in super::super) status: String,
    pub(in super::super) attempts: i64,
    pub(in super::super) next_attempt: Option<i64>,
    pub(in super::super) last_attempt: Option<i64>,
    pub(in super::super) mail_date: Option<i64>,
    pub(in super::super) external_id: Option<String>,
    pub(in super::super) error: Option<String>,
    pub(in super::super) created_at: i64,
    pub(in super::super) updated_at: i64,
}

from_row!(Shown {
    line,
    email,
    original,
    status,
    attempts,
    next_attempt,
    last_attempt,
    mail_date,
    external_id,
    error,
    created_at,
    updated_at,
});

const PAGE: &str = "
    SELECT line, email, original, status, attempts, next_attempt, last_attempt, mail_date, external_id, error,
           created_at, updated_at
    FROM mailing_entries
    WHERE mailing = $1 AND line > $2 AND line <= $3 AND ($4 = '' OR status = $4) ORDER BY line LIMIT $5";

/// Entries after a line and up to another, by the line of their first appearance. No index has the status, so the two
/// lines bound how many rows are read.
pub(in super::super) async fn page(
    conn: &mut Conn<'_>,
    mailing: i64,
    (after, to): (i64, i64),
    status: &str,
    most: i64,
) -> Result<Vec<Shown>> {
    on!(conn, c => sqlx::query_as(PAGE).bind(mailing).bind(after).bind(to).bind(status).bind(most)
        .fetch_all(&mut **c).await.map_err(broken))
}

const LAST: &str = "SELECT COALESCE(max(line), 0) FROM mailing_entries WHERE mailing = $1";

/// The last line that has an entry.
pub(in super::super) async fn last(conn: &mut Conn<'_>, mailing: i64) -> Result<i64> {
    on!(conn, c => sqlx::query_scalar(LAST).bind(mailing).fetch_one(&mut **c).await.map_err(broken))
}

const BY_EMAIL: &str = "
    SELECT line, email, original, status, attempts, next_attempt, last_attempt, mail_date, external_id, error,
           created_at, updated_at
    FROM mailing_entries WHERE mailing = $1 AND email = $2";

/// The entry of an address.
pub(in super::super) async fn by_email(conn: &mut Conn<'_>, mailing: i64, email: &str) -> Result<Option<Shown>> {
    on!(conn, c => sqlx::query_as(BY_EMAIL).bind(mailing).bind(email).fetch_optional(&mut **c).await.map_err(broken))
}

const BY_LINE: &str = "
    SELECT line, email, original, status, attempts, next_attempt, last_attempt, mail_date, external_id, error,
           created_at, updated_at
    FROM mailing_entries WHERE mailing = $1 AND line = $2";

/// One entry.
pub(in super::super) async fn by_line(conn: &mut Conn<'_>, mailing: i64, line: i64) -> Result<Option<Shown>> {
    on!(conn, c => sqlx::query_as(BY_LINE).bind(mailing).bind(line).fetch_optional(&mut **c).await.map_err(broken))
}

const BY_TOKEN: &str = "
    SELECT m.tenant, e.email, e.token FROM mailings AS m JOIN mailing_entries AS e ON e.mailing = m.number
    WHERE m.number = $1 AND e.line = $2";

/// The tenant, the address and the token of an entry that an unsubscribe link names.
pub(in super::super) async fn by_token(
    conn: &mut Conn<'_>,
    mailing: i64,
    line: i64,
) -> Result<Option<(String, String, Vec<u8>)>> {
    on!(conn, c => sqlx::query_as(BY_TOKEN).bind(mailing).bind(line).fetch_optional(&mut **c).await.map_err(broken))
}

const KEPT_LINK: &str = "SELECT tenant, email, token FROM mailing_links WHERE mailing = $1 AND line = $2";

/// The same of an entry whose mailing was deleted.
pub(in super::super) async fn kept_link(
    conn: &mut Conn<'_>,
    mailing: i64,
    line: i64,
) -> Result<Option<(String, String, Vec<u8>)>> {
    on!(conn, c => sqlx::query_as(KEPT_LINK).bind(mailing).bind(line).fetch_optional(&mut **c).await.map_err(broken))
}

const FORGET_LINKS: &str = "
    DELETE FROM mailing_links WHERE (mailing, line) IN
        (SELECT mailing, line FROM mailing_links WHERE until < $1 ORDER BY until LIMIT $2)";

/// Removes links of mailings that were deleted long ago; returns their number.
pub(in super::super) async fn forget_links(conn: &mut Conn<'_>, now: i64, most: i64) -> Result<u64> {
    on!(conn, c => sqlx::query(FORGET_LINKS).bind(now).bind(most)
        .execute(&mut **c).await.map(|done| done.rows_affected()).map_err(broken))
}

statements!(
    FRESH,
    DUE,
    FIRST,
    NEXT,
    SENDING_POSTGRES,
    SENDING_SQLITE,
    TURN_POSTGRES,
    SETTLE_SQLITE,
    MARK_SQLITE,
    CLAIM_IDS_POSTGRES,
    CLAIM_IDS_SQLITE,
    KNOWN_SQLITE,
    PAGE_END,
    CANCEL,
    CANCEL_UNKNOWN,
    RESET,
    RESOLVE,
    PAGE,
    LAST,
    BY_EMAIL,
    BY_LINE,
    BY_TOKEN,
    KEPT_LINK,
    FORGET_LINKS,
);
