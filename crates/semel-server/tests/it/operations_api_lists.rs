//! The laws of lists of operations over the HTTP API.

use serde_json::{Value, json};

use crate::{
    desk::listed,
    operations_api::{Api, id, int, pay, refused, with},
    place::{Place, on_both_databases},
};

on_both_databases! {
    a_list_is_newest_first_and_has_neither_inputs_nor_results
    a_list_has_only_matching_operations
    operations_are_found_by_the_time_of_their_creation
    the_status_follows_the_operation
    pages_have_no_gaps_and_no_repeats_while_statuses_are_mixed
    an_operation_that_settles_between_two_pages_moves_no_other
    a_wrong_query_names_each_wrong_parameter
}

/// The ids of all pages of a list.
fn ids(api: &Api, query: &str) -> Vec<i64> {
    listed(&api.server, &format!("/v1/operations{query}"), "id").iter().map(int).collect()
}

fn newest_first(mut ids: Vec<i64>) -> Vec<i64> {
    ids.sort_unstable();
    ids.reverse();
    ids
}

/// Operations of each status, and the states within pending: their ids by status.
struct Mixed {
    pending: Vec<i64>,
    success: Vec<i64>,
    failed: Vec<i64>,
}

impl Mixed {
    /// Two of each kind, with other ones in between.
    fn made(api: &Api) -> Self {
        let mut mixed = Self { pending: Vec::new(), success: Vec::new(), failed: Vec::new() };
        for round in 0..2 {
            let work = |what: &str| {
                let more = json!({
                    "operationName": if round == 0 { "pay" } else { "ship" }, "processInstanceId": format!("p{round}"),
                    "activityId": format!("Task_{what}"), "onLost": "hold",
                });
                with(&pay(what), more)
            };
            mixed.pending.push(api.claim(&work("runs")).id);
            mixed.success.push(id(&api.complete(&api.claim(&work("done")), json!("r"))));
            mixed.pending.push(id(&api.enqueue(&work("waits"))));
            mixed.pending.push(id(&api.fail(&api.claim(&work("fails")), "once")));
            mixed.failed.push(failed_for_good(api, &work("fails for good")));
            let doubted = api.claim(&work("in doubt"));
            mixed.pending.push(id(&api.does(&doubted, "doubt", json!({ "reason": "r" }))));
            let cancelled = id(&api.enqueue(&work("is cancelled")));
            assert_eq!(api.post(&format!("/{cancelled}/cancel"), &json!({ "reason": "r" })).status, 200);
            mixed.failed.push(cancelled);
            mixed.failed.push(failed_for_good(api, &with(&work("exhausted"), json!({ "maxRetries": 0 }))));
            mixed.success.push(id(&api.complete(&api.claim(&work("done, too")), json!("r"))));
        }
        mixed
    }

    fn all(&self) -> Vec<i64> {
        newest_first([&self.pending[..], &self.success, &self.failed].concat())
    }
}

fn failed_for_good(api: &Api, work: &Value) -> i64 {
    let failed = api.does(&api.claim(work), "fail", json!({ "errorMessage": "broken", "retryable": false }));
    assert_eq!(failed["status"], "FAILED");
    id(&failed)
}

fn a_list_is_newest_first_and_has_neither_inputs_nor_results(place: &Place) {
    let api = Api::start(place);
    assert_eq!(api.get("").json(), json!({ "items": [], "next": null }));
    let first = api.enqueue(&pay(json!({ "n": 1 })));
    let held = api.claim(&pay(2));
    let second = api.complete(&held, json!("r"));
    let page = api.get("").json();
    let items = page["items"].as_array().unwrap();
    assert_eq!((items.len(), &page["next"]), (2, &Value::Null));
    assert_eq!((id(&items[0]), id(&items[1])), (id(&second), id(&first)));
    for (item, whole) in items.iter().zip([&second, &first]) {
        for (name, value) in item.as_object().unwrap() {
            assert_eq!(value, &whole[name], "{name}");
        }
        assert!(["input", "resultData", "attempts"].iter().all(|name| item.get(name).is_none()), "{item}");
    }
}

fn a_list_has_only_matching_operations(place: &Place) {
    let api = Api::start(place);
    let mixed = Mixed::made(&api);
    assert_eq!(ids(&api, ""), mixed.all());
    assert_eq!(ids(&api, "?status=PENDING"), newest_first(mixed.pending.clone()));
    assert_eq!(ids(&api, "?status=SUCCESS"), newest_first(mixed.success.clone()));
    assert_eq!(ids(&api, "?status=FAILED"), newest_first(mixed.failed.clone()));
    let (second, first) = (mixed.all()[..9].to_vec(), mixed.all()[9..].to_vec());
    for (query, expected) in [("operationName=pay", &first), ("processInstanceId=p1", &second)] {
        assert_eq!(&ids(&api, &format!("?{query}")), expected, "{query}");
        for (status, all) in [("PENDING", &mixed.pending), ("SUCCESS", &mixed.success), ("FAILED", &mixed.failed)] {
            let both: Vec<_> = expected.iter().copied().filter(|id| all.contains(id)).collect();
            assert_eq!(ids(&api, &format!("?{query}&status={status}")), both, "{query} {status}");
        }
    }
    assert_eq!(ids(&api, "?activityId=Task_runs"), [mixed.pending[4], mixed.pending[0]]);
    assert_eq!(ids(&api, "?activityId=Task_runs&processInstanceId=p0"), [mixed.pending[0]]);
    assert_eq!(ids(&api, "?activityId=Task_runs&processInstanceId=p0&status=FAILED"), [0; 0]);
    assert_eq!(ids(&api, "?operationName=unknown"), [0; 0]);
    assert_eq!(ids(&api, "?scope=shop"), [0; 0]);
    let elsewhere = api.claim(&with(&pay(1), json!({ "scope": "shop" }))).id;
    assert_eq!(ids(&api, "?scope=shop"), [elsewhere]);
    assert_eq!(ids(&api, "?status=PENDING").len(), mixed.pending.len());
}

