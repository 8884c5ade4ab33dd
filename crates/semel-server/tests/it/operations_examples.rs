//! The examples of the operations API do what they say, against a real node.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use serde_json::{Value, json};

use crate::{
    operations_api::Api,
    place::{Place, on_both_databases},
    proposals::rows,
    support::{Process, SOON, eventually, stderr, stdout},
};

on_both_databases! {
    the_python_example_calls_its_portal_once
    the_shell_example_runs_its_command_once
    the_worker_example_runs_what_was_enqueued
}

const EXAMPLES: [&str; 3] = ["operations.py", "operations.sh", "worker.py"];

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name)
}

/// An example in the directory of a place.
fn example<A: AsRef<OsStr>>(place: &Place, api: &Api, name: &str, arguments: impl IntoIterator<Item = A>) -> Command {
    let program = match name.rsplit_once('.') {
        Some((_, "py")) => std::env::var_os("SEMEL_TEST_PYTHON")
            .expect("set SEMEL_TEST_PYTHON to what `scripts/python.sh bin` prints, or run `make test`"),
        _ => "sh".into(),
    };
    let mut command = Command::new(program);
    command.arg(path(name)).args(arguments).current_dir(&place.dir).stdin(Stdio::null());
    command.env("SEMEL_URL", format!("http://{}", api.server.address));
    command
}

#[test]
fn no_example_of_the_operations_api_has_more_than_30_lines() {
    for name in EXAMPLES {
        let lines = std::fs::read_to_string(path(name)).unwrap().lines().count();
        assert!(lines <= 30, "{name} has {lines} lines");
    }
}

fn the_python_example_calls_its_portal_once(place: &Place) {
    let api = Api::start(place);
    let submit = |process: &str, claim: &str| example(place, &api, "operations.py", [process, claim]).output().unwrap();
    // Some at the same time, and one that finds the result.
    let all: Vec<_> = thread::scope(|scope| {
        let runs: Vec<_> = (0..3).map(|_| scope.spawn(|| submit("proc-123", "CLM-001"))).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    for said in all.into_iter().chain([submit("proc-123", "CLM-001")]) {
        assert!(said.status.success(), "{}", stderr(&said));
        let result: Value = serde_json::from_str(stdout(&said)).unwrap();
        assert_eq!(result, json!({ "claimId": "CLM-001", "status": "approved" }));
    }
    assert_eq!(place.lines("portal.txt"), ["CLM-001"]);
    let found =
        api.get("?processInstanceId=proc-123&activityId=Task_SubmitClaim&status=SUCCESS").json()["items"].take();
    assert_eq!((found.as_array().unwrap().len(), &found[0]["retryCount"]), (1, &json!(0)));
    // A portal that cannot be written to.
    std::fs::create_dir(place.path("broken")).unwrap();
    let mut command = example(place, &api, "operations.py", ["proc-123", "CLM-002"]);
    let said = command.env("PORTAL", place.path("broken")).output().unwrap();
    assert!(!said.status.success());
    assert_eq!(api.get("?processInstanceId=proc-123&status=PENDING").json()["items"][0]["inDoubt"], true);
    let again = submit("proc-123", "CLM-002");
    assert!(!again.status.success() && stdout(&again).is_empty(), "a person decides first");
    assert_eq!(place.lines("portal.txt"), ["CLM-001"]);
}

fn the_shell_example_runs_its_command_once(place: &Place) {
    let api = Api::start(place);
    let script = r#"echo "$0" >>runs; echo "{\"receipt\": \"$0\"}""#;
    let run = |claim: &str| {
        let arguments = ["proc-123", "Task_SubmitClaim", "sh", "-c", script, claim];
        let said = example(place, &api, "operations.sh", arguments).output().unwrap();
        assert!(said.status.success(), "{}", stderr(&said));
        serde_json::from_str::<Value>(stdout(&said)).unwrap()
    };
    let receipt = json!({ "receipt": "CLM-001" });
    assert_eq!(run("CLM-001")["resultData"], receipt);
    let again = run("CLM-001");
    assert_eq!((&again["claim"], &again["operation"]["resultData"]), (&json!("replay"), &receipt));
    assert_eq!(run("CLM-002")["resultData"], json!({ "receipt": "CLM-002" }), "other arguments, another operation");
    assert_eq!(place.lines("runs"), ["CLM-001", "CLM-002"]);
    // A command that fails runs again.
    let fails = ["proc-123", "Task_SubmitClaim", "sh", "-c", "echo failed >>runs; [ -e repaired ] || exit 3; echo 7"];
    assert_eq!(example(place, &api, "operations.sh", fails).output().unwrap().status.code(), Some(3));
    std::fs::write(place.path("repaired"), "").unwrap();
    let said = example(place, &api, "operations.sh", fails).output().unwrap();
    let record: Value = serde_json::from_str(stdout(&said)).unwrap();
    assert_eq!((said.status.code(), &record["resultData"], &record["retryCount"]), (Some(0), &json!(7), &json!(1)));
    assert_eq!(place.lines("runs").len(), 4);
}

fn the_worker_example_runs_what_was_enqueued(place: &Place) {
    let api = Api::start(place);
    let enqueue = |name: &str, n: u32| {
        let to = format!("user{n}@example.com");
        api.enqueue(&json!({ "operationName": name, "input": { "to": to }, "onLost": "rerun" }));
    };
    (0..25).for_each(|n| enqueue("send_mail", n));
    enqueue("send_letter", 0);
    let _workers = [(); 2].map(|()| Process::start(&mut example(place, &api, "worker.py", ["send_mail"])));
    let done =
        || api.get("?operationName=send_mail&status=SUCCESS&limit=500").json()["items"].as_array().unwrap().len();
    eventually(SOON, "it is done", || done() == 25);
    // The workers wait now, and get what comes.
    enqueue("send_mail", 25);
    eventually(SOON, "it is done, too", || done() == 26);
    let effects = Place::at(format!("sqlite:{}", place.path("effects.db").display()));
    let effects = rows(&effects, "SELECT input FROM effects");
    assert_eq!(effects.len(), 26);
    assert!(effects.contains(&r#"{"to": "user25@example.com"}"#.to_owned()), "{effects:?}");
    let other = api.get("?operationName=send_letter").json()["items"][0].take();
    assert_eq!(other["waiting"], true, "it has another name");
}
