//! Notifications of an earlier version are delivered by the worker, once.

use std::{collections::HashSet, thread, time::Duration};

use semel::{Fingerprint, Key, Ledger, Options, Policy, Scope, Work};
use serde_json::json;

use crate::{
    deliveries::{email, fanned_out, statuses, stored},
    desk::{Desk, execute, post, serve},
    endpoint::{Does, Endpoint},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{Server, eventually},
};

on_both_databases! {
    notifications_of_an_earlier_version_are_delivered_once
    two_nodes_that_carry_over_at_once_deliver_once
    deliveries_settled_by_an_earlier_version_are_not_repeated
    a_notification_can_be_resolved_before_its_migration
}

pub(crate) const ROLES: &str = "api,worker,sweeper";
pub(crate) const LONG: Duration = Duration::from_secs(90);
pub(crate) const NOT_CARRIED: &str = "notifications WHERE NOT enqueued";

/// Sets the tables of a place back to the version before.
pub(crate) fn as_it_was(place: &Place) {
    for sql in [
        "DROP INDEX notifications_to_enqueue",
        "ALTER TABLE notifications DROP COLUMN enqueued",
        "ALTER TABLE notifications ADD COLUMN due_at BIGINT NOT NULL DEFAULT 0",
        "CREATE INDEX notifications_to_deliver ON notifications (notification_type, due_at, id) WHERE status = 'PENDING'",
        "DELETE FROM semel_server_migrations WHERE version = 9",
    ] {
        execute(place, sql);
    }
}

pub(crate) fn count(place: &Place, what: &str) -> usize {
    let sql = format!("SELECT CAST(count(*) AS TEXT) FROM {what}");
    rows(place, Box::leak(sql.into_boxed_str())).remove(0).parse().unwrap()
}

/// Sets the checkpoint of the migration, which runs at once. No node may run.
pub(crate) fn remember(place: &Place, checkpoint: &str) {
    let checkpoint = stored(place, checkpoint);
    execute(
        place,
        &format!(
            "UPDATE semel_operations SET checkpoint = {checkpoint}, not_before = NULL
             WHERE kind = 'carry-over' AND state <> 'completed'"
        ),
    );
    execute(place, "UPDATE semel_backlog SET due = 1 WHERE kind = 'carry-over' AND due IS NOT NULL");
}

fn all_sent(place: &Place) {
    eventually(LONG, "all are sent", || count(place, "notifications WHERE status <> 'SENT'") == 0);
}

/// More than two batches, and a node that is killed before the commit of the second and after that of the next.
fn notifications_of_an_earlier_version_are_delivered_once(place: &Place) {
    drop(serve(place, "api", &[]));
    as_it_was(place);
    fanned_out(place, 2200, "SMS");
    execute(
        place,
        "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type)
         VALUES ('default', 'e1', 'customer', 'u1', 'EMAIL'), ('default', 'e1', 'customer', 'u2', 'EMAIL')",
    );
    let endpoint = Endpoint::that([]);
    let url = endpoint.url();
    let variables = email(&url, "rerun");
    for (point, carried) in [("deliveries.carried:2", 1000), ("step.after_commit:1", 2000)] {
        // As if it had found the last one long ago: what it finds now is remembered with its batch.
        remember(place, "{\"found\":1,\"logged\":0,\"checked\":0,\"corrected\":false}");
        let dying = [&variables[..], &[("SEMEL_CRASH", point)]].concat();
        serve(place, ROLES, &dying).process.end();
        assert_eq!(count(place, "notifications WHERE enqueued"), carried, "{point}");
        assert_eq!(count(place, "semel_operations WHERE kind = 'deliver.SMS'"), carried, "in one commit");
        let progress = "semel_operations WHERE kind = 'carry-over' AND crashes = 0 AND length(checkpoint) > 60";
        assert_eq!(count(place, progress), 1, "a batch is progress, and has its time");
    }
    let _server = serve(place, ROLES, &variables);
    eventually(LONG, "all have their operations", || count(place, NOT_CARRIED) == 0);
    eventually(LONG, "those with an endpoint are sent", || {
        count(place, "notifications WHERE status = 'SENT' AND notification_type = 'EMAIL'") == 2
    });
    assert_eq!(count(place, "semel_operations WHERE kind LIKE 'deliver.%'"), 2202);
    assert_eq!(count(place, "semel_operations WHERE kind = 'carry-over'"), 1, "a restart continues the same operation");
    assert_eq!(endpoint.keys().into_iter().collect::<HashSet<_>>().len(), endpoint.calls().len());
}

