//! The command under its lease.

use std::{
    ffi::OsString,
    io::{self, IsTerminal as _},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
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

/// How long a killed command may take to vanish before we exit: the guard's own limit and a margin.
const BURIAL: Duration = Duration::from_secs(3);

/// How far a command got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Began {
    /// It was not started by this process.
    No,
    /// It was started, and its exit code is unknown.
    Yes,
    /// It ended.
    Ended {
        /// With this exit code.
        code: u8,
        /// The attempt, counted from 1; lost runs are not counted.
        attempt: u32,
    },
}

/// The handler that runs the command.
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
    /// The operation and the fence of our lease.
    lease: Option<(i64, Fence)>,
    /// The end of the command's process tree, once it was started.
    ended: Option<Ended>,
    /// Why it was released.
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
        self.progress.lock().lease = Some((context.operation().id, context.fence()));
        let released = Err(Unfinished::released(Duration::ZERO));
        if self.stop.is_asked() {
            return released;
        }
        let guard = match self.start() {
            Ok(guard) => guard,
            Err(not_run) => {
                self.progress.lock().not_run = Some(not_run);
                return released;
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
        // The command has its own process group, which may not read from the terminal.
        let stdin = if io::stdin().is_terminal() { Stdio::null() } else { Stdio::inherit() };
        program.stdin(stdin).stdout(Stdio::piped());
        let guard = Guard::spawn(program, &self.command, Some(self.silence()))
            .map_err(|error| NotRun::NotExecutable(name, error))?;
        let mut progress = self.progress.lock();
        progress.began = Began::Yes;
        progress.ended = Some(guard.ended());
        Ok(guard)
    }

    /// Attends the command until it has ended.
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
        self.progress.lock().began = Began::Ended { code, attempt };
        let printed = tee.finish();
        // This process was suspended (Ctrl-Z) and sent no heartbeats, so the guard has killed the command.
        slept = code == 128 + 9 && (slept || heard_until.has_passed());
        Ok(match code {
            0 => Ok(Stored { exit_code: code, printed }.encode()),
            code if slept && self.on_lost.doubts() => {
                let why = format!("exit code {code}: semel was suspended for longer than its lease allows");
                Err(Unfinished::Doubted(why))
            }
            // The command did not fail, we killed it: no attempt is counted, as for any killed run.
            _ if slept => Err(Unfinished::released(Duration::ZERO)),
            code if asked => Err(self.unknown(format!("exit code {code} after it was asked to stop"))),
            code => Err(Unfinished::failed(format!("exit code {code}"))),
        })
    }

    /// An end of which the progress is unknown: a failure under rerun, doubt otherwise.
    fn unknown(&self, reason: String) -> Unfinished {
        if self.on_lost.doubts() { Unfinished::Doubted(reason) } else { Unfinished::failed(reason) }
    }

    /// The silence after which the guard kills the command. A lease is renewed after a third and counts as lost after
    /// nine tenths: whenever we are suspended, the command ends before that.
    fn silence(&self) -> Duration {
        self.lease * 11 / 20
    }

    /// How far the command got.
    pub(super) fn began(&self) -> Began {
        self.progress.lock().began
    }

    /// How the run ended, read back after the ledger's answer was lost; `None` if it has not ended.
    pub(super) async fn read_back<S: Store>(&self, store: &S) -> Option<Ran> {
        let (id, fence) = self.progress.lock().lease?;
        let operation = store.read_back(id).await.ok()?.filter(|op| op.fence == fence);
        // Another fence, or no operation: others have decided.
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

    /// Why the command was released.
    pub(super) fn not_run(&self) -> Done {
        self.progress.lock().not_run.take().map_or(Done::Stopped, Done::NotRun)
    }

    /// Waits for the end of the command's process tree. It has ended already, unless the lease was lost.
    pub(super) async fn bury(&self) {
        let ended = self.progress.lock().ended.clone();
        if let Some(mut ended) = ended {
            let _ = timeout(BURIAL, ended.wait()).await;
        }
    }
}

/// Five heartbeats per silence: some may be late on a busy machine.
fn beats(silence: Duration) -> Interval {
    let mut beats = interval(silence / 5);
    // After a pause one heartbeat is enough.
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beats
}
