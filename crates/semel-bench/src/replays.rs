//! Claims of completed keys, next to new claims and their completions.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use anyhow::Result;
use semel::{Key, Ledger};
use semel_store::Database;
use tokio::task::JoinSet;

use crate::{
    Plan,
    load::drive,
    pairs::BATCHED,
    report::{Report, Subject},
    site::{Backend, Site, close},
    work::{claim_and_complete, new_key, replay},
};

/// The number of tasks.
pub(crate) const TASKS: [usize; 2] = [64, 512];

pub(crate) const REPLAYS: &str = "replays";

/// The number of replayed keys, in turn: so many that repeats of a key are rarely flushed together.
const KEYS: usize = 32_768;

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let site = Site::fresh(plan, backend).await?;
    let ledger = site.ledger(true).await?;
    let keys = Arc::new(completed(&ledger).await?);
    for _ in 0..plan.rounds {
        for tasks in TASKS {
            if plan.wants(BATCHED, tasks) {
                let asked = ledger.clone();
                let figure = drive(plan, site.cpu, tasks, move || {
                    let ledger = asked.clone();
                    async move { claim_and_complete(&ledger, new_key()?).await }
                })
                .await?;
                report.add(Subject { section: "replays", backend, how: BATCHED, tasks }, figure);
                site.tidy(&ledger).await?;
            }
            if !plan.wants(REPLAYS, tasks) {
                continue;
            }
            let (asked, keys, turn) = (ledger.clone(), keys.clone(), Arc::new(AtomicUsize::new(0)));
            let figure = drive(plan, site.cpu, tasks, move || {
                let (ledger, key) = (asked.clone(), keys[turn.fetch_add(1, Ordering::Relaxed) % KEYS].clone());
                async move { replay(&ledger, key).await }
            })
            .await?;
            report.add(Subject { section: "replays", backend, how: REPLAYS, tasks }, figure);
            site.tidy(&ledger).await?;
        }
    }
    close(ledger).await;
    site.remove().await
}

async fn completed(ledger: &Ledger<Database>) -> Result<Vec<Key>> {
    let keys = (0..KEYS).map(|_| new_key()).collect::<Result<Vec<_>>>()?;
    for some in keys.chunks(1024) {
        let mut running = JoinSet::new();
        for key in some {
            let (ledger, key) = (ledger.clone(), key.clone());
            running.spawn(async move { claim_and_complete(&ledger, key).await });
        }
        while let Some(done) = running.join_next().await {
            done??;
        }
    }
    Ok(keys)
}
