//! How the server and its background rounds are told to end.

use std::{io, sync::Arc};

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

/// How urgently an end has been asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Asked {
    /// Nobody has asked.
    Never,
    /// Once: finish what is in flight.
    Once,
    /// Again: end now.
    Again,
}

/// A stop that any task can ask for and any task can wait for. Clones share it.
#[derive(Clone, Debug)]
pub struct Stop(Arc<watch::Sender<Asked>>);

impl Stop {
    /// A stop that nobody has asked for.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Asked::Never)))
    }

    /// A stop asked for by SIGTERM and SIGINT: the first signal asks, the second forces.
    ///
    /// # Errors
    /// When the system does not let the process listen to signals.
    pub fn on_signals() -> io::Result<Self> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let stop = Self::new();
        let asked = stop.clone();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = terminate.recv() => asked.ask(),
                    _ = interrupt.recv() => asked.ask(),
                }
            }
        });
        Ok(stop)
    }

    /// Asks for the stop; asked a second time, forces it.
    pub fn ask(&self) {
        self.0.send_modify(|asked| {
            *asked = match asked {
                Asked::Never => Asked::Once,
                Asked::Once | Asked::Again => Asked::Again,
            };
        });
    }

    /// Waits until the stop is asked for: take nothing new, finish what is in flight.
    pub async fn asked(&self) {
        self.reached(Asked::Once).await;
    }

    /// Waits until the stop is forced: drop everything.
    pub async fn forced(&self) {
        self.reached(Asked::Again).await;
    }

    async fn reached(&self, level: Asked) {
        // The sender lives in `self`, so the channel cannot close while anyone waits.
        let _ = self.0.subscribe().wait_for(|asked| *asked >= level).await;
    }
}

impl Default for Stop {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_ask_is_gentle_and_the_second_forces() {
        let stop = Stop::new();
        stop.ask();
        stop.asked().await;
        assert_eq!(*stop.0.borrow(), Asked::Once);
        stop.clone().ask();
        stop.forced().await;
        stop.asked().await;
    }
}
