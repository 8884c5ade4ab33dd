//! Route: the rules for the requests of one route.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Response, StatusCode, request::Parts};
use semel::{OnLost, OnMismatch, Policy};

use crate::{BoxFuture, Credentials, Reference, Verdict, fingerprint::Sameness};

/// Whether the handler's effect commits together with its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Claim, work, settle: each on its own.
    Leased,
    /// Claim, then one transaction for the work and the answer.
    Atomic,
}

/// Which methods take a key.
#[derive(Clone)]
pub(crate) enum Methods {
    These(Vec<Method>),
    AllThatMayNotRepeat,
}

impl Methods {
    pub(crate) fn contains(&self, method: &Method) -> bool {
        match self {
            Self::These(methods) => methods.contains(method),
            Self::AllThatMayNotRepeat => may_not_repeat(method),
        }
    }
}

/// Whether a request by this method may do more when it is sent twice. A method is case-sensitive (RFC 9110, 9.1), but
/// not to every server: `put` is none of those that are known to be the same twice as once.
#[must_use]
pub fn may_not_repeat(method: &Method) -> bool {
    const REPEATABLE: [Method; 6] =
        [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE, Method::PUT, Method::DELETE];
    !REPEATABLE.contains(method)
}

/// Makes an answer from what a [`Reference`] names, as it is now.
pub type Rebuild = Arc<dyn Fn(Reference, Parts) -> BoxFuture<'static, Response<Bytes>> + Send + Sync>;

/// Adapts the ledger's policy to a request.
pub(crate) type Adapt = Arc<dyn Fn(&Parts, &mut Policy) + Send + Sync>;

/// The rules for the requests of one route.
#[derive(Clone)]
pub struct Route {
    pub(crate) mode: Mode,
    pub(crate) service: String,
    pub(crate) kind: Option<String>,
    pub(crate) methods: Methods,
    pub(crate) required: bool,
    pub(crate) strict: bool,
    pub(crate) wait: Duration,
    pub(crate) longest_wait: Duration,
    pub(crate) request_limit: usize,
    pub(crate) request_patience: Duration,
    pub(crate) answer_limit: usize,
    pub(crate) answer_patience: Duration,
    pub(crate) sameness: Sameness,
    pub(crate) credentials: Option<Credentials>,
    pub(crate) policy: Policy,
    pub(crate) verdict: fn(StatusCode) -> Verdict,
    pub(crate) rebuild: Option<Rebuild>,
    pub(crate) adapt: Option<Adapt>,
}

impl Route {
    /// The shortest retention. Below it a key protects from nothing, so a request under such a policy is refused
    /// before anything is done.
    pub const SHORTEST_RETENTION: Duration = Duration::from_secs(1);

    fn new(mode: Mode, on_lost: OnLost) -> Self {
        Self {
            mode,
            service: "http".to_owned(),
            kind: None,
            methods: Methods::These(vec![Method::POST, Method::PATCH]),
            required: false,
            strict: false,
            wait: Duration::ZERO,
            longest_wait: Duration::from_secs(30),
            request_limit: 1 << 20,
            request_patience: Duration::from_secs(60),
            answer_limit: 1 << 20,
            answer_patience: Duration::from_secs(2),
            sameness: Sameness::default(),
            credentials: None,
            policy: Policy { on_lost, ..Policy::default() },
            verdict: Verdict::by_status,
            rebuild: None,
            adapt: None,
        }
    }

    /// The handler does what it likes, and the ledger knows that it ran. If the process dies in the
    /// middle, the operation is in doubt: whether the effect was made cannot be known from here.
    #[must_use]
    pub fn leased() -> Self {
        Self::new(Mode::Leased, OnLost::Hold)
    }

    /// The handler works in the request's [`Transaction`](crate::Transaction), which commits together
    /// with the answer. If the process dies in the middle, nothing has happened, and it may run again.
    #[must_use]
    pub fn atomic() -> Self {
        Self::new(Mode::Atomic, OnLost::Rerun)
    }

    /// Requests without a key are refused.
    #[must_use]
    pub fn required(self) -> Self {
        Self { required: true, ..self }
    }

    /// Keys that are not RFC 8941 strings are refused.
    #[must_use]
    pub fn strict_keys(self) -> Self {
        Self { strict: true, ..self }
    }

