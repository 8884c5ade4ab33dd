//! The SQL of transports' rates, and of the waits that they have asked for.

use semel::{Result, micros};
use semel_store::{Conn, broken, on};

use crate::{services::mailings::mail::verdict::LONGEST_WAIT, sql::statements};

/// Missed starts are caught up within this time only, in microseconds.
const BURST: i64 = 1_000_000;

/// The upsert, with the present time. The next start is at most a moment further away than the rate says: otherwise the
/// clock was set back, or the rate was raised. `granted` is what the last node that asked may begin.
macro_rules! reserve {
    ($now:literal) => {
        concat!(
            "INSERT INTO mail_rates (transport, free_at, granted) VALUES ($1, ", $now, " + $2, 1)
             ON CONFLICT (transport) DO UPDATE
             SET granted = ", reserve!(granted $now), ", free_at = ", reserve!(free_at $now), " + $2 * ",
            reserve!(granted $now), " RETURNING granted, free_at"
        )
    };
    (free_at $now:literal) => {
        concat!(
            "(CASE WHEN mail_rates.free_at > ", $now, " + $2 + 10000000 THEN ", $now,
            " WHEN mail_rates.free_at < ", $now, " - $3 THEN ", $now, " - $3 ELSE mail_rates.free_at END)"
        )
    };
    (granted $now:literal) => {
        concat!(
            "(CASE WHEN ", reserve!(free_at $now), " > ", $now, " THEN 0
                   WHEN (", $now, " - ", reserve!(free_at $now), ") / $2 + 1 < $4
                   THEN (", $now, " - ", reserve!(free_at $now), ") / $2 + 1 ELSE $4 END)"
        )
    };
}

// Differs because PostgreSQL has a clock of its own, which all nodes share.
const RESERVE_POSTGRES: &str = reserve!("CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS BIGINT)");
const RESERVE_SQLITE: &str = reserve!("$5");

/// Reserves up to `most` mails of a transport that sends one `every` so many microseconds. Returns how many may begin
/// now, and from when on the next is free.
pub(in super::super) async fn reserve(
    conn: &mut Conn<'_>,
    transport: &str,
    every: i64,
    most: i64,
    now: i64,
) -> Result<(i64, i64)> {
    match conn {
        Conn::Postgres(c) => {
            let reserve = sqlx::query_as(RESERVE_POSTGRES).bind(transport).bind(every).bind(BURST).bind(most);
            reserve.fetch_one(&mut **c).await.map_err(broken)
        }
        Conn::Sqlite(c) => {
            let reserve = sqlx::query_as(RESERVE_SQLITE).bind(transport).bind(every).bind(BURST).bind(most).bind(now);
            reserve.fetch_one(&mut **c).await.map_err(broken)
        }
    }
}

const HOLD: &str = "
    INSERT INTO mail_rates (transport, free_at, granted, held_until, held_why) VALUES ($1, 0, 0, $2, $3)
    ON CONFLICT (transport) DO UPDATE SET held_until = $2, held_why = $3";

/// Nothing is to be given to a transport until then.
pub(in super::super) async fn hold(conn: &mut Conn<'_>, transport: &str, until: i64, why: &str) -> Result<()> {
    on!(conn, c => sqlx::query(HOLD).bind(transport).bind(until).bind(why)
        .execute(&mut **c).await.map(drop).map_err(broken))
}

// A time that is further away than any wait was stored before the clock was set back.
const HELD: &str = "
    SELECT held_until, held_why FROM mail_rates WHERE transport = $1 AND held_until > $2 AND held_until <= $2 + $3";

/// Until when nothing is to be given to a transport, and why.
pub(in super::super) async fn held(conn: &mut Conn<'_>, transport: &str, now: i64) -> Result<Option<(i64, String)>> {
    on!(conn, c => sqlx::query_as(HELD).bind(transport).bind(now).bind(micros(LONGEST_WAIT))
        .fetch_optional(&mut **c).await.map_err(broken))
}

statements!(RESERVE_POSTGRES, RESERVE_SQLITE, HOLD, HELD);
