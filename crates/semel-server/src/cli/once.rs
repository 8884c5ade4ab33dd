//! `semel once`: the flags, the texts and the exit codes. [`crate::once`] does the work.

use std::{ffi::OsString, io::Write as _, process::ExitCode, time::Duration};

use anyhow::Context as _;
use semel::{
    Claim, Key, OnLost, Operation, Policy, Ran, Replay, Scope, State,
    journal::{Event, Note},
    prelude::*,
};
use tokio::signal::unix::{SignalKind, signal};

use super::{
    arguments::duration,
    ledger::{LedgerFlags, Opened},
};
use crate::{
    log,
    once::{Began, DEFAULT_SCOPE, Done, Once, outcome::Stored},
    stop::Stop,
    view::{
        about::command_line,
        words::{hint, plain, resolve, span, times},
    },
};

/// The key belongs to another command.
const MISMATCH: u8 = 65;
/// The ledger could not be opened or queried; nothing was run.
const UNAVAILABLE: u8 = 69;
/// The lease was lost, or the end of the command could not be stored.
const LEASE_LOST: u8 = 70;
/// The output could not be written to stdout.
const NOT_WRITTEN: u8 = 74;
/// Another process runs it, or it is too early: try again later.
const LATER: u8 = 75;
/// It may or may not have taken effect.
const IN_DOUBT: u8 = 76;
/// No attempts are left, or a person resolved it as failed.
const EXHAUSTED: u8 = 77;

const EXIT_CODES: &str = "\
Exit codes:
  0    it took effect, now or before; a replay prints the stored output
  65   the key belongs to another command line
  69   the ledger could not be opened or queried; nothing was run
  70   the lease was lost and the command killed; or its end could not be recorded
  74   it took effect, but its output could not be written; run it again for a replay
  75   nothing was run: another process runs it, it is too early, or a signal came; try again later
  76   it is in doubt whether it took effect; a person has to decide
  77   no attempts are left, or a person resolved it as failed; nothing was run
  126  the command is not executable; the key is still free
  127  the command was not found; the key is still free
  2    the flags are wrong
Any other code is the command's exit code: it ran and failed. 128 + n means that signal n ended it.";

/// Run a command once per key, however often it is called
///
/// Exit code 0 of the command is final: later calls replay its output. Any other code is a failure; the command may run
/// up to --attempts times.
#[derive(clap::Args)]
#[command(after_help = EXIT_CODES)]
pub(super) struct OnceCommand {
    /// The key: the command runs once per key
    #[arg(long, short, value_parser = Key::new)]
    key: Key,
    /// The scope of the key: service/kind or tenant/service/kind
    #[arg(long, default_value = DEFAULT_SCOPE, value_parser = scope)]
    scope: Scope,
    /// How often the command may fail before a person has to decide; a run whose semel was killed is not counted
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    attempts: u32,
    /// How long other processes wait before they take over from a killed one
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = lease)]
    lease: Duration,
    /// Wait this long for another process that runs the command, then replay
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration)]
    wait: Duration,
    /// After a lost run (semel was killed): run again, or hold until a person decides
    #[arg(long, default_value = "rerun")]
    on_lost: Lost,
    /// How long the outcome is kept and the key stays taken: a duration, or forever
    #[arg(long, value_name = "TIME", default_value = "30d", value_parser = retention)]
    retention: Retention,
    #[command(flatten)]
    ledger: LedgerFlags,
    /// The command and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Lost {
    Rerun,
    Hold,
}

/// The kind of an HTTP route may contain slashes. Here a fourth part is a mistake.
fn scope(text: &str) -> Result<Scope, String> {
    match text.split('/').count() {
        2 | 3 => Scope::parse(text).map_err(|error| error.to_string()),
        n => {
            let parts = if n == 1 { "one part".to_owned() } else { format!("{n} parts") };
            Err(format!("it has {parts}; write service/kind or tenant/service/kind, such as {DEFAULT_SCOPE}"))
        }
    }
}

fn lease(text: &str) -> Result<Duration, String> {
    let lease = duration(text)?;
    let shortest = Policy::SHORTEST_LEASE;
    if lease < shortest { Err(format!("must be at least {}", span(shortest))) } else { Ok(lease) }
}

#[derive(Clone, Copy)]
struct Retention(Option<Duration>);

/// The shortest retention: below this, a retry a moment later would run the command again.
const SHORTEST_RETENTION: Duration = Duration::from_secs(1);

fn retention(text: &str) -> Result<Retention, String> {
    match text {
        "forever" => Ok(Retention(None)),
        time => match duration(time).map_err(|error| format!("{error}, or forever"))? {
            kept if kept < SHORTEST_RETENTION => {
                let shortest = humantime::format_duration(SHORTEST_RETENTION);
                Err(format!("must be at least {shortest}: a shorter retention protects from nothing"))
            }
            kept => Ok(Retention(Some(kept))),
        },
    }
}

