//! The laws of `semel operations` and `semel sweep`.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    place::{GATED, Place, assert_gone_within, on_both_databases},
    proposals::rows,
    support::{SOON, eventually, stderr},
};

on_both_databases! {
    a_list_is_newest_first_and_in_pages
    a_list_holds_only_what_was_asked_for
    a_table_is_for_people
    everything_that_is_stored_is_shown
    what_runs_or_took_effect_is_not_decided_about
    a_purged_key_is_free
    what_a_person_decided_is_audited
    a_sweep_ends_what_was_killed_and_removes_what_is_old
}

fn keys(listing: &Value) -> Vec<String> {
    let items = listing["items"].as_array().unwrap();
    items.iter().map(|item| item["key"].as_str().unwrap().to_owned()).collect()
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
    // What comes in between moves no page.
    assert_eq!(place.ends("k6", &[], "true").0, 0);
    let third = next(&second);
    assert_eq!((keys(&second), keys(&third)), (vec!["k3".into(), "k2".into()], vec!["k1".to_owned()]));
    assert!(third["next"].is_null(), "{third}");
    for wrong in [["--limit", "0"], ["--limit", "501"], ["--cursor", "x"], ["--state", "done"], ["--label", "5=x"]] {
        let output = place.semel(["operations", "list"]).args(wrong).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
}

fn a_list_holds_only_what_was_asked_for(place: &Place) {
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

fn a_table_is_for_people(place: &Place) {
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

fn everything_that_is_stored_is_shown(place: &Place) {
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

fn what_runs_or_took_effect_is_not_decided_about(place: &Place) {
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
    assert!(stderr(&said).contains("it has taken effect, and that cannot be decided again"), "{}", stderr(&said));
    let outcome = ["operations", "resolve", "k", "--as", "retry", "--outcome", "x", "--reason", "x"];
    assert!(stderr(&place.run(outcome)).contains("only what took effect has an outcome"));
    let unexplained = ["operations", "resolve", "k", "--as", "retry", "--reason", " "];
    assert_eq!(place.run(unexplained).status.code(), Some(2), "a reason must say something");
    let unknown = place.run(["operations", "resolve", "nobody", "--as", "retry", "--reason", "x"]);
    assert_eq!(unknown.status.code(), Some(1));
}

fn a_purged_key_is_free(place: &Place) {
    assert_eq!(place.ends("k", &[], "echo one").1, "one\n");
    let id = place.json(["operations", "show", "k", "--json"])["id"].to_string();
    let purged = place.json(["operations", "purge", "--id", &id, "--reason", "x", "--json"]);
    assert_eq!(purged["operation"]["key"], "k");
    assert_eq!(place.ends("k", &[], "echo two").1, "two\n");
}

/// Who, what and why, and what it was about: a purge leaves nothing else.
fn what_a_person_decided_is_audited(place: &Place) {
    assert_eq!(place.ends("k", &[], "false").0, 1);
    place.say(["operations", "resolve", "k", "--as", "retry", "--reason", "it is mended"]);
    place.say(["operations", "purge", "k", "--reason", "a slip"]);
    assert!(!place.run(["operations", "purge", "k", "--reason", "again"]).status.success());
    let told = rows(place, "SELECT action || ': ' || reason FROM semel_audit WHERE actor <> '' ORDER BY id");
    assert_eq!(told, ["operations.retry: it is mended", "operations.purge: a slip"]);
    let before = rows(place, "SELECT before FROM semel_audit ORDER BY id");
    assert!(before.iter().all(|before| before.contains("\"key\":\"k\"")), "{before:?}");
}

fn a_sweep_ends_what_was_killed_and_removes_what_is_old(place: &Place) {
    assert_eq!(place.ends("old", &["--retention", "1ms"], "true").0, 0);
    let (mut process, command) = place.start_gated("k", &["--lease", "1s"]);
    process.signal(Signal::KILL);
    process.end();
    assert_gone_within(SOON, command);
    let mut swept = (0, 0);
    eventually(SOON, "the lease has ended", || {
        let did = place.json(["sweep", "--json"]);
        assert!(did["archived"] == 0 && did["folded"].is_u64(), "{did}");
        swept.0 += did["lapsed"].as_u64().unwrap();
        swept.1 += did["expired"].as_u64().unwrap();
        swept.0 == 1
    });
    assert_eq!(swept, (1, 1));
    assert_eq!(place.state("k"), "timed_out");
    assert_eq!(place.run(["why", "old"]).status.code(), Some(1));
    let said = place.say(["sweep"]);
    assert!(said.starts_with("0 lapsed leases ended, 0 expired operations removed, 0 operations archived, "), "{said}");
    place.open_gate();
    assert_eq!(place.ends("k", &[], GATED).0, 0, "and it may run again");
}
