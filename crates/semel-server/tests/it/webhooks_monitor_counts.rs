//! The laws of the monitor's counts: nothing is counted twice, and omissions are reported.

use std::time::Duration;

use semel_http::webhooks::Verifier;
use serde_json::json;

use crate::{
    desk::{execute, shown},
    hooks::{deliver, deliver_to, event, post_raw, signed_by, start, start_as, status},
    place::{Place, on_both_databases},
    support::{SOON, eventually},
    webhooks_monitor::{STRIPE, customer},
};

on_both_databases! {
    the_same_body_under_another_id_is_a_duplicate
    counts_of_separate_functions_are_added_up
    totals_are_exact_with_any_number_of_types
    conflicts_are_filtered_before_they_are_cut
}

fn the_same_body_under_another_id_is_a_duplicate(place: &Place) {
    let variables = [("SEMEL_WEBHOOKS_GITHUB_KIND", "github"), ("SEMEL_WEBHOOKS_GITHUB_SECRETS", "geheim-geheim")];
    let server = start(place, &variables);
    let (body, verifier) = (b"{\"ref\":\"main\"}", Verifier::github(["geheim-geheim"]).unwrap());
    for (id, said) in [("guid-1", "processed"), ("guid-2", "skipped")] {
        let mut headers = signed_by(&verifier, Some(id), body, Duration::ZERO);
        headers.push(("x-github-event".to_owned(), "push".to_owned()));
        assert_eq!(status(&post_raw(server.address, "/webhooks/github", &headers, body)), said);
    }
    eventually(SOON, "the duplicate is counted", || {
        shown(&server, "/webhooks/github/monitor")["duplicates_suppressed"] == 1
    });
    let told = shown(&server, "/webhooks/github/monitor");
    assert_eq!((&told["totals"]["total"], &told["conflicts"]["count"]), (&json!(1), &json!(0)), "bodies are no events");
}

fn counts_of_separate_functions_are_added_up(place: &Place) {
    let variables = [
        ("SEMEL_WEBHOOKS_STRIPE_DEDUP_PER_FUNCTION", "true"),
        ("SEMEL_WEBHOOKS_STRIPE_FUNCTIONS", "connect"),
        ("SEMEL_WEBHOOKS_STRIPE2_KIND", "stripe"),
        ("SEMEL_WEBHOOKS_STRIPE2_SECRETS", "whsec_test_secret"),
    ];
    let server = start(place, &variables);
    for path in ["/webhooks/stripe", "/webhooks/stripe/connect", "/webhooks/stripe2"] {
        assert_eq!(status(&deliver_to(&server, path, &event("evt_1", 1_700_000_000, "a"))), "processed", "{path}");
    }
    let told = shown(&server, STRIPE);
    assert_eq!(told["totals"]["total"], 2, "and none of another source");
    let functions = told["by_webhook_function"].as_array().unwrap();
    assert_eq!(
        functions.iter().map(|it| it["webhook_function"].as_str().unwrap()).collect::<Vec<_>>(),
        ["connect", "stripe"]
    );
    assert_eq!(shown(&server, &format!("{STRIPE}?webhook_function=connect"))["totals"]["total"], 1);
}

/// Types, each with one event that completed in some time; the first ones come twice.
fn types(place: &Place, from: u32, to: u32) {
    for what in ["'', 'processing', '', 0", "'processing', 'completed', '', i % 80"] {
        execute(
            place,
            &format!(
                "INSERT INTO semel_counters
                    (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
                 WITH RECURSIVE counted(i) AS (SELECT {from} UNION ALL SELECT i + 1 FROM counted WHERE i < {to})
                 SELECT 'default', 'webhooks', 'stripe', 'type ' || i, 'stripe', (SELECT max(hour) FROM semel_deltas),
                        {what}, CASE WHEN i <= 3 THEN 2 ELSE 1 END FROM counted"
            ),
        );
    }
}

fn totals_are_exact_with_any_number_of_types(place: &Place) {
    // Without a sweeper: counts that are not folded yet belong to this hour.
    let server = start_as(place, "api", &[]);
    assert_eq!(status(&deliver(&server, &customer("cus_1"))), "processed");
    types(place, 1, 12_000);
    let told = shown(&server, STRIPE);
    assert_eq!((&told["totals"]["total"], &told["totals"]["completed"]), (&json!(12_004), &json!(12_004)));
    assert_eq!(told["rates"]["success_rate"], 1.0);
    assert_eq!((&told["by_day"][0]["total"], &told["processing_time_ms"]["count"]), (&json!(12_004), &json!(12_004)));
    assert_eq!(told["by_webhook_function"][0]["total"], 12_004);
    assert_eq!(told["by_event_type"].as_array().unwrap().len(), 200);
    let first = ["type 1", "type 2", "type 3"].map(|name| json!(name));
    assert_eq!([0, 1, 2].map(|n| told["by_event_type"][n]["event_type"].clone()), first, "those with the most");
    assert_eq!(
        (&told["truncated"], &told["incomplete"]),
        (&json!(true), &json!([])),
        "there are more, and all is right"
    );

    types(place, 12_001, 13_000);
    let told = shown(&server, STRIPE);
    assert_eq!((&told["totals"]["total"], &told["by_day"][0]["total"]), (&json!(13_004), &json!(13_004)));
    assert_eq!(told["processing_time_ms"]["count"], 13_004);
    assert_eq!(told["incomplete"], json!(["by_event_type"]), "these were cut, and only these");
}

fn conflicts_are_filtered_before_they_are_cut(place: &Place) {
    let server = start(place, &[]);
    let conflicts = |id: &str, of: &str| {
        let mut first = event(id, 1_700_000_000, "a");
        first["type"] = json!(of);
        assert_eq!(status(&deliver(&server, &first)), "processed");
        first["data"] = json!({ "object": { "id": "other" } });
        assert_eq!(status(&deliver(&server, &first)), "skipped");
    };
    conflicts("cus_1", "customer.created");
    conflicts("evt_1", "invoice.paid");
    execute(
        place,
        "INSERT INTO semel_webhook_conflicts
            (tenant, source, kind, event_id, event_type, webhook_function, came_fingerprint, stored_fingerprint,
             came_created, stored_created, deed, count, first_at, last_at)
         WITH RECURSIVE counted(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM counted WHERE i < 60)
         SELECT tenant, source, kind, event_id || i, event_type, webhook_function, came_fingerprint, stored_fingerprint,
             came_created, stored_created, deed, count, first_at, last_at + i
         FROM semel_webhook_conflicts, counted WHERE event_id = 'evt_1'",
    );
    assert_eq!(shown(&server, STRIPE)["conflicts"]["items"].as_array().unwrap().len(), 50);
    for filter in ["event_type=customer.created", "event_type=customer.created&webhook_function=stripe"] {
        let told = shown(&server, &format!("{STRIPE}?{filter}"));
        let items = told["conflicts"]["items"].as_array().unwrap();
        assert_eq!((items.len(), &items[0]["event_id"]), (1, &json!("cus_1")), "{filter}");
        assert_eq!(told["health"]["status"], "degraded");
    }
    let none = shown(&server, &format!("{STRIPE}?webhook_function=connect"));
    assert_eq!(none["conflicts"]["items"], json!([]));
}
