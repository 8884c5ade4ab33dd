//! The ledger's own threads, and the tasks that it cannot do without.

use std::future::Future;

use tokio::sync::watch;

use crate::{Error, Result};

/// Threads of our own. Handlers run on the caller's runtime and may block it; renewals, lanes and
/// waiters go on all the same.
pub(crate) struct Engine {
    runtime: Option<tokio::runtime::Runtime>,
    /// The task that panicked, should one have.
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

    /// Runs a task that the ledger cannot do without.
    pub(crate) fn keep(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let broken = self.broken.clone();
        self.spawn(async move {
            if tokio::spawn(task).await.is_err_and(|error| error.is_panic()) {
                tracing::error!(task = name, "a background task of the ledger ended early");
                broken.send_replace(Some(name));
            }
        });
    }

    /// Waits until a task that was to be kept has panicked, and says which.
    pub(crate) fn broken(&self) -> impl Future<Output = &'static str> + Send + use<> {
        let mut broken = self.broken.subscribe();
        async move {
            if let Ok(task) = broken.wait_for(Option::is_some).await
                && let Some(task) = *task
            {
                return task;
            }
            // The ledger is gone, and nothing can break any more.
            std::future::pending().await
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A runtime may not be dropped where blocking is forbidden, which is where ledgers end.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
