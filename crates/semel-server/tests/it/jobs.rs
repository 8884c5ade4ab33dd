//! The laws of background jobs: nodes, progress, once.

use serde_json::{Value, json};

use crate::{
    desk::{Desk, ended, execute, letter, listed, post, serve, shown},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, eventually},
};

on_both_databases! {
    a_pending_job_can_be_cancelled
    a_running_job_can_be_cancelled
    a_job_that_kills_its_nodes_again_and_again_fails
    a_job_is_run_by_another_node_than_the_one_that_was_asked
    jobs_of_the_own_tenant_are_listed_newest_first
    a_job_whose_node_is_killed_continues_after_its_last_step
    two_nodes_run_a_job_once
    a_job_of_an_unknown_kind_is_left_to_other_nodes
    a_job_whose_row_cannot_be_read_blocks_no_other
}

/// Makes a node sweep often: the leases of jobs are short.
pub(crate) const SWEEPS: (&str, &str) = ("SEMEL_SWEEP_EVERY", "200ms");

/// Copies one letter many times, which is faster than writing each.
pub(crate) fn copy_letters(place: &Place, desk: &Desk, number: u32) {
    desk.dead(letter("0"));
    let columns = "tenant, consumer, fingerprint, message_id, message_tenant, queue, kind, body, headers, number, \
                   put_at, operation, fence, failures, reason, died_at";
    execute(
        place,
        &format!(
            "WITH RECURSIVE counted (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted WHERE n < {number} - 1)
             INSERT INTO semel_dead_letters (key, {columns})
             SELECT CAST(n AS TEXT), {columns} FROM counted, semel_dead_letters"
        ),
    );
}

pub(crate) fn count(place: &Place, sql: &'static str) -> usize {
    rows(place, sql)[0].parse().unwrap()
}

pub(crate) const RETRIES: &str = "SELECT CAST(count(*) AS TEXT) FROM semel_retries";
pub(crate) const LETTERS: &str = "SELECT CAST(count(*) AS TEXT) FROM semel_dead_letters";

