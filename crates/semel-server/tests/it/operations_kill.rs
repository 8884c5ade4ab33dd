//! Nodes of the operations API that are killed at each step of a call. The client repeats its call at another node, with
//! the same claim token, or with the same fence and content: nothing runs twice, and nothing is lost. `operations_nodes`
//! has nodes that are suspended, and `operations_pullers` has killed workers.

use std::{collections::BTreeMap, os::unix::process::ExitStatusExt as _, thread};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    operations_api::{Api, Held, handed, refused, try_ask, with},
    operations_nodes::{kill, start, token},
    place::{Place, on_both_databases},
    proposals::rows,
};

on_both_databases! {
    a_call_whose_node_was_killed_can_be_repeated
}

/// What the client does when the node dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Claim,
    TakeOver,
    Enqueue,
    Next,
    Complete,
    Fail,
    Doubt,
    Release,
    ReleasePulled,
}

/// The points at which a node dies in each step.
const STEPS: [(Step, &[&str]); 9] = [
    (Step::Claim, &["claim.before", "store.claim.inserted", "claim.after"]),
    (Step::TakeOver, &["claim.before", "store.claim.taken_over", "claim.after"]),
    (Step::Enqueue, &["enqueue.before", "store.claim.inserted", "enqueue.after"]),
    (Step::Next, &["take.before", "store.take.claimed", "take.after"]),
    (Step::Complete, &["settle.before", "store.write.completed", "settle.after"]),
    (Step::Fail, &["settle.before", "store.write.completed", "store.write.saved", "settle.after"]),
    (Step::Doubt, &["settle.before", "store.write.saved", "settle.after"]),
    (Step::Release, &["settle.before", "store.write.saved", "settle.after"]),
    (Step::ReleasePulled, &["settle.before", "store.write.saved", "settle.after"]),
];

/// An expired lease is taken over by a claim.
const NO_SWEEP: (&str, &str) = ("SEMEL_SWEEP_EVERY", "1h");

/// How many nodes die at a time.
const BESIDE: usize = 3;

/// A call whose node dies at a point.
struct Trial {
    step: Step,
    point: &'static str,
    /// Its operations are its own.
    name: String,
    path: String,
    body: Value,
    /// The lease before the call.
    held: Option<Held>,
}

impl Trial {
    /// Does what comes before the call.
    fn prepare(step: Step, point: &'static str, api: &Api) -> Self {
        let name = format!("{step:?} {point}");
        let call = |path: &str, body| Self { step, point, name: name.clone(), path: path.to_owned(), body, held: None };
        let settle = |held: Held, path: &str, body: Value| {
            let body = with(&body, json!({ "fence": held.fence }));
            Self { held: Some(held.clone()), ..call(&format!("/{}/{path}", held.id), body) }
        };
        let held = || api.claim(&claim(&name));
        match step {
            Step::Claim => call("", claim(&name)),
            Step::TakeOver => {
                let lost = api.loses(&with(&claim(&name), json!({ "onLost": "rerun" })));
                Self { held: Some(lost), ..call("", with(&claim(&name), json!({ "onLost": "rerun" }))) }
            }
            Step::Enqueue => call("", with(&work(&name, 0), json!({ "later": true }))),
            Step::Next => {
                (0..3).for_each(|n| drop(api.enqueue(&work(&name, n))));
                call("/next", json!({ "operationNames": [name], "max": 2, "claimToken": token() }))
            }
            Step::Complete => settle(held(), "complete", json!({ "resultData": { "receipt": 7 } })),
            Step::Fail => settle(held(), "fail", json!({ "errorMessage": "the portal timed out" })),
            Step::Doubt => settle(held(), "doubt", json!({ "reason": "the portal gave no answer" })),
            Step::Release => settle(held(), "release", json!({})),
            Step::ReleasePulled => {
                api.enqueue(&work(&name, 0));
                settle(pull(api, &name).remove(0), "release", json!({}))
            }
        }
    }

