//! The laws of the monitor: every number, from known events. `webhooks_monitor_counts` has the special counts,
//! `webhooks_monitor_health` the verdict.

use std::time::Duration;

use semel::State;
use semel_http::webhooks::Verifier;
use serde_json::{Value, json};

use crate::{
    desk::{execute, shown},
    endpoint::{Does, Endpoint},
    hooks::{HOST, becomes, counted, deliver, deliver_to, event, post_raw, signed_by, start, start_as, status},
    place::{Place, on_both_databases},
    support::{SOON, Server, eventually},
};

on_both_databases! {
    the_monitor_shows_every_number
    an_empty_period_has_no_rates
    bad_parameters_are_all_named
    a_period_is_whole_hours
    only_a_known_source_has_a_monitor
    the_monitor_answers_only_loopback_hosts
}

pub(crate) const STRIPE: &str = "/functions/v1/stripe-events-monitor";

/// An event of another type, that goes to the outbox.
pub(crate) fn customer(id: &str) -> Value {
    let mut customer = event(id, 1_700_000_000, "a");
    customer["type"] = json!("customer.created");
    customer
}

/// Waits until so many answers are in the counters, which may lag a second.
fn is_counted(place: &Place, word: &str, times: i64) {
    eventually(SOON, &format!("{word} is counted"), || counted(place, word) == times);
}

/// Six invoices and two customers. Three invoices and the customers are processed; one fails as often as allowed, one
/// fails once, and the run of one is lost.
fn known_events(place: &Place, endpoint: &Endpoint) -> Server {
    let rules = format!("invoice.*={}", endpoint.url());
    let handlers = ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", rules.as_str());
    // Without a worker: a lost event stays lost.
    let server = start_as(place, "api,sweeper", &[handlers]);
    for id in ["evt_1", "evt_2", "evt_3"] {
        assert_eq!(status(&deliver(&server, &event(id, 1_700_000_000, "a"))), "processed");
    }
    for id in ["cus_1", "cus_2"] {
        assert_eq!(status(&deliver_to(&server, "/webhooks/stripe/connect", &customer(id))), "processed");
    }
    for _ in 0..3 {
        assert_eq!(deliver(&server, &event("evt_bad", 1_700_000_000, "a")).status, 500);
    }
    assert_eq!(deliver(&server, &event("evt_again", 1_700_000_000, "a")).status, 500);
    assert_eq!(status(&deliver(&server, &event("evt_again", 1_700_000_000, "a"))), "processed");
    // Only the run that is to be lost has a short lease.
    let short = [handlers, ("SEMEL_WEBHOOKS_STRIPE_LEASE", "3s"), ("SEMEL_WEBHOOKS_STRIPE_MAX_RUN", "3s")];
    let brief = start(place, &short);
    assert_eq!(status(&deliver(&brief, &event("evt_lost", 1_700_000_000, "a"))), "rejected");
    becomes(place, "evt_lost", State::TimedOut);

    // Duplicates: three that change nothing.
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "skipped");
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "skipped");
    assert_eq!(status(&deliver(&server, &event("evt_bad", 1_700_000_000, "a"))), "max_retries");
    // Conflicts: other data of the same time, and newer data.
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "b"))), "skipped");
    assert_eq!(status(&deliver(&server, &event("evt_2", 1_700_000_001, "b"))), "processed");
    // Refusals: two unsigned deliveries, and one that is no event.
    let (body, wrong) = (b"{}", Verifier::stripe(["whsec_other"], Duration::from_secs(300)).unwrap());
    for _ in 0..2 {
        let headers = signed_by(&wrong, None, body, Duration::ZERO);
        assert_eq!(post_raw(server.address, "/webhooks/stripe", &headers, body).status, 400);
    }
    assert_eq!(deliver(&server, &json!({})).status, 400);
    for (word, times) in [("replay", 2), ("exhausted", 1), ("mismatch", 2), ("refused_wrong", 2), ("refused_event", 1)]
    {
        is_counted(place, word, times);
    }
    server
}