fn redrive_all(server: &crate::support::Server) -> String {
    let answer = post(server, "/dead-letters/redrive", r#"{"all":true}"#);
    assert_eq!(answer.status, 202, "{}", answer.body);
    answer.json()["jobId"].as_str().unwrap().to_owned()
}

fn a_job_is_run_by_another_node_than_the_one_that_was_asked(place: &Place) {
    let (desk, asked) = (Desk::at(place), serve(place, "api", &[]));
    desk.dead(letter("a"));
    let id = redrive_all(&asked);
    let job = shown(&asked, &format!("/jobs/{id}"));
    assert_eq!((&job["state"], &job["done"], &job["endedAt"]), (&json!("running"), &json!(0), &Value::Null));
    let _worker = serve(place, "worker", &[]);
    let job = ended(&asked, &id);
    assert_eq!((&job["state"], &job["done"]), (&json!("done"), &json!(1)));
    assert!(job["endedAt"].as_str().unwrap() >= job["createdAt"].as_str().unwrap(), "{job}");
}

fn jobs_of_the_own_tenant_are_listed_newest_first(place: &Place) {
    let server = serve(place, "api", &[]);
    let of_another = redrive_all(&server);
    let mut made: Vec<_> = (0..5).map(|_| json!(redrive_all(&server))).collect();
    made.reverse();
    for table in
        ["semel_operations SET tenant = 'another' WHERE key", "semel_backlog SET tenant = 'another' WHERE operation"]
    {
        let which = match table.ends_with("key") {
            true => format!("'{of_another}'"),
            false => format!("(SELECT id FROM semel_operations WHERE key = '{of_another}')"),
        };
        execute(place, &format!("UPDATE {table} = {which}"));
    }
    assert_eq!(listed(&server, "/jobs?limit=2", "jobId"), made);
    assert_eq!(listed(&server, "/jobs?state=running", "jobId"), made);
    assert_eq!(listed(&server, "/jobs?state=done", "jobId"), Vec::<Value>::new());
    for query in ["state=x", "cursor=x", "limit=501", "kind=x"] {
        assert_eq!(server.get(&format!("/jobs?{query}")).problem(), "invalid-query", "{query}");
    }
    for id in [&*of_another, "00000000-0000-7000-8000-000000000000", "7", "00000000-0000-7000-8000-00000000000A"] {
        assert_eq!(server.get(&format!("/jobs/{id}")).status, 404, "{id}");
    }
}

/// Killed before the commit of its second step, and after it: nothing is moved twice, and nothing is counted twice.
fn a_job_whose_node_is_killed_continues_after_its_last_step(place: &Place) {
    let (desk, asked) = (Desk::at(place), serve(place, "api", &[]));
    copy_letters(place, &desk, 1_700);
    let id = redrive_all(&asked);
    let path = format!("/jobs/{id}");
    for (point, done) in [("step.before_commit:2", 500), ("step.after_commit:1", 1_000)] {
        let mut worker = serve(place, "worker,sweeper", &[SWEEPS, ("SEMEL_CRASH", point)]);
        worker.process.end();
        let job = shown(&asked, &path);
        assert_eq!((&job["state"], &job["done"]), (&json!("running"), &json!(done)), "{point}");
        assert_eq!((count(place, RETRIES), count(place, LETTERS)), (done, 1_700 - done), "{point}");
    }
    let _worker = serve(place, "worker,sweeper", &[SWEEPS]);
    let job = ended(&asked, &id);
    assert_eq!((&job["state"], &job["done"], &job["total"]), (&json!("done"), &json!(1_700), &json!(1_700)), "{job}");
    assert_eq!((count(place, RETRIES), count(place, LETTERS)), (1_700, 0));
}

fn two_nodes_run_a_job_once(place: &Place) {
    let desk = Desk::at(place);
    let nodes = [serve(place, "api,worker", &[]), serve(place, "api,worker", &[])];
    copy_letters(place, &desk, 1_200);
    let ids: Vec<_> = nodes.iter().map(redrive_all).collect();
    let jobs: Vec<_> = ids.iter().map(|id| ended(&nodes[0], id)).collect();
    assert!(jobs.iter().all(|job| job["state"] == "done"), "{jobs:?}");
    let done: i64 = jobs.iter().map(|job| job["done"].as_i64().unwrap()).sum();
    assert_eq!((done, count(place, RETRIES), count(place, LETTERS)), (1_200, 1_200, 0));
}

fn a_job_of_an_unknown_kind_is_left_to_other_nodes(place: &Place) {
    let (desk, asked) = (Desk::at(place), serve(place, "api", &[]));
    let left = redrive_all(&asked);
    for table in ["semel_operations", "semel_backlog"] {
        execute(place, &format!("UPDATE {table} SET kind = 'newer' WHERE service = 'background-jobs'"));
    }
    let server = serve(place, "api,worker", &[]);
    desk.dead(letter("a"));
    assert_eq!(ended(&server, redrive_all(&server))["done"], 1);
    let left = shown(&server, &format!("/jobs/{left}"));
    assert_eq!((&left["state"], &left["done"], &left["kind"]), (&json!("running"), &json!(0), &json!("newer")));
}

/// Damaged by hand, and older than every other: it is read first.
fn a_job_whose_row_cannot_be_read_blocks_no_other(place: &Place) {
    let (desk, asked) = (Desk::at(place), serve(place, "api", &[]));
    let damaged = redrive_all(&asked);
    let cut = if place.url.starts_with("sqlite:") { "x'01'" } else { "'\\x01'" };
    execute(place, &format!("UPDATE semel_operations SET payload = {cut} WHERE key = '{damaged}'"));
    let server = serve(place, "api,worker", &[]);
    desk.dead(letter("a"));
    let id = redrive_all(&server);
    assert_eq!(ended(&server, &id)["done"], 1);
    assert_eq!(listed(&server, "/jobs", "jobId"), [json!(id), json!(damaged)]);
    let error = &listed(&server, "/jobs", "error")[1];
    assert!(error.as_str().unwrap().starts_with("unreadable: "), "{error}");
    assert_eq!(server.get(&format!("/jobs/{damaged}")).problem(), "row-unreadable");
}

fn cancel(server: &crate::support::Server, id: &str, body: &str) -> crate::support::Answer {
    post(server, &format!("/jobs/{id}/cancel"), body)
}

fn a_pending_job_can_be_cancelled(place: &Place) {
    let (desk, asked) = (Desk::at(place), serve(place, "api", &[]));
    desk.dead(letter("a"));
    let id = redrive_all(&asked);
    assert_eq!(cancel(&asked, &id, "{}").problem(), "invalid-fields");
    assert_eq!(cancel(&asked, "00000000-0000-7000-8000-000000000000", r#"{"reason":"r"}"#).status, 404);
    let cancelled = cancel(&asked, &id, r#"{"reason":"a mistake"}"#);
    assert_eq!(cancelled.status, 200, "{}", cancelled.body);
    let job = cancelled.json();
    assert_eq!((&job["state"], &job["error"], &job["done"]), (&json!("failed"), &json!("cancelled"), &json!(0)));
    assert!(job["endedAt"].is_string(), "{job}");
    let kept =
        "SELECT CAST(count(*) AS TEXT) FROM semel_operations WHERE service = 'background-jobs' AND expires_at IS NULL";
    assert_eq!(count(place, kept), 0, "its retention counts from now");
    let audit = rows(place, "SELECT actor || ' ' || reason FROM semel_audit WHERE action = 'operations.cancel'");
    assert_eq!(audit, ["local a mistake"]);
    // The next worker does not run this one.
    let server = serve(place, "api,worker", &[]);
    let other = redrive_all(&server);
    assert_eq!(ended(&server, &other)["done"], 1);
    assert_eq!(listed(&server, "/jobs?state=failed", "jobId"), [json!(id)]);
    assert_eq!(listed(&server, "/jobs?state=done", "jobId"), [json!(other)]);
    for (id, state) in [(&id, "failed"), (&other, "done")] {
        assert_eq!(cancel(&server, id, r#"{"reason":"r"}"#).problem(), "job-ended", "{state}");
        assert_eq!(shown(&server, &format!("/jobs/{id}"))["state"], state, "nothing has changed");
    }
}

/// Its node is suspended after a step, and never wakes up: the job ends with its lease, and the effects of its steps
/// stay.
fn a_running_job_can_be_cancelled(place: &Place) {
    let (desk, asked) = (Desk::at(place), serve(place, "api", &[]));
    copy_letters(place, &desk, 1_200);
    let id = redrive_all(&asked);
    let worker = serve(place, "worker", &[("SEMEL_CRASH", "step.after_commit:1:stop")]);
    eventually(SOON, "a step is made", || shown(&asked, &format!("/jobs/{id}"))["done"] == 500);
    let told = cancel(&asked, &id, r#"{"reason":"a mistake"}"#);
    assert_eq!((told.status, &told.json()["state"]), (202, &json!("running")), "{}", told.body);
    drop(worker);
    let _sweeper = serve(place, "worker,sweeper", &[SWEEPS]);
    let job = ended(&asked, &id);
    assert_eq!((&job["state"], &job["error"], &job["done"]), (&json!("failed"), &json!("cancelled"), &json!(500)));
    assert_eq!((count(place, RETRIES), count(place, LETTERS)), (500, 700));
}

fn a_job_that_kills_its_nodes_again_and_again_fails(place: &Place) {
    let (desk, asked) = (Desk::at(place), serve(place, "api", &[]));
    desk.dead(letter("a"));
    let id = redrive_all(&asked);
    // As if it had crashed so often before.
    execute(place, "UPDATE semel_operations SET crashes = 4 WHERE service = 'background-jobs'");
    serve(place, "worker", &[("SEMEL_CRASH", "step.before_commit")]).process.end();
    let _sweeper = serve(place, "worker,sweeper", &[SWEEPS]);
    let job = ended(&asked, &id);
    assert_eq!((&job["state"], &job["done"]), (&json!("failed"), &json!(0)), "{job}");
    assert!(job["error"].as_str().unwrap().contains("expired"), "{job}");
    assert_eq!((count(place, RETRIES), count(place, LETTERS)), (0, 1));
}
