//! The laws of the guard.

use std::{
    ffi::OsString,
    io::{BufRead as _, BufReader, Read as _},
    process::{ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use semel_server::guard::Guard;

use crate::support::{Process, SOON, eventually, semel, stderr, stdout, within};

/// How long a tree may live on after its parent was killed.
const AT_ONCE: Duration = Duration::from_secs(15);

/// A tree with a child, one whose own parent has ended, one that left the group, and one that ignores SIGTERM. Each
/// holds stdout open; each of the last three prints "ready".
const TREE: &str = "
    sleep 1000 &
    (sleep 1000 & echo ready)
    setsid sh -c 'echo ready; sleep 1000' &
    sh -c 'trap \"\" TERM; echo ready; sleep 1000' &
    sleep 1000";

/// The guard as a child of this process.
fn guard(arguments: &[&str], command: &[&str]) -> Command {
    let mut guard = semel();
    guard.args(["guard", "--parent", &std::process::id().to_string()]).args(arguments).arg("--").args(command);
    guard
}

fn exit_code(command: &[&str]) -> Option<i32> {
    guard(&[], command).output().unwrap().status.code()
}

/// Reads the script's "ready" lines, as many as it prints.
fn ready(script: &str, stdout: &mut Option<ChildStdout>) -> BufReader<ChildStdout> {
    let mut stdout = BufReader::new(stdout.take().unwrap());
    let times = script.matches("echo ready").count();
    within(SOON, move || {
        for _ in 0..times {
            let mut line = String::new();
            stdout.read_line(&mut line).unwrap();
            assert_eq!(line, "ready\n");
        }
        stdout
    })
    .expect("the script gets ready")
}

/// A script under a guard, both ready.
fn start(arguments: &[&str], script: &str) -> (Process, BufReader<ChildStdout>) {
    let mut guard = Process::start(guard(arguments, &["sh", "-c", script]).stdout(Stdio::piped()));
    let stdout = ready(script, &mut guard.0.stdout);
    (guard, stdout)
}

/// Every process of the tree holds stdout open, so its end is the end of all.
fn assert_gone_within(limit: Duration, mut stdout: BufReader<ChildStdout>) {
    let rest = within(limit, move || stdout.read_to_end(&mut Vec::new()));
    assert!(rest.is_some(), "a process of the tree outlived its parent by {limit:?}");
}

#[test]
fn the_commands_exit_code_is_the_guards() {
    assert_eq!(exit_code(&["true"]), Some(0));
    assert_eq!(exit_code(&["sh", "-c", "exit 7"]), Some(7));
    assert_eq!(exit_code(&["sh", "-c", "kill -9 $$"]), Some(128 + 9));
    assert_eq!(exit_code(&["sh", "-c", "kill -TERM $$"]), Some(128 + 15));
}

#[test]
fn the_guard_passes_arguments_and_output_unchanged() {
    let mut command = guard(&[], &["sh", "-c", "cat; echo \"$@\" >&2", "sh", "--parent", "-h", "a b"]);
    let output = command.stdin(std::fs::File::open("/proc/self/comm").unwrap()).output().unwrap();
    assert!(!output.stdout.is_empty());
    assert_eq!(stderr(&output), "--parent -h a b\n");
}

#[test]
fn a_command_that_cannot_be_run_exits_with_127_or_126() {
    let missing = guard(&[], &["semel-no-such-command"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(127));
    assert_eq!(stderr(&missing), "semel: cannot run \"semel-no-such-command\": there is no such command\n");
    let directory = guard(&[], &["/tmp"]).output().unwrap();
    assert_eq!(directory.status.code(), Some(126));
    assert!(stderr(&directory).starts_with("semel: cannot run \"/tmp\": "), "{}", stderr(&directory));
    assert_eq!(stdout(&directory), "");
}

#[test]
fn a_guard_whose_parent_is_gone_starts_nothing() {
    let output = semel().args(["guard", "--parent", "1", "--", "echo", "started"]).output().unwrap();
    assert_eq!((output.status.code(), stdout(&output)), (Some(1), ""));
    let output = semel().args(["guard-exec", "--parent", "1", "--", "echo", "started"]).output().unwrap();
    assert_eq!((output.status.code(), stdout(&output)), (Some(1), ""));
}

#[test]
fn the_whole_tree_is_gone_soon_after_its_parent_was_killed() {
    for tree in ["echo ready; sleep 1000 & sleep 1000", TREE] {
        let mut shell = Command::new("sh");
        shell.args(["-c", "\"$0\" guard --parent $$ -- sh -c \"$1\" & wait", env!("CARGO_BIN_EXE_semel"), tree]);
        let mut parent = Process::start(shell.stdout(Stdio::piped()));
        let stdout = ready(tree, &mut parent.0.stdout);
        parent.signal(Signal::KILL);
        assert_gone_within(AT_ONCE, stdout);
    }
}

#[test]
fn a_command_dies_with_its_guard() {
    let (guard, stdout) = start(&[], "echo ready; exec sleep 1000");
    guard.signal(Signal::KILL);
    assert_gone_within(AT_ONCE, stdout);
}

#[test]
fn a_command_that_ends_after_sigterm_keeps_its_exit_code() {
    for signal in [Signal::INT, Signal::HUP, Signal::TERM] {
        // The child itself prints "ready": before its exec, it still has the shell's trap and would survive.
        let script = "trap 'echo tidied; exit 3' TERM; sh -c 'echo ready; exec sleep 1000' & wait";
        let (mut guard, mut stdout) = start(&[], script);
        guard.signal(signal);
        assert_eq!(guard.end().code(), Some(3));
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "tidied\n");
    }
}

#[test]
fn processes_that_ignore_sigterm_are_killed_after_the_grace() {
    let (mut guard, stdout) = start(&["--grace", "300ms"], TREE);
    let before = Instant::now();
    guard.signal(Signal::INT);
    assert_eq!(guard.end().code(), Some(128 + 15));
    assert!(before.elapsed() >= Duration::from_millis(300), "the deaf were not given their time");
    assert_gone_within(AT_ONCE, stdout);
}

#[test]
fn a_second_request_to_stop_kills_at_once() {
    let script = "trap '' TERM; echo ready; while :; do sleep 1000; done";
    let (mut guard, stdout) = start(&["--grace", "1h"], script);
    guard.signal(Signal::INT);
    // Pending signals of one number are merged, so the second has another number.
    guard.signal(Signal::HUP);
    assert_eq!(guard.end().code(), Some(128 + 9));
    assert_gone_within(AT_ONCE, stdout);
}

#[test]
fn a_lost_lease_kills_the_whole_tree_at_once() {
    let (mut guard, stdout) = start(&[], TREE);
    guard.signal(Signal::QUIT);
    assert_eq!(guard.end().code(), Some(128 + 9));
    assert_gone_within(AT_ONCE, stdout);
}

#[test]
fn the_tree_ends_when_its_parent_is_killed_during_a_stop() {
    let script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.05; done";
    let mut shell = Command::new("sh");
    let line = "\"$0\" guard --grace 1h --parent $$ -- sh -c \"$1\" & echo $!; wait";
    shell.args(["-c", line, env!("CARGO_BIN_EXE_semel"), script]);
    let mut parent = Process::start(shell.stdout(Stdio::piped()));
    let mut lines = BufReader::new(parent.0.stdout.take().unwrap());
    let (guard, lines) = within(SOON, move || {
        let mut said = [String::new(), String::new()];
        for line in &mut said {
            lines.read_line(line).unwrap();
        }
        let guard = said.iter().find_map(|line| line.trim().parse().ok()).unwrap();
        let guard = Pid::from_raw(guard).unwrap();
        kill_process(guard, Signal::INT).unwrap();
        let mut asked = String::new();
        lines.read_line(&mut asked).unwrap();
        assert_eq!(asked, "asked\n");
        (guard, lines)
    })
    .expect("the command is asked to stop");
    assert!(test_kill_process(guard).is_ok());
    parent.signal(Signal::KILL);
    assert_gone_within(AT_ONCE, lines);
}

#[test]
fn processes_that_outlive_a_finished_command_are_left_alone() {
    let output = guard(&[], &["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"]).output().unwrap();
    let left = Pid::from_raw(stdout(&output).trim().parse().unwrap()).unwrap();
    assert!(test_kill_process(left).is_ok());
    kill_process(left, Signal::KILL).unwrap();
}

#[test]
fn the_guard_has_its_own_process_group() {
    // Without its own group, a guard that kills its group would kill this test.
    let (guard, stdout) = start(&["--grace", "0s"], TREE);
    let group = || rustix::process::getpgid(Some(guard.pid())).unwrap();
    eventually(SOON, "the guard leads a group", || group() == guard.pid());
    guard.signal(Signal::INT);
    assert_gone_within(AT_ONCE, stdout);
}

/// A command under a [`Guard`], started by the program under test as `semel once` starts it.
fn under_guard(script: &str) -> (Guard, BufReader<ChildStdout>) {
    let mut program = semel();
    program.stdout(Stdio::piped());
    let mut guard = Guard::spawn(program, &["sh", "-c", script].map(OsString::from), None).unwrap();
    let stdout = ready(script, &mut guard.stdout);
    (guard, stdout)
}

#[tokio::test]
async fn a_waiter_gets_the_exit_code_of_a_command() {
    assert_eq!(under_guard("exit 7").0.wait().await.unwrap(), 7);

    let (mut guard, stdout) = under_guard("trap 'exit 3' TERM; sh -c 'echo ready; exec sleep 1000' & wait");
    guard.stop();
    assert_eq!(guard.wait().await.unwrap(), 3);
    assert_gone_within(AT_ONCE, stdout);

    let (mut guard, stdout) = under_guard(TREE);
    guard.kill();
    assert_eq!(guard.wait().await.unwrap(), 128 + 9);
    assert_gone_within(AT_ONCE, stdout);
    guard.kill();
}

#[tokio::test]
async fn a_guard_that_is_dropped_kills_its_tree() {
    let (guard, stdout) = under_guard(TREE);
    let mut ended = guard.ended();
    drop(guard);
    assert_eq!(ended.wait().await.unwrap(), 128 + 9);
    assert_gone_within(AT_ONCE, stdout);
}

#[test]
fn the_tree_is_gone_when_its_parent_is_silent_for_too_long() {
    let (mut guard, stdout) = start(&["--silence", "300ms"], TREE);
    assert_eq!(guard.end().code(), Some(128 + 9));
    assert_gone_within(AT_ONCE, stdout);

    let (mut guard, stdout) = start(&["--silence", "2s"], "echo ready; exec sleep 1000");
    let before = Instant::now();
    while before.elapsed() < Duration::from_millis(2500) {
        guard.signal(Signal::URG);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(guard.0.try_wait().unwrap().is_none(), "a parent that is heard of is alive");
    assert_eq!(guard.end().code(), Some(128 + 9));
    assert_gone_within(AT_ONCE, stdout);
}

#[tokio::test]
async fn the_tree_is_gone_even_if_the_guard_itself_is_killed() {
    let (mut guard, stdout) = under_guard("sleep 1000 & echo ready; kill -9 $PPID; wait");
    assert_eq!(guard.wait().await.unwrap(), 128 + 9);
    assert_gone_within(AT_ONCE, stdout);
}
