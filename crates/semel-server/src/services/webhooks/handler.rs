//! What an application does with an event by itself.

use std::{collections::HashMap, sync::Arc};

use semel::{Context, Unfinished};
use semel_http::{BoxFuture, Mode};
use semel_store::{Database, Tx};
use serde_json::Value;

use super::event::Event;

/// Handles events in the program that Semel is built into.
///
/// In atomic mode, what it writes in the transaction commits with the completion of the event, or not at all. In leased
/// mode there is no transaction: what it does elsewhere should go under [`Run::derived_key`], which is the same on every
/// attempt at the same data.
pub trait Handler: Send + Sync + 'static {
    /// Whether it works in the transaction of the completion.
    fn mode(&self) -> Mode {
        Mode::Atomic
    }

    /// Handles an event. What it returns is kept as the event's result; an event that came before the one it needs is
    /// [`Unfinished::NotYet`], which costs no attempt and waits for a second at least.
    fn handle<'a>(&'a self, event: &'a Event, run: &'a Run) -> BoxFuture<'a, Result<Value, Unfinished>>;
}

/// The run that an event is handled in.
pub struct Run {
    /// The lease: its fence, whether it is lost.
    pub context: Context<Database>,
    /// The transaction, in atomic mode.
    pub tx: Option<Tx>,
}

impl Run {
    /// The key for a step's call to another service: the same on every attempt at the same data, and another one for
    /// newer data under the same id. Under the key of the event alone, a service would take the newer for what it has
    /// done already.
    #[must_use]
    pub fn derived_key(&self, step: &str) -> String {
        key_of_data(&self.context, step)
    }
}

/// The key of a step that is done with the data that the operation has now.
pub(super) fn key_of_data(context: &Context<Database>, step: &str) -> String {
    context.derived_key(&format!("{step} {}", context.operation().fingerprint.to_hex()))
}

/// Handlers by the name that the configuration gives them.
#[derive(Clone, Default)]
pub struct Handlers(HashMap<String, Arc<dyn Handler>>);

impl Handlers {
    /// Adds one.
    #[must_use]
    pub fn with(mut self, name: &str, handler: impl Handler) -> Self {
        self.0.insert(name.to_owned(), Arc::new(handler));
        self
    }

    pub(super) fn get(&self, name: &str) -> Option<Arc<dyn Handler>> {
        self.0.get(name).cloned()
    }
}
