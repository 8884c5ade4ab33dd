//! The SQL of mailings.

use semel::Result;
use semel_store::{Conn, Projection, broken, from_row, on};

use crate::{http::query::Place, services::mailings::SERVICE, sql::statements};

/// The kind of the operations that process a mailing.
pub(in super::super) const RUN: &str = "run";

/// A mailing is FAILED when its run fails, in the same commit. A run that is retried sets it to PROCESSING again; one that
/// is not is over. The key of a run is the id of the mailing (36 characters), a slash and the number of the run.
pub(in super::super) const STATUS: Projection = Projection {
    service: SERVICE,
    kinds: RUN,
    update: "
        UPDATE mailings AS m
        SET status = CASE WHEN m.status IN ('PENDING', 'QUEUED', 'PROCESSING') THEN 'FAILED' ELSE m.status END,
            error = o.error, active = (m.active AND o.due IS NOT NULL), retry_at = o.due, updated_at = o.settled_at
        FROM {operations} AS o
        WHERE m.tenant = o.tenant AND m.id = substr(o.key, 1, 36) AND CAST(m.run AS TEXT) = substr(o.key, 38)
          AND (o.state = 'failed' OR (o.state = 'timed_out' AND o.due IS NULL))
          AND m.active AND m.deleted_at IS NULL",
};

/// A row of `mailings`.
#[derive(Clone, Debug)]
pub(in super::super) struct Mailing {
    pub(in super::super) number: i64,
    pub(in super::super) tenant: String,
    pub(in super::super) id: String,
    pub(in super::super) filename: String,
    pub(in super::super) content_hash: String,
    pub(in super::super) content_bytes: i64,
    pub(in super::super) list_hash: Option<String>,
    pub(in super::super) storage_url: Option<String>,
    pub(in super::super) message_hash: String,
    pub(in super::super) message_domain: String,
    pub(in super::super) policy: String,
    pub(in super::super) address_column: i64,
    pub(in super::super) send_at: Option<i64>,
    pub(in super::super) send_at_given: Option<i64>,
    pub(in super::super) status: String,
    pub(in super::super) phase: String,
    pub(in super::super) error: Option<String>,
    pub(in super::super) run: i64,
    pub(in super::super) active: bool,
    pub(in super::super) waiting: bool,
    pub(in super::super) place: Option<String>,
    pub(in super::super) last_line: i64,
    pub(in super::super) in_flight: String,
    pub(in super::super) in_flight_by: String,
    pub(in super::super) task: Option<String>,
    pub(in super::super) task_line: i64,
    pub(in super::super) total: i64,
    pub(in super::super) sending: i64,
    pub(in super::super) sent: i64,
    pub(in super::super) failed: i64,
    pub(in super::super) invalid: i64,
    pub(in super::super) suppressed: i64,
    pub(in super::super) cancelled: i64,
    pub(in super::super) in_doubt: i64,
    pub(in super::super) duplicate_rows: i64,
    pub(in super::super) rejected_rows: i64,
    pub(in super::super) blank_rows: i64,
    pub(in super::super) plus_tags: i64,
    pub(in super::super) mixed_scripts: i64,
    pub(in super::super) rate_since: Option<i64>,
    pub(in super::super) rate_base: i64,
    pub(in super::super) last_attempt: Option<i64>,
    pub(in super::super) retry_at: Option<i64>,
    pub(in super::super) created_at: i64,
    pub(in super::super) updated_at: i64,
}

from_row!(Mailing {
    number,
    tenant,
    id,
    filename,
    content_hash,
    content_bytes,
    list_hash,
    storage_url,
    message_hash,
    message_domain,
    policy,
    address_column,
    send_at,
    send_at_given,
    status,
    phase,
    error,
    run,
    active,
    waiting,
    place,
    last_line,
    in_flight,
    in_flight_by,
    task,
    task_line,
    total,
    sending,
    sent,
    failed,
    invalid,
    suppressed,
    cancelled,
    in_doubt,
    duplicate_rows,
    rejected_rows,
    blank_rows,
    plus_tags,
    mixed_scripts,
    rate_since,
    rate_base,
    last_attempt,
    retry_at,
    created_at,
    updated_at,
});

impl Mailing {
    /// The entries that have not been begun, or wait for another attempt.
    pub(in super::super) fn pending(&self) -> i64 {
        self.total - self.sending - self.settled() - self.in_doubt
    }

    /// Whether a person has paused or cancelled it, or it has paused itself.
    pub(in super::super) fn is_stopped(&self) -> bool {
        ["PAUSED", "CANCELLED"].contains(&self.status.as_str())
    }

