//! The sections `[webhooks.NAME]`, one per source.

mod archive;
mod functions;
mod hmac;
mod kind;
mod rules;
mod secrets;

use std::{collections::BTreeMap, time::Duration};

use semel::{Backoff, Policy, Scope, Work};
use semel_http::webhooks::{Mistakes, Verifier};

use crate::config::{Reader, Report, Size, Tenant};

pub use archive::{Archive, TimeOfDay};
pub use functions::Functions;
pub(crate) use functions::is_function;
pub use hmac::{Hmac, Pointer};
pub use kind::SourceKind;
pub use rules::{Deed, Rule, Rules};
pub use secrets::Secrets;

/// The sources of webhooks, by the name in their path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Webhooks {
    /// The sources.
    pub sources: BTreeMap<String, Source>,
}

/// A sender of webhooks, and what happens to its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The signature scheme, and the form of its events.
    pub kind: SourceKind,
    /// The secrets: any of them is accepted, so that one can be rotated.
    pub secrets: Secrets,
    /// How far a signed time may be in the past or in the future.
    pub tolerance: Duration,
    /// The tenant of its events.
    pub tenant: String,
    /// Whether an event is answered once it is stored, and processed afterwards (`async`).
    pub in_background: bool,
    /// How many runs may fail before a person has to decide.
    pub max_attempts: usize,
    /// How many runs may be lost before a person has to decide.
    pub max_crashes: usize,
    /// The lease of a run.
    pub lease: Duration,
    /// The longest run, however often its lease is renewed.
    pub max_run: Duration,
    /// The backoff after failures.
    pub backoff: Backoff,
    /// The longest body.
    pub max_body: usize,
    /// How long a body may take to arrive.
    pub body_timeout: Duration,
    /// Whether an event takes effect once per function instead of once.
    pub dedup_per_function: bool,
    /// The functions, besides the one of its own name; any if empty.
    pub functions: Functions,
    /// How many of its events a node processes at a time.
    pub concurrency: usize,
    /// The only accepted mode: true is live, false is test.
    pub livemode: Option<bool>,
    /// When events are archived.
    pub archive: Archive,
    /// The time limit of a call that forwards an event.
    pub forward_timeout: Duration,
    /// The rules for its events.
    pub handlers: Rules,
    /// Whether events are unsigned: for trials on this machine.
    pub(crate) unsigned: bool,
}

/// The default limit of a body: four times the largest event of Stripe, and as much as fits a message.
const BODY: usize = 1 << 20;

/// The longest body of a message.
const LONGEST_MESSAGE: usize = 1 << 20;

/// The longest tolerance: beyond a day, an old signature would count as a new one.
const LONGEST_TOLERANCE: Duration = Duration::from_secs(24 * 3600);

/// The longest run, and the longest wait.
const LONGEST_RUN: Duration = Duration::from_secs(24 * 3600);

/// The longest call: its lease is renewed as long.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(300);

/// More than any source needs.
const MOST: usize = 1000;

impl Source {
    /// A source of this kind with these secrets and defaults.
    #[must_use]
    pub fn new(kind: SourceKind, secrets: Secrets) -> Self {
        Self {
            kind,
            secrets,
            tolerance: Duration::from_secs(300),
            tenant: Scope::DEFAULT_TENANT.to_owned(),
            in_background: false,
            max_attempts: 3,
            max_crashes: 5,
            lease: Duration::from_secs(300),
            max_run: Duration::from_secs(15 * 60),
            backoff: Backoff { first: Duration::from_secs(10), cap: Duration::from_secs(600) },
            max_body: BODY,
            body_timeout: Duration::from_secs(10),
            dedup_per_function: false,
            functions: Functions::default(),
            concurrency: 64,
            livemode: None,
            archive: Archive::default(),
            forward_timeout: Duration::from_secs(30),
            handlers: Rules::default(),
            unsigned: false,
        }
    }

