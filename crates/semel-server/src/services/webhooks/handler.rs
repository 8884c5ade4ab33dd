//! Handlers of an application.

use std::{collections::HashMap, sync::Arc};

use semel::{Context, Unfinished};
use semel_http::{BoxFuture, Mode};
use semel_store::{Database, Tx};
use serde_json::Value;

use super::event::Event;

/// Handles events in the program that Semel is built into.
///
/// In atomic mode, its writes in the transaction commit with the completion of the event, or not at all. In leased mode
/// there is no transaction: calls to other services should use [`Run::derived_key`], which is the same on every attempt
/// at the same data.
pub trait Handler: Send + Sync + 'static {
    /// Its mode.
    fn mode(&self) -> Mode {
        Mode::Atomic
    }

    /// Handles an event. The returned value is stored as the event's result. An event that arrived before the one it
    /// needs is [`Unfinished::Released`], which counts no attempt and waits for at least a second.
    fn handle<'a>(&'a self, event: &'a Event, run: &'a Run) -> BoxFuture<'a, Result<Value, Unfinished>>;
}

/// The run of a handler.
pub struct Run {
    /// The lease: its fence, whether it is lost.
    pub context: Context<Database>,
    /// The transaction, in atomic mode.
    pub tx: Option<Tx>,
}

impl Run {
    /// The key for a step's call to another service: the same on every attempt at the same data, and another for newer
    /// data under the same id. With the event's key alone, the service would treat newer data as a repeat.
    #[must_use]
    pub fn derived_key(&self, step: &str) -> String {
        key_of_data(&self.context, step)
    }
}

/// The key of a step with the operation's present data.
pub(super) fn key_of_data(context: &Context<Database>, step: &str) -> String {
    context.derived_key(&format!("{step} {}", context.operation().fingerprint.to_hex()))
}

/// Handlers by their name in the configuration.
#[derive(Clone, Default)]
pub struct Handlers(HashMap<String, Arc<dyn Handler>>);

impl Handlers {
    /// Adds a handler.
    #[must_use]
    pub fn with(mut self, name: &str, handler: impl Handler) -> Self {
        self.0.insert(name.to_owned(), Arc::new(handler));
        self
    }

    pub(super) fn get(&self, name: &str) -> Option<Arc<dyn Handler>> {
        self.0.get(name).cloned()
    }
}
