//! Signs of life.

use std::time::Duration;

use semel::{
    Error, Result, Timestamp,
    fleet::{NodeSeen, Sign},
    micros,
};

use crate::{
    Database,
    connection::{broken, read_failed},
    on,
};

/// The most nodes that are listed.
const MOST: i64 = 1000;

/// How long the last sign of a dead node is kept.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// Owner, roles, version, kinds, since, seen, now.
type NodeRow = (String, String, String, String, i64, i64, i64);

impl Database {
    pub(super) async fn put_sign(&self, owner: &str, sign: &Sign, since: Option<Timestamp>) -> Result<Timestamp> {
        let (sql, clock) = (self.fleet_sql().leave_sign, self.clock());
        let list = |names: &[String]| serde_json::Value::from(names).to_string();
        let since = self.in_short(async |conn| {
            on!(conn, c => sqlx::query_scalar(sql)
                .bind(owner)
                .bind(list(&sign.roles))
                .bind(&sign.version)
                .bind(list(&sign.kinds))
                .bind(since.map(Timestamp::as_micros))
                .bind(clock)
                .fetch_one(&mut **c).await.map_err(broken))
        });
        Ok(Timestamp::from_micros(since.await?))
    }

    pub(super) async fn delete_sign(&self, owner: &str, since: Timestamp) -> Result<()> {
        let sql = self.fleet_sql().remove_sign;
        self.in_short(async |conn| {
            on!(conn, c => sqlx::query(sql)
                .bind(owner).bind(since.as_micros()).execute(&mut **c).await.map(drop).map_err(broken))
        })
        .await
    }

    /// The nodes with a sign of life within a day, latest first. A node that ended in order is not included.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn nodes(&self) -> Result<Vec<NodeSeen>> {
        let rows = self.read(async |conn| {
            on!(conn, c => sqlx::query_as(self.fleet_sql().nodes).bind(self.clock()).bind(MOST).fetch_all(&mut **c).await)
                .map_err(read_failed)
        });
        let rows: Vec<NodeRow> = self.answered(rows).await?;
        let list = |text: &str| serde_json::from_str(text).map_err(|_| Error::Corrupt("the sign of a node"));
        let node = |(owner, roles, version, kinds, since, seen, now): NodeRow| {
            let sign = Sign { roles: list(&roles)?, version, kinds: list(&kinds)? };
            let [since, seen, now] = [since, seen, now].map(Timestamp::from_micros);
            Ok(NodeSeen { owner, sign, since, seen, age: now.since(seen) })
        };
        rows.into_iter().map(node).collect()
    }

    /// Removes nodes that are long dead. Usually there are none, and the writer of SQLite is not taken.
    pub(crate) async fn forget_nodes(&self, now: Timestamp) -> Result<()> {
        let (sql, before) = (self.fleet_sql(), now.as_micros().saturating_sub(micros(KEPT)));
        let any = self.read(async |conn| {
            on!(conn, c => sqlx::query_scalar(sql.any_gone).bind(before).fetch_optional(&mut **c).await)
                .map_err(read_failed)
        });
        let gone: Option<String> = self.answered(any).await?;
        if gone.is_none() {
            return Ok(());
        }
        self.in_short(async |conn| {
            on!(conn, c => sqlx::query(sql.forget_gone).bind(before).execute(&mut **c).await.map(drop).map_err(broken))
        })
        .await
    }
}
