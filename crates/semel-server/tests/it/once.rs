//! The laws of `semel once`. Those of its signals and deaths are in `once_kill`.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    place::{GATED, Place, ended, on_both_databases},
    support::{Process, SOON, eventually, semel, stderr, stdout, within},
};

on_both_databases! {
    a_command_runs_once_and_is_replayed
    a_misspelt_variable_is_reported_even_with_quiet
    output_is_forwarded_as_it_comes
    binary_output_survives
    output_over_a_mebibyte_is_cut_and_marked
    a_second_concurrent_call_exits_with_75
    a_call_that_waits_is_answered_with_the_outcome
    of_many_concurrent_calls_on_a_new_ledger_one_runs
    a_failing_command_runs_up_to_its_number_of_attempts
    an_operation_resolved_as_failed_is_shown_with_name_and_reason
    another_command_under_the_same_key_is_refused
    equal_keys_of_two_scopes_are_independent
    a_command_that_cannot_be_run_leaves_the_key_free
    a_known_key_is_replayed_after_its_program_was_deleted
    a_key_past_its_retention_runs_again
}

fn a_command_runs_once_and_is_replayed(place: &Place) {
    let script = "echo run >>runs; echo out; echo err >&2";
    assert_eq!(place.ends("k", &[], script), (0, "out\n".into(), "err\n".into()));
    let mut again = place.semel(["once", "--key", "k", "--", "sh", "-c", script]);
    let (code, out, err) = ended(&again.output().unwrap());
    assert_eq!((code, out.as_str()), (0, "out\n"));
    let lines: Vec<_> = err.lines().collect();
    assert_eq!(lines.len(), 2, "{err}");
    assert!(lines[0].starts_with("semel: the ledger is in "), "{err}");
    assert!(lines[1].starts_with("semel: this ran before, at 20"), "{err}");
    assert!(lines[1].ends_with("Z; here is what it printed then"), "{err}");
    assert_eq!(place.ends("k", &[], script), (0, "out\n".into(), String::new()), "quiet means quiet");
    assert_eq!(place.lines("runs").len(), 1);
}

fn a_misspelt_variable_is_reported_even_with_quiet(place: &Place) {
    let mut command = place.once("k", &[], "true");
    let (code, _, err) = ended(&command.env("SEMEL_DATABSE_URL", "sqlite:elsewhere.db").output().unwrap());
    assert_eq!(code, 0);
    let told =
        "semel: the environment variable SEMEL_DATABSE_URL is not used by Semel; did you mean SEMEL_DATABASE_URL?\n";
    assert_eq!(err, told);
}

fn output_is_forwarded_as_it_comes(place: &Place) {
    let script = "cat; until [ -e gate ]; do sleep 0.02; done; echo second";
    let mut command = place.once("k", &[], script);
    let mut process = Process::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
    process.0.stdin.take().unwrap().write_all(b"first\n").unwrap();
    let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
    let (first, rest) = within(SOON, move || (lines.next().unwrap().unwrap(), lines)).expect("the first line comes");
    assert_eq!(first, "first", "stdin is the command's");
    assert!(process.0.try_wait().unwrap().is_none());
    place.open_gate();
    assert_eq!(rest.map(Result::unwrap).collect::<Vec<_>>(), ["second"]);
    assert!(process.end().success());
}

fn binary_output_survives(place: &Place) {
    let script = r"printf '\000\377\n\200{'";
    for _ in 0..2 {
        let output = place.once("k", &[], script).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"\0\xff\n\x80{"[..]));
    }
    let body = &place.json(["operations", "show", "k", "--json"])["outcome"]["body"];
    assert!(body["base64"].is_string(), "{body}");
}

fn output_over_a_mebibyte_is_cut_and_marked(place: &Place) {
    let script = "head -c 3000000 /dev/zero | tr '\\0' x; echo end";
    let first = place.once("k", &[], script).output().unwrap();
    assert!(first.status.success() && first.stdout.ends_with(b"xend\n"));
    assert_eq!(first.stdout.len(), 3_000_004, "all of it is passed on");
    let mut again = place.semel(["once", "--key", "k", "--", "sh", "-c", script]);
    let again = again.output().unwrap();
    assert_eq!((again.status.code(), again.stdout.len()), (Some(0), 1 << 20));
    let expected = "here are the first 1048576 of the 3000004 bytes that it printed then; the rest was not kept\n";
    assert!(stderr(&again).ends_with(expected), "{}", stderr(&again));
    let quietly = place.semel(["once", "--quiet", "--key", "k", "--", "sh", "-c", script]).output().unwrap();
    assert!(stderr(&quietly).ends_with(expected), "it is not the whole: {}", stderr(&quietly));
    assert_eq!(place.json(["operations", "show", "k", "--json"])["outcome"]["kept"], false);
}