fn the_monitor_shows_every_number(place: &Place) {
    let fails = Does::Answers(500);
    let fine = Does::Answers(202);
    let endpoint = Endpoint::that([fine, fine, fine, fails, fails, fails, fails, fine, Does::Hangs]);
    let server = known_events(place, &endpoint);
    let told = shown(&server, STRIPE);

    assert_eq!(told["source"], "stripe");
    let stand = |total: i64, completed: i64, failed: i64, timeout: i64| json!({ "total": total, "processing": 0, "completed": completed, "failed": failed, "timeout": timeout, "pending": 0 });
    let named = |mut stand: Value, name: &str, value: &str| {
        stand[name] = json!(value);
        stand
    };
    assert_eq!(told["totals"], stand(8, 6, 1, 1));
    assert_eq!(told["rates"], json!({ "success_rate": 0.75, "failure_rate": 0.125, "timeout_rate": 0.125 }));
    let types = [
        named(stand(6, 4, 1, 1), "event_type", "invoice.paid"),
        named(stand(2, 2, 0, 0), "event_type", "customer.created"),
    ];
    assert_eq!(told["by_event_type"], json!(types));
    let functions = [
        named(stand(6, 4, 1, 1), "webhook_function", "stripe"),
        named(stand(2, 2, 0, 0), "webhook_function", "connect"),
    ];
    assert_eq!(told["by_webhook_function"], json!(functions));
    // All on one day, unless it was midnight meanwhile.
    let days = told["by_day"].as_array().unwrap();
    for (status, expected) in [("total", 8), ("completed", 6), ("failed", 1), ("timeout", 1)] {
        assert_eq!(days.iter().map(|day| day[status].as_i64().unwrap()).sum::<i64>(), expected, "{days:?}");
    }
    let since = told["period"]["since"].as_str().unwrap();
    assert!(since.ends_with(":00:00.000000Z") && told["period"]["days"] == 7, "{since}");

    // Seven runs completed: one of them of newer data.
    let took = &told["processing_time_ms"];
    assert_eq!(took["count"], 7);
    let [min, mean, max, p50, p95, p99] =
        ["min", "mean", "max", "p50", "p95", "p99"].map(|name| took[name].as_f64().unwrap());
    assert!(0.0 < min && min <= p50 && p50 <= p95 && p95 <= p99 && p99 <= max, "{took}");
    // In milliseconds: the quickest of them took few, the slowest whatever the disk needed.
    assert!(min < mean && mean < max && min < 3600.0 && max < 60_000.0, "{took}");

    assert_eq!(told["retries"], json!({ "total": 3, "at_limit": 1, "orphans_found": 1 }));
    let failed = told["failed_events"].as_array().unwrap();
    assert_eq!((failed.len(), &failed[0]["event_id"], &failed[0]["retry_count"]), (1, &json!("evt_bad"), &json!(3)));
    assert_eq!(
        (&failed[0]["last_error"], &failed[0]["next_attempt_at"]),
        (&json!("the endpoint answered 500 Internal Server Error"), &Value::Null)
    );
    let lost = told["timed_out_events"].as_array().unwrap();
    assert_eq!((lost.len(), &lost[0]["event_id"], &lost[0]["crashes"]), (1, &json!("evt_lost"), &json!(1)));
    assert!(lost[0]["next_attempt_at"].is_string(), "a worker would take it up");

    assert_eq!(told["conflicts"]["count"], 2);
    let conflicts = told["conflicts"]["items"].as_array().unwrap();
    let deeds: Vec<_> =
        conflicts.iter().map(|it| (it["event_id"].as_str().unwrap(), it["deed"].as_str().unwrap())).collect();
    assert_eq!(deeds, [("evt_2", "taken"), ("evt_1", "skipped")], "the latest first");
    assert!(conflicts.iter().all(|it| it["came_fingerprint"] != it["stored_fingerprint"]));
    assert_eq!(told["duplicates_suppressed"], 3);
    assert_eq!(told["refused"], json!({ "total": 3, "by_reason": { "event": 1, "wrong": 2 } }));
    assert_eq!((&told["truncated"], &told["incomplete"]), (&json!(false), &json!([])));

    assert_eq!(told["health"]["status"], "degraded");
    let reasons: Vec<_> = told["health"]["reasons"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    assert_eq!(reasons.len(), 3, "{reasons:?}");
    assert!(reasons[0].starts_with("5 of 12 runs"), "{reasons:?}");
    assert!(reasons[1].starts_with("1 event has failed as often as allowed, and runs again only"), "{reasons:?}");
    assert!(reasons[2].starts_with("other data, no newer and no older, came"), "{reasons:?}");

    filters_leave_out_the_others(&server, &told);
}

fn filters_leave_out_the_others(server: &Server, all: &Value) {
    let of_source = shown(server, "/webhooks/stripe/monitor?days=7&event_type=&webhook_function=");
    for (name, value) in all.as_object().unwrap().iter().filter(|(name, _)| *name != "period") {
        assert_eq!(&of_source[name], value, "{name}: an empty parameter is none");
    }
    for filter in ["event_type=customer.created", "webhook_function=connect&days=1"] {
        let told = shown(server, &format!("{STRIPE}?{filter}"));
        assert_eq!((&told["totals"]["total"], &told["totals"]["completed"]), (&json!(2), &json!(2)), "{filter}");
        assert_eq!(told["processing_time_ms"]["count"], 2);
        assert_eq!((&told["retries"]["total"], &told["duplicates_suppressed"]), (&json!(0), &json!(0)));
        assert_eq!(told["conflicts"], json!({ "count": 0, "items": [] }));
        assert_eq!((&told["failed_events"], &told["timed_out_events"]), (&json!([]), &json!([])));
        assert_eq!(told["refused"], Value::Null, "what was refused has no type");
        assert_eq!(told["health"], json!({ "status": "ok", "reasons": [] }), "{filter}");
    }
    let none = shown(server, &format!("{STRIPE}?event_type=customer.created&webhook_function=stripe"));
    assert_eq!((&none["totals"]["total"], &none["rates"]["success_rate"]), (&json!(0), &Value::Null));
}

fn an_empty_period_has_no_rates(place: &Place) {
    let server = start(place, &[]);
    let told = shown(&server, STRIPE);
    assert_eq!(
        told["totals"],
        json!({ "total": 0, "processing": 0, "completed": 0, "failed": 0, "timeout": 0, "pending": 0 })
    );
    assert_eq!(told["rates"], json!({ "success_rate": null, "failure_rate": null, "timeout_rate": null }));
    let none = json!({ "count": 0, "min": null, "mean": null, "max": null, "p50": null, "p95": null, "p99": null });
    assert_eq!(told["processing_time_ms"], none);
    for list in ["by_day", "by_event_type", "by_webhook_function", "failed_events", "timed_out_events"] {
        assert_eq!(told[list], json!([]), "{list}");
    }
    assert_eq!(told["refused"], json!({ "total": 0, "by_reason": {} }));
    assert_eq!(told["health"], json!({ "status": "ok", "reasons": [] }));
}

fn bad_parameters_are_all_named(place: &Place) {
    let server = start(place, &[]);
    let long = "x".repeat(129);
    for (query, wrong) in [
        ("days=0", &["days"][..]),
        ("days=", &["days"]),
        ("days=367", &["days"]),
        ("days=-1", &["days"]),
        ("days=7.5", &["days"]),
        ("days=seven", &["days"]),
        ("days=1&days=2", &["days"]),
        ("event_typ=invoice.paid", &["event_typ"]),
        (&format!("event_type={long}&webhook_function={long}&days=x"), &["days", "event_type", "webhook_function"]),
        ("event_type=a%00", &["event_type"]),
        ("webhook_function=a%0Ab", &["webhook_function"]),
    ] {
        let answer = server.get(&format!("{STRIPE}?{query}"));
        assert_eq!((answer.status, answer.problem().as_str()), (400, "invalid-query"), "{query}");
        let answer = answer.json();
        let errors = answer["errors"].as_array().unwrap().iter();
        let mut named: Vec<_> = errors.map(|error| error["field"].as_str().unwrap()).collect();
        named.sort_unstable();
        assert_eq!(named, wrong, "{query}");
    }
    for days in [1, 366] {
        assert_eq!(shown(&server, &format!("{STRIPE}?days={days}"))["period"]["days"], days);
    }
}

fn a_period_is_whole_hours(place: &Place) {
    let server = start(place, &[]);
    assert_eq!(status(&deliver(&server, &customer("cus_1"))), "processed");
    // As if it had been ten days ago.
    for table in ["semel_deltas", "semel_counters"] {
        execute(place, &format!("UPDATE {table} SET hour = hour - 240"));
    }
    execute(place, "UPDATE semel_operations SET created_at = created_at - 864000000000");
    let total = |days: i64| shown(&server, &format!("{STRIPE}?days={days}"))["totals"]["total"].as_i64().unwrap();
    assert_eq!((total(7), total(9), total(11), total(366)), (0, 0, 1, 1));
    assert_eq!(shown(&server, &format!("{STRIPE}?days=11"))["by_day"].as_array().unwrap().len(), 1);
}

fn only_a_known_source_has_a_monitor(place: &Place) {
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_KIND", "")]);
    for path in [STRIPE, "/webhooks/stripe/monitor", "/webhooks/stripe/events", "/webhooks/stripe/events/evt_1"] {
        let answer = server.get(path);
        assert_eq!((answer.status, answer.problem().as_str()), (404, "not-found"), "{path}");
    }
}

fn the_monitor_answers_only_loopback_hosts(place: &Place) {
    let server = start(place, &[]);
    for path in [STRIPE, "/webhooks/stripe/monitor", "/webhooks/stripe/events", "/webhooks/stripe/events/evt_1"] {
        let answer = server.request("GET", path, &[("host", HOST)]);
        assert_eq!((answer.status, answer.problem().as_str()), (403, "host-not-allowed"), "{path}");
    }
    // These paths belong to the monitor, so they are not functions.
    for path in ["/webhooks/stripe/monitor", "/webhooks/stripe/events"] {
        assert_eq!(server.request("POST", path, &[("host", "localhost")]).status, 405, "{path}");
    }
}