impl OnceCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        log::start("error");
        let runtime = super::runtime()?;
        let code = runtime.block_on(self.once());
        // The remaining tasks may be cut off.
        runtime.shutdown_background();
        code
    }

    async fn once(self) -> anyhow::Result<ExitCode> {
        let stop = Stop::on_signals_of_a_job().context("cannot listen to signals")?;
        // The parent process may ignore SIGCHLD; the exit status of children would then be lost.
        let _children = signal(SignalKind::child()).context("cannot listen to signals")?;
        let opened = match self.ledger.open().await {
            Ok(opened) => opened,
            Err(error) => {
                super::complain(format_args!("{error:#}; nothing was run"));
                return Ok(UNAVAILABLE.into());
            }
        };
        let once = Once {
            scope: self.scope,
            key: self.key,
            command: self.command,
            attempts: self.attempts,
            lease: self.lease,
            wait: self.wait,
            on_lost: match self.on_lost {
                Lost::Rerun => OnLost::Rerun,
                Lost::Hold => OnLost::Hold,
            },
            retention: self.retention.0,
        };
        let done = once.run(&opened.ledger, &stop).await;
        let decided = match &done {
            Ok(Done::Answer(Claim::Exhausted(operation), _)) => resolved_as_failed(&opened, operation).await,
            _ => None,
        };
        let teller = Teller { once: &once, ledger: opened.flags.clone(), decided };
        opened.close().await;
        let (code, said) = match done {
            Ok(Done::Answer(Claim::Replay(replay), _)) => return replayed(&replay, self.ledger.quiet),
            Ok(done) => teller.tell(done),
            Err(error) => (NOT_WRITTEN, Some(format!("the output of the command could not be written: {error}"))),
        };
        if let Some(said) = said {
            super::complain(format_args!("{said}"));
        }
        Ok(code.into())
    }
}

/// Prints the stored output.
fn replayed(replay: &Replay, quiet: bool) -> anyhow::Result<ExitCode> {
    let by_a_person = Stored::read(&replay.outcome.body).is_none();
    let Stored { exit_code, printed } = Stored::decode(&replay.outcome.body);
    // Also with --quiet: a program that reads cut output must not take it for the whole.
    if !quiet || printed.is_cut() {
        let when = replay.operation.settled_at.map(|at| format!(", at {at}")).unwrap_or_default();
        let what = match (replay.outcome.kept, printed.is_cut()) {
            _ if by_a_person && printed.kept.is_empty() => "a person said that it took effect".to_owned(),
            _ if by_a_person => "a person said that it took effect; here is the outcome that was entered".to_owned(),
            (true, _) => "here is what it printed then".to_owned(),
            (false, true) => format!(
                "here are the first {} of the {} bytes that it printed then; the rest was not kept",
                printed.kept.len(),
                printed.total
            ),
            (false, false) => "its output was not kept".to_owned(),
        };
        let before = if by_a_person { "this was decided before" } else { "this ran before" };
        super::complain(format_args!("{before}{when}; {what}"));
    }
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(&printed.kept).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            super::complain(format_args!("the output of the command could not be written: {error}"));
            Ok(NOT_WRITTEN.into())
        }
        _ => Ok(exit_code.into()),
    }
}

/// Turns an answer into an exit code and a line for people.
struct Teller<'a> {
    once: &'a Once,
    /// The flags of the ledger, for a suggested command.
    ledger: String,
    /// The note of the person who resolved it as failed, if one did.
    decided: Option<Note>,
}

/// The note of the person who resolved an operation as failed, if a person did. An unreadable journal counts as none.
async fn resolved_as_failed(opened: &Opened, operation: &Operation) -> Option<Note> {
    if operation.state != State::Failed {
        return None;
    }
    let (notes, _) = opened.ledger.store().journal(operation.id).await.ok()?;
    notes.into_iter().rfind(|note| note.event == Event::Resolved && Some(note.at) == operation.settled_at)
}

