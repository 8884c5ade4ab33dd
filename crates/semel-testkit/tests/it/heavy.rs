//! Many tasks in several processes, and every effect once.

use std::{collections::BTreeMap, time::Duration};

use semel::{OnLost, Policy, State, look::Counted, prelude::*};
use semel_testkit::{
    Kind,
    faults::{Mode, Order, Report, effect_rows, torture, worker::policy},
    scope,
};

use crate::support::{Site, acknowledged, lost_leases, on_both_databases, troubled};

on_both_databases!(heavy_512_tasks_on_100_keys_over_two_processes_make_100_effects);

fn race(keys: &[String], from: usize, tasks: usize, policy: &Policy, mode: Mode) -> Order {
    Order::Race { keys: keys.to_vec(), from, tasks, terms: policy.to_terms(), mode }
}

fn count(reports: &[Report], word: &str) -> usize {
    reports.iter().filter(|reports| matches!(reports, Report::Ended { how, .. } if how == word)).count()
}

async fn heavy_512_tasks_on_100_keys_over_two_processes_make_100_effects(kind: Kind) {
    let keys: Vec<String> = (0..100).map(|n| format!("key-{n}")).collect();
    for mode in [Mode::Leased, Mode::Atomic] {
        let site = Site::new(kind).await;
        let (mut a, mut b) = (site.worker().await, site.worker().await);
        let policy = policy(Duration::from_secs(30));
        a.order(&race(&keys, 0, 256, &policy, mode)).await;
        b.order(&race(&keys, 50, 256, &policy, mode)).await;
        let reports: Vec<Report> = [a.until_done().await, b.until_done().await].concat();
        a.stop().await;
        b.stop().await;

        // A task whose own run ended unknown gets the outcome like the others.
        let troubled = troubled(&reports, &format!("{mode:?}"));
        let (completed, replayed) = (count(&reports, "completed"), count(&reports, "replay"));
        assert_eq!(completed + replayed, 512, "{mode:?}: {reports:?}");
        assert!((100 - troubled.len()..=100).contains(&completed), "{mode:?}: {reports:?}");
        let once: BTreeMap<String, i64> = keys.iter().map(|key| (key.clone(), 1)).collect();
        let effects = match mode {
            // A run with an unknown end may run again, under its policy.
            Mode::Leased => {
                let ran = |(key, n): (String, usize)| match troubled.contains(&key) && n > 1 {
                    true => (key, 1),
                    false => (key, i64::try_from(n).unwrap()),
                };
                site.bank.by_key().into_iter().map(ran).collect()
            }
            Mode::Atomic => effect_rows(&site.db).await,
        };
        assert_eq!(effects, once, "{mode:?}");
        // Every task got the outcome of the one that made it.
        assert_eq!(acknowledged(&reports).len(), 100);
        site.check_counters().await;
        let counts = site.db.counts(scope().tenant(), 0).await.unwrap();
        let replays = counts.iter().filter(|count| count.what == Counted::Answer("replay".into()));
        let counted = replays.map(|count| count.n).sum::<i64>();
        assert_eq!(usize::try_from(counted), Ok(replayed), "each replay is counted once");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_file_shared_by_four_processes() {
    let site = Site::new(Kind::Sqlite).await;
    let tasks = if torture() { 2000 } else { 200 };
    let keys = |mode: Mode| (0..tasks).map(|n| format!("{mode:?}-{n}")).collect::<Vec<String>>();
    // Short leases: the operations of the killed process are free soon.
    let rerun = policy(Duration::from_secs(2));
    let hold = Policy { on_lost: OnLost::Hold, ..rerun.clone() };
    let mut workers = Vec::new();
    for _ in 0..4 {
        workers.push(site.worker().await);
    }
    for (n, worker) in workers.iter_mut().enumerate() {
        worker.order(&race(&keys(Mode::Atomic), n * tasks / 4, tasks, &rerun, Mode::Atomic)).await;
        worker.order(&race(&keys(Mode::Leased), n * tasks / 4, tasks, &hold, Mode::Leased)).await;
    }
    // In the middle of it: the last process has reported some, and not all.
    let mut killed = workers.pop().unwrap();
    let mut reports = Vec::new();
    while reports.len() < tasks / 4 {
        reports.extend(killed.next().await);
    }
    killed.kill().await;
    reports.extend(killed.reports_so_far());
    assert!(reports.len() < 2 * tasks, "it was killed too late");
    // The killed one may have begun the leased tasks whose end it had not reported.
    let ended = |reports: &&Report| matches!(reports, Report::Ended { key, how, .. } if key.starts_with("Leased") && how != "lease_lost");
    let begun = tasks - reports.iter().filter(ended).count();
    for worker in &mut workers {
        reports.extend(worker.until_done().await);
        reports.extend(worker.until_done().await);
    }
    for worker in workers {
        worker.stop().await;
    }

    let once = keys(Mode::Atomic).into_iter().map(|key| (key, 1)).collect();
    assert_eq!(effect_rows(&site.db).await, once);
    let (outcomes, effects, mut lost) = (acknowledged(&reports), site.bank.by_key(), lost_leases(&reports));
    lost.extend(troubled(&reports, "a busy file is waited for"));
    let mut doubted = 0;
    for key in keys(Mode::Leased) {
        let (op, effects) = (site.operation(&key).await, effects.get(&key).copied().unwrap_or(0));
        match op.state {
            State::Completed => assert_eq!(effects, 1, "{key}"),
            // Only what the killed process had begun.
            State::InDoubt => {
                assert!(effects <= 1 && !outcomes.contains_key(&key), "{key}: {effects} effects");
                doubted += usize::from(!lost.contains(&key));
            }
            other => panic!("{key} is {other}"),
        }
    }
    assert!(doubted <= begun, "{doubted} are in doubt, and the killed process had begun {begun} at most");
    site.check_counters().await;
}