    /// Makes the call at a node that dies of it.
    fn dies(&self, place: &Place) {
        let notes = self.name.replace(' ', "-");
        let noted = place.path(&notes);
        let own = [("SEMEL_CRASH", self.point), ("SEMEL_CRASH_LOG", noted.to_str().unwrap()), NO_SWEEP];
        let mut node = start(place, &own).server;
        assert!(!node.greeting.is_empty(), "{}: it died before the call", self.name);
        let answer = try_ask(node.address, "POST", &self.path, &self.body);
        assert!(answer.is_none(), "{}: {answer:?}", self.name);
        let status = node.process.end();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{}: {status}", self.name);
        assert!(place.lines(&notes).iter().any(|point| point == self.point), "{} was never reached", self.name);
    }

    /// Repeats the call at another node, and goes on from there. `stored` has the operations as the dead node left them,
    /// with their fences.
    fn repeat(&self, api: &Api, stored: &BTreeMap<i64, i64>) {
        let again = || api.post(&self.path, &self.body);
        match self.step {
            Step::Claim => {
                let held = self.is_acquired(api, stored);
                self.completes(api, &held, 0);
            }
            Step::TakeOver => {
                let (held, zombie) = (self.is_acquired(api, stored), self.held());
                assert!(held.id == zombie.id && held.fence > zombie.fence);
                refused(&api.call(zombie, "complete", json!({})), 409, "lease-lost");
                self.completes(api, &held, 1);
            }
            Step::Enqueue => {
                let (said, due) = (again(), pull(api, &self.name));
                assert_eq!((said.status, due.len()), (202, 1), "{}", said.body);
                let word = if stored.contains_key(&due[0].id) { "waiting" } else { "enqueued" };
                assert_eq!(said.json()["claim"], word);
                api.complete(&due[0], json!(7));
                let known = again().json();
                assert_eq!((&known["claim"], &known["operation"]["resultData"]), (&json!("replay"), &json!(7)));
                assert_eq!(pull(api, &self.name), []);
            }
            Step::Next => {
                let held = handed(&again());
                let same = held.iter().filter(|held| stored[&held.id] == held.fence).count();
                match self.point {
                    "take.before" => assert_eq!((held.len(), same), (2, 0)),
                    "take.after" => assert_eq!((held.len(), same), (2, 2), "the same leases"),
                    _ => assert_eq!(held.len(), 2),
                }
                assert_eq!(handed(&again()), held);
                let rest = pull(api, &self.name);
                assert_eq!(rest.len(), 1, "{rest:?} after {held:?}");
                for held in held.iter().chain(&rest) {
                    let done = api.complete(held, json!(7));
                    assert_eq!((&done["status"], &done["retryCount"]), (&json!("SUCCESS"), &json!(0)));
                }
            }
            Step::Complete => {
                let record = self.is_settled(api, "SUCCESS");
                assert_eq!(record["resultData"], json!({ "receipt": 7 }));
                let other = with(&self.body, json!({ "resultData": { "receipt": 8 } }));
                refused(&api.post(&self.path, &other), 409, "lease-lost");
                let known = api.post("", &claim(&self.name)).json();
                assert_eq!((&known["claim"], &known["operation"]), (&json!("replay"), &record));
            }
            Step::Fail => {
                let record = self.is_settled(api, "PENDING");
                assert_eq!(
                    (&record["backingOff"], &record["errorMessage"]),
                    (&json!(true), &self.body["errorMessage"])
                );
                refused(&api.post("", &claim(&self.name)), 409, "backing-off");
            }
            Step::Doubt => {
                let record = self.is_settled(api, "PENDING");
                assert_eq!((&record["inDoubt"], &record["errorMessage"]), (&json!(true), &self.body["reason"]));
                refused(&api.post("", &claim(&self.name)), 409, "in-doubt");
            }
            Step::Release => {
                for answer in [again(), again()] {
                    assert_eq!((answer.status, answer.json()), (200, json!({ "released": true })));
                }
                let anew = api.claim(&claim(&self.name));
                assert!(anew.fence > self.held().fence && anew.operation["retryCount"] == 0);
            }
            Step::ReleasePulled => {
                assert_eq!(self.is_settled(api, "PENDING")["waiting"], true);
                let (before, due) = (self.held(), pull(api, &self.name));
                assert!(due.len() == 1 && due[0].id == before.id && due[0].fence > before.fence, "{due:?}");
                refused(&again(), 409, "lease-lost");
            }
        }
    }