impl Teller<'_> {
    /// The exit code, and a line for people.
    fn tell(&self, done: Done) -> (u8, Option<String>) {
        match done {
            Done::Answer(Claim::Acquired(ran), began) => self.tell_run(ran, began),
            Done::Answer(Claim::Replay(_), _) => (0, None),
            Done::Answer(Claim::InFlight(there), _) => {
                let (owner, left) = (&there.operation.owner, span(there.retry_after));
                let then = if self.once.wait.is_zero() {
                    "try again later, or wait for it with --wait"
                } else {
                    "try again later"
                };
                (
                    LATER,
                    Some(format!(
                        "not run: {owner} runs it now, and its lease lasts {left} unless it is renewed; {then}"
                    )),
                )
            }
            Done::Answer(Claim::NotYet(there), _) => {
                (LATER, Some(format!("not run: it failed before, and may run again after {}", there.until)))
            }
            Done::Answer(Claim::Mismatch(operation), _) => {
                let command = command_line(&operation).map_or_else(String::new, |command| format!(": {command}"));
                let first = operation.created_at;
                (MISMATCH, Some(format!("refused: since {first} the key belongs to another command{command}")))
            }
            Done::Answer(Claim::Exhausted(operation), _) => (EXHAUSTED, Some(self.exhausted(&operation))),
            Done::Answer(Claim::InDoubt(operation), _) => {
                let doubt = plain(operation.error.as_deref().unwrap_or("the reason is not known"));
                let why = hint("semel why", "", &self.once.scope, &self.once.key, &self.ledger);
                let said = format!(
                    "not run: it is in doubt whether it took effect ({doubt}). See {why}; then decide: {}",
                    self.resolve()
                );
                (IN_DOUBT, Some(said))
            }
            Done::Broken(error, Began::No) => (UNAVAILABLE, Some(format!("nothing was run: {error}"))),
            Done::Broken(error, began) => {
                let (end, then) = (ended(began), after(self.once));
                let said = format!(
                    "{end}, but that may not be recorded: {error}. If it is not, the lease expires, and then {then}"
                );
                (LEASE_LOST, Some(said))
            }
            Done::NotRun(not_run) => {
                let code = not_run.exit_code();
                (code, Some(format!("{:#}; the key is still free", anyhow::Error::new(not_run))))
            }
            Done::Stopped => (LATER, Some("stopped before anything was run".to_owned())),
        }
    }

    fn tell_run(&self, ran: Ran, began: Began) -> (u8, Option<String>) {
        match ran {
            Ran::Completed(_) => (0, None),
            Ran::Failed(failure) => {
                let (code, attempt) = match began {
                    Began::Ended { code, attempt } => {
                        (code, format!("; this was attempt {attempt} of {}", self.once.attempts))
                    }
                    Began::Yes | Began::No => (LEASE_LOST, String::new()),
                };
                (code, Some(format!("the command failed: {}{attempt}", failure.error)))
            }
            Ran::Released if matches!(began, Began::Ended { .. }) => {
                let said =
                    "the command was killed, because semel was suspended for too long for its lease; it may run again";
                (LEASE_LOST, Some(said.to_owned()))
            }
            Ran::Released => (LATER, Some("released before anything was run".to_owned())),
            Ran::Doubted(reason) => {
                let hint = self.resolve();
                let said = format!("it is in doubt whether the command took effect: {reason}. Decide: {hint}");
                (IN_DOUBT, Some(said))
            }
            Ran::LeaseLost => {
                let end = match began {
                    Began::Ended { .. } => ended(began),
                    Began::Yes | Began::No => "the command was killed".to_owned(),
                };
                (LEASE_LOST, Some(format!("{end}: the lease was lost, and another process may run it now")))
            }
        }
    }

    /// The reason why it may not run again, with the remedy.
    fn exhausted(&self, operation: &Operation) -> String {
        let last = operation.error.as_deref().map(|error| format!(" ({})", plain(error))).unwrap_or_default();
        let Once { scope, key, attempts, .. } = self.once;
        if let Some(Note { at, actor, .. }) = &self.decided {
            let retry = hint("semel operations resolve", "--as retry --reason '…'", scope, key, &self.ledger);
            let reason = plain(operation.error.as_deref().unwrap_or_default());
            return format!(
                "not run: at {at}, {} resolved it as failed: {reason}. To let it run: {retry}",
                plain(actor)
            );
        }
        let person = self.resolve();
        if operation.parked || operation.failures < *attempts {
            return format!("not run: it waits for a person to decide{last}: {person}");
        }
        let (failures, more) = (times(operation.failures), operation.failures + 1);
        format!("not run: it has failed {failures}{last}. Allow more with --attempts {more}, or decide: {person}")
    }

    /// The command by which a person decides.
    fn resolve(&self) -> String {
        resolve(&self.once.scope, &self.once.key, &self.ledger)
    }
}

fn ended(began: Began) -> String {
    match began {
        Began::Ended { code, .. } => format!("the command ended with exit code {code}"),
        Began::Yes | Began::No => "the command was killed".to_owned(),
    }
}

/// The result of the lease expiry of this run.
fn after(once: &Once) -> &'static str {
    if once.on_lost.doubts() { "it is in doubt whether it took effect" } else { "it may run again" }
}
