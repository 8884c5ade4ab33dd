//! The laws of `semel why`. Stories of killed processes are in `once_kill`.

use rustix::process::Signal;

use crate::{
    place::{GATED, Place, assert_gone_within, on_both_databases},
    support::{SOON, eventually, semel, stderr},
};

on_both_databases! {
    a_completed_operation_is_shown_with_its_repeats
    a_failure_is_shown_with_the_next_step
    a_running_operation_is_shown_with_its_lease
    a_run_suspended_past_its_lease_is_shown_with_the_expiry
    a_decision_is_shown_with_the_name_of_the_person
    a_story_can_be_shown_as_json
    a_key_is_found_by_the_hash_that_logs_show_and_by_its_number
    a_key_is_found_in_any_scope
    a_number_is_first_looked_up_as_a_key
    a_purged_operation_is_still_known_by_its_number
    an_unknown_key_is_reported_with_the_searched_scope
}

/// The story's lines without their times, for comparison.
fn untimed(story: &str) -> Vec<String> {
    let cut = |line: &str| match line.split_once("Z  ") {
        Some((time, rest)) if time.starts_with("20") => rest.to_owned(),
        _ => line.to_owned(),
    };
    story.lines().map(cut).collect()
}

fn a_completed_operation_is_shown_with_its_repeats(place: &Place) {
    for _ in 0..3 {
        assert_eq!(place.ends("nightly", &[], "echo hi").0, 0);
    }
    assert_eq!(place.ends("nightly", &[], "echo ho").0, 65);
    let story = place.say(["why", "nightly"]);
    let lines = untimed(&story);
    assert_eq!(lines[0], "nightly in default/cli/once: it took effect");
    assert_eq!(lines[1], "The command: sh -c 'echo hi'");
    assert!(lines[3].starts_with("first claimed by "), "{story}");
    assert!(lines[4].starts_with("completed by ") && lines[4].ends_with(": exit code 0; 3 bytes printed"), "{story}");
    assert!(lines[6].starts_with("The same input came again twice, first at 20"), "{story}");
    assert!(lines[6].ends_with("; the last was answered replay."), "{story}");
    assert!(lines[7].starts_with("Another input came under this key once, at 20"), "{story}");
    assert!(lines[7].ends_with(", and was answered mismatch."), "{story}");
    assert!(lines[8].starts_with("Every repeat is answered with this outcome. It is kept until 20"), "{story}");
    assert_eq!(lines.len(), 9, "{story}");
}

fn a_failure_is_shown_with_the_next_step(place: &Place) {
    for code in [3, 3, 77] {
        assert_eq!(place.ends("k", &["--attempts", "2"], "exit 3").0, code);
    }
    let story = place.say(["why", "k"]);
    let lines = untimed(&story);
    assert_eq!(lines[0], "k in default/cli/once: it failed");
    assert_eq!(lines[3], "first claimed");
    for line in [&lines[4], &lines[6]] {
        assert!(line.starts_with("the run by ") && line.contains(" failed after "), "{story}");
        assert!(line.ends_with("ms: exit code 3") || line.ends_with(" s: exit code 3"), "{story}");
    }
    assert!(
        lines[5].starts_with("claimed again by ") && lines[5].ends_with(": attempt 2, after a run that failed"),
        "{story}"
    );
    assert!(lines[8].ends_with(", and was answered exhausted."), "{story}");
    assert_eq!(
        lines[9],
        "It has failed twice, and may run again for a claim that allows 3 attempts or more. A person can decide, too: \
         semel operations resolve k --as completed|failed|retry --reason '…'"
    );
}

fn a_running_operation_is_shown_with_its_lease(place: &Place) {
    let (mut process, _) = place.start_gated("k", &[]);
    let story = place.say(["why", "k"]);
    assert!(story.starts_with("k in default/cli/once: it is running\n"), "{story}");
    assert!(story.contains(" holds the lease until 20") && story.contains("and longer if it renews it.\n"), "{story}");
    place.open_gate();
    assert_eq!(process.end().code(), Some(0));
}

fn a_run_suspended_past_its_lease_is_shown_with_the_expiry(place: &Place) {
    let flags = ["--lease", "1s"];
    let (mut late, command) = place.start_gated("k", &flags);
    late.signal(Signal::STOP);
    eventually(SOON, "its lease is over", || place.say(["why", "k"]).contains("its lease has expired"));
    assert_gone_within(SOON, command);
    place.open_gate();
    assert_eq!(place.ends("k", &["--wait", "20s"], GATED).0, 0);
    late.signal(Signal::CONT);
    assert_eq!(late.end().code(), Some(70));
    let story = place.say(["why", "k"]);
    assert!(story.starts_with("k in default/cli/once: it took effect\n"), "{story}");
    assert!(story.contains(" expired; it may run again\n"), "{story}");
}

fn a_decision_is_shown_with_the_name_of_the_person(place: &Place) {
    assert_eq!(place.ends("k", &[], "exit 1").0, 1);
    place.say(["operations", "resolve", "k", "--as", "retry", "--reason", "the disk\nwas full"]);
    let story = place.say(["why", "k"]);
    assert!(story.starts_with("k in default/cli/once: it waits to be run\n"), "{story}");
    assert!(story.contains("  decided by ana@"), "{story}");
    assert!(story.contains(": it may run again: the disk\\nwas full\n"), "a reason cannot forge a line: {story}");
    assert!(story.ends_with("It runs when it is claimed next.\n"), "{story}");
}

