//! The epoch keeps fences growing when the server's sequence goes back.
//!
//! A fence is an epoch (20 bits) above the number of a sequence (43 bits). The sequence goes back when a lagging
//! standby is promoted, and restarts after a logical replication of rows. So the epoch is a row of the database, with
//! the server that it was last used on. Every new connection compares that with the server it has reached:
//!
//! - another timeline (a promotion), or another system identifier (`pg_upgrade`, a restored dump, a logical migration):
//!   the epoch is raised, in a short transaction, before this connection draws a fence;
//! - ids above the next number of the sequence: the same;
//! - a server without a readable identity: the stored epoch counts.
//!
//! Statements read the epoch from its row, so a raised epoch applies to the next statement of every connection.

use semel::{Error, Fence, Result};
use sqlx::{PgConnection, Row as _, postgres::PgRow};

use super::{begin, commit};
use crate::connection::{READ_ONLY, broken};

/// A new fence.
macro_rules! next_fence {
    () => {
        "((SELECT epoch FROM semel_epoch WHERE one) << 43) + nextval('semel_fence')"
    };
}
pub(crate) use next_fence;

/// The sequence has the bits below.
const SHIFT: u32 = Fence::COUNTER_BITS;

/// Read on every new connection: the server, the stored epoch, the highest id and the sequence. The snapshot is older
/// than the reading of the sequence, so no id in it can be above the sequence unless the sequence went back.
const SEE: &str = "SELECT pg_is_in_recovery() AS standby, c.system, c.timeline, e.epoch, e.system AS known_system,
            e.timeline AS known_timeline, coalesce((SELECT max(id) FROM semel_operations), 0) AS highest,
            (SELECT last_value FROM semel_fence) AS last
     FROM semel_cluster() AS c LEFT JOIN semel_epoch AS e ON TRUE";

/// The highest fence. This scans whole tables, and is used only if the stored epoch is not sufficient: before there is
/// one, or if rows came without their sequence.
const HIGHEST: &str =
    "SELECT greatest((SELECT max(fence) FROM semel_operations), (SELECT max(token) FROM semel_outbox),
                    (SELECT max(token) FROM semel_queue), (SELECT max(token) FROM semel_retries), 0)";

/// Checks the server of a new connection, and raises the epoch if it is another one. Otherwise it costs one read.
pub(super) async fn check(conn: &mut PgConnection) -> Result<()> {
    let seen = see(conn).await?;
    if seen.standby {
        return Err(standby());
    }
    if seen.stored == Some(next(&seen)) {
        return Ok(());
    }
    begin(conn).await?;
    // One node at a time decides. Readers, and so all statements that draw fences, continue.
    sqlx::raw_sql("LOCK TABLE semel_epoch IN SHARE ROW EXCLUSIVE MODE").execute(&mut *conn).await.map_err(broken)?;
    let mut seen = see(conn).await?;
    if seen.stored.is_none() || seen.is_behind() {
        let highest: i64 = sqlx::query_scalar(HIGHEST).fetch_one(&mut *conn).await.map_err(broken)?;
        seen.highest = seen.highest.max(highest);
    }
    let (before, now) = (seen.stored, next(&seen));
    if before != Some(now) {
        sqlx::query(
            "INSERT INTO semel_epoch (epoch, system, timeline) VALUES ($1, $2, $3)
             ON CONFLICT (one) DO UPDATE SET epoch = $1, system = $2, timeline = $3",
        )
        .bind(now.epoch)
        .bind(now.server.map(|server| server.system))
        .bind(now.server.map(|server| server.timeline))
        .execute(&mut *conn)
        .await
        .map_err(broken)?;
    }
    commit(conn).await?;
    if let Some(before) = before.filter(|before| before.epoch != now.epoch) {
        tracing::warn!(?before, ?now, "another PostgreSQL server, or another timeline: new fences are in a new epoch");
    }
    Ok(())
}

pub(super) fn standby() -> Error {
    Error::Unavailable(format!("{READ_ONLY}: this server is a standby and cannot write"))
}

async fn see(conn: &mut PgConnection) -> Result<Seen> {
    let row = sqlx::raw_sql(SEE).fetch_one(conn).await.map_err(broken)?;
    Seen::read(&row).map_err(broken)
}

/// The server, as far as its identity is readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Server {
    system: i64,
    timeline: i64,
}

impl Server {
    /// Only if both are known: some servers have an identifier per node, and no timeline.
    fn known(system: Option<i64>, timeline: Option<i64>) -> Option<Self> {
        Some(Self { system: system?, timeline: timeline? })
    }
}

/// The stored epoch, and the server that it was last used on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stored {
    epoch: i64,
    server: Option<Server>,
}

