//! The laws of jobs in the table of an older version: each is migrated once, and continues where it was.

use std::{thread, time::Duration};

use semel::{Claim, Fingerprint, Key, Ledger, Options, Scope, Work, prelude::*, store::Commit};
use semel_store::{Conn, Database};
use serde_json::{Value, json};

use crate::{
    desk::{Desk, ended, execute, listed, serve, shown},
    jobs::{LETTERS, RETRIES, SWEEPS, copy_letters, count},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, Server, eventually},
};

on_both_databases! {
    jobs_of_an_older_version_go_on_and_stay_readable
    a_job_of_an_older_version_with_invalid_params_fails_with_the_reason
    a_node_that_is_killed_while_it_carries_over_loses_no_job
    a_lease_that_an_older_version_released_is_completed_and_expires
    two_nodes_that_carry_over_at_once_migrate_each_job_once
}

const LEFT: &str = "SELECT CAST(count(*) AS TEXT) FROM semel_jobs";
const CARRIED: &str = "SELECT CAST(count(*) AS TEXT) FROM semel_operations WHERE service = 'background-jobs'";

fn id(n: usize) -> String {
    format!("00000000-0000-7000-8000-{n:012}")
}

/// A row of an older version. `rest` has its columns from `state` on.
fn row(n: usize, tenant: &str, params: &str, rest: &str) -> String {
    format!("('{}', '{tenant}', 'redrive-dead-letters', '{params}', 'ana', {rest})", id(n))
}

fn insert(place: &Place, rows: &[String]) {
    let columns =
        "id, tenant, kind, params, actor, state, done, total, cursor, error, created_at, updated_at, ended_at";
    execute(place, &format!("INSERT INTO semel_jobs ({columns}) VALUES {}", rows.join(", ")));
}

/// A database with the tables of the services, and no running node.
fn made(place: &Place) {
    drop(serve(place, "api", &[]));
}

const LONG: Duration = Duration::from_secs(60);
const NOON: i64 = 1_700_000_000_000_000;

fn jobs_of_an_older_version_go_on_and_stay_readable(place: &Place) {
    made(place);
    copy_letters(place, &Desk::at(place), 1_700);
    // Half-way: as if its first step had moved these.
    execute(place, "DELETE FROM semel_dead_letters WHERE id <= 500");
    let rows = [
        row(1, "default", "{}", &format!("'done', 7, 7, '9', NULL, {NOON}, {NOON} + 2000000, {NOON} + 2000000")),
        row(
            2,
            "default",
            "{}",
            &format!("'failed', 3, NULL, '9', 'no luck', {NOON}, {NOON} + 1000000, {NOON} + 1000000"),
        ),
        row(3, "default", "{}", "'running', 500, 1700, '500', NULL, 4000000000000000, 4000000000000000, NULL"),
        row(4, "another", "{}", &format!("'done', 1, 1, NULL, NULL, {NOON}, {NOON}, {NOON}")),
        row(0, "default", "{}", &format!("'done', 1, 1, NULL, NULL, {NOON}, {NOON}, {NOON}"))
            .replace("00000000-", "no uuid-"),
    ];
    insert(place, &rows);
    let server = serve(place, "api,worker,sweeper", &[SWEEPS]);
    eventually(SOON, "what can be read is carried over", || count(place, LEFT) == 1);
    let all = [id(3), id(2), id(1)].map(Value::from);
    assert_eq!(listed(&server, "/jobs", "jobId"), all);
    let job = ended(&server, id(3));
    assert_eq!((&job["state"], &job["done"], &job["total"]), (&json!("done"), &json!(1_700), &json!(1_700)), "{job}");
    assert_eq!((count(place, RETRIES), count(place, LETTERS)), (1_200, 0));
    let (done, failed) = (shown(&server, &format!("/jobs/{}", id(1))), shown(&server, &format!("/jobs/{}", id(2))));
    let expected = json!({
        "jobId": id(1), "kind": "redrive-dead-letters", "params": {}, "actor": "ana", "state": "done", "done": 7,
        "total": 7, "error": null, "createdAt": "2023-11-14T22:13:20.000000Z", "updatedAt": "2023-11-14T22:13:22.000000Z",
        "endedAt": "2023-11-14T22:13:22.000000Z",
    });
    assert_eq!(done, expected);
    let told = ["state", "done", "total", "error", "endedAt"].map(|member| failed[member].clone());
    let expected = [json!("failed"), json!(3), json!(null), json!("no luck"), json!("2023-11-14T22:13:21.000000Z")];
    assert_eq!(told, expected);
    let waiting =
        "SELECT CAST(count(*) AS TEXT) FROM semel_operations WHERE service = 'background-jobs' AND expires_at IS NULL";
    eventually(SOON, "those that had ended are settled", || count(place, waiting) == 0);
    assert_eq!(listed(&server, "/jobs?state=failed", "jobId"), [json!(id(2))]);
    assert_eq!(listed(&server, "/jobs", "jobId"), all);
    assert_eq!(shown(&server, &format!("/jobs/{}", id(1))), done, "settling them changes nothing that is shown");
}

