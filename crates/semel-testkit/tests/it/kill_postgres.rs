//! PostgreSQL is killed and restarted under load, and every acknowledged commit is there.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use semel::{OnLost, Policy, State};
use semel_testkit::faults::{Mode, Order, Process, Report, Server, effect_rows, torture, worker::policy};

use crate::support::{Site, acknowledged, errors, lost_leases};

/// Free again soon, and long enough for the server to come back.
const LEASE: Duration = Duration::from_secs(3);

/// Concurrent runs of each mode per worker.
const TASKS: usize = 8;

const MODES: [Mode; 2] = [Mode::Atomic, Mode::Leased];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_postgres_under_load_loses_nothing_acknowledged() {
    let server = Server::start("");
    let site = Site::at(&server.url()).await;
    let mut workers = vec![site.worker().await, site.worker().await];
    for (n, worker) in workers.iter_mut().enumerate() {
        for mode in MODES {
            let on_lost = if mode == Mode::Atomic { OnLost::Rerun } else { OnLost::Hold };
            let terms = Policy { on_lost, ..policy(LEASE) }.to_terms();
            worker.order(&Order::Pump { prefix: format!("{mode:?}-{n}"), tasks: TASKS, terms, mode }).await;
        }
    }
    let mut reports = Vec::new();
    let kills = if torture() { 30 } else { 3 };
    for round in 0..kills {
        until_they_work(&mut workers, &mut reports).await;
        match round % 3 {
            1 => server.kill(),
            _ => server.crash(),
        }
        server.restart();
    }
    // Without any order: they continue by themselves.
    until_they_work(&mut workers, &mut reports).await;
    for worker in workers {
        reports.extend(worker.stop().await);
    }
    check(&site, &reports, 2 * TASKS * kills).await;
}

/// Waits until each worker has completed some operations in each mode since now, up to a limit.
pub(crate) async fn until_they_work(workers: &mut [Process], reports: &mut Vec<Report>) {
    for worker in &mut *workers {
        reports.extend(worker.reports_so_far());
    }
    for worker in workers {
        let mut left: BTreeMap<&str, usize> = BTreeMap::from([("Atomic", 300), ("Leased", 300)]);
        while left.values().any(|left| *left > 0) {
            let one = worker.next().await.expect("a worker has ended");
            if let Report::Ended { key, how, .. } = &one
                && how == "completed"
                && let Some(left) = left.get_mut(key.split('-').next().unwrap())
            {
                *left = left.saturating_sub(1);
            }
            reports.push(one);
        }
    }
}

/// Checks the guarantees. A kill of the server leaves only the runs of that moment in doubt; a lease that was lost on a
/// busy machine is reported, and leaves a doubt as well.
pub(crate) async fn check(site: &Site, reports: &[Report], most_in_doubt: usize) {
    for error in errors(reports) {
        assert!(matches!(error, Report::Broke { transient: true, .. }), "{error:?}");
    }
    // A repeated claim of an acknowledged key gets the acknowledged outcome.
    let outcomes = acknowledged(reports);
    assert_eq!(site.replay(outcomes.keys()).await, outcomes);
    let operations = site.operations().await;
    let completed = |prefix: &'static str| {
        let all = operations.iter().filter(move |(key, op)| key.starts_with(prefix) && op.state == State::Completed);
        all.map(|(key, _)| key.clone()).collect::<BTreeSet<String>>()
    };
    let lost = lost_leases(reports);
    let doubted = operations.iter().filter(|(key, op)| op.state == State::InDoubt && !lost.contains(*key)).count();
    assert!(
        doubted <= most_in_doubt,
        "{doubted} are in doubt, and at most {most_in_doubt} ran when the server was killed"
    );
    let rows = effect_rows(&site.db).await;
    assert!(rows.values().all(|rows| *rows == 1), "an operation took effect twice in the database");
    assert_eq!(
        rows.keys().cloned().collect::<BTreeSet<_>>(),
        completed("Atomic"),
        "rows without a completion, or the reverse"
    );
    let effects = site.bank.by_key();
    assert!(effects.values().all(|effects| *effects == 1), "an operation took effect twice outside");
    assert!(completed("Leased").iter().all(|key| effects.contains_key(key)));
    site.check_counters().await;
    println!("{} acknowledged operations, {} transient errors", outcomes.len(), errors(reports).len());
}
