//! `semel once`: runs a command once per key.
//!
//! - [`Once`]: the request, and [`Done`], its result;
//! - `run`: runs the command under its lease and its guard, and copies its output;
//! - [`outcome`]: the stored form of a run.

pub mod outcome;
mod output;
mod program;
mod run;

use std::{ffi::OsString, io, os::unix::ffi::OsStrExt as _, path::Path, sync::Arc, time::Duration};

use semel::{
    Backoff, Claim, Fingerprint, Key, Labels, Ledger, OnLost, Operation, Policy, Ran, Result, Scope, State, Store,
    Uptime, Work,
};
use serde_json::json;

pub use run::Began;

use crate::{guard::NotRun, stop::Stop};
use run::Runner;

/// The default scope of `semel once` and of all commands for people.
pub const DEFAULT_SCOPE: &str = "cli/once";

/// How often to poll for the end of another process's run: half of the ledger's limit for waiters.
const LOOK: Duration = Duration::from_millis(50);

/// The longest run, however often the lease is renewed. Backups and migrations take hours; a command that takes more
/// than a week counts as stuck.
const LONGEST_RUN: Duration = Duration::from_secs(7 * 24 * 3600);

/// A request to `semel once`.
#[derive(Clone, Debug)]
pub struct Once {
    /// The key's scope.
    pub scope: Scope,
    /// The command is run once per key.
    pub key: Key,
    /// The program and its arguments; never empty.
    pub command: Vec<OsString>,
    /// How often it may be tried.
    pub attempts: u32,
    /// The time after which another process may take over from a killed one.
    pub lease: Duration,
    /// How long to wait for another process that runs it.
    pub wait: Duration,
    /// The rule for a lost run.
    pub on_lost: OnLost,
    /// How long the outcome is kept; for ever if `None`.
    pub retention: Option<Duration>,
}

/// How it ended.
#[derive(Debug)]
pub enum Done {
    /// The ledger's answer, and how far the command got if this process started it.
    Answer(Claim<Ran>, Began),
    /// The ledger could not be read or written.
    Broken(semel::Error, Began),
    /// The command cannot be executed. It was not started, and no attempt is counted.
    NotRun(NotRun),
    /// A signal came before the command was started.
    Stopped,
}

impl Once {
    /// The policy: no backoff, and every failure except a lost lease counts.
    fn policy(&self) -> Policy {
        Policy {
            lease: self.lease,
            max_run: LONGEST_RUN.max(self.lease),
            retention: self.retention,
            max_attempts: Some(self.attempts),
            backoff: Backoff::NONE,
            on_lost: self.on_lost,
            ..Policy::default()
        }
    }

    /// Only the command line distinguishes a retry from a reuse of the key.
    fn fingerprint(&self) -> Fingerprint {
        let add = |fields: semel::Fields, argument: &OsString| fields.field("argument", argument.as_bytes());
        self.command.iter().fold(Fingerprint::fields(), add).finish()
    }

    fn work(&self) -> Work {
        let text = |argument: &OsString| argument.to_string_lossy().into_owned();
        let command: Vec<_> = self.command.iter().map(text).collect();
        let program = self.command.first().and_then(|program| Path::new(program).file_name());
        // For searches. A name that is not a valid label is left out, not refused.
        let label = program.and_then(|name| Labels::default().with(1, &name.to_string_lossy()).ok());
        Work::new(self.scope.clone(), self.key.clone(), self.fingerprint())
            .policy(self.policy())
            .labels(label.unwrap_or_default())
            .payload(json!({ "command": command }).to_string())
    }

    /// Runs the command if the key is free, otherwise waits for the process that runs it.
    ///
    /// # Errors
    /// When our stdout cannot be written. The operation itself has ended properly.
    pub async fn run<S: Store>(&self, ledger: &Ledger<S>, stop: &Stop) -> io::Result<Done> {
        let (stdout, written) = output::stdout();
        let runner = Arc::new(Runner::new(self, stdout, stop.clone()));
        let done = self.claim(ledger, &runner, stop).await;
        runner.bury().await;
        // The counts of repeats are in memory only, and this process ends.
        ledger.flush().await;
        drop(runner);
        let written = tokio::select! {
            written = written => written.unwrap_or(Ok(())),
            // The reader of our stdout does not read, and a second signal came.
            () = stop.forced() => Ok(()),
        };
        written.map(|()| done)
    }

