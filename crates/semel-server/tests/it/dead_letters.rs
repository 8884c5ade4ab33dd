//! The laws of `/dead-letters`.

use semel::{messaging::LetterFilter, prelude::*};
use serde_json::{Value, json};

use crate::{
    desk::{Desk, ended, execute, letter, listed, post, post_to, serve, shown},
    place::{Place, on_both_databases},
    proposals::rows,
};

on_both_databases! {
    letters_are_listed_newest_first_page_by_page
    a_letter_that_cannot_be_read_is_listed_as_such
    a_filter_shows_exactly_the_matching_letters
    a_wrong_filter_is_refused_and_not_ignored
    a_letter_shows_its_message_and_a_body_that_is_no_json_as_base64
    a_redrive_without_a_clear_selection_is_refused
    a_redrive_of_named_letters_leaves_their_neighbours_alone
    a_redrive_by_filter_moves_exactly_the_matching_letters
    a_redrive_of_all_moves_all_of_one_tenant
    a_redrive_sent_again_under_its_key_is_one_job
    one_letter_can_be_redriven
    a_letter_is_discarded_only_with_a_reason
    readiness_reports_dead_letters_of_all_tenants
}

/// The keys of the letters that a path lists.
fn keys(server: &crate::support::Server, path: &str) -> Vec<Value> {
    listed(server, path, "key")
}

fn letters_are_listed_newest_first_page_by_page(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api", &[]));
    assert_eq!(shown(&server, "/dead-letters"), json!({ "items": [], "next": null }));
    for key in ["a", "b", "c", "d", "e"] {
        desk.dead(letter(key));
    }
    assert_eq!(keys(&server, "/dead-letters"), ["e", "d", "c", "b", "a"]);
    assert_eq!(keys(&server, "/dead-letters?limit=2"), ["e", "d", "c", "b", "a"]);
    let page = shown(&server, "/dead-letters?limit=2");
    assert_eq!(page["items"].as_array().unwrap().len(), 2);
    let expected = json!({
        "id": page["items"][0]["id"], "messageId": "id-e", "kind": "mail", "consumer": "mail", "queue": "mail.out",
        "key": "e", "failures": 10, "reason": "the mailbox is full", "diedAt": page["items"][0]["diedAt"],
    });
    assert_eq!(page["items"][0], expected);
}

fn a_letter_that_cannot_be_read_is_listed_as_such(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api", &[]));
    for key in ["a", "b", "c"] {
        desk.dead(letter(key));
    }
    execute(place, "UPDATE semel_dead_letters SET body = substr(body, 1, 1) WHERE key = 'b'");
    assert_eq!(keys(&server, "/dead-letters?limit=2"), ["c", "b", "a"]);
    let page = shown(&server, "/dead-letters");
    let expected = json!({
        "id": page["items"][1]["id"], "messageId": "id-b", "kind": "mail", "consumer": "mail", "queue": "mail.out",
        "key": "b", "failures": 0, "diedAt": page["items"][1]["diedAt"],
        "reason": "unreadable: a stored row cannot be read: a payload whose first bytes are damaged",
    });
    assert_eq!(page["items"][1], expected);
    // Read by its id it is a problem that names it; a person can still discard it.
    let id = page["items"][1]["id"].to_string();
    let alone = server.get(&format!("/dead-letters/{}", id.trim_matches('"')));
    assert_eq!((alone.status, alone.problem().as_str()), (500, "row-unreadable"));
    assert_eq!(alone.json()["id"], id.trim_matches('"'));
    assert!(alone.body.contains("DELETE"), "{}", alone.body);
}

fn a_filter_shows_exactly_the_matching_letters(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api", &[]));
    desk.dead(letter("a"));
    let mut other = letter("b");
    other.consumer = "push".to_owned();
    desk.dead(other);
    let mut other = letter("c");
    other.message.queue = "mail.late".to_owned();
    desk.dead(other);
    let mut other = letter("d");
    other.reason = "100% wrong_address".to_owned();
    desk.dead(other);
    let mut other = letter("e");
    other.tenant = "another".to_owned();
    desk.dead(other);

    assert_eq!(keys(&server, "/dead-letters"), ["d", "c", "b", "a"]);
    assert_eq!(keys(&server, "/dead-letters?consumer=push"), ["b"]);
    assert_eq!(keys(&server, "/dead-letters?queue=mail.late"), ["c"]);
    assert_eq!(keys(&server, "/dead-letters?reason=wrong_addr"), ["d"]);
    // A reason is not a pattern.
    assert_eq!(keys(&server, "/dead-letters?reason=m%25box"), Vec::<Value>::new());
    assert_eq!(keys(&server, "/dead-letters?consumer=mail&queue=mail.out"), ["d", "a"]);
    let died_at = |key: &str| {
        let page = shown(&server, "/dead-letters");
        let found = page["items"].as_array().unwrap().iter().find(|letter| letter["key"] == key).cloned();
        found.unwrap()["diedAt"].as_str().unwrap().to_owned()
    };
    let (first, last) = (died_at("a"), died_at("d"));
    assert_eq!(keys(&server, &format!("/dead-letters?since={first}")), ["d", "c", "b", "a"]);
    assert_eq!(keys(&server, &format!("/dead-letters?before={first}")), Vec::<Value>::new());
    let before_last = keys(&server, &format!("/dead-letters?before={last}"));
    assert!(!before_last.contains(&json!("d")), "{before_last:?}");
}

