//! The laws of claims and their ends over the HTTP API of operations, and what its tests share. The other files of this
//! name have the rest.

use std::{net::SocketAddr, time::SystemTime};

use chrono::DateTime;
use semel::Timestamp;
use serde_json::{Value, json};

use crate::{
    fleet::ask,
    place::{Place, on_both_databases},
    support::{Answer, SOON, Server, eventually},
};

on_both_databases! {
    a_repeat_of_a_completed_operation_gets_its_result
    a_claim_of_a_running_operation_is_in_flight
    a_claim_within_the_backoff_is_told_when_to_come_back
    another_payload_under_the_key_is_a_mismatch_whatever_the_state
    an_operation_is_exhausted_after_its_retries
    an_error_that_is_not_retryable_ends_the_operation
    a_lost_lease_under_hold_is_in_doubt
    a_doubt_of_the_worker_is_in_doubt
    a_lost_lease_under_rerun_is_taken_over_with_a_higher_fence
    a_lost_lease_uses_up_no_retry
}

/// A server on a place's database, and requests to its operations.
pub(crate) struct Api {
    pub(crate) server: Server,
}

/// The lease of an operation, and the operation as it was shown with it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Held {
    pub(crate) id: i64,
    pub(crate) fence: i64,
    pub(crate) until: Value,
    pub(crate) operation: Value,
}

impl Held {
    pub(crate) fn of(shown: &Value) -> Self {
        let (lease, operation) = (&shown["lease"], &shown["operation"]);
        assert_eq!((&lease["fence"], &lease["leaseExpiresAt"]), (&operation["fence"], &operation["leaseExpiresAt"]));
        Self {
            id: id(operation),
            fence: int(&lease["fence"]),
            until: lease["leaseExpiresAt"].clone(),
            operation: operation.clone(),
        }
    }
}

impl Api {
    /// A node that retries at once and never sweeps: what has expired must count as such without a sweep.
    pub(crate) fn start(place: &Place) -> Self {
        Self::start_as(place, "api", &[])
    }

    pub(crate) fn start_as(place: &Place, roles: &str, variables: &[(&str, &str)]) -> Self {
        let mut command = place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", roles]);
        command.env("SEMEL_OPERATIONS_BACKOFF", "0s").env("SEMEL_CRASH_LOG", place.path("points"));
        Self { server: Server::start_with(command.envs(variables.iter().copied())) }
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &Value::Null)
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, body)
    }

    /// A request to a path below that of the operations. A body that is null is none.
    pub(crate) fn ask(&self, method: &str, path: &str, body: &Value) -> Answer {
        try_ask(self.server.address, method, path, body).expect("an answer")
    }

    /// Claims, and must get the lease.
    pub(crate) fn claim(&self, body: &Value) -> Held {
        let answer = self.post("", body);
        assert_eq!((answer.status, &answer.json()["claim"]), (201, &json!("acquired")), "{}", answer.body);
        Held::of(&answer.json())
    }

    /// Enqueues something new; the operation.
    pub(crate) fn enqueue(&self, body: &Value) -> Value {
        let answer = self.post("", &with(body, json!({ "later": true })));
        assert_eq!((answer.status, &answer.json()["claim"]), (202, &json!("enqueued")), "{}", answer.body);
        answer.json()["operation"].clone()
    }

    /// Asks for what is due.
    pub(crate) fn next(&self, body: &Value) -> Vec<Held> {
        handed(&self.post("/next", body))
    }

    /// A call of a lease's holder.
    pub(crate) fn call(&self, held: &Held, call: &str, body: Value) -> Answer {
        self.post(&format!("/{}/{call}", held.id), &with(&json!({ "fence": held.fence }), body))
    }

    /// A call of a lease's holder that must succeed; its answer.
    pub(crate) fn does(&self, held: &Held, call: &str, body: Value) -> Value {
        let answer = self.call(held, call, body);
        assert_eq!(answer.status, 200, "{call}: {}", answer.body);
        answer.json()
    }

    /// Fails a run.
    pub(crate) fn fail(&self, held: &Held, error: &str) -> Value {
        self.does(held, "fail", json!({ "errorMessage": error }))
    }

    pub(crate) fn complete(&self, held: &Held, result: Value) -> Value {
        self.does(held, "complete", json!({ "resultData": result }))
    }

    /// The record.
    pub(crate) fn shown(&self, id: i64) -> Value {
        let answer = self.get(&format!("/{id}"));
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()
    }

    /// Waits until the lease of a claim has expired.
    pub(crate) fn expires(&self, held: &Held) {
        eventually(SOON, "the lease expires", || self.shown(held.id)["leaseExpired"] == true);
    }

    /// Starts a run of an operation under a lease of a second, and lets the lease expire.
    pub(crate) fn loses(&self, work: &Value) -> Held {
        let lost = self.claim(&with(work, json!({ "leaseSeconds": 1 })));
        self.expires(&lost);
        lost
    }
}