    async fn claim<S: Store>(&self, ledger: &Ledger<S>, runner: &Arc<Runner>, stop: &Stop) -> Done {
        let until = Uptime::now() + self.wait;
        loop {
            // A signal interrupts only waiting. After an interrupted claim it would be unknown whether it got the
            // lease.
            let known = tokio::select! {
                known = self.look(ledger.store(), until) => known,
                () = stop.asked() => return Done::Stopped,
            };
            match known {
                Ok(Known::Yes) => {}
                // A known key is answered even if its program is gone. A new one is not claimed.
                Ok(Known::No) => {
                    if let Some(Err(not_run)) = self.command.first().map(|program| program::find(program)) {
                        return Done::NotRun(not_run);
                    }
                }
                Err(error) => return Done::Broken(error, Began::No),
            }
            let handler = {
                let runner = Arc::clone(runner);
                move |context| Arc::clone(&runner).run(context)
            };
            match ledger.run(self.work(), handler).await {
                // Another process was faster, or it is backing off: there is time left to wait.
                Ok(Claim::InFlight(_)) if !until.has_passed() => {}
                Ok(Claim::NotYet(there)) if !until.has_passed() => {
                    tokio::select! {
                        () = tokio::time::sleep(there.retry_after.min(until.remaining())) => {}
                        () = stop.asked() => return Done::Stopped,
                    }
                }
                Ok(Claim::Acquired(Ran::Released)) if matches!(runner.began(), Began::No) => return runner.not_run(),
                Ok(answer) => return Done::Answer(answer, runner.began()),
                Err(error) => {
                    return match runner.read_back(ledger.store()).await {
                        Some(ran) => Done::Answer(Claim::Acquired(ran), runner.began()),
                        None => Done::Broken(error, runner.began()),
                    };
                }
            }
        }
    }

    /// Checks whether the key is known, and waits while another process runs it. Reading is not a claim, so it does not
    /// count as a duplicate.
    async fn look<S: Store>(&self, store: &S, until: Uptime) -> Result<Known> {
        let now = store.now().await?;
        let found = store.by_key(&self.scope, &self.key).await?.filter(|op| !op.has_expired(now));
        let Some(operation) = found else { return Ok(Known::No) };
        while !until.has_passed() && self.is_running(store, &operation).await? {
            tokio::time::sleep(LOOK.min(until.remaining())).await;
        }
        Ok(Known::Yes)
    }

    /// Whether that run continues. A run of another command is not waited for: the answer will be a mismatch.
    async fn is_running<S: Store>(&self, store: &S, operation: &Operation) -> Result<bool> {
        if operation.state != State::Processing || !operation.fingerprint.matches(&self.fingerprint()) {
            return Ok(false);
        }
        let seen = store.glance(vec![operation.id]).await?;
        Ok(seen.iter().any(|seen| seen.live && seen.fence == operation.fence))
    }
}

/// Whether a key is known to the ledger.
enum Known {
    Yes,
    No,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn once(command: &[&str]) -> Once {
        Once {
            scope: Scope::parse("cli/once").unwrap(),
            key: Key::new("k").unwrap(),
            command: command.iter().map(OsString::from).collect(),
            attempts: 1,
            lease: Duration::from_secs(30),
            wait: Duration::ZERO,
            on_lost: OnLost::Rerun,
            retention: None,
        }
    }

    #[test]
    fn only_the_same_command_line_is_the_same_command() {
        let commands = [&["a", "b"][..], &["a"], &["a b"], &["ab"], &["a", "b", ""], &["b", "a"]];
        for (i, one) in commands.iter().enumerate() {
            for (j, other) in commands.iter().enumerate() {
                assert_eq!(once(one).fingerprint() == once(other).fingerprint(), i == j, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn every_allowed_lease_gives_a_valid_policy() {
        for lease in [Policy::SHORTEST_LEASE, Duration::from_secs(30), LONGEST_RUN * 2] {
            assert!(Once { lease, ..once(&["true"]) }.policy().check().is_ok(), "{lease:?}");
        }
    }
}