struct Seen {
    standby: bool,
    server: Option<Server>,
    stored: Option<Stored>,
    /// The highest id, or the highest fence if that was requested.
    highest: i64,
    /// The last number of the sequence.
    last: i64,
}

impl Seen {
    fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let server = Server::known(row.try_get("system")?, row.try_get("timeline")?);
        let known = Server::known(row.try_get("known_system")?, row.try_get("known_timeline")?);
        let epoch: Option<i64> = row.try_get("epoch")?;
        Ok(Self {
            standby: row.try_get("standby")?,
            server,
            stored: epoch.map(|epoch| Stored { epoch, server: known }),
            highest: row.try_get("highest")?,
            last: row.try_get("last")?,
        })
    }

    /// Whether there are ids above the next ones of the stored epoch and the sequence.
    fn is_behind(&self) -> bool {
        self.stored.is_some_and(|stored| self.is_below(stored.epoch))
    }

    fn is_below(&self, epoch: i64) -> bool {
        self.highest > (epoch << SHIFT) + self.last
    }
}

/// The row to store before the next fence is drawn. Its epoch is never lower than the one before.
fn next(seen: &Seen) -> Stored {
    let shown = seen.highest >> SHIFT;
    let Some(stored) = seen.stored else {
        // Versions before this one used the timeline itself. They may still run beside this one, so their epoch is kept
        // if it is high enough.
        let epoch = seen.server.map_or(0, |server| server.timeline - 1);
        let epoch = if seen.is_below(epoch) { shown + 1 } else { epoch };
        return Stored { epoch, server: seen.server };
    };
    let steps = match (stored.server, seen.server) {
        // By the number of promotions: a server whose row was lost may have used the next epoch.
        (Some(known), Some(here)) if known.system == here.system && known != here => {
            (here.timeline - known.timeline).max(1)
        }
        (Some(known), Some(here)) if known != here => here.timeline.max(1),
        _ => i64::from(seen.is_behind()),
    };
    let epoch = if steps == 0 { stored.epoch } else { stored.epoch.max(shown) + steps };
    Stored { epoch, server: seen.server.or(stored.server) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Server = Server { system: 7, timeline: 3 };

    fn seen(stored: Option<(i64, Option<(i64, i64)>)>, highest: (i64, i64)) -> Seen {
        let server = |(system, timeline)| Server { system, timeline };
        let stored = stored.map(|(epoch, known)| Stored { epoch, server: known.map(server) });
        Seen { standby: false, server: Some(HERE), stored, highest: (highest.0 << SHIFT) + highest.1, last: 10 }
    }

    #[test]
    fn the_epoch_is_raised_with_the_server_and_never_lowered() {
        // The stored epoch, system and timeline; the highest fence (epoch, number); the new epoch. The server has
        // system 7 and timeline 3, and its sequence is at 10.
        for (stored, highest, epoch) in [
            (Some((2, Some((7, 3)))), (2, 10), 2),
            (Some((0, Some((7, 3)))), (0, 0), 0),
            // Promoted once since; twice since; a timeline that went back.
            (Some((1, Some((7, 2)))), (1, 10), 2),
            (Some((5, Some((7, 1)))), (5, 10), 7),
            (Some((5, Some((7, 4)))), (5, 10), 6),
            // Another system: by as many as it was promoted, and one.
            (Some((5, Some((8, 1)))), (5, 10), 8),
            // Ids above the sequence, or above the epoch.
            (Some((2, Some((7, 3)))), (2, 11), 3),
            (Some((2, Some((7, 3)))), (4, 1), 5),
            (Some((5, Some((8, 1)))), (9, 1), 12),
            // A server whose identity was unreadable, and is readable now.
            (Some((5, None)), (5, 10), 5),
            // From before there was a row: the timeline, if that is high enough.
            (None, (0, 0), 2),
            (None, (2, 10), 2),
            (None, (2, 11), 3),
            (None, (6, 1), 7),
        ] {
            let next = next(&seen(stored, highest));
            assert_eq!((next.epoch, next.server), (epoch, Some(HERE)), "{stored:?} {highest:?}");
        }
    }

    #[test]
    fn a_server_without_identity_keeps_the_epoch() {
        let silent = |stored, highest| Seen { server: None, ..seen(stored, highest) };
        for (stored, highest, epoch) in [
            (Some((5, Some((7, 3)))), (5, 10), 5),
            (Some((5, None)), (5, 10), 5),
            (Some((5, None)), (6, 1), 7),
            (None, (0, 10), 0),
            (None, (3, 1), 4),
        ] {
            let seen = silent(stored, highest);
            let next = next(&seen);
            assert_eq!((next.epoch, next.server), (epoch, seen.stored.and_then(|stored| stored.server)));
        }
    }
}