fn a_story_can_be_shown_as_json(place: &Place) {
    assert_eq!(place.ends("k", &[], "exit 3").0, 3);
    assert_eq!(place.ends("k", &[], "exit 4").0, 65);
    let told = place.json(["why", "k", "--json"]);
    assert_eq!(told["operation"]["key"], "k");
    assert_eq!(told["operation"]["payload"], r#"{"command":["sh","-c","exit 3"]}"#);
    let note = &told["journal"][0];
    assert_eq!((note["event"].as_str(), note["detail"].as_str()), (Some("failed"), Some("exit code 3")));
    assert!(is_time(&note["at"]) && is_time(&told["now"]), "{told}");
    assert_eq!(told["repeats"]["duplicate"]["count"], 0);
    assert_eq!(told["repeats"]["conflict"]["count"], 1);
    let seen = &told["repeats"]["conflict"]["first"][0];
    assert!(is_time(&seen["at"]) && seen["answer"] == "mismatch", "{told}");
    assert_eq!(told["story"][0], "k in default/cli/once: it failed");
}

/// RFC 3339, UTC, with microseconds.
fn is_time(value: &serde_json::Value) -> bool {
    let text = value.as_str().unwrap_or_default();
    text.len() == "2026-11-15T02:00:00.000000Z".len() && text.ends_with('Z') && text.as_bytes()[10] == b'T'
}

fn a_key_is_found_by_the_hash_that_logs_show_and_by_its_number(place: &Place) {
    assert_eq!(place.ends("k", &["--scope", "cli/other"], "true").0, 0);
    assert_eq!(place.ends("other", &[], "true").0, 0);
    let shown = place.json(["operations", "show", "k", "--scope", "cli/other", "--json"]);
    let story = place.say(["why", shown["keyHash"].as_str().unwrap()]);
    assert!(story.starts_with("k in default/cli/other: "), "{story}");
    let story = place.say(["why", &shown["id"].to_string()]);
    assert!(story.starts_with("k in default/cli/other: "), "{story}");
}

fn a_key_is_found_in_any_scope(place: &Place) {
    assert_eq!(place.ends("k", &["--scope", "cli/other"], "true").0, 0);
    let story = place.say(["why", "k"]);
    assert!(story.starts_with("k in default/cli/other: "), "{story}");
    assert_eq!(place.ends("k", &["--scope", "cli/third"], "true").0, 0);
    let output = place.run(["why", "k", "--quiet"]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(said.contains("several scopes") && said.contains("--scope default/cli/third"), "{said}");
    assert_eq!(place.run(["why", "k", "--scope", "cli/fourth"]).status.code(), Some(1), "a scope that is given counts");
}

fn a_number_is_first_looked_up_as_a_key(place: &Place) {
    assert_eq!(place.ends("k", &["--scope", "cli/other"], "true").0, 0);
    let shown = place.json(["operations", "show", "k", "--scope", "cli/other", "--json"]);
    let id = shown["id"].to_string();
    // The number of one operation is the key of another.
    assert_eq!(place.ends(&id, &["--scope", "cli/third"], "true").0, 0);
    let output = place.run(["why", &id, "--quiet"]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    let told = format!("--scope default/cli/third, or --id {id} without a key");
    assert!(said.contains("with the key k in default/cli/other") && said.contains(&told), "{said}");
    let story = place.say(["why", &id, "--scope", "cli/third"]);
    assert!(story.starts_with(&format!("{id} in default/cli/third: ")), "{story}");
    let story = place.say(["why", "--id", &id]);
    assert!(story.starts_with("k in default/cli/other: "), "{story}");
    assert_eq!(place.ends(&id, &[], "true").0, 0);
    let story = place.say(["why", &id]);
    assert!(story.starts_with(&format!("{id} in default/cli/once: ")), "the default scope: {story}");
}

fn a_purged_operation_is_still_known_by_its_number(place: &Place) {
    assert_eq!(place.ends("k", &[], "true").0, 0);
    let id = place.json(["operations", "show", "k", "--json"])["id"].to_string();
    place.say(["operations", "purge", "k", "--reason", "a test"]);
    assert_eq!(place.run(["why", "k"]).status.code(), Some(1));
    let story = place.say(["why", "--id", &id]);
    assert!(story.starts_with(&format!("Operation {id} is gone, and its key is free.")), "{story}");
    assert!(story.contains("  purged by ana@") && story.ends_with(": a test\n"), "{story}");
    assert!(place.json(["why", "--id", &id, "--json"])["operation"].is_null());
}

fn an_unknown_key_is_reported_with_the_searched_scope(place: &Place) {
    assert_eq!(place.ends("k", &[], "true").0, 0);
    let output = place.run(["why", "nightly", "--quiet"]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(said.starts_with("semel: the key nightly is not known in the scope default/cli/once of the ledger in "));
    assert!(said.ends_with("Use --scope for a key of another scope; semel operations list lists them\n"), "{said}");
    let output = place.run(["why", "--id", "999", "--quiet"]);
    assert!(stderr(&output).starts_with("semel: there is no operation 999 of the tenant default"), "{output:?}");
}

#[test]
fn why_operations_and_sweep_create_no_ledger() {
    let place = Place::sqlite();
    for command in [&["why", "k"][..], &["operations", "list"], &["operations", "show", "k"], &["sweep"]] {
        let output = place.run(command);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).starts_with("semel: there is no ledger in /"), "{}", stderr(&output));
    }
    assert!(!place.path("semel.db").exists());
    assert_eq!(semel().arg("why").output().unwrap().status.code(), Some(2), "which one?");
}
