//! Route: the rules for the requests of one route.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Response, StatusCode, request::Parts};
use semel::{OnLost, OnMismatch, Policy};

use crate::{BoxFuture, Credentials, Reference, Verdict, fingerprint::Sameness};

/// Whether the handler's effect commits together with its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Claim, work and settle are separate commits.
    Leased,
    /// Claim, then one transaction for the work and the answer.
    Atomic,
}

/// The methods that take a key.
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

/// Whether a request with this method may have more effect when it is sent twice. Methods are case-sensitive (RFC 9110,
/// 9.1), but not in every server, so `put` is not taken for PUT.
#[must_use]
pub fn may_not_repeat(method: &Method) -> bool {
    const REPEATABLE: [Method; 6] =
        [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE, Method::PUT, Method::DELETE];
    !REPEATABLE.contains(method)
}

/// Makes an answer from a [`Reference`] and the present state.
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
    /// The shortest retention. A shorter one protects from nothing, so requests under it are refused before anything is
    /// done.
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

    /// Leased mode: the handler may do anything. If the process dies in the middle, the operation is in doubt,
    /// because the layer cannot know whether it had an effect.
    #[must_use]
    pub fn leased() -> Self {
        Self::new(Mode::Leased, OnLost::Hold)
    }

    /// Atomic mode: the handler works in the request's [`Transaction`](crate::Transaction), which commits together
    /// with the answer. If the process dies in the middle, nothing has happened, and the request may run again.
    #[must_use]
    pub fn atomic() -> Self {
        Self::new(Mode::Atomic, OnLost::Rerun)
    }

    /// Refuses requests without a key.
    #[must_use]
    pub fn required(self) -> Self {
        Self { required: true, ..self }
    }

    /// Refuses keys that are not RFC 8941 strings.
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

    /// All methods take a key, except those that HTTP defines as safe or idempotent (GET, HEAD, OPTIONS, TRACE, PUT,
    /// DELETE). This includes unknown methods and other spellings (`post`). For a proxy, whose upstream may know more
    /// methods.
    #[must_use]
    pub fn all_methods_that_may_not_repeat(self) -> Self {
        Self { methods: Methods::AllThatMayNotRepeat, ..self }
    }

    /// A request that finds its key in flight waits up to this long for the answer. Without this, only requests
    /// with `Prefer: wait=N` wait.
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

    /// The time limit for a request's body, a minute unless set.
    #[must_use]
    pub fn request_patience(self, request_patience: Duration) -> Self {
        Self { request_patience, ..self }
    }

    /// The longest stored answer, 1 MiB unless set and at most 7 MiB. A longer answer goes to the first caller
    /// unchanged, and a repeat gets `response-not-kept`.
    #[must_use]
    pub fn answer_limit(self, answer_limit: usize) -> Self {
        Self { answer_limit: answer_limit.min(7 << 20), ..self }
    }

    /// The time limit for an answer's body, 2 s unless set; a slower one counts as streamed.
    #[must_use]
    pub fn answer_patience(self, answer_patience: Duration) -> Self {
        Self { answer_patience, ..self }
    }

    /// Compares JSON bodies by value (RFC 8785) instead of by bytes.
    #[must_use]
    pub fn canonical_json(mut self) -> Self {
        self.sameness.canonical_json = true;
        self
    }

    /// The host is part of the comparison, for a server with many host names.
    #[must_use]
    pub fn host_counts(mut self) -> Self {
        self.sameness.host = true;
        self
    }

    /// A repeat must have the credentials of the first request: its `Authorization` and the named cookies (several
    /// `Cookie`
    /// fields reach the handler as one). Otherwise it is 409 `credentials-differ`, neither executed nor replayed. For a
    /// layer without authentication before it; behind authentication the principal's tenant separates keys, and a
    /// refreshed access token changes nothing.
    #[must_use]
    pub fn same_credentials(self, credentials: Credentials) -> Self {
        Self { credentials: Some(credentials), ..self }
    }

    /// Query parameters that are not compared.
    #[must_use]
    pub fn ignore_query<T: Into<String>>(mut self, names: impl IntoIterator<Item = T>) -> Self {
        self.sameness.ignored_query.extend(names.into_iter().map(Into::into));
        self
    }

    /// Members of a JSON body that are not compared, as JSON pointers (`/sent_at`).
    #[must_use]
    pub fn ignore_fields<T: Into<String>>(mut self, pointers: impl IntoIterator<Item = T>) -> Self {
        self.sameness.ignored_fields.extend(pointers.into_iter().map(Into::into));
        self
    }

    /// The whole policy, including `on_mismatch` and `on_lost`. To change one rule of a leased route, start from
    /// `Policy { on_lost: OnLost::Hold, ..Policy::default() }`.
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

    /// A final answer cannot be changed or purged until its retention ends, and a node that gave it replays it from
    /// memory, without the database. The price: a wrong answer cannot be taken back, not even on request. Choose
    /// the retention accordingly.
    #[must_use]
    pub fn pinned(mut self) -> Self {
        self.policy.pinned = true;
        self
    }

    /// Sets the rule for a lost run: hold, probe or rerun.
    #[must_use]
    pub fn on_lost(mut self, on_lost: OnLost) -> Self {
        self.policy.on_lost = on_lost;
        self
    }

    /// The meaning of a status for the key, [`Verdict::by_status`] unless set.
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

    /// Reference mode: instead of the answer, the [`Reference`] in its extensions is stored, and `rebuild` makes the
    /// answer of a repeat from it.
    #[must_use]
    pub fn rebuild<F>(self, rebuild: F) -> Self
    where
        F: Fn(Reference, Parts) -> BoxFuture<'static, Response<Bytes>> + Send + Sync + 'static,
    {
        Self { rebuild: Some(Arc::new(rebuild)), ..self }
    }

    /// Adapts the ledger's policy to a request, for example to a client's parameter.
    #[must_use]
    pub fn adapt(self, adapt: impl Fn(&Parts, &mut Policy) + Send + Sync + 'static) -> Self {
        Self { adapt: Some(Arc::new(adapt)), ..self }
    }
}
