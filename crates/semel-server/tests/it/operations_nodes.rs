//! The operations API at two nodes: calls at the same time, and nodes that are suspended past a lease.

use std::{collections::BTreeSet, sync::Barrier, thread};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    notifications_crash_pauses::is_still,
    operations_api::{Api, Held, handed, pay, refused, with},
    operations_api_leases::is_a_zombie,
    place::{Place, on_both_databases},
    support::{Answer, SOON, eventually},
};

on_both_databases! {
    a_node_suspended_with_a_completion_past_its_lease_stores_nothing
}

/// A node that sweeps often. Its leases and backoffs outlast every test, unless a request brings shorter ones.
pub(crate) fn start(place: &Place, variables: &[(&str, &str)]) -> Api {
    let own = [
        ("SEMEL_SWEEP_EVERY", "100ms"),
        ("SEMEL_OPERATIONS_LEASE", "10m"),
        ("SEMEL_OPERATIONS_BACKOFF", "1h"),
        ("SEMEL_OPERATIONS_BACKOFF_CAP", "1h"),
    ];
    Api::start_as(place, "api,sweeper", &[&own[..], variables].concat())
}

pub(crate) fn kill(mut node: Api) {
    node.server.process.signal(Signal::KILL);
    node.server.process.end();
}

/// A new token.
pub(crate) fn token() -> String {
    uuid::Uuid::from_u128(fastrand::u128(1..)).to_string()
}

