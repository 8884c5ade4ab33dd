//! The ledger's own threads, and its background tasks.

use std::future::Future;

use tokio::sync::watch;

use crate::{Error, Result};

/// The engine's own threads. Handlers run on the caller's runtime and may block it; renewals, lanes and waiters
/// continue.
pub(crate) struct Engine {
    runtime: Option<tokio::runtime::Runtime>,
    /// The name of a task that panicked.
    broken: watch::Sender<Option<&'static str>>,
}

impl Engine {
    pub(crate) fn start() -> Result<Self> {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("semel-engine")
            .enable_all()
            .build()
            .map(|runtime| Self { runtime: Some(runtime), broken: watch::Sender::default() })
            .map_err(|e| Error::Unavailable(format!("the engine's threads could not be started: {e}")))
    }

    pub(crate) fn spawn<F>(&self, task: F) -> Option<tokio::task::JoinHandle<F::Output>>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.runtime.as_ref().map(|runtime| runtime.spawn(task))
    }

    /// Runs a background task that the ledger needs.
    pub(crate) fn keep(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let broken = self.broken.clone();
        self.spawn(async move {
            if tokio::spawn(task).await.is_err_and(|error| error.is_panic()) {
                tracing::error!(task = name, "a background task of the ledger ended early");
                broken.send_replace(Some(name));
            }
        });
    }

    /// Waits until a background task has panicked, and returns its name.
    pub(crate) fn broken(&self) -> impl Future<Output = &'static str> + Send + use<> {
        let mut broken = self.broken.subscribe();
        async move {
            if let Ok(task) = broken.wait_for(Option::is_some).await
                && let Some(task) = *task
            {
                return task;
            }
            // The ledger is gone, so no task can fail any more.
            std::future::pending().await
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A runtime must not be dropped where blocking is forbidden, and ledgers are dropped there.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