    fn read(reader: &mut Reader<'_>, name: &str) -> Option<Self> {
        let at = |field: &str| format!("webhooks.{name}.{field}");
        let kind: Option<SourceKind> = kind::read(reader, &at);
        let default = Self::new(kind.clone().unwrap_or(SourceKind::Stripe), Secrets::default());
        let read = Self {
            kind: default.kind,
            secrets: reader.field(at("secrets"), Secrets::default),
            tolerance: reader.field(at("tolerance"), || default.tolerance),
            tenant: reader.field(at("tenant"), || Tenant(default.tenant)).0,
            in_background: reader.field(at("async"), || default.in_background),
            max_attempts: reader.field(at("max_attempts"), || default.max_attempts),
            max_crashes: reader.field(at("max_crashes"), || default.max_crashes),
            lease: reader.field(at("lease"), || default.lease),
            max_run: reader.field(at("max_run"), || default.max_run),
            backoff: Backoff {
                first: reader.field(at("backoff"), || default.backoff.first),
                cap: reader.field(at("backoff_cap"), || default.backoff.cap),
            },
            max_body: reader.field(at("max_body"), || Size(default.max_body)).0,
            body_timeout: reader.field(at("body_timeout"), || default.body_timeout),
            dedup_per_function: reader.field(at("dedup_per_function"), || default.dedup_per_function),
            functions: reader.field(at("functions"), || default.functions),
            concurrency: reader.field(at("concurrency"), || default.concurrency),
            livemode: reader.field(at("livemode"), || default.livemode),
            archive: Archive {
                after: reader.field(at("archive_after"), || default.archive.after),
                at: reader.field(at("archive_at"), || default.archive.at),
                zone: reader.field(at("time_zone"), || default.archive.zone),
            },
            forward_timeout: reader.field(at("forward_timeout"), || default.forward_timeout),
            handlers: reader.field(at("handlers"), || default.handlers),
            unsigned: false,
        };
        for (field, message) in read.mistakes(name) {
            reader.mistake(&at(&field), message);
        }
        kind.map(|_| read)
    }

    /// All mistakes: the field and the message.
    fn mistakes(&self, name: &str) -> Vec<(String, String)> {
        let mut wrong = Vec::new();
        let mut note = |field: &str, message: String| wrong.push((field.to_owned(), message));
        if !is_name(name) {
            note(
                "kind",
                "belongs to a source whose name is not 1 to 64 of a-z, 0-9, _ and -, or is default".to_owned(),
            );
        }
        if let Some(Err(mistakes)) = self.verifier() {
            for mistake in mistakes.all().iter().filter(|mistake| mistake.field != "tolerance") {
                // The verifier counts secrets from 0; people do not.
                let field = mistake.field.split('[').next().unwrap_or_default();
                note(field, mistake.what.clone());
            }
        }
        for mistake in self.secrets.mistakes(&self.kind) {
            note("secrets", mistake);
        }
        let mut within = |field, span: Duration, least: Duration, most: Duration| {
            if !(least..=most).contains(&span) {
                let [least, most] = [least, most].map(humantime::format_duration);
                note(field, format!("must be at least {least} and at most {most}"));
            }
        };
        let second = Duration::from_secs(1);
        within("tolerance", self.tolerance, second, LONGEST_TOLERANCE);
        within("lease", self.lease, second, LONGEST_RUN);
        within("max_run", self.max_run, self.lease.min(LONGEST_RUN), LONGEST_RUN);
        within("backoff", self.backoff.first, Duration::from_millis(1), self.backoff.cap.max(second));
        within("backoff_cap", self.backoff.cap, Duration::from_millis(1), LONGEST_RUN);
        within("body_timeout", self.body_timeout, Duration::from_millis(1), LONGEST_TIMEOUT);
        within("forward_timeout", self.forward_timeout, Duration::from_millis(1), LONGEST_TIMEOUT);
        within("archive_after", self.archive.after, second, Policy::LONGEST / 2);
        let counts =
            [("max_attempts", self.max_attempts), ("max_crashes", self.max_crashes), ("concurrency", self.concurrency)];
        for (field, number) in counts {
            if !(1..=MOST).contains(&number) {
                note(field, format!("must be 1 to {MOST}"));
            }
        }
        if self.max_body == 0 || self.max_body > Work::MAX_PAYLOAD {
            note("max_body", "must be 1B to 7MiB".to_owned());
        } else if self.max_body > LONGEST_MESSAGE && self.handlers.publishes() {
            note("max_body", "must be at most 1MiB if events go to the outbox".to_owned());
        }
        if let Some(mistake) = self.functions.mistake() {
            note("functions", mistake);
        } else if self.dedup_per_function && self.functions.0.is_empty() {
            // The path is not signed: one delivery, replayed to invented functions, would take effect at each.
            note("functions", "must name the functions, because dedup_per_function is set".to_owned());
        }
        if self.livemode.is_some() && self.kind != SourceKind::Stripe {
            note("livemode", "is for Stripe's events only".to_owned());
        }
        wrong
    }