fn operations_are_found_by_the_time_of_their_creation(place: &Place) {
    let api = Api::start(place);
    let all: Vec<_> = (0..4).map(|n| api.claim(&pay(n)).operation).collect();
    api.enqueue(&with(&pay("elsewhere"), json!({ "scope": "shop" })));
    let third = all[2]["createdAt"].as_str().unwrap();
    assert_eq!(ids(&api, &format!("?createdBefore={third}")), [id(&all[1]), id(&all[0])]);
    assert_eq!(ids(&api, &format!("?createdAfter={third}")), [id(&all[3]), id(&all[2])]);
    let pending = format!("?status=PENDING&createdBefore={third}&limit=1");
    assert_eq!(ids(&api, &pending), [id(&all[1]), id(&all[0])]);
    let both = format!("?createdAfter={}&createdBefore={third}", all[1]["createdAt"].as_str().unwrap());
    assert_eq!(ids(&api, &both), [id(&all[1])]);
}

fn the_status_follows_the_operation(place: &Place) {
    let api = Api::start(place);
    let is = |status: &str| {
        let found: Vec<_> = ["PENDING", "SUCCESS", "FAILED"]
            .into_iter()
            .filter(|s| !ids(&api, &format!("?status={s}")).is_empty())
            .collect();
        assert_eq!(found, [status]);
    };
    let held = api.claim(&with(&pay(1), json!({ "maxRetries": 1, "leaseSeconds": 1 })));
    is("PENDING");
    api.fail(&held, "once");
    is("PENDING");
    api.fail(&api.claim(&with(&pay(1), json!({ "maxRetries": 1 }))), "twice");
    is("FAILED");
    assert_eq!(api.post(&format!("/{}/retry", held.id), &json!({ "reason": "r" })).status, 200);
    is("PENDING");
    api.loses(&pay(1));
    is("PENDING");
    refused(&api.post("", &pay(1)), 409, "in-doubt");
    is("PENDING");
    let verdict = json!({ "as": "completed", "reason": "r" });
    assert_eq!(api.post(&format!("/{}/resolve", held.id), &verdict).status, 200);
    is("SUCCESS");
}

fn pages_have_no_gaps_and_no_repeats_while_statuses_are_mixed(place: &Place) {
    let api = Api::start(place);
    let mixed = Mixed::made(&api);
    for limit in [1, 2, 3, 5, 18, 500] {
        assert_eq!(ids(&api, &format!("?limit={limit}")), mixed.all(), "{limit}");
        for (status, all) in [("PENDING", &mixed.pending), ("SUCCESS", &mixed.success), ("FAILED", &mixed.failed)] {
            let found = ids(&api, &format!("?status={status}&limit={limit}"));
            assert_eq!(found, newest_first(all.clone()), "{status} {limit}");
        }
        assert_eq!(ids(&api, &format!("?operationName=pay&limit={limit}")), mixed.all()[9..], "{limit}");
        assert_eq!(ids(&api, &format!("?processInstanceId=p1&limit={limit}")), mixed.all()[..9], "{limit}");
    }
    let first = api.get("?limit=4").json();
    assert_eq!(first["items"].as_array().unwrap().len(), 4, "a page is full if there are more");
    api.claim(&pay("newer"));
    let second = api.get(&format!("?limit=4&cursor={}", first["next"].as_str().unwrap())).json();
    let seen: Vec<_> = [&first, &second].iter().flat_map(|page| page["items"].as_array().unwrap()).map(id).collect();
    assert_eq!(seen, mixed.all()[..8], "newer operations move no page");
}

fn an_operation_that_settles_between_two_pages_moves_no_other(place: &Place) {
    let api = Api::start(place);
    let held: Vec<_> = (0..6).map(|n| api.claim(&pay(n))).collect();
    let first = api.get("?status=PENDING&limit=2").json();
    assert_eq!(first["items"].as_array().unwrap().iter().map(id).collect::<Vec<_>>(), [held[5].id, held[4].id]);
    api.complete(&held[5], json!(1));
    api.fail(&held[3], "once");
    api.complete(&held[1], json!(1));
    let second = api.get(&format!("?status=PENDING&limit=2&cursor={}", first["next"].as_str().unwrap())).json();
    assert_eq!(second["items"].as_array().unwrap().iter().map(id).collect::<Vec<_>>(), [held[3].id, held[2].id]);
    let third = api.get(&format!("?status=PENDING&limit=2&cursor={}", second["next"].as_str().unwrap())).json();
    assert_eq!(third["items"].as_array().unwrap().iter().map(id).collect::<Vec<_>>(), [held[0].id]);
    assert_eq!(third["next"], Value::Null);
}

fn a_wrong_query_names_each_wrong_parameter(place: &Place) {
    let api = Api::start(place);
    let wrong = "?status=pending&createdBefore=yesterday&createdAfter=1&limit=0&cursor=x&scope=a%2Fb&operationName=&key=&state=x";
    let answer = api.get(wrong);
    refused(&answer, 400, "invalid-query");
    let mut told: Vec<_> =
        answer.json()["errors"].as_array().unwrap().iter().map(|e| e["field"].as_str().unwrap().to_owned()).collect();
    told.sort();
    let names =
        ["createdAfter", "createdBefore", "cursor", "key", "limit", "operationName", "scope", "state", "status"];
    assert_eq!(told, names);
    let held = api.claim(&pay(1));
    refused(&api.get(&format!("/{}?verbose=1", held.id)), 400, "invalid-query");
}