    /// The methods that take a key, instead of POST and PATCH. GET, HEAD and OPTIONS never do.
    #[must_use]
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        let safe = [Method::GET, Method::HEAD, Method::OPTIONS];
        let methods = methods.into_iter().filter(|method| !safe.contains(method)).collect();
        Self { methods: Methods::These(methods), ..self }
    }

    /// Every method takes a key but those that HTTP calls safe or idempotent (GET, HEAD, OPTIONS, TRACE, PUT, DELETE):
    /// also one that is not known here, or is written in another way (`post`). For a proxy, whose upstream may know
    /// what it does not.
    #[must_use]
    pub fn all_methods_that_may_not_repeat(self) -> Self {
        Self { methods: Methods::AllThatMayNotRepeat, ..self }
    }

    /// A request that finds its key in flight waits up to this long for the answer. Without it only
    /// those wait that ask for it with `Prefer: wait=N`.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait, longest_wait: self.longest_wait.max(wait), ..self }
    }

    /// The longest wait that `Prefer` may ask for, 30 s unless set.
    #[must_use]
    pub fn longest_wait(self, longest_wait: Duration) -> Self {
        Self { longest_wait, ..self }
    }

    /// The longest request body, 1 MiB unless set.
    #[must_use]
    pub fn request_limit(self, request_limit: usize) -> Self {
        Self { request_limit, ..self }
    }

    /// How long a request's body may take to come, a minute unless set.
    #[must_use]
    pub fn request_patience(self, request_patience: Duration) -> Self {
        Self { request_patience, ..self }
    }

    /// The longest answer that is kept, 1 MiB unless set and 7 MiB at most. A longer one goes to the
    /// first caller as it is, and a repeat is told that it took effect.
    #[must_use]
    pub fn answer_limit(self, answer_limit: usize) -> Self {
        Self { answer_limit: answer_limit.min(7 << 20), ..self }
    }

    /// How long an answer's body may take to come, 2 s unless set; then it counts as streamed.
    #[must_use]
    pub fn answer_patience(self, answer_patience: Duration) -> Self {
        Self { answer_patience, ..self }
    }

    /// JSON bodies count as the same by what they say (RFC 8785), not by how they are written.
    #[must_use]
    pub fn canonical_json(mut self) -> Self {
        self.sameness.canonical_json = true;
        self
    }

    /// The host that is asked for tells requests apart, too: where one server answers for many.
    #[must_use]
    pub fn host_counts(mut self) -> Self {
        self.sameness.host = true;
        self
    }

    /// A repeat must come with the credentials of the first request, which are its `Authorization` and the cookies that
    /// are named (several `Cookie` fields reach the handler as one): one with others, or none, is 409
    /// `credentials-differ`, and neither carried out nor answered from memory. For a layer before which nothing
    /// authenticates; behind authentication the principal's tenant says whose key it is, and a refreshed token changes
    /// nothing.
    #[must_use]
    pub fn same_credentials(self, credentials: Credentials) -> Self {
        Self { credentials: Some(credentials), ..self }
    }

    /// Query parameters that do not tell requests apart.
    #[must_use]
    pub fn ignore_query<T: Into<String>>(mut self, names: impl IntoIterator<Item = T>) -> Self {
        self.sameness.ignored_query.extend(names.into_iter().map(Into::into));
        self
    }

    /// Members of a JSON body that do not tell requests apart, as JSON pointers (`/sent_at`).
    #[must_use]
    pub fn ignore_fields<T: Into<String>>(mut self, pointers: impl IntoIterator<Item = T>) -> Self {
        self.sameness.ignored_fields.extend(pointers.into_iter().map(Into::into));
        self
    }

    /// The ledger's policy as a whole, also what a mismatch and a lost lease get: to change one rule of a leased route,
    /// start from `Policy { on_lost: OnLost::Hold, ..Policy::default() }`.
    #[must_use]
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }

    /// Another payload under the same key gets the original's answer, marked `Idempotency-Mismatch`,
    /// instead of 422.
    #[must_use]
    pub fn replay_mismatches(mut self) -> Self {
        self.policy.on_mismatch = OnMismatch::Replay;
        self
    }

    /// An answer stays as it is until its retention ends: nobody can purge it before, and a node that
    /// has given it gives it again from memory, without asking the database. The price is that a wrong
    /// answer, or one that somebody wants forgotten, cannot be taken back: choose the retention for it.
    #[must_use]
    pub fn pinned(mut self) -> Self {
        self.policy.pinned = true;
        self
    }

    /// What a lost lease gets.
    #[must_use]
    pub fn on_lost(mut self, on_lost: OnLost) -> Self {
        self.policy.on_lost = on_lost;
        self
    }

    /// What a status means for the key, [`Verdict::by_status`] unless set.
    #[must_use]
    pub fn verdict(self, verdict: fn(StatusCode) -> Verdict) -> Self {
        Self { verdict, ..self }
    }

    /// The service in the operations' scope, `http` unless set.
    #[must_use]
    pub fn service(self, service: impl Into<String>) -> Self {
        Self { service: service.into(), ..self }
    }

    /// The kind in the operations' scope, instead of method and route template.
    #[must_use]
    pub fn kind(self, kind: impl Into<String>) -> Self {
        Self { kind: Some(kind.into()), ..self }
    }

    /// Reference mode: what is kept is not the answer but the [`Reference`] in its extensions, and a
    /// repeat gets what `rebuild` makes of that.
    #[must_use]
    pub fn rebuild<F>(self, rebuild: F) -> Self
    where
        F: Fn(Reference, Parts) -> BoxFuture<'static, Response<Bytes>> + Send + Sync + 'static,
    {
        Self { rebuild: Some(Arc::new(rebuild)), ..self }
    }

    /// Adapts the ledger's policy to a request: a client that asks for strictness, say.
    #[must_use]
    pub fn adapt(self, adapt: impl Fn(&Parts, &mut Policy) + Send + Sync + 'static) -> Self {
        Self { adapt: Some(Arc::new(adapt)), ..self }
    }
}
