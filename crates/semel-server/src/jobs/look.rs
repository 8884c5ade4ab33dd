//! Finds the operations of jobs.

use std::collections::HashMap;

use semel::{
    Key, Operation, Result, Scope,
    look::{Filter, Page},
    prelude::*,
};

use super::{
    Jobs, SERVICE,
    model::{Job, JobId, JobState},
};

/// The most operations that one statement reads.
const PAGE: usize = 500;

/// How many pages a search for jobs in a state reads before it answers with a page that is not full.
const MOST_LOOKS: usize = 20;

pub(super) fn scope(tenant: &str, kind: &str) -> Result<Scope> {
    Scope::new(tenant, SERVICE, kind)
}

pub(super) fn key(id: JobId) -> Result<Key> {
    Key::new(&id.to_string())
}

impl Jobs {
    /// The operation of a tenant's job. The id does not contain the kind, but there are few kinds.
    pub(super) async fn find(&self, tenant: &str, id: JobId) -> Result<Option<Operation>> {
        let store = self.0.ledger.store();
        for kind in store.kinds(tenant, SERVICE, "").await? {
            if let Some(found) = store.by_key(&scope(tenant, &kind)?, &key(id)?).await? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// A tenant's jobs, newest first, and the operation after which the next page begins.
    pub(super) async fn list(
        &self,
        tenant: &str,
        state: Option<JobState>,
        mut after: Option<i64>,
        limit: usize,
    ) -> Result<(Vec<Job>, Option<i64>)> {
        let kinds = self.0.ledger.store().kinds(tenant, SERVICE, "").await?;
        let size = if state.is_some() { PAGE } else { PAGE.min(limit + 1) };
        let mut found = Vec::new();
        for _ in 0..MOST_LOOKS {
            let page = self.page(tenant, &kinds, after, size).await?;
            let is_last = page.len() < size;
            after = page.last().map(|(id, _)| *id);
            let jobs = page.into_iter().filter_map(|(id, job)| Some((id, job?)));
            found.extend(jobs.filter(|(_, job)| state.is_none_or(|state| job.state == state)));
            if is_last || found.len() > limit {
                let more = found.len() > limit;
                found.truncate(limit);
                after = found.last().filter(|_| more).map(|(id, _)| *id);
                break;
            }
        }
        Ok((found.into_iter().map(|(_, job)| job).collect(), after))
    }

    /// The newest operations of these kinds after one, with their jobs; none for an operation that has expired
    /// meanwhile.
    async fn page(
        &self,
        tenant: &str,
        kinds: &[String],
        after: Option<i64>,
        size: usize,
    ) -> Result<Vec<(i64, Option<Job>)>> {
        let store = self.0.ledger.store();
        let limit = u32::try_from(size).unwrap_or(u32::MAX);
        let mut known = Vec::new();
        for kind in kinds {
            let listed = store.list(&Filter::scope(&scope(tenant, kind)?), Page { after, limit }).await?;
            let whole = listed.items.into_iter().map(|op| (op.id, op.key.as_str().to_owned(), op.created_at));
            let damaged = listed.unreadable.into_iter().map(|row| (row.id, row.key, row.created_at));
            known.extend(whole.chain(damaged).map(|(id, key, at)| (id, key, kind.clone(), at)));
        }
        known.sort_unstable_by_key(|(id, ..)| std::cmp::Reverse(*id));
        known.truncate(size);
        let ids: Vec<i64> = known.iter().map(|(id, ..)| *id).collect();
        let loaded = store.loaded(tenant, &ids).await?;
        let mut jobs: HashMap<i64, Result<Job, String>> =
            loaded.items.iter().map(|op| (op.id, Job::of(op).map_err(|error| error.to_string()))).collect();
        jobs.extend(loaded.unreadable.into_iter().map(|row| (row.id, Err(row.why))));
        let mut job = |id, key: &str, kind, at| match jobs.remove(&id)? {
            Ok(job) => Some(job),
            Err(why) => Some(Job::unreadable(JobId::parse(key)?, kind, at, &why)),
        };
        Ok(known.into_iter().map(|(id, key, kind, at)| (id, job(id, &key, kind, at))).collect())
    }
}