/// Two operations of the migration, one on each node.
fn two_nodes_that_carry_over_at_once_deliver_once(place: &Place) {
    const MAILS: usize = 40;
    drop(serve(place, "api", &[]));
    as_it_was(place);
    fanned_out(place, 3200, "SMS");
    execute(
        place,
        &format!(
            "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type)
             SELECT tenant, event_id, kind, user_id, 'EMAIL' FROM notifications ORDER BY id LIMIT {MAILS}"
        ),
    );
    let desk = Desk::at(place);
    desk.block(async {
        let ledger = Ledger::new(desk.database.clone(), Options::default()).unwrap();
        let scope = Scope::new(Scope::DEFAULT_TENANT, "notifications", "carry-over").unwrap();
        let second = Work::new(scope, Key::new("second").unwrap(), Fingerprint::of_bytes(b""));
        ledger.enqueue(second.policy_of_worker(Policy::default())).await.unwrap();
    });
    let endpoint = Endpoint::that([]);
    let url = endpoint.url();
    let variables = email(&url, "hold");
    let start = || serve(place, ROLES, &variables);
    let _servers = thread::scope(|scope| [scope.spawn(start), scope.spawn(start)].map(|one| one.join().unwrap()));
    eventually(LONG, "all have their operations", || count(place, NOT_CARRIED) == 0);
    eventually(LONG, "those with an endpoint are sent", || {
        count(place, "notifications WHERE status = 'SENT'") == MAILS
    });
    assert_eq!(count(place, "semel_operations WHERE kind LIKE 'deliver.%'"), 3200 + MAILS);
    assert_eq!(count(place, "semel_operations WHERE kind = 'carry-over'"), 2, "the nodes enqueued one");
    assert_eq!((endpoint.keys().into_iter().collect::<HashSet<_>>().len(), endpoint.calls().len()), (MAILS, MAILS));
}

/// One was sent, one is in doubt, one has failed and one is to be tried again; the node died before it wrote the
/// statuses.
fn deliveries_settled_by_an_earlier_version_are_not_repeated(place: &Place) {
    drop(serve(place, "api", &[]));
    fanned_out(place, 4, "EMAIL");
    let endpoint = Endpoint::that([Does::Answers(202), Does::Cuts, Does::Answers(422), Does::Answers(503)]);
    let url = endpoint.url();
    let mut variables = email(&url, "hold");
    variables.push(("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_CONCURRENCY", "1"));
    let slow = [&variables[..], &[("SEMEL_NOTIFICATIONS_CHANNELS_EMAIL_BACKOFF", "10m")]].concat();
    let server = serve(place, ROLES, &slow);
    eventually(LONG, "all were tried", || {
        let mut stand = statuses(place);
        stand.sort_unstable();
        stand == ["FAILED", "IN_DOUBT", "PENDING", "SENT"] && endpoint.calls().len() == 4
    });
    eventually(LONG, "the last one waits", || count(place, "semel_operations WHERE state = 'failed'") == 2);
    drop(server);
    let (before, failed) = (statuses(place), "UPDATE semel_backlog SET due = 1 WHERE due IS NOT NULL");
    execute(place, "UPDATE notifications SET status = 'PENDING', error = NULL, sent_at = NULL, attempt = 0");
    execute(place, failed);
    execute(place, "UPDATE semel_operations SET not_before = NULL WHERE not_before IS NOT NULL");
    as_it_was(place);
    let _server = serve(place, ROLES, &variables);
    let expected: Vec<_> = before.iter().map(|s| if s == "PENDING" { "SENT".to_owned() } else { s.clone() }).collect();
    eventually(LONG, "the statuses are put right", || statuses(place) == expected);
    assert_eq!(endpoint.calls().len(), 5, "only the one that was to be tried again");
}

fn a_notification_can_be_resolved_before_its_migration(place: &Place) {
    let server: Server = serve(place, "api", &[]);
    fanned_out(place, 2, "EMAIL");
    let ids = rows(place, "SELECT CAST(id AS TEXT) FROM notifications ORDER BY id");
    let body = json!({ "status": "SENT", "reason": "our own mailer" }).to_string();
    assert_eq!(post(&server, &format!("/notifications/{}/resolve", ids[0]), &body).status, 200);
    assert_eq!(statuses(place), ["SENT", "PENDING"]);
    drop(server);
    let endpoint = Endpoint::that([]);
    let _server = serve(place, ROLES, &email(&endpoint.url(), "hold"));
    all_sent(place);
    assert_eq!(endpoint.calls().len(), 1);
}