    /// The entries that nothing more happens to.
    pub(in super::super) fn settled(&self) -> i64 {
        self.sent + self.failed + self.invalid + self.suppressed + self.cancelled
    }
}

/// The columns of a [`Mailing`].
macro_rules! mailing {
    ($rest:literal) => {
        concat!(
            "SELECT number, tenant, id, filename, content_hash, content_bytes, list_hash, storage_url, \
                    message_hash, message_domain, policy, address_column, send_at, send_at_given, status, phase, error, run, active, waiting, place, \
                    last_line, in_flight, in_flight_by, task, task_line, total, sending, sent, failed, invalid, suppressed, cancelled, \
                    in_doubt, duplicate_rows, rejected_rows, blank_rows, plus_tags, mixed_scripts, rate_since, rate_base, last_attempt, retry_at, created_at, \
                    updated_at
             FROM mailings ",
            $rest
        )
    };
}

const FIND: &str = mailing!("WHERE tenant = $1 AND id = $2 AND deleted_at IS NULL");

/// A mailing of a tenant.
pub(in super::super) async fn find(conn: &mut Conn<'_>, tenant: &str, id: &str) -> Result<Option<Mailing>> {
    on!(conn, c => sqlx::query_as(FIND).bind(tenant).bind(id).fetch_optional(&mut **c).await.map_err(broken))
}

const MESSAGE: &str = "SELECT message FROM mailings WHERE number = $1";

/// The message of a mailing. Apart from its other columns: every step reads those, and a message may be long.
pub(in super::super) async fn message(conn: &mut Conn<'_>, number: i64) -> Result<Vec<u8>> {
    on!(conn, c => sqlx::query_scalar(MESSAGE).bind(number).fetch_one(&mut **c).await.map_err(broken))
}

const SHAPE: &str = "SELECT shape FROM mailings WHERE number = $1";

/// How the file of a mailing is read, as JSON. Apart from its other columns: the header of a file may be long, and lists
/// of mailings do not show it.
pub(in super::super) async fn shape(conn: &mut Conn<'_>, number: i64) -> Result<String> {
    on!(conn, c => sqlx::query_scalar(SHAPE).bind(number).fetch_one(&mut **c).await.map_err(broken))
}

// Differs because SQLite has no row locks: there is one writer.
const LOCK_POSTGRES: &str = mailing!("WHERE tenant = $1 AND id = $2 AND deleted_at IS NULL FOR NO KEY UPDATE");

/// The same, locked until the end of the transaction.
pub(in super::super) async fn lock(conn: &mut Conn<'_>, tenant: &str, id: &str) -> Result<Option<Mailing>> {
    let sql = match conn {
        Conn::Postgres(_) => LOCK_POSTGRES,
        Conn::Sqlite(_) => FIND,
    };
    on!(conn, c => sqlx::query_as(sql).bind(tenant).bind(id).fetch_optional(&mut **c).await.map_err(broken))
}

// Differs because SQLite has no row locks: there is one writer.
const LOCK_IF_FREE_POSTGRES: &str =
    mailing!("WHERE tenant = $1 AND id = $2 AND deleted_at IS NULL FOR NO KEY UPDATE SKIP LOCKED");

/// As [`lock`], or none if another transaction holds it.
pub(in super::super) async fn lock_if_free(conn: &mut Conn<'_>, tenant: &str, id: &str) -> Result<Option<Mailing>> {
    let sql = match conn {
        Conn::Postgres(_) => LOCK_IF_FREE_POSTGRES,
        Conn::Sqlite(_) => FIND,
    };
    on!(conn, c => sqlx::query_as(sql).bind(tenant).bind(id).fetch_optional(&mut **c).await.map_err(broken))
}

const SAME_FILE: &str = mailing!(
    "WHERE tenant = $1 AND filename = $2 AND content_hash = $3 AND deleted_at IS NULL ORDER BY number LIMIT 1"
);
const SAME_NAME: &str = mailing!("WHERE tenant = $1 AND filename = $2 AND deleted_at IS NULL ORDER BY number LIMIT 1");
const SAME_CONTENT: &str =
    mailing!("WHERE tenant = $1 AND content_hash = $2 AND deleted_at IS NULL ORDER BY number LIMIT 1");

/// The oldest mailings of a file name, of a content, and of both.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Alike {
    pub(in super::super) both: Option<Mailing>,
    pub(in super::super) by_name: Option<Mailing>,
    pub(in super::super) by_content: Option<Mailing>,
}

