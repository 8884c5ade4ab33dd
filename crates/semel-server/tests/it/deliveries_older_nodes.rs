//! The laws of the migration while nodes of the earlier version still run: they create notifications without
//! operations, and change operations without the status of the notification.

use std::{fs::File, time::Duration};

use semel::{
    Claim, Failure, Fingerprint, Key, Lease, Ledger, OnLost, Options, Outcome, Policy, Retry, Scope, Settled, Work,
    prelude::*, store::Commit,
};
use semel_store::{Conn, Database};

use crate::{
    deliveries::{email, fanned_out, statuses},
    deliveries_carried_over::{LONG, NOT_CARRIED, ROLES, as_it_was, count, remember},
    desk::{Desk, execute, serve},
    endpoint::Endpoint,
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, Server, eventually},
};

on_both_databases! {
    statuses_that_an_older_node_did_not_write_are_corrected_before_the_migration_ends
    a_delivery_that_an_older_node_is_making_is_left_to_it
    notifications_that_an_older_node_creates_later_are_carried_over
    an_unreadable_notification_keeps_no_other_from_being_carried_over
    a_notification_whose_operation_is_unreadable_keeps_no_other_from_being_carried_over
}

const SETTLED: Settled = Settled::Yes { successor: false };

/// A checkpoint of the migration: it found the last notification long ago.
const LONG_AGO: &str = r#"{"found":1,"logged":0,"checked":0,"corrected":false}"#;

const ENDED: &str = "semel_operations WHERE kind = 'carry-over' AND state = 'completed'";

/// Notifications of the version before, as its nodes leave them.
fn left_by_an_older_version(place: &Place, users: u32, channel: &str) {
    drop(serve(place, "api", &[]));
    as_it_was(place);
    fanned_out(place, users, channel);
}

fn ids(place: &Place) -> Vec<String> {
    rows(place, "SELECT CAST(id AS TEXT) FROM notifications ORDER BY id")
}

/// A claim as a node of the older version makes it: without the projection.
fn claim_as_an_older_node(desk: &Desk, channel: &str, id: &str) -> Lease<Database> {
    let scope = Scope::new("default", "notifications", &format!("deliver.{channel}")).unwrap();
    let work = Work::new(scope, Key::new(id).unwrap(), Fingerprint::of_bytes(id.as_bytes()));
    let policy = Policy { lease: LONG, max_attempts: Some(3), on_lost: OnLost::Hold, ..Policy::default() };
    desk.block(async {
        let ledger = Ledger::new(desk.database.clone(), Options::default()).unwrap();
        match ledger.claim(work.policy(policy)).await.unwrap() {
            Claim::Acquired(lease) => lease,
            other => panic!("{id} is {}", other.word()),
        }
    })
}

/// Whatever ended its operation: a run, a person, a sweep.
fn statuses_that_an_older_node_did_not_write_are_corrected_before_the_migration_ends(place: &Place) {
    left_by_an_older_version(place, 5, "SMS");
    let server = serve(place, ROLES, &[]);
    eventually(LONG, "all have their operations", || count(place, NOT_CARRIED) == 0);
    drop(server);
    let (desk, ids) = (Desk::at(place), ids(place));
    let claim = |n: usize| claim_as_an_older_node(&desk, "SMS", &ids[n]);
    let failure = |retry| Failure { error: "no luck".to_owned(), retry };
    let [sent, in_doubt, failed, again] = [claim(0), claim(1), claim(2), claim(3)];
    desk.block(async {
        assert_eq!(sent.complete(Outcome::kept("")).await.unwrap(), SETTLED);
        assert_eq!(in_doubt.doubt("cut off").await.unwrap(), SETTLED);
        assert_eq!(failed.fail(failure(Retry::Never)).await.unwrap(), SETTLED);
        assert_eq!(again.fail(failure(Retry::After(Duration::from_secs(3600)))).await.unwrap(), SETTLED);
    });
    assert_eq!(statuses(place), ["PENDING"; 5]);
    let expected = ["SENT", "IN_DOUBT", "FAILED", "PENDING", "PENDING"];
    remember(place, LONG_AGO);
    let server = serve(place, ROLES, &[]);
    eventually(LONG, "the statuses are corrected", || statuses(place) == expected);
    assert_eq!(rows(place, "SELECT error FROM notifications WHERE status = 'FAILED'"), ["no luck"]);
    let waits = "semel_operations WHERE kind = 'carry-over' AND state = 'pending' AND not_before IS NOT NULL";
    eventually(LONG, "it looks again: an older node was there", || count(place, waits) == 1);
    drop(server);
    remember(place, LONG_AGO);
    let server = serve(place, ROLES, &[]);
    eventually(LONG, "the migration ends", || count(place, ENDED) == 1);
    assert_eq!(statuses(place), expected);
    drop(server);
    // Another one begins when a node finds more at its start.
    execute(
        place,
        "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type)
         VALUES ('default', 'e1', 'customer', 'late', 'SMS')",
    );
    let _server = serve(place, ROLES, &[]);
    eventually(LONG, "the late one has its operation", || count(place, NOT_CARRIED) == 0);
}

