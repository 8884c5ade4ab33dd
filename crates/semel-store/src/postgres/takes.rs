//! First runs of enqueued operations, in one statement for each kind and tenant.
//!
//! Differs from SQLite because here the general path is six statements, each a round trip with locks held.

use std::collections::HashMap;

use semel::{
    LeaseRow, Result,
    machine::Answer,
    micros,
    store::{Applied, Take, Want},
};
use sqlx::PgConnection;

use super::{Postgres, hot};
use crate::{connection::read_failed, project::Tables, rows::Read, take::Picked};

impl Postgres {
    /// Takes locked rows, as far as they are first runs: the index of the want, and the answer of the claim. `None` if
    /// one of them is unreadable: the transaction must be rolled back then.
    pub(crate) async fn take_first(
        &self,
        conn: &mut PgConnection,
        take: &Take,
        sql: &Tables,
        picked: &[Picked],
    ) -> Result<Option<Vec<(usize, Applied)>>> {
        let mut taken = Vec::with_capacity(picked.len());
        for (n, want) in take.wants.iter().enumerate().filter(|(_, want)| is_plain(want, sql)) {
            let ids: Vec<i64> = picked.iter().filter(|picked| picked.want == n).map(|picked| picked.id).collect();
            if ids.is_empty() {
                continue;
            }
            let (mut operations, unreadable) = Read::sorted(self.take_of(conn, take, want, ids).await?);
            if !unreadable.is_empty() {
                return Ok(None);
            }
            // In the order in which they were picked: by priority.
            let place: HashMap<i64, usize> = picked.iter().enumerate().map(|(n, picked)| (picked.id, n)).collect();
            operations.sort_by_key(|op| place.get(&op.id).copied());
            for mut op in operations {
                let (now, policy) = (op.claimed_at, want.policy.clone());
                op.lease = Some(LeaseRow {
                    token: take.token,
                    deadline: now + policy.lease,
                    run_until: now + policy.max_run,
                    terms: policy,
                    cancelled: false,
                });
                taken.push((n, Applied { answer: Answer::Acquired, operation: Some(op), now }));
            }
        }
        Ok(Some(taken))
    }

    async fn take_of(&self, conn: &mut PgConnection, take: &Take, want: &Want, ids: Vec<i64>) -> Result<Vec<Read>> {
        let policy = &want.policy;
        let taken = sqlx::query_as(hot::TAKE)
            .bind(ids)
            .bind(&take.owner)
            .bind(policy.pinned)
            .bind(policy.retention.into_iter().chain(policy.tombstone).min().map(micros))
            .bind(&take.token.0[..])
            .bind(micros(policy.lease))
            .bind(micros(policy.max_run))
            .bind(policy.retention.map(micros))
            .bind(policy.tombstone.map(micros))
            .bind(policy.to_terms())
            .bind(self.clock.fixed());
        taken.fetch_all(conn).await.map_err(read_failed)
    }
}

/// Whether first runs can be claimed under this policy without the state machine, and no row of a service follows them.
fn is_plain(Want { scope, policy, .. }: &Want, sql: &Tables) -> bool {
    policy.max_attempts != Some(0) && policy.max_crashes > 0 && !sql.projections.follow(scope)
}