/// The mailings that an upload may be. Each is found by an index, however many mailings there are.
pub(in super::super) async fn alike(
    conn: &mut Conn<'_>,
    tenant: &str,
    filename: &str,
    content_hash: &str,
) -> Result<Alike> {
    on!(conn, c => Ok(Alike {
        both: sqlx::query_as(SAME_FILE).bind(tenant).bind(filename).bind(content_hash)
            .fetch_optional(&mut **c).await.map_err(broken)?,
        by_name: sqlx::query_as(SAME_NAME).bind(tenant).bind(filename)
            .fetch_optional(&mut **c).await.map_err(broken)?,
        by_content: sqlx::query_as(SAME_CONTENT).bind(tenant).bind(content_hash)
            .fetch_optional(&mut **c).await.map_err(broken)?,
    }))
}

const SAME_LIST: &str = "
    SELECT id FROM mailings
    WHERE tenant = $1 AND list_hash = $2 AND number <> $3 AND deleted_at IS NULL ORDER BY number LIMIT 1";

/// The oldest other mailing to the same set of addresses.
pub(in super::super) async fn same_list(conn: &mut Conn<'_>, mailing: &Mailing) -> Result<Option<String>> {
    let Some(hash) = &mailing.list_hash else { return Ok(None) };
    on!(conn, c => sqlx::query_scalar(SAME_LIST).bind(&mailing.tenant).bind(hash).bind(mailing.number)
        .fetch_optional(&mut **c).await.map_err(broken))
}

const TENANT: &str = "INSERT INTO mailing_tenants (tenant) VALUES ($1) ON CONFLICT (tenant) DO NOTHING";
const LOCK_TENANT_POSTGRES: &str = "SELECT tenant FROM mailing_tenants WHERE tenant = $1 FOR UPDATE";

/// How long an upload waits for those of its tenant: each holds the row for some milliseconds. A longer wait would keep
/// connections from other tenants.
const SHORT_WAIT: &str = "SET LOCAL lock_timeout = '2s'";

/// Lets only one upload of a tenant at a time decide whether its file is known.
pub(in super::super) async fn one_at_a_time(conn: &mut Conn<'_>, tenant: &str) -> Result<()> {
    if let Conn::Postgres(c) = conn {
        sqlx::raw_sql(SHORT_WAIT).execute(&mut **c).await.map_err(broken)?;
    }
    on!(&mut *conn, c => sqlx::query(TENANT).bind(tenant).execute(&mut **c).await.map(drop).map_err(broken))?;
    if let Conn::Postgres(c) = conn {
        sqlx::query(LOCK_TENANT_POSTGRES).bind(tenant).execute(&mut **c).await.map_err(broken)?;
    }
    Ok(())
}

const INSERT: &str = "
    INSERT INTO mailings (tenant, id, filename, content_hash, content_bytes, storage_url, message, message_hash,
                          message_domain, policy, shape, address_column, send_at, send_at_given, created_at, updated_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $13, $14, $14)";

/// A mailing to be stored.
pub(in super::super) struct New<'a> {
    pub(in super::super) tenant: &'a str,
    pub(in super::super) id: &'a str,
    pub(in super::super) filename: &'a str,
    pub(in super::super) content_hash: &'a str,
    pub(in super::super) content_bytes: i64,
    pub(in super::super) storage_url: &'a str,
    pub(in super::super) message: Vec<u8>,
    pub(in super::super) message_hash: &'a str,
    pub(in super::super) message_domain: &'a str,
    pub(in super::super) policy: &'a str,
    pub(in super::super) shape: &'a str,
    pub(in super::super) address_column: i64,
    pub(in super::super) send_at: Option<i64>,
}

impl New<'_> {
    pub(in super::super) async fn insert(&self, conn: &mut Conn<'_>, now: i64) -> Result<()> {
        on!(conn, c => sqlx::query(INSERT).bind(self.tenant).bind(self.id).bind(self.filename).bind(self.content_hash)
            .bind(self.content_bytes).bind(self.storage_url).bind(&self.message).bind(self.message_hash)
            .bind(self.message_domain).bind(self.policy).bind(self.shape).bind(self.address_column).bind(self.send_at).bind(now)
            .execute(&mut **c).await.map(drop).map_err(broken))
    }
}

const PAGE: &str = mailing!(
    "WHERE tenant = $1 AND deleted_at IS NULL AND ($2 = 0 OR number < $2) AND ($3 = '' OR status = $3)
       AND ($4 = '' OR filename = $4)
     ORDER BY number DESC LIMIT $5"
);