    fn held(&self) -> &Held {
        self.held.as_ref().unwrap()
    }

    /// The repeated claim has the lease of the first one, or a new one if that was not stored. Another claim has none.
    fn is_acquired(&self, api: &Api, stored: &BTreeMap<i64, i64>) -> Held {
        let held = api.claim(&self.body);
        let is_same = stored.get(&held.id) == Some(&held.fence);
        match self.point {
            "claim.before" => assert!(!is_same),
            "claim.after" => assert!(is_same, "the same lease"),
            _ => {}
        }
        assert_eq!(api.claim(&self.body), held);
        refused(&api.post("", &with(&self.body, json!({ "claimToken": token() }))), 409, "in-flight");
        held
    }

    /// The operation completes after so many lost runs, and the claim is answered with its result.
    fn completes(&self, api: &Api, held: &Held, lost: usize) {
        let done = api.complete(held, json!(7));
        assert_eq!(done["status"], "SUCCESS");
        assert_eq!(done["attempts"].as_array().unwrap().len(), lost + 1);
        let known = api.post("", &self.body).json();
        assert_eq!((&known["claim"], &known["operation"]), (&json!("replay"), &done));
    }

    /// The repeated settle succeeds, and changes nothing if it was stored: there was one run.
    fn is_settled(&self, api: &Api, status: &str) -> Value {
        let held = self.held();
        let settled = api.post(&self.path, &self.body);
        assert_eq!(settled.status, 200, "{}", settled.body);
        let record = settled.json();
        assert_eq!((&record["status"], &record["fence"]), (&json!(status), &json!(held.fence)));
        assert_eq!(record["attempts"].as_array().unwrap().len(), 1, "{record}");
        assert_eq!(api.post(&self.path, &self.body).json(), record);
        record
    }
}

/// A claim by key with its own token.
fn claim(name: &str) -> Value {
    json!({ "operationName": name, "idempotencyKey": "k", "claimToken": token() })
}

fn work(name: &str, input: u32) -> Value {
    json!({ "operationName": name, "input": input })
}

/// Pulls all due operations of a name.
fn pull(api: &Api, name: &str) -> Vec<Held> {
    api.next(&json!({ "operationNames": [name], "max": 100 }))
}

fn a_call_whose_node_was_killed_can_be_repeated(place: &Place) {
    let first = start(place, &[NO_SWEEP]);
    let points = STEPS.iter().flat_map(|(step, points)| points.iter().map(|point| (*step, *point)));
    let trials: Vec<_> = points.map(|(step, point)| Trial::prepare(step, point, &first)).collect();
    kill(first);
    for some in trials.chunks(BESIDE) {
        thread::scope(|scope| some.iter().for_each(|trial| drop(scope.spawn(|| trial.dies(place)))));
    }
    let stored = rows(place, "SELECT id || ' ' || fence FROM semel_operations");
    let stored = stored.iter().map(|row| row.split_once(' ').unwrap());
    let stored = stored.map(|(id, fence)| (id.parse().unwrap(), fence.parse().unwrap())).collect();
    let _ = std::fs::remove_file(place.path("points"));
    let last = start(place, &[]);
    for trial in &trials {
        // Shown if it fails.
        eprintln!("{}", trial.name);
        trial.repeat(&last, &stored);
    }
    // The sweep and the counters of repeats have tests of their own.
    let others = ["sweep.", "repeats."];
    let reached = place.lines("points");
    assert!(!reached.is_empty());
    for point in reached.iter().filter(|point| !others.iter().any(|other| point.starts_with(other))) {
        let dies = STEPS.iter().any(|(_, points)| points.contains(&point.as_str()));
        assert!(dies, "no node died at {point}, which a call reaches");
    }
}
