//! The relay's loop: takes, publishes, marks. `semel-testkit` tests it with real databases.

mod memory;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use semel::{
    Uptime,
    messaging::{BrokerHealth, Mark, Published, Relay, RelayOptions},
};
use tokio::{sync::watch, task::JoinHandle};

use self::memory::{Memory, Script};

fn confirmed(n: usize) -> Vec<Published> {
    vec![Published::Confirmed; n]
}

/// A relay that looks only when it is woken.
fn start(memory: &Memory, script: &Arc<Script>, options: RelayOptions) -> (watch::Sender<bool>, JoinHandle<()>) {
    let (stop, stopped) = watch::channel(false);
    let options = RelayOptions { poll: Duration::from_secs(3600), ..options };
    (stop, tokio::spawn(Relay::new(memory.clone(), script.clone(), options).run(stopped)))
}

async fn stop((stop, task): (watch::Sender<bool>, JoinHandle<()>)) {
    stop.send_replace(true);
    tokio::time::timeout(Duration::from_secs(20), task).await.expect("it should have stopped long ago").unwrap();
}

async fn eventually(is_so: impl Fn() -> bool) {
    let so = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), so).await.expect("this should have happened long ago");
}

#[tokio::test]
async fn an_idle_relay_asks_for_nothing_until_it_is_woken() {
    let memory = Memory::new();
    let script = Script::new(|_, batch, _| async move { confirmed(batch.len()) });
    let running = start(&memory, &script, RelayOptions::default());
    eventually(|| memory.state().tends == 1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let takes = memory.state().takes.len();
    assert!(takes <= 2, "{takes} takes of an empty outbox");
    memory.fill(3);
    eventually(|| memory.sent() == 3).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(memory.state().takes.len() <= takes + 2);
    stop(running).await;
}

#[tokio::test]
async fn no_more_batches_are_on_their_way_than_may_be() {
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let script = Script::new({
        let (now, most) = (now.clone(), most.clone());
        move |_, batch, _| {
            let (now, most) = (now.clone(), most.clone());
            async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(5)).await;
                now.fetch_sub(1, Ordering::SeqCst);
                confirmed(batch.len())
            }
        }
    });
    let memory = Memory::new();
    memory.fill(100);
    let running = start(&memory, &script, RelayOptions { batch: 5, in_flight: 3, ..RelayOptions::default() });
    eventually(|| memory.sent() == 100).await;
    stop(running).await;
    assert_eq!(most.load(Ordering::SeqCst), 3, "as many as may be, and no more");
}

/// While a mark is in flight, answered batches wait for the next one, together.
#[tokio::test]
async fn batches_that_are_done_share_a_mark() {
    let memory = Memory::new();
    let script = Script::new(|_, batch, _| async move { confirmed(batch.len()) });
    let held = memory.marking.clone().acquire_owned().await.unwrap();
    memory.fill(40);
    let running = start(&memory, &script, RelayOptions { batch: 5, in_flight: 4, ..RelayOptions::default() });
    eventually(|| *script.calls.lock().unwrap() == 8).await;
    drop(held);
    eventually(|| memory.sent() == 40).await;
    stop(running).await;
    let marks = memory.state().marked.len();
    assert!(marks < 8, "{marks} marks for 8 batches");
}

/// Batches that wait for confirmations are renewed, all in one statement per round; batches that are marked at once are
/// not.
#[tokio::test]
async fn batches_that_wait_for_confirmations_are_renewed_together() {
    let memory = Memory::new();
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let script = Script::new({
        let gate = gate.clone();
        move |_, batch, _| {
            let gate = gate.clone();
            async move {
                drop(gate.acquire().await);
                confirmed(batch.len())
            }
        }
    });
    memory.fill(10);
    let lease = Duration::from_millis(500);
    let running = start(&memory, &script, RelayOptions { batch: 5, in_flight: 2, lease, ..RelayOptions::default() });
    // Several times the lease.
    eventually(|| memory.state().holds.iter().filter(|rows| **rows == 10).count() >= 10).await;
    assert_eq!((*script.calls.lock().unwrap(), memory.sent()), (2, 0), "nothing is published again meanwhile");
    gate.close();
    eventually(|| memory.sent() == 10).await;
    stop(running).await;

    let (memory, script) = (Memory::new(), Script::new(|_, batch, _| async move { confirmed(batch.len()) }));
    memory.fill(50);
    let running = start(&memory, &script, RelayOptions { batch: 5, ..RelayOptions::default() });
    eventually(|| memory.sent() == 50).await;
    stop(running).await;
    assert!(memory.state().holds.is_empty(), "a batch that is marked at once costs no renewal");
}