fn a_job_of_an_older_version_with_invalid_params_fails_with_the_reason(place: &Place) {
    made(place);
    let running = "'running', 0, NULL, NULL, NULL, 1, 1, NULL";
    insert(place, &[row(1, "default", r#"{"odd":1}"#, running), row(2, "default", "no json", running)]);
    let server = serve(place, "api,worker", &[]);
    eventually(SOON, "both are carried over", || count(place, CARRIED) == 2);
    for n in [1, 2] {
        let job = ended(&server, id(n));
        assert_eq!(job["state"], "failed", "{job}");
        assert!(job["error"].as_str().unwrap().contains("params") && job["endedAt"].is_string(), "{job}");
    }
}

/// Killed before the commit of a batch, and after one.
fn a_node_that_is_killed_while_it_carries_over_loses_no_job(place: &Place) {
    const ALL: usize = 250;
    made(place);
    let ended = format!("'done', 1, 1, NULL, NULL, {NOON}, {NOON}, {NOON}");
    let rows: Vec<_> = (0..ALL).map(|n| row(n, "default", "{}", &ended)).collect();
    insert(place, &rows);
    for (point, left) in [("job.carried:2", 150), ("step.after_commit:1", 50)] {
        serve(place, "worker", &[("SEMEL_CRASH", point)]).process.end();
        assert_eq!((count(place, LEFT), count(place, CARRIED)), (left, ALL - left), "{point}");
    }
    let server = serve(place, "api,worker,sweeper", &[SWEEPS]);
    eventually(SOON, "all are carried over", || count(place, LEFT) == 0);
    let ids: Vec<_> = (0..ALL).rev().map(|n| json!(id(n))).collect();
    assert_eq!(listed(&server, "/jobs?limit=100", "jobId"), ids);
    assert_eq!(listed(&server, "/jobs?limit=100&state=done", "jobId"), ids);
}

/// What an older version leaves of a job whose run it released: a pending operation, which was the lease on its row.
fn released_lease(desk: &Desk, n: usize) {
    let (scope, key) = (Scope::parse("jobs/redrive-dead-letters").unwrap(), Key::new(&id(n)).unwrap());
    desk.block(async {
        let ledger = Ledger::new(desk.database.clone(), Options::default()).unwrap();
        let work = Work::new(scope, key, Fingerprint::of_bytes(id(n).as_bytes()));
        let Claim::Acquired(lease) = ledger.claim(work).await.unwrap() else { panic!("its key is free") };
        let _ = lease.release(Duration::from_millis(1)).await.unwrap();
    });
}

fn a_lease_that_an_older_version_released_is_completed_and_expires(place: &Place) {
    const COMPLETED: &str = "SELECT key FROM semel_operations
        WHERE service = 'jobs' AND state = 'completed' AND expires_at IS NOT NULL AND kind <> 'carry-over' ORDER BY id";
    made(place);
    let desk = Desk::at(place);
    released_lease(&desk, 1);
    let log = std::fs::File::create(place.path("log")).unwrap();
    let mut command = place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", "api,worker"]);
    let server = Server::start_with(command.env("RUST_LOG", "warn").stderr(log));
    eventually(SOON, "it is completed", || rows(place, COMPLETED) == [id(1)]);
    // A node of the older version makes a job, and its turn ends.
    insert(place, &[row(2, "default", "{}", "'running', 0, NULL, NULL, NULL, 1, 1, NULL")]);
    released_lease(&desk, 2);
    eventually(SOON, "it is completed", || rows(place, COMPLETED) == [id(1), id(2)]);
    eventually(SOON, "its job is carried over", || count(place, LEFT) == 0);
    assert_eq!(ended(&server, id(2))["state"], "done");
    drop(server);
    let log = std::fs::read_to_string(place.path("log")).unwrap();
    assert!(!log.contains("no handler"), "{log}");
}

/// Each of the two has its own operation for it.
fn two_nodes_that_carry_over_at_once_migrate_each_job_once(place: &Place) {
    const ALL: usize = 1_200;
    made(place);
    let ended = format!("'done', 1, 1, NULL, NULL, {NOON}, {NOON}, {NOON}");
    let rows: Vec<_> = (0..ALL).map(|n| row(n, "default", "{}", &ended)).collect();
    insert(place, &rows);
    let start = || serve(place, "api,worker,sweeper", &[SWEEPS]);
    let [server, _other] =
        thread::scope(|scope| [scope.spawn(start), scope.spawn(start)].map(|one| one.join().unwrap()));
    eventually(LONG, "all are carried over", || count(place, LEFT) == 0);
    assert_eq!(count(place, CARRIED), ALL);
    let at_it = "SELECT CAST(count(*) AS TEXT) FROM semel_operations
                 WHERE service = 'jobs' AND kind = 'carry-over' AND state <> 'completed'";
    eventually(LONG, "both have ended", || count(place, at_it) == 0);
    // Listed in the order of their migration.
    let mut all = listed(&server, "/jobs?limit=100", "jobId");
    all.sort_by_key(Value::to_string);
    assert_eq!(all, (0..ALL).map(|n| json!(id(n))).collect::<Vec<_>>());
}

/// A node of the older version runs a step: the others are migrated now, and this one after the step.
#[test]
fn a_job_whose_row_is_locked_is_carried_over_later() {
    let place = Place::postgres();
    made(&place);
    let ended = format!("'done', 1, 1, NULL, NULL, {NOON}, {NOON}, {NOON}");
    insert(&place, &[1, 2, 3].map(|n| row(n, "default", "{}", &ended)));
    let desk = Desk::at(&place);
    let tx = desk.block(async {
        let tx = desk.database.begin(SOON).await.unwrap();
        let mut held = tx.connection().await.unwrap();
        let Conn::Postgres(conn) = held.get().unwrap() else { panic!("this is PostgreSQL") };
        let lock = "SELECT id FROM semel_jobs WHERE id = '00000000-0000-7000-8000-000000000002' FOR UPDATE";
        sqlx::query(lock).execute(conn).await.unwrap();
        drop(held);
        tx
    });
    let server = serve(&place, "api,worker", &[]);
    eventually(SOON, "the others are carried over", || count(&place, CARRIED) == 2);
    assert_eq!(count(&place, LEFT), 1);
    let over: Commit = desk.block(Database::commit(&desk.database, &tx));
    assert!(matches!(over, Commit::Done));
    eventually(SOON, "this one is carried over", || count(&place, LEFT) == 0);
    assert_eq!(shown(&server, &format!("/jobs/{}", id(2)))["state"], "done");
}
