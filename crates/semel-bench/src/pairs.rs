//! New claims and their completions, batched and unbatched; on PostgreSQL with pgbench in between.

use anyhow::Result;

use crate::{
    Plan, limit,
    load::drive,
    report::{Report, Subject},
    site::{Backend, Site, close},
    work::{claim_and_complete, new_key},
};

/// The numbers of tasks.
pub(crate) const TASKS: [usize; 4] = [1, 16, 64, 512];

pub(crate) const BATCHED: &str = "batched";
pub(crate) const UNBATCHED: &str = "unbatched";

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let site = Site::fresh(plan, backend).await?;
    let ledgers = [(BATCHED, site.ledger(true).await?), (UNBATCHED, site.ledger(false).await?)];
    for _ in 0..plan.rounds {
        for tasks in TASKS {
            for (how, ledger) in ledgers.iter().filter(|(how, _)| plan.wants(how, tasks)) {
                let asked = ledger.clone();
                let figure = drive(plan, site.cpu, tasks, move || {
                    let ledger = asked.clone();
                    async move { claim_and_complete(&ledger, new_key()?).await }
                })
                .await?;
                report.add(Subject { section: "pairs", backend, how, tasks }, figure);
                site.tidy(ledger).await?;
            }
        }
        if backend == Backend::Postgres && plan.wants(limit::PGBENCH, limit::CLIENTS) {
            let figure = limit::measure(plan, &site).await?;
            report.add(Subject { section: "pairs", backend, how: limit::PGBENCH, tasks: limit::CLIENTS }, figure);
            site.tidy(&ledgers[0].1).await?;
        }
    }
    for (_, ledger) in ledgers {
        close(ledger).await;
    }
    site.remove().await
}
