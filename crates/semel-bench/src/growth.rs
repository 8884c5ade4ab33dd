//! The cost of a claim and its completion in a small table and in a large one.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::{
    Plan,
    fill::{analyze, checkpoint, fill},
    load::{Figure, drive_after},
    report::{Report, Subject},
    site::{Backend, Site, close},
    work::{claim_and_complete, new_key},
};

/// The number of tasks.
pub(crate) const TASKS: usize = 64;

/// The warm-up: a new connection's cache fills only by use, and that of the large table needs tens of thousands of
/// claims for the upper levels of its indexes alone. Both tables get it.
const WARM_UP: Duration = Duration::from_secs(6);

/// The rows of the small table.
const FEW: i64 = 10_000;

pub(crate) const SMALL: &str = "10 thousand rows";
pub(crate) const LARGE: &str = "large";
pub(crate) const ANALYZED: &str = "large, analyzed";

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let large = Site::fresh(plan, backend).await?;
    let begun = Instant::now();
    fill(&large, plan.rows).await?;
    report.say(format!(
        "{backend}: {} million rows were made in {} s",
        plan.rows / 1_000_000,
        begun.elapsed().as_secs()
    ));
    // Gigabytes of new rows are still being written to the disk.
    rustix::fs::sync();
    for _ in 0..plan.rounds {
        // A measurement adds many times its rows to the small table: each round has a new one.
        let small = Site::fresh(plan, backend).await?;
        fill(&small, FEW).await?;
        report.add(subject(backend, SMALL), run(plan, &small).await?);
        small.remove().await?;
        report.add(subject(backend, LARGE), run(plan, &large).await?);
    }
    analyze(&large).await?;
    report.add(subject(backend, ANALYZED), run(plan, &large).await?);
    large.remove().await
}

fn subject(backend: Backend, how: &'static str) -> Subject {
    Subject { section: "growth", backend, how, tasks: TASKS }
}

async fn run(plan: &Plan, site: &Site) -> Result<Figure> {
    checkpoint(site).await?;
    let ledger = site.ledger(true).await?;
    let asked = ledger.clone();
    let figure = drive_after(WARM_UP, plan, site.cpu, TASKS, move || {
        let ledger = asked.clone();
        async move { claim_and_complete(&ledger, new_key()?).await }
    })
    .await?;
    close(ledger).await;
    Ok(figure)
}
