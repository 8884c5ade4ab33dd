//! Notifications of an earlier version are delivered by the worker, once.

use std::{collections::HashSet, time::Duration};

use serde_json::json;

use crate::{
    deliveries::{email, fanned_out, statuses},
    desk::{execute, post, serve},
    endpoint::{Does, Endpoint},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{Server, eventually},
};

on_both_databases! {
    notifications_of_an_earlier_version_are_delivered_once
    deliveries_settled_by_an_earlier_version_are_not_repeated
    a_notification_can_be_resolved_before_its_migration
}

const ROLES: &str = "api,worker,sweeper";
const LONG: Duration = Duration::from_secs(90);

/// Sets the tables of a place back to the version before.
fn as_it_was(place: &Place) {
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

fn count(place: &Place, what: &str) -> usize {
    let sql = format!("SELECT CAST(count(*) AS TEXT) FROM {what}");
    rows(place, Box::leak(sql.into_boxed_str())).remove(0).parse().unwrap()
}

fn all_sent(place: &Place) {
    eventually(LONG, "all are sent", || count(place, "notifications WHERE status <> 'SENT'") == 0);
}

/// More than two batches, and a node that is killed after each of the first two.
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
    // After its first batch, and before the commit of another.
    for (point, carried) in [("deliveries.carried:1", 1000..=1000), ("deliveries.carried:1", 1000..=2000)] {
        let dying = [&variables[..], &[("SEMEL_CRASH", point)]].concat();
        serve(place, ROLES, &dying).process.end();
        let enqueued = count(place, "notifications WHERE enqueued");
        assert!(carried.contains(&enqueued), "{enqueued} after {point}");
        assert_eq!(count(place, "semel_operations WHERE kind = 'deliver.SMS'"), enqueued, "in one commit");
    }
    let _server = serve(place, ROLES, &variables);
    let waits = "notifications WHERE NOT enqueued";
    eventually(LONG, "all have their operations", || count(place, waits) == 0);
    eventually(LONG, "those with an endpoint are sent", || {
        count(place, "notifications WHERE status = 'SENT' AND notification_type = 'EMAIL'") == 2
    });
    assert_eq!(count(place, "semel_operations WHERE kind LIKE 'deliver.%'"), 2202);
    assert_eq!(endpoint.keys().into_iter().collect::<HashSet<_>>().len(), endpoint.calls().len());
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
