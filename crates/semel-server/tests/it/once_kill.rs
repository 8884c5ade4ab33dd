//! The laws of `semel once` under signals and kills. Named so that they run one at a time: on a busy machine they would
//! lose leases for the wrong reason.

use std::{
    io::Read as _,
    process::{Command, Stdio},
    time::Duration,
};

use rustix::process::Signal;

use crate::{
    place::{GATED, Place, assert_gone_within, on_both_databases},
    support::{Process, SOON, eventually},
    wire::Wire,
};

/// How long a command may live on after `semel once` was killed.
const AT_ONCE: Duration = Duration::from_secs(15);

/// Short enough to wait for, long enough for a busy machine to renew. Only the run that is to lose it has such a short
/// lease.
const LEASE: &str = "6s";

on_both_databases! {
    after_a_kill_the_command_ends_and_the_next_call_takes_over_after_the_lease
    an_operation_killed_under_hold_is_in_doubt_until_a_person_decides
    a_stopped_process_loses_its_lease_and_its_command_before_another_begins
    a_suspended_process_counts_no_attempt
    a_command_that_exits_nonzero_after_a_stop_has_failed
    a_command_stopped_under_hold_is_in_doubt
}

fn stderr_of(process: &mut Process) -> String {
    let mut text = String::new();
    process.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

fn after_a_kill_the_command_ends_and_the_next_call_takes_over_after_the_lease(place: &Place) {
    let (mut process, command) = place.start_gated("k", &["--lease", LEASE]);
    process.signal(Signal::KILL);
    process.end();
    assert_gone_within(AT_ONCE, command);
    let (code, _, err) = place.ends("k", &[], GATED);
    assert_eq!(code, 75, "the lease is not over: {err}");
    place.open_gate();
    assert_eq!(place.ends("k", &["--wait", "60s"], GATED), (0, "through\n".into(), String::new()));
    assert_eq!(place.lines("pids").len(), 2);
    let story = place.say(["why", "k"]);
    assert!(story.contains(" expired; it may run again\n"), "{story}");
    assert!(story.contains(": attempt 2, after the lease of the last run ended\n"), "{story}");
    assert!(story.starts_with("k in default/cli/once: it took effect\n"), "{story}");
}

fn an_operation_killed_under_hold_is_in_doubt_until_a_person_decides(place: &Place) {
    let flags = ["--lease", "3s", "--on-lost", "hold"];
    let hold = &flags[2..];
    let keys = ["done", "again", "never"];
    for key in keys {
        let (mut process, command) = place.start_gated(key, &flags);
        process.signal(Signal::KILL);
        process.end();
        assert_gone_within(AT_ONCE, command);
    }
    place.open_gate();
    for key in keys {
        let (code, out, err) = place.ends(key, &["--wait", "60s", "--on-lost", "hold"], GATED);
        assert_eq!((code, out.as_str()), (76, ""));
        assert!(err.contains("it is in doubt whether it took effect (the lease of "), "{err}");
        assert!(err.contains(&format!("semel operations resolve {key} --as completed|failed|retry")), "{err}");
        let story = place.say(["why", key]);
        assert!(story.starts_with(&format!("{key} in default/cli/once: it is in doubt whether it took effect\n")));
        assert!(story.contains(&format!("A person must resolve it: semel operations resolve {key} ")), "{story}");
    }
    assert_eq!(place.lines("pids").len(), 3, "nothing is run on a guess");

    let resolve = |key: &str, how: &str, more: &[&str]| {
        let mut command = place.semel(["operations", "resolve", key, "--as", how, "--reason", "I looked"]);
        assert!(command.args(more).output().unwrap().status.success());
    };
    resolve("done", "completed", &["--outcome", "it is there\n"]);
    resolve("again", "retry", &[]);
    resolve("never", "failed", &[]);
    assert_eq!(place.ends("done", hold, GATED), (0, "it is there\n".into(), String::new()));
    let loud = place.semel(["once", "--key", "done", "--", "sh", "-c", GATED]).output().unwrap();
    let said = crate::support::stderr(&loud);
    assert!(said.contains("this was decided before, at "), "{said}");
    assert!(said.contains("a person said that it took effect; here is the outcome that was entered"), "{said}");
    assert!(!said.contains("printed then"), "{said}");
    assert_eq!(place.json(["operations", "show", "done", "--json"])["attempt"], 1, "there was no second run");
    assert_eq!(place.ends("again", hold, GATED), (0, "through\n".into(), String::new()));
    let (code, _, err) = place.ends("never", hold, GATED);
    assert_eq!(code, 77);
    assert!(err.starts_with("semel: not run: at 20") && err.contains(" resolved it as failed: I looked. "), "{err}");
    let story = place.say(["why", "done"]);
    assert!(story.contains("  decided by ana@") && story.contains("it took effect: I looked\n"), "{story}");
    assert!(story.contains("It is kept for ever."), "{story}");
    assert!(place.say(["why", "never"]).contains("It runs again only if a person decides so: "));
    assert_eq!(place.lines("pids").len(), 4);
}

fn a_stopped_process_loses_its_lease_and_its_command_before_another_begins(place: &Place) {
    let (mut stopped, command) = place.start_gated("k", &["--lease", LEASE]);
    stopped.signal(Signal::STOP);
    let mut second = Process::start(place.once("k", &["--wait", "60s"], GATED).stdout(Stdio::null()));
    eventually(SOON, "another takes over", || place.lines("pids").len() == 2);
    assert_gone_within(Duration::ZERO, command);
    place.open_gate();
    assert_eq!(second.end().code(), Some(0));
    stopped.signal(Signal::CONT);
    assert_eq!(stopped.end().code(), Some(70));
    let said = stderr_of(&mut stopped);
    assert!(said.contains(": the lease was lost, and another process may run it now"), "{said}");
    assert_eq!(place.state("k"), "completed");
    assert_eq!(place.lines("pids").len(), 2);
}

fn a_suspended_process_counts_no_attempt(place: &Place) {
    let (mut stopped, command) = place.start_gated("k", &["--lease", LEASE]);
    stopped.signal(Signal::STOP);
    // The guard ends it after about half of the lease: the time that is left must not matter.
    assert_gone_within(SOON, command);
    stopped.signal(Signal::CONT);
    assert_eq!(stopped.end().code(), Some(70), "{}", stderr_of(&mut stopped));
    place.open_gate();
    assert_eq!(place.ends("k", &["--wait", "60s"], GATED).0, 0, "the only attempt is still to be made");
    assert_eq!(place.lines("pids").len(), 2);
}

/// Prints "ready", and exits in its own way when asked to stop.
const TIDY: &str = "trap 'echo tidied >>runs; exit 3' TERM; echo $$ >>pids; while :; do sleep 0.02; done";

fn start(place: &Place, command: &mut Command) -> Process {
    let before = place.lines("pids").len();
    let process = Process::start(command.stdout(Stdio::null()).stderr(Stdio::piped()));
    eventually(SOON, "the command runs", || place.lines("pids").len() > before);
    process
}

fn a_command_that_exits_nonzero_after_a_stop_has_failed(place: &Place) {
    for (n, signal) in [Signal::TERM, Signal::INT, Signal::HUP].into_iter().enumerate() {
        let mut process = start(place, &mut place.once(&n.to_string(), &[], TIDY));
        process.signal(signal);
        assert_eq!(process.end().code(), Some(3));
        let said = stderr_of(&mut process);
        let expected = "semel: the command failed: exit code 3 after it was asked to stop; this was attempt 1 of 1\n";
        assert!(said.ends_with(expected), "{said}");
        assert_eq!(place.state(&n.to_string()), "failed");
    }
    assert_eq!(place.lines("runs").len(), 3);
}

fn a_command_stopped_under_hold_is_in_doubt(place: &Place) {
    let mut process = start(place, &mut place.once("k", &["--on-lost", "hold"], TIDY));
    process.signal(Signal::TERM);
    assert_eq!(process.end().code(), Some(76));
    let said = stderr_of(&mut process);
    assert!(said.contains("semel: it is in doubt whether the command took effect: exit code 3 after"), "{said}");
    assert_eq!(place.state("k"), "in_doubt");
    let story = place.say(["why", "k"]);
    assert!(story.contains(" ended in doubt after "), "{story}");
}

#[test]
fn a_long_database_outage_loses_the_lease_and_kills_the_command() {
    let mut place = Place::postgres();
    let mut wire = Wire::to_postgres();
    place.url = wire.url(&place.url);
    let (mut process, command) = place.start_gated("k", &["--lease", "3s"]);
    wire.cut();
    assert_eq!(process.end().code(), Some(70));
    assert_gone_within(Duration::ZERO, command);
    let said = stderr_of(&mut process);
    assert!(said.contains("semel: the command was killed: the lease was lost"), "{said}");
}

#[test]
fn a_short_database_outage_kills_nothing() {
    let mut place = Place::postgres();
    let mut wire = Wire::to_postgres();
    place.url = wire.url(&place.url);
    let (mut process, _) = place.start_gated("k", &[]);
    wire.cut();
    place.open_gate();
    // The command has ended, and its end cannot be stored yet: after the first try, the wire is repaired.
    eventually(SOON, "its end is being told", || wire.was_tried());
    wire.mend();
    assert_eq!(process.end().code(), Some(0));
    assert_eq!(place.state("k"), "completed");
}

#[test]
fn a_second_signal_kills_a_command_that_ignores_sigterm() {
    let place = Place::sqlite();
    let script = "trap '' TERM; echo $$ >>pids; while :; do sleep 0.02; done";
    let mut process = start(&place, &mut place.once("k", &[], script));
    process.signal(Signal::TERM);
    process.signal(Signal::INT);
    assert_eq!(process.end().code(), Some(128 + 9));
}

#[test]
fn a_command_that_exits_0_after_a_stop_has_taken_effect() {
    let place = Place::sqlite();
    let script = "trap 'echo whole; exit 0' TERM; echo $$ >>pids; while :; do sleep 0.02; done";
    let mut process = start(&place, &mut place.once("k", &["--on-lost", "hold"], script));
    process.signal(Signal::TERM);
    assert_eq!(process.end().code(), Some(0));
    assert_eq!(place.ends("k", &[], script).1, "whole\n");
}

#[test]
fn a_signal_that_nohup_ignores_does_not_kill() {
    let place = Place::sqlite();
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_semel"), "once", "-q", "-k", "k"]);
    shell.args(["--", "sh", "-c", GATED]).env("SEMEL_DATABASE_URL", &place.url).current_dir(&place.dir);
    let mut process = start(&place, &mut shell);
    process.signal(Signal::HUP);
    place.open_gate();
    assert_eq!(process.end().code(), Some(0));
}

#[test]
fn a_signal_before_anything_ran_ends_the_waiting_without_a_kill() {
    let place = Place::sqlite();
    let (_first, _) = place.start_gated("k", &[]);
    let mut waiting = place.once("k", &["--wait", "1h"], GATED);
    let mut waiting = Process::start(waiting.stderr(Stdio::piped()));
    // The handlers are in place once the caught signals include SIGTERM; before that, the signal would just kill.
    let status = format!("/proc/{}/status", waiting.0.id());
    eventually(SOON, "it hears signals", || {
        let status = std::fs::read_to_string(&status).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0").trim().to_owned();
        u64::from_str_radix(&caught, 16).unwrap_or(0) >> 14 & 1 == 1
    });
    waiting.signal(Signal::TERM);
    assert_eq!(waiting.end().code(), Some(75));
    assert_eq!(stderr_of(&mut waiting), "semel: stopped before anything was run\n");
}