fn a_delivery_that_an_older_node_is_making_is_left_to_it(place: &Place) {
    left_by_an_older_version(place, 3, "EMAIL");
    let desk = Desk::at(place);
    let lease = claim_as_an_older_node(&desk, "EMAIL", &ids(place)[1]);
    let endpoint = Endpoint::that([]);
    let _server = serve(place, ROLES, &email(&endpoint.url(), "hold"));
    eventually(LONG, "the others are sent", || statuses(place) == ["SENT", "PENDING", "SENT"]);
    assert_eq!(count(place, NOT_CARRIED), 1);
    assert_eq!(desk.block(lease.complete(Outcome::kept(""))).unwrap(), SETTLED);
    eventually(LONG, "its status is written", || statuses(place) == ["SENT"; 3]);
    assert_eq!((endpoint.calls().len(), count(place, NOT_CARRIED)), (2, 0));
}

fn notifications_that_an_older_node_creates_later_are_carried_over(place: &Place) {
    left_by_an_older_version(place, 1, "EMAIL");
    let endpoint = Endpoint::that([]);
    let _server = serve(place, ROLES, &email(&endpoint.url(), "hold"));
    eventually(LONG, "the first is sent", || statuses(place) == ["SENT"]);
    execute(
        place,
        "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type)
         VALUES ('default', 'e1', 'customer', 'later', 'EMAIL')",
    );
    eventually(LONG, "the second is sent", || statuses(place) == ["SENT"; 2]);
    assert_eq!(endpoint.calls().len(), 2);
}

/// A server whose log goes to a file.
fn logging(place: &Place, variables: &[(&str, &str)]) -> Server {
    let mut command = place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", ROLES]);
    Server::start_with(command.envs(variables.iter().copied()).stderr(File::create(place.path("log")).unwrap()))
}

/// The first row and one further on: no node could start with the first, and none would come past the other.
fn an_unreadable_notification_keeps_no_other_from_being_carried_over(place: &Place) {
    left_by_an_older_version(place, 5, "EMAIL");
    let bytes = if place.url.starts_with("sqlite:") { "X'ff00'" } else { "''" };
    execute(place, &format!("UPDATE notifications SET tenant = {bytes} WHERE user_id = 'u1'"));
    execute(place, "UPDATE notifications SET tenant = '' WHERE user_id = 'u3'");
    let endpoint = Endpoint::that([]);
    let url = endpoint.url();
    let variables = email(&url, "hold");
    let server = logging(place, &variables);
    let expected = ["PENDING", "SENT", "PENDING", "SENT", "SENT"];
    eventually(LONG, "the others are sent", || statuses(place) == expected);
    let told = || std::fs::read_to_string(place.path("log")).unwrap();
    eventually(LONG, "the log says so", || told().contains("notifications=2"));
    drop(server);
    remember(place, &LONG_AGO.replace("\"logged\":0", "\"logged\":2"));
    let _server = logging(place, &variables);
    eventually(LONG, "the migration ends", || count(place, ENDED) == 1);
    assert_eq!((statuses(place), count(place, NOT_CARRIED)), (expected.map(str::to_owned).into(), 2));
    assert!(!told().contains("cannot be read"), "said before: {}", told());
}

/// A batch that fails is halved until the offending row is alone.
fn a_notification_whose_operation_is_unreadable_keeps_no_other_from_being_carried_over(place: &Place) {
    left_by_an_older_version(place, 5, "EMAIL");
    let desk = Desk::at(place);
    let lease = claim_as_an_older_node(&desk, "EMAIL", &ids(place)[1]);
    assert_eq!(desk.block(lease.complete(Outcome::kept(""))).unwrap(), SETTLED);
    let bytes = if place.url.starts_with("sqlite:") { "X'09'" } else { "'\\x09'::bytea" };
    execute(place, &format!("UPDATE semel_operations SET outcome = {bytes} WHERE kind = 'deliver.EMAIL'"));
    let endpoint = Endpoint::that([]);
    let _server = serve(place, ROLES, &email(&endpoint.url(), "hold"));
    eventually(LONG, "the others are sent", || statuses(place) == ["SENT", "PENDING", "SENT", "SENT", "SENT"]);
    assert_eq!((endpoint.calls().len(), count(place, NOT_CARRIED)), (4, 1));
}

/// The others are migrated at once, and these after the lock. One wait for each of these would take a minute.
#[test]
fn locked_notifications_are_carried_over_later() {
    let place = Place::postgres();
    // With the new tables: their migration would wait for the lock.
    drop(serve(&place, "api", &[]));
    fanned_out(&place, 40, "EMAIL");
    let desk = Desk::at(&place);
    let tx = desk.block(async {
        let tx = desk.database.begin(LONG).await.unwrap();
        let mut held = tx.connection().await.unwrap();
        let Conn::Postgres(conn) = held.get().unwrap() else { panic!("this is PostgreSQL") };
        let lock = "SELECT id FROM notifications WHERE user_id IN ('u1', 'u10', 'u20', 'u30', 'u40') FOR UPDATE";
        sqlx::query(lock).execute(conn).await.unwrap();
        drop(held);
        tx
    });
    // Without an endpoint: a delivery would wait for the lock, too.
    let _server = serve(&place, ROLES, &[]);
    eventually(SOON, "the others are carried over", || count(&place, NOT_CARRIED) == 5);
    let over: Commit = desk.block(Database::commit(&desk.database, &tx));
    assert!(matches!(over, Commit::Done));
    eventually(LONG, "these are carried over", || count(&place, NOT_CARRIED) == 0);
    assert_eq!(count(&place, "semel_operations WHERE kind = 'deliver.EMAIL'"), 40);
}
