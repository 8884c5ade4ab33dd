//! Several processes on one SQLite file.

use std::time::{Duration, Instant};

use semel_testkit::{
    Kind,
    faults::{Mode, Order, Report, worker::policy},
};

use crate::support::{Site, troubled};

/// The operations that a worker completed, each of which took two commits.
fn completed(reports: &[Report]) -> usize {
    reports.iter().filter(|reports| matches!(reports, Report::Ended { how, .. } if how == "completed")).count()
}

fn pump(prefix: &str, tasks: usize) -> Order {
    let terms = policy(Duration::from_secs(30)).to_terms();
    Order::Pump { prefix: prefix.to_owned(), tasks, terms, mode: Mode::Leased }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_that_write_all_the_time_share_the_file_fairly() {
    let site = Site::new(Kind::Sqlite).await;
    let mut workers = [site.worker().await, site.worker().await];
    for (worker, prefix) in workers.iter_mut().zip(["a", "b"]) {
        worker.order(&pump(prefix, 16)).await;
    }
    // For a while, and until there are enough: a slow disk completes few in that time.
    let (mut begun, mut done) = (None, [0, 0]);
    let patience = Instant::now() + Duration::from_secs(120);
    while done.iter().sum::<usize>() < 400
        || begun.is_none_or(|begun: Instant| begun.elapsed() < Duration::from_secs(2))
    {
        assert!(Instant::now() < patience, "too few to tell: {done:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
        for (worker, done) in workers.iter_mut().zip(&mut done) {
            let reports = worker.reports_so_far();
            troubled(&reports, "a busy file is waited for");
            *done += completed(&reports);
        }
        // Counted from when both are at work.
        if begun.is_none() && done.iter().all(|done| *done > 0) {
            (begun, done) = (Some(Instant::now()), [0, 0]);
        }
    }
    for worker in workers {
        troubled(&worker.stop().await, "a busy file is waited for");
    }
    let (least, all) = (done.iter().min().unwrap(), done.iter().sum::<usize>());
    println!("{done:?}");
    assert!(least * 5 >= all, "one of them got less than a fifth: {done:?}");
}