/// A request, and its answer if the server lived to give one.
pub(crate) fn try_ask(address: SocketAddr, method: &str, path: &str, body: &Value) -> Option<Answer> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    ask(address, method, &format!("/v1/operations{path}"), &body)
}

/// What an answer hands out.
pub(crate) fn handed(answer: &Answer) -> Vec<Held> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()["operations"].as_array().unwrap().iter().map(Held::of).collect()
}

/// The operation `pay` with this input.
pub(crate) fn pay(input: impl Into<Value>) -> Value {
    json!({ "operationName": "pay", "input": input.into() })
}

/// An object with more members.
pub(crate) fn with(base: &Value, more: Value) -> Value {
    let mut both = base.clone();
    both.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    both
}

/// Asserts that a request was refused with a problem.
pub(crate) fn refused(answer: &Answer, status: u16, problem: &str) {
    assert_eq!((answer.status, answer.problem().as_str()), (status, problem), "{}", answer.body);
}

/// The names of the fields that a request was refused for.
pub(crate) fn wrong_fields(answer: &Answer) -> Vec<String> {
    refused(answer, 422, "invalid-fields");
    answer.json()["errors"].as_array().unwrap().iter().map(|e| e["field"].as_str().unwrap().to_owned()).collect()
}

pub(crate) fn int(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("no integer: {value}"))
}

pub(crate) fn id(operation: &Value) -> i64 {
    int(&operation["id"])
}

/// The time so many seconds from now.
pub(crate) fn in_seconds(seconds: i64) -> String {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros();
    Timestamp::from_micros(i64::try_from(now).unwrap() + seconds * 1_000_000).to_string()
}

/// A time, in microseconds.
pub(crate) fn micros(time: &Value) -> i64 {
    let text = time.as_str().unwrap_or_else(|| panic!("no time: {time}"));
    assert!(text.ends_with('Z') && text.len() == "2026-01-31T12:00:00.000000Z".len(), "{text}");
    DateTime::parse_from_rfc3339(text).unwrap().timestamp_micros()
}

/// The seconds between two times.
pub(crate) fn between(from: &Value, to: &Value) -> f64 {
    (micros(to) - micros(from)) as f64 / 1e6
}

fn a_repeat_of_a_completed_operation_gets_its_result(place: &Place) {
    let api = Api::start(place);
    let result = json!({ "claimId": "CLM-001", "status": "approved", "amount": 12.50 });
    let held = api.claim(&pay(7));
    let completed = api.complete(&held, result.clone());
    assert_eq!((&completed["status"], &completed["resultData"]), (&json!("SUCCESS"), &result));
    assert_eq!((&completed["canRetry"], &completed["leaseExpiresAt"]), (&json!(false), &Value::Null));
    let repeat = api.post("", &pay(7));
    assert_eq!((repeat.status, &repeat.json()["claim"]), (200, &json!("replay")), "{}", repeat.body);
    assert_eq!(repeat.json()["operation"], completed);
    assert_eq!(repeat.json()["lease"], Value::Null);
    assert_eq!(api.shown(held.id), completed);
}

fn a_claim_of_a_running_operation_is_in_flight(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&pay(1));
    let second = api.post("", &pay(1));
    refused(&second, 409, "in-flight");
    assert!((1..=60).contains(&retry_after(&second)));
    let told = second.json();
    assert_eq!((id(&told["operation"]), &told["operation"]["status"]), (held.id, &json!("PENDING")));
    assert_eq!(told["first_seen"], held.operation["createdAt"]);
}

/// The seconds after which a request is to be sent again.
fn retry_after(answer: &Answer) -> u64 {
    let seconds = answer.header("retry-after").unwrap_or_else(|| panic!("no Retry-After: {}", answer.head));
    seconds.parse().unwrap()
}

fn a_claim_within_the_backoff_is_told_when_to_come_back(place: &Place) {
    let backoff = [("SEMEL_OPERATIONS_BACKOFF", "10m"), ("SEMEL_OPERATIONS_BACKOFF_CAP", "10m")];
    let api = Api::start_as(place, "api", &backoff);
    let failed = api.fail(&api.claim(&pay(1)), "the portal is down");
    let again = api.post("", &pay(1));
    refused(&again, 409, "backing-off");
    assert!((400..=600).contains(&retry_after(&again)), "{}", again.head);
    let told = again.json()["operation"].clone();
    assert_eq!((&told["backingOff"], &told["errorMessage"]), (&json!(true), &json!("the portal is down")));
    assert_eq!(told["notBefore"], failed["notBefore"]);
}

