//! A process that keeps a command from outliving its `semel once`.
//!
//! `semel once` runs a command under a lease. After `kill -9` it cannot clean up, but the command and all its
//! descendants must end at once: without a lease, another node may run the same operation. So a guard stands between
//! the two:
//!
//! ```text
//! semel once ── semel guard ── the command ── its processes
//!            │              └ parent-death signal SIGKILL: dies with the guard
//!            └ parent-death signal SIGTERM: learns that its parent is gone, and kills the tree
//! ```
//!
//! The command is started through `semel guard-exec`, which sets its own parent-death signal and then executes the
//! command. The usual way, a hook between fork and exec, needs unsafe code.
//!
//! | the guard gets | it means | what happens |
//! |---|---|---|
//! | SIGTERM, parent gone | the lease is not renewed | SIGKILL to the whole tree |
//! | no SIGURG for too long | the parent lives but is stopped (Ctrl-Z, `kill -STOP`): the lease is not renewed | SIGKILL to the whole tree |
//! | SIGQUIT | the lease is lost | SIGKILL to the whole tree |
//! | SIGINT, SIGHUP, SIGTERM with a living parent | please stop | SIGTERM to the tree, SIGKILL to the rest after [`GRACE`], or at once on a second SIGINT or SIGHUP |
//!
//! The guard leads the process group of the command, so that `kill -9 -<guard>` ends both. It is the subreaper of the
//! tree, so that a process that left the group (a daemon) is found too. Processes that a command leaves running when it
//! ends by itself are left alone. Linux only.

mod exec;
mod tree;
mod watch;

use std::{
    ffi::OsString,
    io,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    process::{Child, ChildStderr, ChildStdout, Command, ExitStatus},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use tokio::sync::watch as channel;

pub use exec::{NotRun, exec};
pub use watch::watch;

/// The time between SIGTERM and SIGKILL.
pub const GRACE: Duration = Duration::from_secs(5);

/// The guard's exit code if its parent was gone before the command was started.
const ORPHANED: u8 = 1;

/// The exit code if the guard failed and the command was not started, as in `timeout` and `env`.
pub const GUARD_FAILED: u8 = 125;

/// The heartbeat of the parent. Its default action is to be ignored, so one that arrives before the guard listens does
/// no harm.
const ALIVE: Signal = Signal::URG;

/// A command under a guard. If it is dropped before the command ends, the command and all its descendants are killed.
#[derive(Debug)]
#[must_use = "a command is killed when its guard is dropped"]
pub struct Guard {
    /// The command's stdout, if the program's stdout was piped.
    pub stdout: Option<ChildStdout>,
    /// The command's stderr, if the program's stderr was piped.
    pub stderr: Option<ChildStderr>,
    // None once the guard has ended: its pid may then belong to another process.
    pid: Arc<Mutex<Option<Pid>>>,
    ended: Ended,
}

/// The end of a command, for any number of waiters. It outlives the [`Guard`].
#[derive(Clone, Debug)]
pub struct Ended(channel::Receiver<Option<Result<u8, String>>>);

impl Ended {
    /// Waits for the command's exit code; 128 + n if signal n ended it.
    ///
    /// # Errors
    /// When the exit status is unknown.
    pub async fn wait(&mut self) -> io::Result<u8> {
        let ended = self.0.wait_for(Option::is_some).await.map_err(io::Error::other)?;
        ended.clone().unwrap_or(Ok(1)).map_err(io::Error::other)
    }
}

impl Guard {
    /// Starts a command under a guard. `program` is [`this_program`], with optional variables and redirections, which
    /// the command inherits through the guard. With `silence`, the command is killed if [`beat`](Self::beat) was not
    /// called for that long.
    ///
    /// # Errors
    /// When the guard cannot be started. If the command itself cannot be executed, its exit code is 126 or 127.
    pub fn spawn(mut program: Command, command: &[OsString], silence: Option<Duration>) -> io::Result<Self> {
        program.args(["guard", "--parent", &std::process::id().to_string()]).process_group(0);
        if let Some(silence) = silence {
            program.args(["--silence", &humantime::format_duration(silence).to_string()]);
        }
        program.arg("--").args(command);
        let pid = Arc::new(Mutex::new(None));
        let (started, is_started) = mpsc::sync_channel(1);
        let (end, ended) = channel::channel(None);

        // The parent-death signal is sent when the *thread* that forked ends, not the process. A command started from a
        // thread of a pool would be killed when the pool shrinks; this thread lives as long as the guard.
        let known_pid = Arc::clone(&pid);
        thread::Builder::new().name("guard".to_owned()).spawn(move || {
            let mut child = match program.spawn() {
                Ok(child) => child,
                Err(error) => return drop(started.send(Err(error))),
            };
            *known_pid.lock() = Some(Pid::from_child(&child));
            let _ = started.send(Ok((child.stdout.take(), child.stderr.take())));
            let _ = end.send(Some(wait(child, &known_pid).map_err(|error| error.to_string())));
        })?;
        let (stdout, stderr) = is_started.recv().map_err(io::Error::other)??;
        Ok(Self { stdout, stderr, pid, ended: Ended(ended) })
    }

    /// Tells the guard that this process is alive and holds its lease.
    pub fn beat(&self) {
        self.signal(ALIVE);
    }

    /// Asks the command to stop: it and all its descendants get SIGTERM, and SIGKILL after [`GRACE`].
    pub fn stop(&self) {
        self.signal(Signal::INT);
    }

    /// Kills the command and all its descendants.
    pub fn kill(&self) {
        self.signal(Signal::QUIT);
    }

    /// Waits for the command's exit code; 128 + n if signal n ended it.
    ///
    /// # Errors
    /// When the exit status is unknown.
    pub async fn wait(&mut self) -> io::Result<u8> {
        self.ended.wait().await
    }

    /// The command's end, for other waiters.
    #[must_use]
    pub fn ended(&self) -> Ended {
        self.ended.clone()
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = *self.pid.lock() {
            // Fails only if the guard has just ended.
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits for the guard, and kills the rest of its group.
fn wait(mut child: Child, pid: &Mutex<Option<Pid>>) -> io::Result<u8> {
    let group = Pid::from_child(&child);
    // Does not reap yet: until then the pid, and with it the group's id, cannot be reused.
    let ended =
        rustix::io::retry_on_intr(|| waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT))?;
    *pid.lock() = None;
    // A guard that was itself killed took the command with it, but not the command's descendants.
    if ended.is_some_and(|status| status.terminating_signal().is_some()) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    child.wait().map(code)
}

/// This program, even if its file was replaced by an upgrade meanwhile.
#[must_use]
pub fn this_program() -> Command {
    let mut program = Command::new("/proc/self/exe");
    program.arg0("semel");
    program
}

/// A status as an exit code of a shell.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}
