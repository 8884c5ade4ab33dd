//! The laws of claim tokens over the HTTP API of operations: a claim whose answer was lost is sent again.

use serde_json::{Value, json};

use crate::{
    operations_api::{Api, pay, refused, with, wrong_fields},
    place::{Place, on_both_databases},
};

on_both_databases! {
    a_claim_repeated_with_its_token_gets_the_same_lease
    a_claim_repeated_with_its_token_at_another_node_gets_the_same_lease
    a_token_holds_no_other_payload_and_no_other_key
    a_token_does_not_bring_an_expired_lease_back
    a_token_is_a_uuid_that_is_not_nil
}

/// UUIDs, as clients make them.
pub(crate) const TOKENS: [&str; 2] = ["4f7c2a9e-3b1d-4c8a-9f00-0123456789ab", "4f7c2a9e-3b1d-4c8a-9f00-0123456789ac"];

/// The first input, with a token.
fn claim_with(token: &str) -> Value {
    with(&pay(1), json!({ "claimToken": token }))
}

fn a_claim_repeated_with_its_token_gets_the_same_lease(place: &Place) {
    let api = Api::start(place);
    let first = api.claim(&claim_with(TOKENS[0]));
    assert_eq!(api.claim(&claim_with(TOKENS[0])), first);
    refused(&api.post("", &claim_with(TOKENS[1])), 409, "in-flight");
    refused(&api.post("", &pay(1)), 409, "in-flight");
    let done = api.complete(&first, json!(7));
    let again = api.post("", &claim_with(TOKENS[0]));
    assert_eq!((again.status, &again.json()["operation"]), (200, &done), "{}", again.body);
}

fn a_claim_repeated_with_its_token_at_another_node_gets_the_same_lease(place: &Place) {
    let (one, other) = (Api::start(place), Api::start(place));
    let first = one.claim(&claim_with(TOKENS[0]));
    assert_eq!(other.claim(&claim_with(TOKENS[0])), first);
    refused(&other.post("", &claim_with(TOKENS[1])), 409, "in-flight");
    // The answer to the first may be lost with its node: any node settles the lease.
    let done = other.complete(&first, json!(7));
    assert_eq!(one.complete(&first, json!(7)), done);
    let again = one.post("", &claim_with(TOKENS[0]));
    assert_eq!((again.status, &again.json()["operation"]), (200, &done), "{}", again.body);
}

fn a_token_holds_no_other_payload_and_no_other_key(place: &Place) {
    let api = Api::start(place);
    let work = |key: &str, input: u32| with(&pay(input), json!({ "idempotencyKey": key, "claimToken": TOKENS[0] }));
    let first = api.claim(&work("k", 1));
    refused(&api.post("", &work("k", 2)), 422, "payload-mismatch");
    let other = api.claim(&work("other", 1));
    assert!(other.id != first.id && other.fence != first.fence);
    assert_eq!(api.claim(&work("k", 1)), first);
}

fn a_token_does_not_bring_an_expired_lease_back(place: &Place) {
    let api = Api::start(place);
    let rerun = with(&claim_with(TOKENS[0]), json!({ "onLost": "rerun" }));
    let lost = api.loses(&rerun);
    let taken = api.claim(&rerun);
    assert!(taken.fence > lost.fence, "{} {}", taken.fence, lost.fence);
    assert_eq!(taken.operation["attempts"].as_array().unwrap().len(), 2);
    let hold = with(&pay(2), json!({ "claimToken": TOKENS[0] }));
    api.loses(&hold);
    refused(&api.post("", &hold), 409, "in-doubt");
}

fn a_token_is_a_uuid_that_is_not_nil(place: &Place) {
    let api = Api::start(place);
    for token in ["00000000-0000-0000-0000-000000000000", "4f7c2a9e", ""] {
        assert_eq!(wrong_fields(&api.post("", &claim_with(token))), ["claimToken"]);
        let next = json!({ "operationNames": ["pay"], "claimToken": token });
        assert_eq!(wrong_fields(&api.post("/next", &next)), ["claimToken"]);
    }
}
