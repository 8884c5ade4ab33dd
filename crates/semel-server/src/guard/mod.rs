//! A process that keeps a command from outliving the process that asked for it.
//!
//! `semel once` runs a command under a lease. If it is killed with `kill -9` it can clean up nothing, yet the command
//! and all that it started must end at once: without a lease, another node may run the same operation. So a guard
//! stands between the two:
//!
//! ```text
//! semel once ── semel guard ── the command ── whatever it starts
//!            │              └ parent-death signal SIGKILL: dies with the guard
//!            └ parent-death signal SIGTERM: learns that its parent is gone, and kills the tree
//! ```
//!
//! The command is started through `semel guard-exec`, which sets its own parent-death signal and then becomes the
//! command: the usual way, a hook between fork and exec, is unsafe code.
//!
//! | the guard gets | it means | what happens |
//! |---|---|---|
//! | SIGTERM, parent gone | nobody renews the lease | SIGKILL to the whole tree |
//! | no SIGURG for too long | the parent lives but is stopped (Ctrl-Z, `kill -STOP`): nobody renews the lease | SIGKILL to the whole tree |
//! | SIGQUIT | the lease is lost | SIGKILL to the whole tree |
//! | SIGINT, SIGHUP, SIGTERM with a living parent | please stop | SIGTERM to the tree, SIGKILL to what is left after [`GRACE`], or at once on a second SIGINT or SIGHUP |
//!
//! The guard leads the process group of the command, so that `kill -9 -<guard>` ends both, and is the reaper of the
//! tree, so that a process which left the group (a daemon) is found too. What a command leaves running when it ends
//! by itself is left alone: that was its decision. Linux only.

mod exec;
mod tree;
mod watch;

use std::{
    ffi::OsString,
    io,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    process::{Child, ChildStderr, ChildStdout, Command, ExitStatus},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use tokio::sync::watch as channel;

pub use exec::{NotRun, exec};
pub use watch::watch;

/// How long a command may take to end after it was asked to.
pub const GRACE: Duration = Duration::from_secs(5);

/// The guard's exit code when its parent was gone before the command was started; nobody is left to see it.
const ORPHANED: u8 = 1;

/// The exit code when guarding failed and the command was not started, as `timeout` and `env` have it.
pub const GUARD_FAILED: u8 = 125;

/// By which a parent says that it is alive. Ignored by default, so that one which comes before the guard listens does
/// no harm.
const ALIVE: Signal = Signal::URG;

/// A command that runs under a guard. Dropped before its end, it is killed with all that it started: whoever drops it
/// can no longer answer for it.
#[derive(Debug)]
#[must_use = "a command is killed when its guard is dropped"]
pub struct Guard {
    /// What the command prints, if the program's stdout was piped.
    pub stdout: Option<ChildStdout>,
    /// What the command complains of, if the program's stderr was piped.
    pub stderr: Option<ChildStderr>,
    // None once the guard has ended: its number may then belong to another process.
    pid: Arc<Mutex<Option<Pid>>>,
    ended: Ended,
}

/// The end of a command, for any number of those who wait for it. It outlives the [`Guard`].
#[derive(Clone, Debug)]
pub struct Ended(channel::Receiver<Option<Result<u8, String>>>);

impl Ended {
    /// Waits for the command's exit code; 128 + n if signal n ended it.
    ///
    /// # Errors
    /// When the system does not tell.
    pub async fn wait(&mut self) -> io::Result<u8> {
        let ended = self.0.wait_for(Option::is_some).await.map_err(io::Error::other)?;
        ended.clone().unwrap_or(Ok(1)).map_err(io::Error::other)
    }
}

impl Guard {
    /// Starts a command under a guard. `program` is [`this_program`], to which variables and redirections may have been
    /// added: the command inherits them through the guard. With `silence`, the command is killed when
    /// [`beat`](Self::beat) was not called for that long.
    ///
    /// # Errors
    /// When the guard cannot be started. That the command itself cannot be run is told by its exit code, 126 or 127.
    pub fn spawn(mut program: Command, command: &[OsString], silence: Option<Duration>) -> io::Result<Self> {
        program.args(["guard", "--parent", &std::process::id().to_string()]).process_group(0);
        if let Some(silence) = silence {
            program.args(["--silence", &humantime::format_duration(silence).to_string()]);
        }
        program.arg("--").args(command);
        let pid = Arc::new(Mutex::new(None));
        let (started, is_started) = mpsc::sync_channel(1);
        let (end, ended) = channel::channel(None);

        // The parent-death signal comes when the *thread* that forked ends, not the process. Started from a thread of
        // a pool, the command would be killed when the pool shrinks; this thread lives just as long as the guard.
        let known_pid = Arc::clone(&pid);
        thread::Builder::new().name("guard".to_owned()).spawn(move || {
            let mut child = match program.spawn() {
                Ok(child) => child,
                Err(error) => return drop(started.send(Err(error))),
            };
            *lock(&known_pid) = Some(Pid::from_child(&child));
            let _ = started.send(Ok((child.stdout.take(), child.stderr.take())));
            let _ = end.send(Some(wait(child, &known_pid).map_err(|error| error.to_string())));
        })?;
        let (stdout, stderr) = is_started.recv().map_err(io::Error::other)??;
        Ok(Self { stdout, stderr, pid, ended: Ended(ended) })
    }

    /// Says that this process is alive and holds its lease.
    pub fn beat(&self) {
        self.signal(ALIVE);
    }

    /// Asks the command to stop: it and all that it started get SIGTERM, and SIGKILL after [`GRACE`].
    pub fn stop(&self) {
        self.signal(Signal::INT);
    }

    /// Ends the command and all that it started at once.
    pub fn kill(&self) {
        self.signal(Signal::QUIT);
    }

    /// Waits for the command's exit code; 128 + n if signal n ended it.
    ///
    /// # Errors
    /// When the system does not tell.
    pub async fn wait(&mut self) -> io::Result<u8> {
        self.ended.wait().await
    }

    /// The command's end, for somebody else to wait for.
    #[must_use]
    pub fn ended(&self) -> Ended {
        self.ended.clone()
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = *lock(&self.pid) {
            // Fails only for a guard that has just ended, and that is what was wanted.
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits for the guard, and makes sure that nothing of its group outlives it.
fn wait(mut child: Child, pid: &Mutex<Option<Pid>>) -> io::Result<u8> {
    let group = Pid::from_child(&child);
    // Only looks: until the guard is reaped, its number, and with it the group's, cannot be given to another.
    let ended =
        rustix::io::retry_on_intr(|| waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT))?;
    *lock(pid) = None;
    // A guard that was itself killed took the command with it, but not what the command had started.
    if ended.is_some_and(|status| status.terminating_signal().is_some()) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    child.wait().map(code)
}

/// This very program, even if its file was replaced by an upgrade in the meantime.
#[must_use]
pub fn this_program() -> Command {
    let mut program = Command::new("/proc/self/exe");
    program.arg0("semel");
    program
}

/// A status as shells tell it.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

fn lock(pid: &Mutex<Option<Pid>>) -> std::sync::MutexGuard<'_, Option<Pid>> {
    pid.lock().unwrap_or_else(PoisonError::into_inner)
}
