//! Rows of a service that follow its operations.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test that cannot count fails")]

use std::{collections::BTreeMap, time::Duration};

use semel::prelude::*;
use semel_store::{Database, Projection, on};

use super::bank::counted;

/// The operations of [`queue`](super::scenario::queue) have a row each in the table `followers`. It refuses the key
/// `poison`.
pub const FOLLOWERS: Projection = Projection {
    service: "bank",
    kinds: "queue",
    update: "INSERT INTO followers (id, tenant, key, state, due, error, attempt, settled_at)
             SELECT o.id, o.tenant, o.key, o.state, o.due, o.error, o.attempt, o.settled_at FROM {operations} AS o
             WHERE true
             ON CONFLICT (id) DO UPDATE
             SET state = excluded.state, due = excluded.due, error = excluded.error, attempt = excluded.attempt,
                 settled_at = excluded.settled_at",
};

/// Creates their table.
pub async fn make_followers(db: &Database) {
    let tx = db.begin(Duration::from_secs(5)).await.unwrap();
    {
        let mut held = tx.connection().await.unwrap();
        let table = "CREATE TABLE IF NOT EXISTS followers (
                id BIGINT PRIMARY KEY, tenant TEXT NOT NULL, key TEXT NOT NULL, state TEXT NOT NULL, due BIGINT, error TEXT,
                attempt BIGINT NOT NULL, settled_at BIGINT, CONSTRAINT no_poison CHECK (key <> 'poison'))";
        on!(held.get().unwrap(), c => drop(sqlx::raw_sql(table).execute(&mut *c).await.unwrap()));
    }
    assert!(matches!(db.commit(&tx).await, semel::store::Commit::Done));
}

/// Operations whose row differs from them, by state. A claim changes no row: under a lease the row may show the earlier
/// state.
pub async fn disagreements(db: &Database) -> BTreeMap<String, i64> {
    let sql = "SELECT o.state, count(*) FROM semel_operations AS o LEFT JOIN followers AS f ON f.id = o.id
         WHERE o.service = 'bank' AND o.kind LIKE 'queue%' AND CASE o.state
            WHEN 'pending' THEN coalesce(f.state, 'pending') <> 'pending'
            WHEN 'processing' THEN coalesce(f.state, 'pending') IN ('completed', 'in_doubt')
            ELSE coalesce(f.state, '') <> o.state OR f.settled_at <> o.settled_at END
         GROUP BY o.state";
    counted(db, sql).await
}