/// A page of mailings, newest first.
pub(in super::super) async fn page(
    conn: &mut Conn<'_>,
    tenant: &str,
    status: &str,
    filename: &str,
    place: Place,
) -> Result<Vec<Mailing>> {
    on!(conn, c => sqlx::query_as(PAGE).bind(tenant).bind(place.after).bind(status).bind(filename)
        .bind(place.limit + 1).fetch_all(&mut **c).await.map_err(broken))
}

// A mailing that runs or waits as it should is found by its operation and left out here: a round reads only the others.
const LOST: &str = "
    SELECT m.tenant, m.id FROM mailings AS m
    LEFT JOIN semel_operations AS o
      ON o.tenant = m.tenant AND o.service = 'mailings' AND o.kind = 'run'
         AND o.key = m.id || '/' || CAST(m.run AS TEXT)
    LEFT JOIN semel_leases AS l ON l.operation = o.id
    WHERE (m.active OR m.task IS NOT NULL) AND m.deleted_at IS NULL
      AND CASE WHEN m.status = 'PROCESSING'
               THEN o.id IS NULL OR m.last_attempt IS NULL OR o.state = 'timed_out'
                    OR (o.state = 'processing' AND (l.deadline IS NULL OR l.deadline < $1))
               ELSE m.updated_at < $2 AND (o.id IS NULL OR NOT m.active) AND (m.active OR m.status = 'CANCELLED') END
    ORDER BY m.number LIMIT $3";

/// Mailings of all tenants that have no run, or a lost one: those that are PROCESSING, and others that have not changed
/// since `before`. Also a cancelled one whose run failed before all its entries were cancelled.
pub(in super::super) async fn lost(
    conn: &mut Conn<'_>,
    now: i64,
    before: i64,
    most: i64,
) -> Result<Vec<(String, String)>> {
    on!(conn, c => sqlx::query_as(LOST).bind(now).bind(before).bind(most).fetch_all(&mut **c).await.map_err(broken))
}

const SAVE: &str = "
    UPDATE mailings
    SET status = $2, phase = $3, error = $4, run = $5, active = $6, place = $7, last_line = $8, in_flight = $9,
        task = $10, task_line = $11, total = $12, sending = $13, sent = $14, failed = $15, invalid = $16,
        suppressed = $17, cancelled = $18, in_doubt = $19, duplicate_rows = $20, rejected_rows = $21, rate_since = $22,
        rate_base = $23, last_attempt = $24, list_hash = $25, storage_url = $26, updated_at = $27, send_at = $28,
        waiting = $29, in_flight_by = $30, blank_rows = $31, plus_tags = $32, mixed_scripts = $33
    WHERE number = $1";

/// Stores the changed columns of a mailing that this transaction has locked.
pub(in super::super) async fn save(conn: &mut Conn<'_>, m: &Mailing, now: i64) -> Result<()> {
    on!(conn, c => sqlx::query(SAVE).bind(m.number).bind(&m.status).bind(&m.phase).bind(&m.error).bind(m.run)
        .bind(m.active).bind(&m.place).bind(m.last_line).bind(&m.in_flight).bind(&m.task).bind(m.task_line)
        .bind(m.total).bind(m.sending).bind(m.sent).bind(m.failed).bind(m.invalid).bind(m.suppressed).bind(m.cancelled)
        .bind(m.in_doubt).bind(m.duplicate_rows).bind(m.rejected_rows).bind(m.rate_since).bind(m.rate_base)
        .bind(m.last_attempt).bind(&m.list_hash).bind(&m.storage_url).bind(now)
        .bind(m.send_at).bind(m.waiting).bind(&m.in_flight_by)
        .bind(m.blank_rows).bind(m.plus_tags).bind(m.mixed_scripts)
        .execute(&mut **c).await.map(drop).map_err(broken))
}

const DELETE: &str = "UPDATE mailings SET deleted_at = $2, updated_at = $2 WHERE number = $1";

/// Hides a mailing; the sweep removes its rows.
pub(in super::super) async fn delete(conn: &mut Conn<'_>, number: i64, now: i64) -> Result<()> {
    on!(conn, c => sqlx::query(DELETE).bind(number).bind(now).execute(&mut **c).await.map(drop).map_err(broken))
}

const DELETED: &str = "
    SELECT number, id FROM mailings WHERE deleted_at IS NOT NULL AND number > $1 ORDER BY number LIMIT $2";

/// Mailings after one whose rows are to be removed: their numbers and ids.
pub(in super::super) async fn deleted(conn: &mut Conn<'_>, after: i64, most: i64) -> Result<Vec<(i64, String)>> {
    on!(conn, c => sqlx::query_as(DELETED).bind(after).bind(most).fetch_all(&mut **c).await.map_err(broken))
}

