//! Names in a path, which unverified senders choose, use no lasting memory and reach nothing else.

use std::{collections::BTreeSet, time::Duration};

use semel::{look::Counted, prelude::*};
use semel_http::webhooks::Verifier;

use crate::{
    desk::Desk,
    hooks::{counted, deliver_to, event, post_raw, signed_by, start, status, stored},
    place::{Place, on_both_databases},
    support::{SOON, eventually},
};

on_both_databases! {
    refusals_are_counted_by_known_functions_only
    a_reserved_path_is_no_function_in_any_percent_encoding
}

/// The functions by which an answer was counted.
fn functions_of(place: &Place, word: &str) -> BTreeSet<String> {
    let desk = Desk::at(place);
    let counts = desk.block(desk.database.counts("default", 0)).unwrap();
    let counts = counts.into_iter().filter(|count| count.what == Counted::Answer(word.to_owned()));
    counts.map(|count| count.group.label2).collect()
}

/// A body that was signed once stays valid for ever, and its headers can be anything.
fn refusals_are_counted_by_known_functions_only(place: &Place) {
    let secret = "a secret of the hub";
    let variables = [
        ("SEMEL_WEBHOOKS_ANY_KIND", "github"),
        ("SEMEL_WEBHOOKS_ANY_SECRETS", secret),
        ("SEMEL_WEBHOOKS_SOME_KIND", "github"),
        ("SEMEL_WEBHOOKS_SOME_SECRETS", secret),
        ("SEMEL_WEBHOOKS_SOME_FUNCTIONS", "billing"),
    ];
    let (server, body) = (start(place, &variables), br#"{"ref":"main"}"#);
    let headers = signed_by(&Verifier::github([secret]).unwrap(), Some("guid-1"), body, Duration::ZERO);
    let refused = |path: &str| assert_eq!(post_raw(server.address, path, &headers, body).status, 400, "{path}");
    for i in 0..20 {
        refused(&format!("/webhooks/any/z{i}"));
    }
    refused("/webhooks/any");
    refused("/webhooks/some/billing");
    refused("/webhooks/some");
    eventually(SOON, "they are counted", || counted(place, "refused_event") == 23);
    let known = ["", "any", "billing", "some"].map(str::to_owned);
    assert_eq!(functions_of(place, "refused_event"), known.into());
}

fn a_reserved_path_is_no_function_in_any_percent_encoding(place: &Place) {
    let server = start(place, &[]);
    let paid = event("evt_1", 1_700_000_000, "a");
    for name in ["event%73", "%65vents", "m%6Fnitor"] {
        assert_eq!(deliver_to(&server, &format!("/webhooks/stripe/{name}"), &paid).status, 404, "{name}");
    }
    assert!(stored(place, "stripe", "evt_1").is_none());
    assert_eq!(status(&deliver_to(&server, "/webhooks/stripe/Events", &paid)), "processed");
}