    /// The verifier of signatures, or the mistakes in its settings; none if events are unsigned.
    pub(crate) fn verifier(&self) -> Option<Result<Verifier, Mistakes>> {
        let secrets = self.secrets.0.iter().cloned();
        Some(match &self.kind {
            _ if self.unsigned => return None,
            SourceKind::Stripe => Verifier::stripe(secrets, self.tolerance),
            SourceKind::Standard => Verifier::standard(secrets, self.tolerance),
            SourceKind::Github => Verifier::github(secrets),
            SourceKind::Shopify => Verifier::shopify(secrets),
            SourceKind::Hmac(hmac) => Verifier::hmac(&hmac.scheme, secrets, self.tolerance),
        })
    }

    /// Whether a third party that saw a delivery could replay it under another id: then the body hash deduplicates,
    /// too.
    pub(crate) fn id_can_be_forged(&self) -> bool {
        match &self.kind {
            SourceKind::Stripe | SourceKind::Standard => false,
            SourceKind::Github | SourceKind::Shopify => true,
            SourceKind::Hmac(hmac) => hmac.scheme.id_header.is_some() && !hmac.scheme.signed.contains("{id}"),
        }
    }

    /// Whether its events need no signature: for trials on this machine.
    #[must_use]
    pub fn is_unsigned(&self) -> bool {
        self.unsigned
    }

    /// Refuses a source that was not made by reading the configuration.
    ///
    /// # Errors
    /// [`semel::Error::Invalid`], naming every problem.
    pub fn check(&self, name: &str) -> semel::Result<()> {
        let wrong: Vec<_> = self.mistakes(name).into_iter().map(|(field, why)| format!("{field}: {why}")).collect();
        match wrong[..] {
            [] => Ok(()),
            _ => Err(semel::Error::Invalid(format!("webhooks.{name}: {}", wrong.join("; ")))),
        }
    }
}

impl Webhooks {
    /// The name of the source that [`Webhooks::for_trying`] adds.
    pub const TRYING: &str = "stripe";

    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        let names = reader.sections("webhooks", "kind");
        let sources = names.into_iter().filter_map(|name| Some((name.clone(), Source::read(reader, &name)?)));
        Self { sources: sources.collect() }
    }

    /// Adds an unsigned source `stripe`, if there is none: for trials, on this machine only.
    #[must_use]
    pub fn for_trying(mut self) -> Self {
        let unsigned = || Source { unsigned: true, ..Source::new(SourceKind::Stripe, Secrets::default()) };
        self.sources.entry(Self::TRYING.to_owned()).or_insert_with(unsigned);
        self
    }
}

/// Reports each rule that names a handler as a mistake: for a program without handlers.
pub(crate) fn refuse_handlers(mut report: Report) -> Report {
    for (source, config) in report.services().get::<Webhooks>().sources {
        for rule in config.handlers.0 {
            let Deed::Handler(handler) = rule.deed else { continue };
            let message = format!(
                "there is no handler called {handler:?}: handlers are for a Rust program that Semel is built into; here a \
                 rule can store an event, send it to the outbox or forward it to a URL"
            );
            report.mistake(&format!("webhooks.{source}.handlers"), message);
        }
    }
    report
}

/// Whether a name can be a source's. It has no dot, so that `source.function` can be split.
fn is_name(name: &str) -> bool {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-';
    (1..=64).contains(&name.len()) && name.bytes().all(fits) && name != "default"
}