// Differs because SQLite has no row locks: there is one writer.
const LOCK_DELETED_POSTGRES: &str = "
    SELECT number FROM mailings WHERE number = $1 AND deleted_at IS NOT NULL FOR UPDATE SKIP LOCKED";

// The links in mails that may have been sent work for another 60 days: people unsubscribe by old mails, too. The law of
// the United States (CAN-SPAM) demands 30.
const KEEP_LINKS: &str = "
    INSERT INTO mailing_links (mailing, line, token, tenant, email, until)
    SELECT e.mailing, e.line, e.token, m.tenant, e.email, m.deleted_at + 5184000000000
    FROM mailing_entries AS e JOIN mailings AS m ON m.number = e.mailing
    WHERE e.mailing = $1 AND e.mail_date IS NOT NULL AND e.status NOT IN ('INVALID', 'SUPPRESSED')
      AND e.line IN (SELECT line FROM mailing_entries WHERE mailing = $1 ORDER BY line LIMIT $2)";
const REMOVE_ENTRIES: &str = "
    DELETE FROM mailing_entries WHERE mailing = $1
      AND line IN (SELECT line FROM mailing_entries WHERE mailing = $1 ORDER BY line LIMIT $2)";
const REMOVE_REJECTS: &str = "
    DELETE FROM mailing_rejects WHERE mailing = $1
      AND line IN (SELECT line FROM mailing_rejects WHERE mailing = $1 ORDER BY line LIMIT $2)";
const REMOVE_DUPLICATES: &str = "
    DELETE FROM mailing_duplicates WHERE mailing = $1
      AND line IN (SELECT line FROM mailing_duplicates WHERE mailing = $1 ORDER BY line LIMIT $2)";
// A mailing whose file is still stored waits for the next round: the sweep removes the file first, and it knows it only
// from here.
const REMOVE: &str = "DELETE FROM mailings WHERE number = $1 AND storage_url IS NULL";

/// Removes some rows of a deleted mailing, the mailing itself last; true if there may be more. The ids of transports
/// stay: another entry must not get one of them.
///
/// One sweeper at a time: a second one would pick rows that the first removes, wait, remove none, and then remove the
/// mailing although it has rows.
pub(in super::super) async fn remove_some(conn: &mut Conn<'_>, number: i64, most: i64) -> Result<bool> {
    if let Conn::Postgres(c) = conn {
        let locked: Option<i64> =
            sqlx::query_scalar(LOCK_DELETED_POSTGRES).bind(number).fetch_optional(&mut **c).await.map_err(broken)?;
        if locked.is_none() {
            return Ok(false);
        }
    }
    on!(&mut *conn, c => sqlx::query(KEEP_LINKS).bind(number).bind(most)
        .execute(&mut **c).await.map(drop).map_err(broken)?);
    for text in [REMOVE_ENTRIES, REMOVE_REJECTS, REMOVE_DUPLICATES] {
        let removed = on!(&mut *conn, c => sqlx::query(text).bind(number).bind(most)
            .execute(&mut **c).await.map(|done| done.rows_affected()).map_err(broken)?);
        if removed > 0 {
            return Ok(true);
        }
    }
    on!(conn, c => sqlx::query(REMOVE).bind(number).execute(&mut **c).await.map_err(broken).map(|_| false))
}

statements!(
    STATUS,
    FIND,
    MESSAGE,
    SHAPE,
    LOCK_POSTGRES,
    LOCK_IF_FREE_POSTGRES,
    SAME_FILE,
    SAME_NAME,
    SAME_CONTENT,
    SAME_LIST,
    TENANT,
    LOCK_TENANT_POSTGRES,
    INSERT,
    PAGE,
    LOST,
    SAVE,
    DELETE,
    DELETED,
    LOCK_DELETED_POSTGRES,
    KEEP_LINKS,
    REMOVE_ENTRIES,
    REMOVE_REJECTS,
    REMOVE_DUPLICATES,
    REMOVE,
);

#[cfg(test)]
mod tests {
    use super::PAGE;

    /// A message has up to 3 MiB, a header 64 KiB, and a page 500 mailings.
    #[test]
    fn a_list_of_mailings_reads_no_messages_and_no_headers_of_files() {
        let read: Vec<&str> = PAGE.split_once(" FROM ").unwrap().0.split([',', ' ', '\n']).collect();
        assert!(read.contains(&"filename"));
        assert!(!read.contains(&"message") && !read.contains(&"shape"), "{read:?}");
    }
}