fn a_wrong_filter_is_refused_and_not_ignored(place: &Place) {
    let server = serve(place, "api", &[]);
    for query in ["consumer=", "quue=x", "since=yesterday", "limit=0", "cursor=x", "reason=a&reason=b"] {
        let answer = server.get(&format!("/dead-letters?{query}"));
        assert_eq!((answer.status, answer.problem().as_str()), (400, "invalid-query"), "{query}");
    }
}

fn a_letter_shows_its_message_and_a_body_that_is_no_json_as_base64(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api", &[]));
    desk.dead(letter("a"));
    let mut raw = letter("b");
    raw.message.body = b"\xff\x00no".to_vec().into();
    desk.dead(raw);
    let ids = listed(&server, "/dead-letters", "id");

    let json = shown(&server, &format!("/dead-letters/{}", ids[1]));
    assert_eq!((&json["body"], &json["headers"]), (&json!({ "key": "a" }), &json!({ "colour": "red" })));
    assert_eq!((&json["number"], &json["key"], json.get("bodyBase64")), (&json!(7), &json!("a"), None));
    let raw = shown(&server, &format!("/dead-letters/{}", ids[0]));
    assert_eq!((&raw["bodyBase64"], raw.get("body")), (&json!("/wBubw=="), None));

    for path in ["/dead-letters/999999", "/dead-letters/x", "/dead-letters/01"] {
        assert_eq!(server.get(path).status, 404, "{path}");
    }
    let mut foreign = letter("c");
    foreign.tenant = "another".to_owned();
    desk.dead(foreign);
    let foreign = LetterFilter { tenant: "another".to_owned(), ..LetterFilter::default() };
    let foreign = desk.block(desk.database.letters(&foreign, None, 1)).unwrap().items.remove(0).id;
    assert_eq!(server.get(&format!("/dead-letters/{foreign}")).status, 404);
    for action in ["redrive", "discard"] {
        let answer = post(&server, &format!("/dead-letters/{foreign}/{action}"), r#"{"reason":"x"}"#);
        assert_eq!(answer.status, 404, "{action}");
    }
}

fn a_redrive_without_a_clear_selection_is_refused(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api,worker", &[]));
    desk.dead(letter("a"));
    for body in [
        "",
        "{}",
        r#"{"all":false}"#,
        r#"{"ids":[]}"#,
        r#"{"ids":[1],"all":true}"#,
        r#"{"ids":[1],"queue":"mail.out"}"#,
        r#"{"all":true,"consumer":"mail"}"#,
        r#"{"consumer":""}"#,
        r#"{"consumr":"mail"}"#,
        r#"{"since":"soon"}"#,
    ] {
        let answer = post(&server, "/dead-letters/redrive", body);
        assert_eq!((answer.status, answer.problem().as_str()), (422, "invalid-fields"), "{body}");
    }
    assert_eq!(post(&server, "/dead-letters/redrive", "[1]").problem(), "invalid-json");
    assert_eq!(listed(&server, "/jobs", "jobId"), Vec::<Value>::new());
    assert_eq!(keys(&server, "/dead-letters"), ["a"]);
}

/// The letters that wait for their consumers again.
fn retries(place: &Place) -> Vec<String> {
    rows(place, "SELECT key FROM semel_retries ORDER BY key")
}

fn a_redrive_of_named_letters_leaves_their_neighbours_alone(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api,worker", &[]));
    for key in ["a", "b", "c", "d"] {
        desk.dead(letter(key));
    }
    let ids = listed(&server, "/dead-letters", "id");
    // An unknown id selects no other letter.
    let body = json!({ "ids": [ids[3], ids[1], 999_999] }).to_string();
    let answer = post(&server, "/dead-letters/redrive", &body);
    assert_eq!(answer.status, 202, "{}", answer.body);
    let job = answer.json();
    let id = job["jobId"].as_str().unwrap();
    assert_eq!(answer.header("location"), Some(format!("/jobs/{id}").as_str()));
    assert_eq!((&job["kind"], &job["actor"]), (&json!("redrive-dead-letters"), &json!("local")));
    let job = ended(&server, id);
    assert_eq!((&job["state"], &job["done"], &job["total"]), (&json!("done"), &json!(2), &json!(2)), "{job}");
    assert_eq!(keys(&server, "/dead-letters"), ["d", "b"]);
    assert_eq!(retries(place), ["a", "c"]);
    assert_eq!(rows(place, "SELECT DISTINCT actor FROM semel_audit"), ["local"]);
}

fn a_redrive_by_filter_moves_exactly_the_matching_letters(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api,worker", &[]));
    desk.dead(letter("a"));
    let mut other = letter("b");
    other.consumer = "push".to_owned();
    desk.dead(other);
    let mut other = letter("c");
    other.reason = "no route".to_owned();
    desk.dead(other);
    let body = r#"{"consumer":"mail","reason":"full"}"#;
    let job = ended(&server, post(&server, "/dead-letters/redrive", body).json()["jobId"].as_str().unwrap());
    assert_eq!((&job["state"], &job["done"]), (&json!("done"), &json!(1)));
    assert_eq!(job["params"], json!({ "consumer": "mail", "reason": "full" }));
    assert_eq!((keys(&server, "/dead-letters"), retries(place)), (vec![json!("c"), json!("b")], vec!["a".to_owned()]));
}

fn a_redrive_of_all_moves_all_of_one_tenant(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api,worker", &[]));
    for key in ["a", "b"] {
        desk.dead(letter(key));
    }
    let mut foreign = letter("c");
    foreign.tenant = "another".to_owned();
    desk.dead(foreign);
    let job = post(&server, "/dead-letters/redrive", r#"{"all":true}"#).json();
    let job = ended(&server, job["jobId"].as_str().unwrap());
    assert_eq!((&job["done"], &job["total"], &job["error"]), (&json!(2), &json!(2), &Value::Null));
    assert_eq!(retries(place), ["a", "b"]);
    assert_eq!(rows(place, "SELECT key FROM semel_dead_letters"), ["c"]);
    // A letter that died after the job was created is not selected.
    desk.dead(letter("late"));
    assert_eq!(shown(&server, &format!("/jobs/{}", job["jobId"].as_str().unwrap()))["done"], 2);
    assert_eq!(keys(&server, "/dead-letters"), ["late"]);
}

fn a_redrive_sent_again_under_its_key_is_one_job(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api,worker", &[]));
    desk.dead(letter("a"));
    let send = || post_to(server.address, "/dead-letters/redrive", &[("idempotency-key", "k")], r#"{"all":true}"#);
    let (first, again) = (send(), send());
    assert_eq!((first.status, again.status), (202, 202), "{}", again.body);
    assert_eq!(first.json()["jobId"], again.json()["jobId"]);
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    ended(&server, first.json()["jobId"].as_str().unwrap());
    assert_eq!(listed(&server, "/jobs", "done"), [1]);
}

fn one_letter_can_be_redriven(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api", &[]));
    for key in ["a", "b", "c"] {
        desk.dead(letter(key));
    }
    let path = format!("/dead-letters/{}/redrive", listed(&server, "/dead-letters", "id")[1]);
    assert_eq!(post(&server, &path, "").status, 204);
    assert_eq!((keys(&server, "/dead-letters"), retries(place)), (vec![json!("c"), json!("a")], vec!["b".to_owned()]));
    assert_eq!(post(&server, &path, "").status, 404, "it is gone, and its neighbour stays");
    assert_eq!(retries(place), ["b"]);
}

fn a_letter_is_discarded_only_with_a_reason(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api", &[]));
    desk.dead(letter("a"));
    let path = format!("/dead-letters/{}/discard", listed(&server, "/dead-letters", "id")[0]);
    for body in ["{}", r#"{"reason":" "}"#, r#"{"reason":7}"#] {
        assert_eq!(post(&server, &path, body).problem(), "invalid-fields", "{body}");
    }
    assert_eq!(keys(&server, "/dead-letters"), ["a"]);
    assert_eq!(post(&server, &path, r#"{"reason":"sent by hand"}"#).status, 204);
    assert_eq!(keys(&server, "/dead-letters"), Vec::<Value>::new());
    assert_eq!(retries(place), Vec::<String>::new());
    assert_eq!(rows(place, "SELECT actor || ': ' || reason FROM semel_audit"), ["local: sent by hand"]);
    assert_eq!(post(&server, &path, r#"{"reason":"again"}"#).status, 404);
}

fn readiness_reports_dead_letters_of_all_tenants(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, "api", &[]));
    let ready = || {
        let answer = server.get("/readyz");
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["degraded"].clone()
    };
    assert_eq!(ready(), json!([]));
    desk.dead(letter("a"));
    assert_eq!(ready(), json!(["1 dead letter waits for a person: see GET /dead-letters"]));
    // Letters of all tenants.
    let mut other = letter("b");
    other.tenant = "another".to_owned();
    desk.dead(other);
    assert_eq!(ready(), json!(["2 dead letters wait for a person: see GET /dead-letters"]));
}
