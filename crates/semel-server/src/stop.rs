//! Stops the server and its background tasks.

use std::{io, sync::Arc};

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

/// How urgently a stop was requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Asked {
    /// No stop was requested.
    Never,
    /// Requested once: finish the work in flight.
    Once,
    /// Requested again: end now.
    Again,
}

/// A stop that any task can request and wait for. Clones share it.
#[derive(Clone, Debug)]
pub struct Stop(Arc<watch::Sender<Asked>>);

impl Stop {
    /// A stop that was not requested yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Asked::Never)))
    }

    /// A stop requested by SIGTERM or SIGINT: the first signal asks, the second forces.
    ///
    /// # Errors
    /// When the system does not let the process listen to signals.
    pub fn on_signals() -> io::Result<Self> {
        Self::on(&[SignalKind::terminate(), SignalKind::interrupt()])
    }

    /// As [`Stop::on_signals`], for a job of a shell: SIGHUP (a closed terminal) counts too, and signals that the
    /// parent made it ignore (`nohup`, `&` in a script) do not.
    ///
    /// # Errors
    /// When the system does not let the process listen to signals.
    pub fn on_signals_of_a_job() -> io::Result<Self> {
        let ignored = ignored(&std::fs::read_to_string("/proc/self/status")?);
        let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()];
        let heard: Vec<_> = kinds.into_iter().filter(|kind| !is_in(ignored, *kind)).collect();
        Self::on(&heard)
    }

    fn on(kinds: &[SignalKind]) -> io::Result<Self> {
        let stop = Self::new();
        // A file that may not grow (`ulimit -f`) is an error of the write, like a full disk, and must not end the
        // process. A listener for SIGXFSZ is enough.
        drop(signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?);
        for kind in kinds {
            let mut signals = signal(*kind)?;
            let asked = stop.clone();
            tokio::spawn(async move {
                while signals.recv().await.is_some() {
                    asked.ask();
                }
            });
        }
        Ok(stop)
    }

    /// Requests the stop; a second request forces it.
    pub fn ask(&self) {
        self.0.send_modify(|asked| {
            *asked = match asked {
                Asked::Never => Asked::Once,
                Asked::Once | Asked::Again => Asked::Again,
            };
        });
    }

    /// Requests the stop unless it was requested already. Never forces it.
    pub fn ask_once(&self) {
        self.0.send_if_modified(|asked| {
            let first = *asked == Asked::Never;
            if first {
                *asked = Asked::Once;
            }
            first
        });
    }

    /// Whether the stop was requested.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        *self.0.borrow() >= Asked::Once
    }

    /// Waits until the stop is requested: take nothing new, finish the work in flight.
    pub async fn asked(&self) {
        self.reached(Asked::Once).await;
    }

    /// Waits until the stop is forced: drop everything.
    pub async fn forced(&self) {
        self.reached(Asked::Again).await;
    }

    async fn reached(&self, level: Asked) {
        // The sender lives in `self`, so the channel cannot close while a task waits.
        let _ = self.0.subscribe().wait_for(|asked| *asked >= level).await;
    }
}

/// The set of signals that a process ignores, from its `/proc/…/status`.
fn ignored(status: &str) -> u64 {
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

fn is_in(set: u64, kind: SignalKind) -> bool {
    let bit = u32::try_from(kind.as_raw_value() - 1).unwrap_or(0);
    set >> bit & 1 == 1
}

impl Default for Stop {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status_of_a_process() {
        let set = ignored("Name:\tsemel\nSigBlk:\t0000000000000004\nSigIgn:\t0000000000000001\n");
        assert!(is_in(set, SignalKind::hangup()));
        assert!(!is_in(set, SignalKind::interrupt()) && !is_in(set, SignalKind::terminate()));
        assert_eq!(ignored(""), 0);
    }

    #[tokio::test]
    async fn the_first_stop_request_is_graceful_and_the_second_forces() {
        let stop = Stop::new();
        stop.ask();
        stop.asked().await;
        assert_eq!(*stop.0.borrow(), Asked::Once);
        stop.clone().ask();
        stop.forced().await;
        stop.asked().await;
    }
}