#[tokio::test]
async fn a_mark_is_retried_while_the_store_is_unavailable() {
    let memory = Memory::new();
    memory.state().refuse_marks = 4;
    memory.fill(3);
    let script = Script::new(|_, batch, _| async move { confirmed(batch.len()) });
    let running = start(&memory, &script, RelayOptions::default());
    eventually(|| memory.sent() == 3).await;
    stop(running).await;
    assert_eq!(*script.calls.lock().unwrap(), 1, "and nothing is published again");
}

#[tokio::test]
async fn a_row_that_cannot_be_marked_spoils_none_of_the_others() {
    let memory = Memory::new();
    memory.state().bad_row = Some(4);
    memory.fill(9);
    let script = Script::new(|_, batch, _| async move { confirmed(batch.len()) });
    let running = start(&memory, &script, RelayOptions::default());
    eventually(|| memory.sent() == 8).await;
    stop(running).await;
}

#[tokio::test]
async fn the_broker_is_given_less_time_than_the_lease() {
    let lease = Duration::from_secs(10);
    let memory = Memory::new();
    memory.fill(1);
    let script = Script::new(move |_, batch, until| async move {
        assert!(until < Uptime::now() + lease * 9 / 10 && until > Uptime::now() + lease / 2);
        confirmed(batch.len())
    });
    let running = start(&memory, &script, RelayOptions { lease, ..RelayOptions::default() });
    eventually(|| memory.sent() == 1).await;
    stop(running).await;
}

#[tokio::test]
async fn every_answer_of_the_broker_has_its_mark() {
    let memory = Memory::new();
    memory.fill(5);
    let script = Script::new(|n, batch, _| async move {
        match n {
            1 => vec![
                Published::Confirmed,
                Published::Unroutable("u".into()),
                Published::Refused("r".into()),
                Published::NotSent("n".into()),
                Published::Unknown("?".into()),
            ],
            _ => confirmed(batch.len()),
        }
    });
    let running = start(&memory, &script, RelayOptions::default());
    eventually(|| memory.sent() == 5).await;
    stop(running).await;
    let marks = memory.marks();
    assert!(matches!(marks[0], (1, Mark::Sent)), "{marks:?}");
    assert!(matches!(&marks[1], (2, Mark::Unroutable { error, after }) if error == "u" && after.as_secs() == 60));
    assert!(matches!(&marks[2], (3, Mark::Retry { error, .. }) if error == "r"), "{marks:?}");
    assert!(matches!(marks[3], (4, Mark::PutBack)), "{marks:?}");
    assert!(matches!(&marks[4], (5, Mark::Later { error, .. }) if error == "?"), "{marks:?}");
}

/// A broker that omits answers, or panics, has a bug. Its messages are not lost.
#[tokio::test]
async fn a_missing_answer_is_no_answer() {
    let memory = Memory::new();
    memory.fill(3);
    let script = Script::new(|n, batch, _| async move { confirmed(if n == 1 { 1 } else { batch.len() }) });
    let running = start(&memory, &script, RelayOptions::default());
    eventually(|| memory.sent() == 3).await;
    stop(running).await;
    let later = memory.marks().iter().filter(|(_, mark)| matches!(mark, Mark::Later { .. })).count();
    assert_eq!(later, 2);
}

#[tokio::test]
async fn a_pause_ends_as_soon_as_the_broker_is_there() {
    let memory = Memory::new();
    memory.fill(1);
    let script = Script::new(|n, batch, _| async move {
        match n {
            // By now the delays are long.
            1..=5 => vec![Published::NotSent("no connection".into()); batch.len()],
            _ => confirmed(batch.len()),
        }
    });
    *script.health.lock().unwrap() = BrokerHealth::Down("no connection".into());
    let running = start(&memory, &script, RelayOptions::default());
    eventually(|| *script.calls.lock().unwrap() == 5).await;
    let begun = std::time::Instant::now();
    *script.health.lock().unwrap() = BrokerHealth::Up;
    eventually(|| memory.sent() == 1).await;
    assert!(begun.elapsed() < Duration::from_secs(1), "the pause would have been longer: {:?}", begun.elapsed());
    stop(running).await;
    assert!(memory.marks()[..5].iter().all(|(_, mark)| *mark == Mark::PutBack));
}
