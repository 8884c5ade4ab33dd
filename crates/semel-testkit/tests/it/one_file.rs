//! Several processes on one SQLite file.

use std::time::Duration;

use semel_testkit::{
    Kind,
    faults::{Mode, Order, Told, worker::policy},
};

use crate::support::Site;

/// The operations that a worker completed, each of which took two commits.
fn completed(told: &[Told]) -> usize {
    told.iter().filter(|told| matches!(told, Told::Ended { how, .. } if how == "completed")).count()
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
    tokio::time::sleep(Duration::from_secs(4)).await;
    let mut done = Vec::new();
    for worker in &mut workers {
        done.push(completed(&worker.told_so_far()));
    }
    for worker in workers {
        let told = worker.stop().await;
        let broke: Vec<_> = told.iter().filter(|told| matches!(told, Told::Broke { .. })).collect();
        assert!(broke.is_empty(), "{broke:?}");
    }
    let (least, all) = (done.iter().min().unwrap(), done.iter().sum::<usize>());
    println!("{done:?}");
    assert!(all >= 20, "too few to tell: {done:?}");
    assert!(least * 5 >= all, "one of them got less than a fifth: {done:?}");
}
