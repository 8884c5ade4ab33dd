//! Workers in Python that pull operations and are killed at random, and so is their node.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use rustix::process::Signal;
use semel_testkit::faults::torture;
use serde_json::{Value, json};

use crate::{
    operations_api::{Api, with},
    operations_nodes::{kill, start},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{Process, eventually},
};

on_both_databases! {
    pulled_operations_take_effect_once_when_their_workers_are_killed
}

const WORKER: &str = include_str!("operations_puller.py");

/// The workers, and how many operations each holds at most.
const WORKERS: usize = 3;
const HELD: usize = 5;

/// So many mails under rerun, and so many cards under hold; and how many workers are killed meanwhile.
fn size() -> (usize, usize) {
    if torture() { (10_000, 60) } else { (500, 6) }
}

/// After so many workers, their node is killed.
const NODE_AFTER: usize = 4;

/// How long the work may take, even the long version on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// A node and its workers.
struct Site<'a> {
    place: &'a Place,
    node: Api,
    workers: Vec<Process>,
}

impl<'a> Site<'a> {
    fn open(place: &'a Place) -> Self {
        let site = Self { place, node: start(place, &[]), workers: Vec::new() };
        site.tell();
        site
    }

    /// Tells the workers where the node is.
    fn tell(&self) {
        let next = self.place.path("next-address");
        std::fs::write(&next, self.node.server.address.to_string()).unwrap();
        std::fs::rename(next, self.place.path("address")).unwrap();
    }

    fn enqueue(&self, operations: usize) {
        let enqueue = |n: usize| {
            for (name, on_lost) in [("mail", "rerun"), ("card", "hold")] {
                let work = json!({ "operationName": name, "idempotencyKey": format!("k{n}"), "onLost": on_lost });
                self.node.enqueue(&with(&work, json!({ "input": { "n": n } })));
            }
        };
        thread::scope(|scope| {
            for first in 0..8 {
                scope.spawn(move || (first..operations).step_by(8).for_each(enqueue));
            }
        });
    }

    fn start_worker(&mut self) {
        let python = std::env::var_os("SEMEL_TEST_PYTHON")
            .expect("set SEMEL_TEST_PYTHON to what `scripts/python.sh bin` prints, or run `make test`");
        let files = ["address", "notes", "effects"].map(|name| self.place.path(name));
        let mut command = Command::new(python);
        self.workers.push(Process::start(command.args(["-c", WORKER]).args(files).stdin(Stdio::null())));
    }

    /// A worker that was answered what it does not expect has ended.
    fn all_live(&mut self) {
        assert!(self.workers.iter_mut().all(|worker| worker.0.try_wait().unwrap().is_none()), "a worker has failed");
    }

    fn kill_worker(&mut self) {
        self.all_live();
        let mut worker = self.workers.swap_remove(fastrand::usize(..WORKERS));
        worker.signal(Signal::KILL);
        worker.end();
        self.start_worker();
    }

    /// The node dies, and another one begins at another address.
    fn kill_node(&mut self) {
        let next = start(self.place, &[]);
        kill(std::mem::replace(&mut self.node, next));
        self.tell();
    }

    /// All operations of a name with this status.
    fn all(&self, name: &str, status: &str) -> Vec<Value> {
        let (mut all, mut next) = (Vec::new(), String::new());
        loop {
            let page = self.node.get(&format!("?operationName={name}&status={status}&limit=500{next}")).json();
            all.extend(page["items"].as_array().unwrap().iter().cloned());
            match page["next"].as_str() {
                Some(cursor) => next = format!("&cursor={cursor}"),
                None => return all,
            }
        }
    }

    /// Whether only persons have something left to do.
    fn is_over(&self) -> bool {
        let rests = |name: &str| {
            let page = self.node.get(&format!("?operationName={name}&status=PENDING&limit=500")).json();
            page["items"].as_array().unwrap().iter().all(|operation| operation["inDoubt"] == true)
        };
        rests("mail") && rests("card")
    }
}

fn keys(operations: &[Value]) -> BTreeSet<String> {
    operations.iter().map(|operation| operation["idempotencyKey"].as_str().unwrap().to_owned()).collect()
}

fn pulled_operations_take_effect_once_when_their_workers_are_killed(place: &Place) {
    let (operations, kills) = size();
    let mut site = Site::open(place);
    site.enqueue(operations);
    (0..WORKERS).for_each(|_| site.start_worker());
    for n in 1..=kills {
        // Spread over the work, each at a random moment of it.
        let noted = 2 * operations * n / (kills + 2) * "mail k1\n".len();
        let notes = || std::fs::metadata(place.path("notes")).map_or(0, |notes| notes.len());
        eventually(LIMIT, "the workers work", || notes() >= u64::try_from(noted).unwrap());
        thread::sleep(Duration::from_millis(fastrand::u64(..50)));
        site.kill_worker();
        if n % NODE_AFTER == 0 {
            site.kill_node();
        }
    }
    eventually(LIMIT, "all is done or in doubt", || {
        thread::sleep(Duration::from_millis(100));
        site.is_over()
    });
    site.all_live();
    // How often each was asked for.
    let mut noted = BTreeMap::<(String, String), usize>::new();
    for line in place.lines("notes") {
        let mut words = line.split(' ').map(str::to_owned);
        *noted.entry((words.next().unwrap(), words.next().unwrap())).or_default() += 1;
    }
    let all: BTreeSet<_> = (0..operations).map(|n| format!("k{n}")).collect();
    // Under rerun each is done, and its effect was made once, even if it was asked for again.
    assert_eq!(keys(&site.all("mail", "SUCCESS")), all);
    let effects = rows(&Place::at(format!("sqlite:{}", place.path("effects").display())), "SELECT key FROM effects");
    assert_eq!((effects.len(), effects.into_iter().collect()), (operations, all.clone()));
    let again = place.lines("notes").iter().filter(|note| note.ends_with(" known")).count();
    assert!(again <= kills * HELD, "{again} effects were asked for again after {kills} kills");
    // Under hold none is made twice, and the killed workers leave no more in doubt than they held.
    let twice: Vec<_> = noted.iter().filter(|((name, _), times)| name == "card" && **times > 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
    let (done, in_doubt) = (keys(&site.all("card", "SUCCESS")), keys(&site.all("card", "PENDING")));
    assert!(in_doubt.len() <= kills * HELD, "{} are in doubt after {kills} kills", in_doubt.len());
    assert_eq!((&done | &in_doubt, done.len() + in_doubt.len()), (all, operations));
    for key in done {
        assert!(noted.contains_key(&("card".to_owned(), key.clone())), "{key} has had no effect");
    }
}
