//! A configured source: its name, its rules, and the verifier of its signatures.

use std::{collections::HashMap, sync::Arc, time::SystemTime};

use chrono::{DateTime, Utc};
use semel::{Error, Key, Labels, OnLost, OnMismatch, Policy, Result, Runner, Scope, Work};
use semel_http::{Mode, webhooks::Verifier};
use tokio::sync::Semaphore;

use super::{
    SERVICE,
    event::Event,
    handler::{Handler, Handlers},
};
use crate::{
    services::call::Caller,
    services::webhooks::config::{self, Deed},
};

pub(super) use super::config::is_function;

/// How many kibibytes of a source's bodies are read at a time: their senders are not verified yet. As much as four
/// thousand bodies that have begun, or nine of the longest.
const ROOM: usize = 64 << 10;

/// A sender of webhooks.
pub struct Source {
    /// Its name in the path.
    pub name: String,
    /// Its rules.
    pub config: config::Source,
    /// None if events are unsigned.
    pub(super) verifier: Option<Verifier>,
    /// The seats: how many of its events a node processes at a time.
    pub(super) seats: Arc<Semaphore>,
    /// Room for bodies that are being read, in kibibytes.
    pub(super) room: Arc<Semaphore>,
    /// The callers of forwarding URLs.
    callers: HashMap<String, Caller>,
    handlers: HashMap<String, Arc<dyn Handler>>,
}

