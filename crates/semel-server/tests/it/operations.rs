//! The laws of `semel operations` and `semel sweep`.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    desk::execute,
    place::{GATED, Place, assert_gone_within, on_both_databases},
    proposals::rows,
    support::{SOON, Server, eventually, stderr},
};

on_both_databases! {
    a_list_is_newest_first_and_in_pages
    a_list_has_only_matching_operations
    the_table_of_operations_is_aligned_and_names_the_next_page
    every_stored_field_is_shown
    a_running_or_completed_operation_cannot_be_resolved
    a_purged_key_is_free
    a_decision_on_a_key_of_another_scope_is_refused_with_that_scope
    decisions_are_audited
    a_sweep_ends_killed_runs_and_deletes_expired_operations
    an_unreadable_operation_is_shown_and_can_be_purged
}

fn keys(listing: &Value) -> Vec<String> {
    let items = listing["items"].as_array().unwrap();
    items.iter().map(|item| item["key"].as_str().unwrap().to_owned()).collect()
}

fn a_decision_on_a_key_of_another_scope_is_refused_with_that_scope(place: &Place) {
    assert_eq!(place.ends("k", &["--scope", "jobs/export"], "false").0, 1);
    for decision in [&["purge", "k"][..], &["resolve", "k", "--as", "retry"]] {
        let told = |scope: &[&str]| place.run([&["operations"], decision, &["--reason", "r"], scope].concat());
        let elsewhere = told(&[]);
        assert_eq!(elsewhere.status.code(), Some(1));
        let advice = "it is in default/jobs/export; use --scope default/jobs/export";
        assert!(stderr(&elsewhere).contains(advice), "{}", stderr(&elsewhere));
    }
    assert!(
        place.run(["operations", "purge", "k", "--reason", "r", "--scope", "default/jobs/export"]).status.success()
    );
    let gone = place.run(["operations", "purge", "k", "--reason", "r"]);
    assert!(stderr(&gone).contains("It was never claimed there"), "{}", stderr(&gone));
    let number = place.run(["operations", "purge", "--id", "abc", "--reason", "r"]);
    assert!(stderr(&number).contains("it must be an operation's number"), "{}", stderr(&number));
}