fn a_second_concurrent_call_exits_with_75(place: &Place) {
    let (mut first, _) = place.start_gated("k", &[]);
    let (code, out, err) = place.ends("k", &[], GATED);
    assert_eq!((code, out.as_str()), (75, ""));
    assert!(err.starts_with("semel: not run: ") && err.contains("runs it now, and its lease lasts"), "{err}");
    let (code, _, err) = place.ends("k", &["--wait", "100ms"], GATED);
    assert_eq!(code, 75, "waiting ends: {err}");
    place.open_gate();
    assert_eq!(first.end().code(), Some(0));
    assert_eq!(place.lines("pids").len(), 1);
}

fn a_call_that_waits_is_answered_with_the_outcome(place: &Place) {
    let (mut first, _) = place.start_gated("k", &[]);
    let mut command = place.once("k", &["--wait", "20s"], GATED);
    let second = Process::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let mut third = Process::start(place.once("k", &["--wait", "20s"], "another").stderr(Stdio::null()));
    assert_eq!(third.end().code(), Some(65), "another command need not wait for its refusal");
    place.open_gate();
    assert_eq!(first.end().code(), Some(0));
    let (code, out, _) = ended(&output(second));
    assert_eq!((code, out.as_str()), (0, "through\n"));
    assert_eq!(place.lines("pids").len(), 1);
}