/// The way of an event, with the part that executes it.
pub(super) enum Way<'a> {
    /// It is only stored.
    Store,
    /// It waits until a program asks for it.
    Pull,
    /// It goes to the outbox.
    Outbox(Option<&'a semel::messaging::Topic>),
    /// It is posted.
    Forward(&'a Caller),
    /// A handler gets it.
    Handler(&'a Arc<dyn Handler>),
}

impl Way<'_> {
    /// Whether it runs in the transaction of its completion.
    pub(super) fn mode(&self) -> Mode {
        match self {
            Self::Outbox(_) => Mode::Atomic,
            Self::Store | Self::Pull | Self::Forward(_) => Mode::Leased,
            Self::Handler(handler) => handler.mode(),
        }
    }
}

impl Source {
    pub(super) fn open(name: &str, config: config::Source, handlers: &Handlers) -> Result<Self> {
        config.check(name)?;
        let verifier = config.verifier().transpose().map_err(|mistakes| Error::Invalid(mistakes.to_string()))?;
        let (mut callers, mut known) = (HashMap::new(), HashMap::new());
        for rule in &config.handlers.0 {
            match &rule.deed {
                Deed::Store | Deed::Pull | Deed::Outbox(_) => {}
                Deed::Forward(url) => {
                    let caller = Caller::new(url.clone(), config.forward_timeout, config.concurrency)?;
                    callers.insert(url.expose().to_string(), caller);
                }
                Deed::Handler(handler) => {
                    let found = handlers.get(handler).ok_or_else(|| {
                        Error::Invalid(format!("webhooks.{name}.handlers: there is no handler called {handler:?}"))
                    })?;
                    known.insert(handler.clone(), found);
                }
            }
        }
        let seats = Arc::new(Semaphore::new(config.concurrency));
        let room = Arc::new(Semaphore::new(ROOM));
        Ok(Self { name: name.to_owned(), config, verifier, seats, room, callers, handlers: known })
    }

    /// Whether it accepts events for a function of this name: its own always, and any if no names are configured.
    pub(super) fn knows(&self, function: &str) -> bool {
        self.config.functions.0.is_empty() || self.names(function)
    }

    /// Whether this is its own name, or that of a configured function.
    pub(super) fn names(&self, function: &str) -> bool {
        function == self.name || self.config.functions.0.contains(function)
    }

    /// Whether events are unsigned, so that only this machine may send them.
    pub(super) fn is_unsigned(&self) -> bool {
        self.verifier.is_none()
    }

    /// The scope of its events. The function is part of it only if events take effect once per function.
    ///
    /// # Errors
    /// Never for a function that a path may name.
    pub fn scope(&self, function: &str) -> Result<Scope> {
        Scope::new(&self.config.tenant, SERVICE, &self.kind(function))
    }

    /// The kind of its events' operations.
    #[must_use]
    pub fn kind(&self, function: &str) -> String {
        if self.config.dedup_per_function { format!("{}.{function}", self.name) } else { self.name.clone() }
    }

    /// The scope of an event's body claim. No function and no source has a slash in its name.
    pub(super) fn body_scope(&self, event: &Event) -> Result<Scope> {
        Scope::new(&event.tenant, SERVICE, &format!("{}/body", self.kind(&event.function)))
    }

    /// The policy of a claim that is made now.
    #[must_use]
    pub fn policy(&self, now: SystemTime) -> Policy {
        let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        Policy {
            lease: self.config.lease,
            max_run: self.config.max_run,
            retention: None,
            tombstone: Some(self.config.archive.tombstone(DateTime::<Utc>::from(now))),
            max_attempts: Some(number(self.config.max_attempts)),
            max_crashes: number(self.config.max_crashes),
            backoff: self.config.backoff,
            on_mismatch: OnMismatch::Reject,
            on_lost: OnLost::Rerun,
            pinned: false,
            runner: Runner::Worker,
        }
    }

    /// The policy of an event of this type: programs ask for it if a rule says so.
    pub(super) fn policy_of(&self, kind: &str, now: SystemTime) -> Policy {
        let runner = if self.pulls(kind) { Runner::ByLabel } else { Runner::Worker };
        Policy { runner, ..self.policy(now) }
    }

    /// Whether events of this type wait until a program asks for them.
    pub(super) fn pulls(&self, kind: &str) -> bool {
        *self.config.handlers.of(kind) == Deed::Pull
    }

    /// The claim of an event. A redelivery does not wait for the backoff.
    pub(super) fn work(&self, event: &Event, now: SystemTime) -> Result<Work> {
        let labels = Labels([Some(event.kind.clone()), Some(event.function.clone()), Some(self.name.clone()), None]);
        let work = Work::new(self.scope(&event.function)?, Key::new(&event.id)?, event.fingerprint)
            .policy(self.policy_of(&event.kind, now))
            .payload(event.body.clone())
            .labels(labels)
            .at_once();
        Ok(match event.created {
            Some(created) => work.order(created),
            None => work,
        })
    }

    /// Whether any of its events are forwarded.
    pub(super) fn forwards(&self) -> bool {
        !self.callers.is_empty()
    }

    /// Whether events of this type are only stored.
    pub(super) fn stores(&self, kind: &str) -> bool {
        *self.config.handlers.of(kind) == Deed::Store
    }

    /// The way of an event.
    pub(super) fn way(&self, event: &Event) -> Option<Way<'_>> {
        Some(match self.config.handlers.of(&event.kind) {
            Deed::Store => Way::Store,
            Deed::Pull => Way::Pull,
            Deed::Outbox(topic) => Way::Outbox(topic.as_ref()),
            Deed::Forward(url) => Way::Forward(self.callers.get(url.expose().as_str())?),
            Deed::Handler(name) => Way::Handler(self.handlers.get(name)?),
        })
    }
}

/// The source of a kind: all of it, or the part before the function.
pub(super) fn source_of(kind: &str) -> &str {
    kind.split_once(['.', ':']).map_or(kind, |(source, _)| source)
}

/// The type in a listed kind, of events that programs ask for.
pub(super) fn pulled_type(kind: &str) -> Option<&str> {
    kind.split_once(':').map(|(_, kind)| kind)
}

/// Whether a kind is that of body claims, which are not events.
pub(super) fn is_body(kind: &str) -> bool {
    kind.split_once(':').map_or(kind, |(kind, _)| kind).contains('/')
}
