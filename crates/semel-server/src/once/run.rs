//! The command under its lease.

use std::{
    ffi::OsString,
    io::{self, IsTerminal as _},
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use semel::{Context, Failure, Fence, OnLost, Outcome, Ran, Retry, State, Store, Unfinished, Uptime};
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use super::{
    Done, Once,
    outcome::Stored,
    output::{Stdout, Tee},
    program,
};
use crate::{
    guard::{self, Ended, Guard, NotRun},
    stop::Stop,
};

/// How long a killed command may take to vanish before we end without it: the guard's own patience and some.
const BURIAL: Duration = Duration::from_secs(3);

/// How far a command got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Began {
    /// It was not started by this process.
    No,
    /// It was started, and ended before it could say how.
    Yes,
    /// It ended.
    Ended {
        /// With this exit code.
        code: u8,
        /// As this attempt, counted from 1; runs that ended without a word are not counted.
        attempt: u32,
    },
}

/// Runs the command when the ledger says so.
pub(super) struct Runner {
    command: Vec<OsString>,
    lease: Duration,
    on_lost: OnLost,
    stdout: Stdout,
    stop: Stop,
    progress: Mutex<Progress>,
}

struct Progress {
    began: Began,
    /// Which operation this process got the lease of, and under which fence.
    lease: Option<(i64, Fence)>,
    /// The end of the command's tree, once there is one.
    ended: Option<Ended>,
    /// Why it was put back.
    not_run: Option<NotRun>,
}

impl Runner {
    pub(super) fn new(once: &Once, stdout: Stdout, stop: Stop) -> Self {
        let progress = Progress { began: Began::No, lease: None, ended: None, not_run: None };
        let Once { command, lease, on_lost, .. } = once.clone();
        Self { command, lease, on_lost, stdout, stop, progress: Mutex::new(progress) }
    }

    /// The handler. If the lease is lost, its future is dropped, and the guard with it: that kills the command.
    pub(super) async fn run<S: Store>(self: Arc<Self>, context: Context<S>) -> Result<Outcome, Unfinished> {
        self.progress().lease = Some((context.operation().id, context.fence()));
        let put_back = Err(Unfinished::NotYet(Duration::ZERO));
        if self.stop.is_asked() {
            return put_back;
        }
        let guard = match self.start() {
            Ok(guard) => guard,
            Err(not_run) => {
                self.progress().not_run = Some(not_run);
                return put_back;
            }
        };
        match self.attend(guard, context.operation().failures + 1).await {
            Ok(end) => end,
            Err(error) => Err(self.unknown(format!("the command could not be watched: {error}"))),
        }
    }

    fn start(&self) -> Result<Guard, NotRun> {
        let name = self.command.first().cloned().unwrap_or_default();
        program::find(&name)?;
        let mut program = guard::this_program();
        // The command is in a process group of its own, which a terminal does not let read.
        let stdin = if io::stdin().is_terminal() { Stdio::null() } else { Stdio::inherit() };
        program.stdin(stdin).stdout(Stdio::piped());
        let guard = Guard::spawn(program, &self.command, Some(self.silence()))
            .map_err(|error| NotRun::NotExecutable(name, error))?;
        let mut progress = self.progress();
        progress.began = Began::Yes;
        progress.ended = Some(guard.ended());
        Ok(guard)
    }

    /// Stays with the command until it has ended, however it ends.
    async fn attend(&self, mut guard: Guard, attempt: u32) -> io::Result<Result<Outcome, Unfinished>> {
        let stdout = guard.stdout.take().ok_or_else(|| io::Error::other("its stdout is missing"))?;
        let mut tee = Tee::new(stdout, self.stdout.clone()).await?;
        let mut beats = beats(self.silence());
        let mut heard_until = Uptime::now() + self.silence();
        let (mut asked, mut forced, mut slept) = (false, false, false);
        let code = loop {
            tokio::select! {
                code = guard.wait() => break code?,
                _ = beats.tick() => {
                    slept |= heard_until.has_passed();
                    guard.beat();
                    heard_until = Uptime::now() + self.silence();
                }
                () = self.stop.asked(), if !asked => {
                    asked = true;
                    guard.stop();
                }
                () = self.stop.forced(), if !forced => {
                    forced = true;
                    guard.kill();
                }
                () = tee.pass_on() => {}
            }
        };
        self.progress().began = Began::Ended { code, attempt };
        let printed = tee.finish();
        // We slept through our own beats (Ctrl-Z, a stopped process), and the guard has ended the command.
        slept = code == 128 + 9 && (slept || heard_until.has_passed());
        Ok(match code {
            0 => Ok(Stored { exit_code: code, printed }.encode()),
            code if slept && self.on_lost.doubts() => {
                let why = format!("exit code {code}: semel was suspended for longer than its lease allows");
                Err(Unfinished::Unknown(why))
            }
            // The command did not fail, it was killed by us: no attempt, as for any run that is killed.
            _ if slept => Err(Unfinished::NotYet(Duration::ZERO)),
            code if asked => Err(self.unknown(format!("exit code {code} after it was asked to stop"))),
            code => Err(Unfinished::failed(format!("exit code {code}"))),
        })
    }

    /// An end that says nothing about how far the command got: a failure where it may simply run again, doubt where
    /// that would be a guess.
    fn unknown(&self, reason: String) -> Unfinished {
        if self.on_lost.doubts() { Unfinished::Unknown(reason) } else { Unfinished::failed(reason) }
    }

    /// How long the guard lets the command go on without hearing from us. A lease is renewed when a third of it is
    /// over and counts as lost after nine tenths: whenever we are stopped, the command ends before that.
    fn silence(&self) -> Duration {
        self.lease * 11 / 20
    }

    /// How far the command got.
    pub(super) fn began(&self) -> Began {
        self.progress().began
    }

    /// How the run ended, read back after the ledger's answer was lost; nothing if that is still open.
    pub(super) async fn read_back<S: Store>(&self, store: &S) -> Option<Ran> {
        let (id, fence) = self.progress().lease?;
        let operation = store.read_back(id).await.ok()?.filter(|op| op.fence == fence);
        // Under another fence, or gone: others have decided.
        let Some(operation) = operation else { return Some(Ran::LeaseLost) };
        let said = operation.error.unwrap_or_default();
        match operation.state {
            State::Completed => operation.outcome.map(Ran::Completed),
            State::Failed => Some(Ran::Failed(Failure { error: said, retry: Retry::Backoff })),
            State::InDoubt => Some(Ran::Doubted(said)),
            State::Pending => Some(Ran::Released),
            State::Processing | State::TimedOut => None,
        }
    }

    /// Why the command was put back.
    pub(super) fn not_run(&self) -> Done {
        self.progress().not_run.take().map_or(Done::Stopped, Done::NotRun)
    }

    /// Waits for the command's tree to be gone. It is already, unless the lease was lost.
    pub(super) async fn bury(&self) {
        let ended = self.progress().ended.clone();
        if let Some(mut ended) = ended {
            let _ = timeout(BURIAL, ended.wait()).await;
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Five beats for each silence that would end the command: a few may come late on a busy machine.
fn beats(silence: Duration) -> Interval {
    let mut beats = interval(silence / 5);
    // After a pause one beat is enough.
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beats
}