fn a_list_is_newest_first_and_in_pages(place: &Place) {
    for n in 1..=5 {
        assert_eq!(place.ends(&format!("k{n}"), &[], "true").0, 0);
    }
    let first = place.json(["operations", "list", "--limit", "2", "--json"]);
    assert_eq!(keys(&first), ["k5", "k4"]);
    let next = |page: &Value| {
        place.json(["operations", "list", "--limit", "2", "--json", "--cursor", &page["next"].to_string()])
    };
    let second = next(&first);
    // New operations move no page.
    assert_eq!(place.ends("k6", &[], "true").0, 0);
    let third = next(&second);
    assert_eq!((keys(&second), keys(&third)), (vec!["k3".into(), "k2".into()], vec!["k1".to_owned()]));
    assert!(third["next"].is_null(), "{third}");
    for wrong in [["--limit", "0"], ["--limit", "501"], ["--cursor", "x"], ["--state", "done"], ["--label", "5=x"]] {
        let output = place.semel(["operations", "list"]).args(wrong).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
}

fn a_list_has_only_matching_operations(place: &Place) {
    assert_eq!(place.ends("good", &[], "true").0, 0);
    assert_eq!(place.ends("bad", &["--scope", "cli/other"], "false").0, 1);
    assert_eq!(place.ends("foreign", &["--scope", "acme/cli/once"], "true").0, 0);
    let output = place.run(["once", "-q", "--key", "direct", "--", "/bin/true"]);
    assert!(output.status.success());
    let (mut running, _) = place.start_gated("running", &[]);
    let list = |flags: &[&str]| {
        let mut arguments = vec!["operations", "list", "--json"];
        arguments.extend(flags);
        keys(&place.json(arguments))
    };
    assert_eq!(list(&[]), ["running", "direct", "bad", "good"]);
    assert_eq!(list(&["--state", "completed"]), ["direct", "good"]);
    assert_eq!(list(&["--state", "failed"]), ["bad"]);
    assert_eq!(list(&["--state", "processing"]), ["running"]);
    assert_eq!(list(&["--service", "cli", "--kind", "other"]), ["bad"]);
    assert_eq!(list(&["--label", "1=true"]), ["direct"]);
    assert_eq!(list(&["--tenant", "acme"]), ["foreign"]);
    assert_eq!(list(&["--older-than", "1h"]), [""; 0]);
    assert_eq!(list(&["--older-than", "0s", "--state", "failed"]), ["bad"]);
    place.open_gate();
    assert_eq!(running.end().code(), Some(0));
}

fn the_table_of_operations_is_aligned_and_names_the_next_page(place: &Place) {
    assert_eq!(place.ends("other", &[], "true").0, 0, "the ledger is there");
    place.say(["operations", "purge", "other", "--reason", "x"]);
    assert_eq!(place.say(["operations", "list"]), "none\n");
    assert_eq!(place.ends("short", &[], "true").0, 0);
    assert_eq!(place.ends("a much longer key", &[], "exit 3").0, 3);
    let table = place.say(["operations", "list"]);
    let lines: Vec<_> = table.lines().collect();
    let column = |name| lines[0].find(name).unwrap();
    assert_eq!(lines.len(), 3, "{table}");
    assert!(lines[1][column("STATE")..].starts_with("failed "), "{table}");
    assert!(lines[1][column("KEY")..].starts_with("a much longer key  exit code 3"), "{table}");
    assert!(lines[2][column("KEY")..].starts_with("short              sh"), "{table}");
    let table = place.say(["operations", "list", "--limit", "1"]);
    assert!(table.lines().last().unwrap().starts_with("There are more: --cursor "), "{table}");
}

fn every_stored_field_is_shown(place: &Place) {
    assert_eq!(place.ends("k", &["--retention", "1d"], "echo hi").0, 0);
    let shown = place.json(["operations", "show", "k", "--json"]);
    let expected = json!({
        "tenant": "default", "service": "cli", "kind": "once", "key": "k", "state": "completed",
        "labels": ["sh", null, null, null], "attempt": 1, "failures": 0, "crashes": 0, "parked": false,
        "order": null, "notBefore": null, "archiveAt": null, "archived": false, "lease": null, "error": null,
        "checkpoint": null, "successor": null,
        "outcome": { "kept": true, "body": "{\"semelOnce\":1,\"exitCode\":0,\"printed\":3}\nhi\n" },
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&shown[name], value, "{name}");
    }
    for name in ["createdAt", "claimedAt", "settledAt", "expiresAt", "owner", "keyHash", "fingerprint", "payload"] {
        assert!(shown[name].is_string(), "{name}");
    }
    assert!(shown["id"].is_i64() && shown["fence"].is_i64());
    let brief = &place.json(["operations", "list", "--json"])["items"][0];
    assert!(brief["payload"].is_null() && brief["outcome"].is_null(), "a list is light: {brief}");

    let text = place.say(["operations", "show", &shown["id"].to_string()]);
    assert!(text.contains("\nstate        completed\n"), "{text}");
    assert!(text.contains("\ncommand      sh -c 'echo hi'\n"), "{text}");
    assert!(text.contains("\noutcome      exit code 0; 3 bytes printed\n"), "{text}");
    assert!(text.ends_with("\noutcome:\n  hi\n"), "{text}");
}

fn a_running_or_completed_operation_cannot_be_resolved(place: &Place) {
    let (mut running, _) = place.start_gated("k", &[]);
    let resolve = ["operations", "resolve", "k", "-q", "--as", "failed", "--reason", "x"];
    let purge = ["operations", "purge", "k", "-q", "--reason", "x"];
    for command in [&resolve[..], &purge[..]] {
        let output = place.run(command);
        assert_eq!(output.status.code(), Some(1));
        let said = stderr(&output);
        assert!(said.starts_with("semel: nothing was changed: ") && said.contains(" is running it; "), "{said}");
    }
    place.open_gate();
    assert_eq!(running.end().code(), Some(0));
    let said = place.run(resolve);
    assert_eq!(said.status.code(), Some(1));
    assert!(stderr(&said).contains("it has taken effect, and cannot be decided again"), "{}", stderr(&said));
    let outcome = ["operations", "resolve", "k", "--as", "retry", "--outcome", "x", "--reason", "x"];
    assert!(stderr(&place.run(outcome)).contains("only a completed operation has an outcome"));
    let unexplained = ["operations", "resolve", "k", "--as", "retry", "--reason", " "];
    assert_eq!(place.run(unexplained).status.code(), Some(2), "a reason must say something");
    let unknown = place.run(["operations", "resolve", "unknown", "--as", "retry", "--reason", "x"]);
    assert_eq!(unknown.status.code(), Some(1));
}

fn a_purged_key_is_free(place: &Place) {
    assert_eq!(place.ends("k", &[], "echo one").1, "one\n");
    let id = place.json(["operations", "show", "k", "--json"])["id"].to_string();
    let purged = place.json(["operations", "purge", "--id", &id, "--reason", "x", "--json"]);
    assert_eq!(purged["operation"]["key"], "k");
    assert_eq!(place.ends("k", &[], "echo two").1, "two\n");
}

/// Actor, action, reason and operation: a purge leaves nothing else.
fn decisions_are_audited(place: &Place) {
    assert_eq!(place.ends("k", &[], "false").0, 1);
    place.say(["operations", "resolve", "k", "--as", "retry", "--reason", "it is mended"]);
    place.say(["operations", "purge", "k", "--reason", "a slip"]);
    assert!(!place.run(["operations", "purge", "k", "--reason", "again"]).status.success());
    let told = rows(place, "SELECT action || ': ' || reason FROM semel_audit WHERE actor <> '' ORDER BY id");
    assert_eq!(told, ["operations.retry: it is mended", "operations.purge: a slip"]);
    let before = rows(place, "SELECT before FROM semel_audit ORDER BY id");
    assert!(before.iter().all(|before| before.contains("\"key\":\"k\"")), "{before:?}");
}

fn a_sweep_ends_killed_runs_and_deletes_expired_operations(place: &Place) {
    assert_eq!(place.ends("old", &["--retention", "1s"], "true").0, 0);
    let (mut process, command) = place.start_gated("k", &["--lease", "1s"]);
    process.signal(Signal::KILL);
    process.end();
    assert_gone_within(SOON, command);
    let mut swept = (0, 0);
    eventually(SOON, "the lease and the retention have ended", || {
        let did = place.json(["sweep", "--json"]);
        assert!(did["archived"] == 0 && did["folded"].is_u64(), "{did}");
        swept.0 += did["lapsed"].as_u64().unwrap();
        swept.1 += did["expired"].as_u64().unwrap();
        swept.0 >= 1 && swept.1 >= 1
    });
    assert_eq!(swept, (1, 1));
    assert_eq!(place.state("k"), "timed_out");
    assert_eq!(place.run(["why", "old"]).status.code(), Some(1));
    let said = place.say(["sweep"]);
    assert!(
        said.starts_with("0 expired leases ended, 0 expired operations deleted, 0 operations archived, "),
        "{said}"
    );
    place.open_gate();
    assert_eq!(place.ends("k", &[], GATED).0, 0, "and it may run again");
}

/// One unreadable row harms no other: it is listed as such, every command reports it, and a person can free its key.
fn an_unreadable_operation_is_shown_and_can_be_purged(place: &Place) {
    for key in ["a", "bad", "c"] {
        assert_eq!(place.ends(key, &[], "true").0, 0);
    }
    let id = place.json(["operations", "show", "bad", "--json"])["id"].to_string();
    execute(place, "UPDATE semel_operations SET outcome = substr(outcome, 1, 1) WHERE key = 'bad'");
    let listing = place.json(["operations", "list", "--json"]);
    assert_eq!(keys(&listing), ["c", "bad", "a"]);
    let why = "a stored row cannot be read: a payload whose first bytes are damaged";
    assert_eq!(listing["items"][1]["unreadable"], why);
    assert_eq!(listing["items"][1]["id"].to_string(), id);
    let table = place.say(["operations", "list"]);
    assert!(
        table.lines().any(|line| line.contains(" bad ") && line.contains(&format!("unreadable: {why}"))),
        "{table}"
    );
    for target in ["bad", id.as_str()] {
        let shown = place.say(["operations", "show", target]);
        assert!(shown.contains("completed") && shown.contains(why), "{shown}");
        let story = place.say(["why", target]);
        assert!(story.contains("completed") && story.contains(why), "{story}");
    }
    assert_eq!(place.json(["why", "bad", "--json"])["operation"]["unreadable"], why);

    // The operations that the sweep has set aside are listed separately, with the reason; the server reports them, too.
    execute(
        place,
        "INSERT INTO semel_set_aside (item, what, since, tries, retry_at, reason)
         SELECT id, 'age', 1600000000000000, 3, 9000000000000000, 'no room' FROM semel_operations WHERE key IN ('a', 'bad')",
    );
    let aside = place.json(["operations", "list", "--set-aside", "--json"]);
    assert_eq!(keys(&aside), ["bad", "a"]);
    let told = json!([{
        "task": "age", "since": "2020-09-13T12:26:40.000000Z", "tries": 3, "retryAt": "2255-03-14T16:00:00.000000Z",
        "reason": "no room",
    }]);
    assert_eq!((&aside["items"][0]["setAside"], &aside["items"][1]["setAside"]), (&told, &told));
    let table = place.say(["operations", "list", "--set-aside"]);
    assert!(table.contains("set aside since 2020-09-13T12:26:40.000000Z") && table.contains("no room"), "{table}");
    assert!(place.say(["operations", "show", "a"]).contains("no room"));
    assert!(place.say(["why", "a"]).contains("no room"));
    let server = Server::start_with(&mut place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", "api"]));
    let ready = server.get("/readyz");
    assert_eq!(
        (ready.status, &ready.json()["degraded"][0]),
        (200, &json!("2 operations are set aside: semel operations list --set-aside shows why"))
    );

    place.say(["operations", "purge", "bad", "--reason", "damaged"]);
    assert_eq!(place.ends("bad", &[], "echo again").1, "again\n", "the key is free");
    // The entry of a purged row is deleted too, and repaired rows are no longer set aside.
    let swept = place.json(["sweep", "--set-aside", "--json"]);
    assert_eq!((&swept["setAside"], &swept["troubles"]), (&json!(0), &json!([])));
    assert_eq!(place.say(["operations", "list", "--set-aside"]), "none\n");
    assert_eq!(server.get("/readyz").json()["degraded"], json!([]));
}