fn of_many_concurrent_calls_on_a_new_ledger_one_runs(place: &Place) {
    let script = "echo run >>runs; echo ran";
    let start = |_| {
        let mut command = place.once("k", &["--wait", "20s"], script);
        Process::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let all: Vec<_> = (0..8).map(start).collect();
    for process in all {
        assert_eq!(ended(&output(process)), (0, "ran\n".into(), String::new()));
    }
    assert_eq!(place.lines("runs").len(), 1);
}

fn a_failing_command_runs_up_to_its_number_of_attempts(place: &Place) {
    let script = "echo run >>runs; [ -e mended ] && echo fine && exit 0; exit 3";
    for attempt in 1..=2 {
        let (code, _, err) = place.ends("k", &["--attempts", "2"], script);
        assert_eq!(code, 3);
        assert_eq!(err, format!("semel: the command failed: exit code 3; this was attempt {attempt} of 2\n"));
    }
    let (code, _, err) = place.ends("k", &["--attempts", "2"], script);
    assert_eq!(code, 77);
    assert!(
        err.starts_with("semel: not run: it has failed twice (exit code 3). Allow more with --attempts 3"),
        "{err}"
    );
    assert_eq!(place.lines("runs").len(), 2);
    std::fs::write(place.path("mended"), "").unwrap();
    assert_eq!(place.ends("k", &["--attempts", "3"], script), (0, "fine\n".into(), String::new()));
    assert_eq!(place.ends("k", &[], script), (0, "fine\n".into(), String::new()), "what took effect is replayed");
    assert_eq!(place.lines("runs").len(), 3);
}

fn an_operation_resolved_as_failed_is_shown_with_name_and_reason(place: &Place) {
    assert_eq!(place.ends("k", &["--attempts", "3"], "exit 3").0, 3);
    place.say(["operations", "resolve", "k", "--as", "failed", "--reason", "not needed any more"]);
    let (code, _, err) = place.ends("k", &["--attempts", "3"], "exit 3");
    assert_eq!(code, 77, "{err}");
    assert!(err.starts_with("semel: not run: at 20") && err.contains("Z, ana@"), "{err}");
    assert!(err.contains(" resolved it as failed: not needed any more. To let it run: semel operations resolve k "));
    assert!(err.ends_with("--as retry --reason '…'\n") && !err.contains("waits for a person"), "{err}");
}

/// Runs a suggested command as a person who pastes it would.
fn paste(place: &Place, advice: &str) -> std::process::Output {
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_semel")).parent().unwrap();
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", advice]).env("PATH", program).env_remove("SEMEL_DATABASE_URL");
    shell.env("HOME", place.dir.path()).env_remove("XDG_STATE_HOME").current_dir(&place.dir).output().unwrap()
}

#[test]
fn suggested_commands_can_be_pasted_for_any_ledger() {
    let place = Place::sqlite();
    std::fs::write(place.path("semel.toml"), "data_dir = \"from a file\"\n").unwrap();
    for ledger in [["--data-dir", "my data"], ["--database-url", "sqlite:other.db"], ["--config", "semel.toml"]] {
        let run = |arguments: &[&str]| {
            let mut command = at_home(&[("HOME", place.dir.path().to_str().unwrap())], arguments);
            command.current_dir(&place.dir).output().unwrap()
        };
        let once = [&["once", "-q", "--key", "k"], &ledger[..], &["--", "false"]].concat();
        assert_eq!(run(&once).status.code(), Some(1));
        let refused = run(&once);
        assert_eq!(refused.status.code(), Some(77));
        let story = run(&[&["why", "k", "-q"], &ledger[..]].concat());
        for (said, before) in [(stderr(&refused), "or decide: "), (stdout(&story), "can decide, too: ")] {
            let (_, advice) = said.trim_end().rsplit_once(before).unwrap_or_else(|| panic!("{said}"));
            let pasted = paste(&place, &advice.replace("completed|failed|retry", "retry"));
            assert!(pasted.status.success(), "{advice}: {}", stderr(&pasted));
        }
    }
}

fn another_command_under_the_same_key_is_refused(place: &Place) {
    assert_eq!(place.ends("k", &[], "echo 'first one'").0, 0);
    let (code, out, err) = place.ends("k", &[], "echo second");
    assert_eq!((code, out.as_str()), (65, ""));
    assert!(err.contains("the key belongs to another command: sh -c 'echo '\\''first one'\\'''"), "{err}");
}

fn equal_keys_of_two_scopes_are_independent(place: &Place) {
    assert_eq!(place.ends("k", &[], "echo one").1, "one\n");
    assert_eq!(place.ends("k", &["--scope", "cli/other"], "echo two").1, "two\n");
    assert_eq!(place.ends("k", &["--scope", "acme/cli/once"], "echo three").1, "three\n");
    let story = place.say(["why", "k", "--scope", "acme/cli/once"]);
    assert!(story.starts_with("k in acme/cli/once: it took effect\n"), "{story}");
}

fn a_command_that_cannot_be_run_leaves_the_key_free(place: &Place) {
    let once = |command: &str| ended(&place.run(["once", "--quiet", "--key", "k", "--", command]));
    let (code, _, err) = once("no-such-command");
    let expected = "semel: cannot run \"no-such-command\": there is no such command; the key is still free\n";
    assert_eq!((code, err.as_str()), (127, expected));
    assert_eq!(once("/tmp").0, 126);
    assert_eq!(place.run(["why", "k"]).status.code(), Some(1), "nothing was claimed");
    assert_eq!(place.ends("k", &[], "exit 127").0, 127, "a script's own 127 is a failure like any other");
    assert_eq!(place.ends("k", &[], "exit 127").0, 77);
}

fn a_known_key_is_replayed_after_its_program_was_deleted(place: &Place) {
    let script = place.path("export.sh");
    std::fs::write(&script, "#!/bin/sh\necho exported\n").unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    let once = || ended(&place.run(["once", "--quiet", "--key", "k", "--", "./export.sh"]));
    assert_eq!(once(), (0, "exported\n".into(), String::new()));
    std::fs::remove_file(&script).unwrap();
    assert_eq!(once(), (0, "exported\n".into(), String::new()));
}

fn a_key_past_its_retention_runs_again(place: &Place) {
    let script = "echo run >>runs";
    eventually(SOON, "the key is free again", || {
        assert_eq!(place.ends("k", &["--retention", "1s"], script).0, 0);
        place.lines("runs").len() == 2
    });
    assert_eq!(place.ends("forever", &["--retention", "forever"], script).0, 0);
    let shown = place.json(["operations", "show", "forever", "--json"]);
    assert!(shown["expiresAt"].is_null(), "{shown}");
}

#[test]
fn a_closed_stdout_does_not_stop_the_command() {
    let place = Place::sqlite();
    let (mut process, _) = place.start_gated("k", &[]);
    drop(process.0.stdout.take());
    place.open_gate();
    assert_eq!(process.end().code(), Some(0));
    assert_eq!(place.ends("k", &[], GATED).1, "through\n");
}

#[test]
fn processes_that_outlive_a_command_are_not_waited_for() {
    let place = Place::sqlite();
    let script = "sleep 1000 2>/dev/null & echo $!";
    let mut command = place.once("k", &[], script);
    let output = within(SOON, move || command.output().unwrap()).expect("an end although stdout is still held open");
    let left = Pid::from_raw(stdout(&output).trim().parse().unwrap()).unwrap();
    kill_process(left, Signal::KILL).unwrap();
}

#[test]
fn output_that_cannot_be_written_is_reported_and_can_be_replayed() {
    let place = Place::sqlite();
    let mut command = place.once("k", &[], "echo out");
    let output = command.stdout(std::fs::File::create("/dev/full").unwrap()).output().unwrap();
    assert_eq!(output.status.code(), Some(74));
    assert!(stderr(&output).contains("could not be written"), "{}", stderr(&output));
    assert_eq!(place.ends("k", &[], "echo out").1, "out\n");
}

/// The program with its own home directory and no setting of a database.
fn at_home(variables: &[(&str, &str)], arguments: &[&str]) -> Command {
    let mut command = semel();
    command.env_remove("HOME").env_remove("XDG_STATE_HOME").envs(variables.iter().copied()).args(arguments);
    command
}

#[test]
fn the_default_ledger_is_in_the_users_state_directory() {
    let dir = tempfile::TempDir::new().unwrap();
    let home = dir.path().to_str().unwrap();
    let once = ["once", "--key", "k", "--", "echo", "hi"];
    for (variables, folder) in [
        (vec![("HOME", home)], dir.path().join(".local/state/semel")),
        (vec![("HOME", home), ("XDG_STATE_HOME", "relative")], dir.path().join(".local/state/semel")),
        (vec![("HOME", "/nowhere"), ("XDG_STATE_HOME", home)], dir.path().join("semel")),
    ] {
        let (code, out, err) = ended(&at_home(&variables, &once).output().unwrap());
        assert_eq!((code, out.as_str()), (0, "hi\n"));
        let file = folder.join("semel.db");
        assert!(err.contains(&format!("the ledger is in {}", file.display())), "{err}");
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let why = at_home(&variables, &["why", "k"]).output().unwrap();
        assert!(why.status.success(), "{}", stderr(&why));
    }
    let nowhere = at_home(&[], &once).output().unwrap();
    assert_eq!(nowhere.status.code(), Some(69));
    assert!(stderr(&nowhere).contains("Neither HOME nor XDG_STATE_HOME is set"), "{}", stderr(&nowhere));
}

#[test]
fn a_ledger_that_cannot_be_opened_is_reported_without_its_password() {
    for url in ["postgres://ana:geheim@127.0.0.1:1/x", "sqlite:/proc/nowhere/semel.db", "mysql://ana:geheim@db/x"] {
        let once = semel().args(["once", "-q", "--database-url", url, "-k", "k", "--", "true"]).output().unwrap();
        assert_eq!(once.status.code(), Some(69), "{url}");
        let why = semel().args(["why", "k", "-q", "--database-url", url]).output().unwrap();
        assert_eq!(why.status.code(), Some(1), "{url}");
        for said in [stderr(&once), stderr(&why)] {
            assert!(said.starts_with("semel: ") && !said.contains("geheim"), "{said}");
        }
        if !url.starts_with("mysql") {
            assert_eq!(stderr(&once).lines().count(), 1, "{}", stderr(&once));
        }
    }
}

#[test]
fn wrong_flags_are_refused_before_anything_is_opened() {
    for flags in [
        &["--key", ""][..],
        &["--key", "k", "--lease", "1ms"],
        &["--key", "k", "--attempts", "0"],
        &["--key", "k", "--scope", "x"],
        &["--key", "k", "--on-lost", "probe"],
        &["--key", "k", "--retention", "never"],
        &[],
    ] {
        let output = semel().arg("once").args(flags).args(["--", "true"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
    }
    assert_eq!(semel().args(["once", "--key", "k"]).output().unwrap().status.code(), Some(2), "no command");
}

fn output(mut process: Process) -> std::process::Output {
    process.end();
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    std::io::copy(&mut process.0.stdout.take().unwrap(), &mut stdout).unwrap();
    std::io::copy(&mut process.0.stderr.take().unwrap(), &mut stderr).unwrap();
    std::process::Output { status: process.0.wait().unwrap(), stdout, stderr }
}

#[test]
fn a_wrong_flag_is_refused_with_its_valid_form() {
    for (flag, value, said) in [
        ("--lease", "banana", "must be a length of time such as 30s, 5m or 1h 30m"),
        ("--wait", "soon", "must be a length of time such as 30s, 5m or 1h 30m"),
        ("--retention", "ever", "such as 30s, 5m or 1h 30m, or forever"),
        ("--retention", "0s", "must be at least 1s: a shorter retention protects from nothing"),
        ("--retention", "1ms", "must be at least 1s"),
        ("--scope", "a/b/c/d", "it has 4 parts; write service/kind or tenant/service/kind, such as cli/once"),
        ("--scope", "once", "it has one part; write service/kind or tenant/service/kind"),
    ] {
        let output = crate::support::semel().args(["once", "--key", "k", flag, value, "--", "true"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{flag} {value}");
        let told = crate::support::stderr(&output);
        assert!(told.contains(said) && told.contains(flag) && told.contains(value), "{told}");
    }
}