fn another_payload_under_the_key_is_a_mismatch_whatever_the_state(place: &Place) {
    let api = Api::start(place);
    let work = |input: u32| with(&pay(input), json!({ "idempotencyKey": "k", "maxRetries": 1 }));
    let mismatched = || {
        let answer = api.post("", &work(2));
        refused(&answer, 422, "payload-mismatch");
        assert!(answer.header("retry-after").is_none());
        answer.json()["operation"].clone()
    };
    let first = api.claim(&work(1));
    let told = mismatched();
    assert_eq!(id(&told), first.id);
    assert!(told.get("input").is_none() && told.get("resultData").is_none(), "it belongs to another request: {told}");
    api.fail(&first, "once");
    mismatched();
    let second = api.claim(&work(1));
    mismatched();
    api.complete(&second, json!("secret"));
    assert!(!mismatched().to_string().contains("secret"));
    refused(&api.post("", &with(&work(2), json!({ "later": true }))), 422, "payload-mismatch");
}

fn an_operation_is_exhausted_after_its_retries(place: &Place) {
    let api = Api::start(place);
    for (retries, input) in [(Some(0), "none"), (Some(1), "one"), (None, "by default")] {
        let work = with(&pay(input), retries.map_or(json!({}), |retries: i64| json!({ "maxRetries": retries })));
        let retries = retries.unwrap_or(3);
        for run in 0..=retries {
            let held = api.claim(&work);
            assert_eq!(
                (&held.operation["retryCount"], &held.operation["canRetry"]),
                (&json!(run), &json!(run < retries))
            );
            let failed = api.fail(&held, &format!("error {run}"));
            let status = if run < retries { "PENDING" } else { "FAILED" };
            assert_eq!((&failed["status"], &failed["retryCount"]), (&json!(status), &json!(run)));
            assert_eq!((&failed["canRetry"], &failed["maxRetries"]), (&json!(run < retries), &json!(retries)));
        }
        let over = api.post("", &work);
        refused(&over, 409, "attempts-exhausted");
        let told = over.json()["operation"].clone();
        assert_eq!((&told["status"], &told["errorMessage"]), (&json!("FAILED"), &json!(format!("error {retries}"))));
    }
}

fn an_error_that_is_not_retryable_ends_the_operation(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&pay(1));
    let failed = api.does(&held, "fail", json!({ "errorMessage": "no such account", "retryable": false }));
    assert_eq!((&failed["status"], &failed["canRetry"]), (&json!("FAILED"), &json!(false)));
    refused(&api.post("", &pay(1)), 409, "attempts-exhausted");
}

fn a_lost_lease_under_hold_is_in_doubt(place: &Place) {
    let api = Api::start(place);
    for work in [pay(1), with(&pay(2), json!({ "onLost": "hold" }))] {
        let lost = api.loses(&work);
        let again = api.post("", &work);
        refused(&again, 409, "in-doubt");
        let told = again.json()["operation"].clone();
        assert_eq!((&told["status"], &told["inDoubt"]), (&json!("PENDING"), &json!(true)));
        assert_eq!((id(&told), &api.shown(lost.id)["inDoubt"]), (lost.id, &json!(true)));
    }
}

fn a_doubt_of_the_worker_is_in_doubt(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&with(&pay(1), json!({ "onLost": "rerun" })));
    let doubted = api.does(&held, "doubt", json!({ "reason": "the portal did not answer" }));
    assert_eq!((&doubted["status"], &doubted["inDoubt"]), (&json!("PENDING"), &json!(true)));
    assert_eq!(doubted["errorMessage"], "the portal did not answer");
    refused(&api.post("", &pay(1)), 409, "in-doubt");
}

fn a_lost_lease_under_rerun_is_taken_over_with_a_higher_fence(place: &Place) {
    let api = Api::start(place);
    let work = with(&pay(1), json!({ "onLost": "rerun" }));
    let lost = api.loses(&work);
    let taken = api.claim(&work);
    assert_eq!((taken.id, taken.operation["attempts"].as_array().unwrap().len()), (lost.id, 2));
    assert!(taken.fence > lost.fence, "{} {}", taken.fence, lost.fence);
    assert_eq!(api.complete(&taken, json!(7))["resultData"], 7);
}

fn a_lost_lease_uses_up_no_retry(place: &Place) {
    let api = Api::start(place);
    let work = with(&pay(1), json!({ "onLost": "rerun", "maxRetries": 1 }));
    api.loses(&work);
    for run in 0..=1 {
        let held = api.claim(&work);
        assert_eq!((&held.operation["retryCount"], &held.operation["canRetry"]), (&json!(run), &json!(run < 1)));
        api.fail(&held, "once more");
    }
    refused(&api.post("", &work), 409, "attempts-exhausted");
}
