//! The laws of background jobs: on which node, how far, and once.

use serde_json::{Value, json};

use crate::{
    desk::{Desk, ended, execute, letter, listed, post, serve, shown},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, eventually},
};

on_both_databases! {
    a_job_is_run_by_another_node_than_the_one_that_was_asked
    jobs_are_listed_newest_first_and_only_ones_own
    a_job_whose_node_is_killed_goes_on_where_it_was
    two_nodes_run_a_job_once
    a_job_of_a_kind_that_nobody_knows_is_left_to_those_who_do
    a_job_that_cannot_be_done_fails_and_says_why
    a_job_whose_row_cannot_be_read_keeps_no_other_waiting
}

/// Makes many letters of one, which is quicker than putting each.
fn copy_letters(place: &Place, desk: &Desk, number: u32) {
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

fn count(place: &Place, sql: &'static str) -> usize {
    rows(place, sql)[0].parse().unwrap()
}

const RETRIES: &str = "SELECT CAST(count(*) AS TEXT) FROM semel_retries";
const LETTERS: &str = "SELECT CAST(count(*) AS TEXT) FROM semel_dead_letters";

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

fn jobs_are_listed_newest_first_and_only_ones_own(place: &Place) {
    let server = serve(place, "api", &[]);
    let mut made: Vec<_> = (0..5).map(|_| json!(redrive_all(&server))).collect();
    made.reverse();
    execute(
        place,
        "INSERT INTO semel_jobs (id, tenant, kind, params, actor, state)
         VALUES ('00000000-0000-7000-8000-000000000000', 'another', 'redrive-dead-letters', '{}', 'eve', 'running')",
    );
    assert_eq!(listed(&server, "/jobs?limit=2", "jobId"), made);
    assert_eq!(listed(&server, "/jobs?state=running", "jobId"), made);
    assert_eq!(listed(&server, "/jobs?state=done", "jobId"), Vec::<Value>::new());
    for query in ["state=x", "cursor=7", "limit=501", "kind=x"] {
        assert_eq!(server.get(&format!("/jobs?{query}")).problem(), "invalid-query", "{query}");
    }
    for id in ["00000000-0000-7000-8000-000000000000", "7", "00000000-0000-7000-8000-00000000000A"] {
        assert_eq!(server.get(&format!("/jobs/{id}")).status, 404, "{id}");
    }
}

/// Killed before the commit of its second step, and after it: nothing is moved twice, and nothing is counted twice.
fn a_job_whose_node_is_killed_goes_on_where_it_was(place: &Place) {
    let (desk, asked) = (Desk::at(place), serve(place, "api", &[]));
    copy_letters(place, &desk, 1_700);
    let id = redrive_all(&asked);
    let path = format!("/jobs/{id}");
    for (point, done) in [("job.stepped:2", 500), ("job.committed:1", 1_000)] {
        let mut worker = serve(place, "worker", &[("SEMEL_CRASH", point)]);
        worker.process.end();
        let job = shown(&asked, &path);
        assert_eq!((&job["state"], &job["done"]), (&json!("running"), &json!(done)), "{point}");
        assert_eq!((count(place, RETRIES), count(place, LETTERS)), (done, 1_700 - done), "{point}");
    }
    let _worker = serve(place, "worker", &[]);
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

fn a_job_of_a_kind_that_nobody_knows_is_left_to_those_who_do(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api,worker", &[]));
    execute(
        place,
        "INSERT INTO semel_jobs (id, tenant, kind, params, actor, state)
         VALUES ('00000000-0000-7000-8000-000000000000', 'default', 'newer', '{}', 'ana', 'running')",
    );
    desk.dead(letter("a"));
    assert_eq!(ended(&server, redrive_all(&server))["done"], 1);
    let left = shown(&server, "/jobs/00000000-0000-7000-8000-000000000000");
    assert_eq!((&left["state"], &left["done"]), (&json!("running"), &json!(0)));
}

/// Damaged by hand, and older than every other: it is looked at first.
fn a_job_whose_row_cannot_be_read_keeps_no_other_waiting(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api,worker", &[]));
    execute(
        place,
        "INSERT INTO semel_jobs (id, tenant, kind, params, actor, state)
         VALUES ('00000000-0000-7000-8000-000000000000', 'default', 'redrive-dead-letters', 'no json', 'ana', 'running')",
    );
    desk.dead(letter("a"));
    let id = redrive_all(&server);
    assert_eq!(ended(&server, &id)["done"], 1);
    assert_eq!(listed(&server, "/jobs", "jobId"), [json!(id), json!("00000000-0000-7000-8000-000000000000")]);
    let error = &listed(&server, "/jobs", "error")[1];
    assert!(error.as_str().unwrap().starts_with("unreadable: "), "{error}");
}

fn a_job_that_cannot_be_done_fails_and_says_why(place: &Place) {
    let server = serve(place, "api,worker", &[]);
    execute(
        place,
        "INSERT INTO semel_jobs (id, tenant, kind, params, actor, state)
         VALUES ('00000000-0000-7000-8000-000000000000', 'default', 'redrive-dead-letters', '{\"odd\":1}', 'ana',
                 'running')",
    );
    let path = "/jobs/00000000-0000-7000-8000-000000000000";
    eventually(SOON, "the job fails", || shown(&server, path)["state"] == "failed");
    let job = shown(&server, path);
    assert!(job["error"].as_str().unwrap().contains("params"), "{job}");
    assert!(job["endedAt"].is_string(), "{job}");
}