/// Makes calls at the same time, to each of the nodes in turn.
fn at_once(nodes: &[Api], path: &str, bodies: &[Value]) -> Vec<Answer> {
    let barrier = Barrier::new(bodies.len());
    thread::scope(|scope| {
        let calls: Vec<_> = bodies
            .iter()
            .enumerate()
            .map(|(i, body)| {
                let (node, barrier) = (&nodes[i % nodes.len()], &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    node.post(path, body)
                })
            })
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

/// How many claims are made at the same time.
const CLAIMS: usize = 32;

#[test]
fn one_of_many_claims_at_two_nodes_is_acquired() {
    let place = Place::postgres();
    let nodes = [start(&place, &[]), start(&place, &[])];
    let claims: Vec<_> = (0..CLAIMS).map(|_| with(&pay(1), json!({ "claimToken": token() }))).collect();
    let answers = at_once(&nodes, "", &claims);
    let (acquired, others): (Vec<_>, Vec<_>) = (0..CLAIMS).partition(|i| answers[*i].status == 201);
    assert_eq!(acquired.len(), 1, "{answers:?}");
    for i in others {
        refused(&answers[i], 409, "in-flight");
        assert!(answers[i].header("retry-after").is_some(), "{}", answers[i].head);
    }
    // The lease is its holder's, who may settle it at the other node.
    let (granted_by, held) = (acquired[0] % 2, Held::of(&answers[acquired[0]].json()));
    nodes[1 - granted_by].complete(&held, json!({ "receipt": 7 }));
    nodes[granted_by].complete(&held, json!({ "receipt": 7 }));
    for answer in at_once(&nodes, "", &claims) {
        let known = answer.json();
        assert_eq!((answer.status, &known["claim"]), (200, &json!("replay")));
        assert_eq!(known["operation"]["resultData"], json!({ "receipt": 7 }));
    }
}

#[test]
fn claims_with_one_token_at_two_nodes_get_one_lease() {
    let place = Place::postgres();
    let nodes = [start(&place, &[]), start(&place, &[])];
    for n in 0..5 {
        let claim = with(&pay(n), json!({ "claimToken": token() }));
        let answers = at_once(&nodes, "", &vec![claim; CLAIMS]);
        let fences: BTreeSet<_> = answers.iter().map(|answer| answer.json()["lease"]["fence"].as_i64()).collect();
        assert!(fences.len() == 1 && !fences.contains(&None), "{answers:?}");
    }
}

/// The client may have sent it again too early: whatever answer it reads, it finds all of its leases.
#[test]
fn a_repeat_of_a_pull_has_every_lease_that_two_nodes_have_handed_out_for_it() {
    let place = Place::postgres();
    let nodes = [start(&place, &[]), start(&place, &[])];
    (0..20).for_each(|n| drop(nodes[0].enqueue(&pay(n))));
    let pull = json!({ "operationNames": ["pay"], "max": 5, "claimToken": token() });
    let leases = |answer: &Answer| -> BTreeSet<_> { handed(answer).iter().map(|held| (held.id, held.fence)).collect() };
    let answers = at_once(&nodes, "/next", &vec![pull.clone(); 4]);
    let last = leases(&nodes[0].post("/next", &pull));
    for answer in &answers {
        assert!(!leases(answer).is_empty() && leases(answer).is_subset(&last), "{} beyond {last:?}", answer.body);
    }
    assert!(last.len() <= 10, "each node hands out at most as many as asked for: {last:?}");
    // At one node, repeats follow one another.
    let pull = json!({ "operationNames": ["pay"], "max": 5, "claimToken": token() });
    let answers = at_once(&nodes[..1], "/next", &vec![pull; 4]);
    assert_eq!(leases(&answers[0]).len(), 5);
    assert!(answers.iter().all(|answer| leases(answer) == leases(&answers[0])));
}

/// Meanwhile the other node has handed the operation out again.
fn a_node_suspended_with_a_completion_past_its_lease_stores_nothing(place: &Place) {
    let still = start(place, &[("SEMEL_CRASH", "settle.before:1:stop"), ("SEMEL_SWEEP_EVERY", "1h")]);
    let other = start(place, &[]);
    let work = with(&pay(1), json!({ "onLost": "rerun" }));
    let zombie = still.claim(&with(&work, json!({ "leaseSeconds": 1 })));
    let held = thread::scope(|scope| {
        let late = scope.spawn(|| still.call(&zombie, "complete", json!({ "resultData": "late" })));
        eventually(SOON, "it stands still", || is_still(&still.server));
        let mut last = None;
        eventually(SOON, "it is taken over", || last.insert(other.post("", &work)).status == 201);
        still.server.process.signal(Signal::CONT);
        refused(&late.join().unwrap(), 409, "lease-lost");
        Held::of(&last.unwrap().json())
    });
    assert!(held.id == zombie.id && held.fence > zombie.fence);
    is_a_zombie(&still, &zombie);
    is_a_zombie(&other, &zombie);
    let done = still.complete(&held, json!("in time"));
    assert_eq!((&done["resultData"], &done["retryCount"]), (&json!("in time"), &json!(0)));
    for node in [&still, &other] {
        is_a_zombie(node, &zombie);
        assert_eq!(node.post("", &work).json()["operation"]["resultData"], "in time");
    }
}

/// No other worker gets it, and its holder cannot end the doubt: a person does.
#[test]
fn an_operation_held_past_its_lease_at_a_suspended_node_is_in_doubt() {
    let place = Place::postgres();
    let (still, other) = (start(&place, &[]), start(&place, &[]));
    let (work, pull) = (with(&pay(1), json!({ "onLost": "hold" })), json!({ "operationNames": ["pay"] }));
    still.enqueue(&work);
    let zombie = still.next(&with(&pull, json!({ "leaseSeconds": 1 }))).remove(0);
    still.server.process.signal(Signal::STOP);
    eventually(SOON, "it is in doubt", || other.shown(zombie.id)["inDoubt"] == true);
    assert_eq!(other.next(&pull), []);
    refused(&other.post("", &with(&work, json!({ "later": true }))), 409, "in-doubt");
    still.server.process.signal(Signal::CONT);
    is_a_zombie(&still, &zombie);
    is_a_zombie(&other, &zombie);
    let verdict = json!({ "as": "completed", "resultData": "seen at the bank", "reason": "asked the bank" });
    let done = still.post(&format!("/{}/resolve", zombie.id), &verdict).json();
    assert_eq!((&done["status"], &done["resultData"]), (&json!("SUCCESS"), &json!("seen at the bank")));
}
