//! The layer: whose request it is, which key it has, and what the ledger says of it.

use std::{
    sync::{Arc, OnceLock},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, Request, Response, header, request::Parts};
use http_body::Body as HttpBody;
use semel::{Claim, Error, Fingerprint, Key, Labels, Lease, Ledger, Operation, Replay, Scope, Store, Work};
use tower::{Layer, Service};

use crate::{
    Body, BoxFuture, Mode, Principal, Problem, Reference, Route,
    answer::{Answer, MISMATCH, REPLAYED, mark},
    body::read_request,
    cookies::join_cookies,
    fingerprint::normal_path,
    key, problem,
    waiting::Waiting,
};

/// How long a client should wait that finds its key in flight: most requests take less than this.
const SOON: Duration = Duration::from_secs(1);

/// Idempotency for the routes of a service. Cheap to clone.
pub struct Idempotency<S: Store> {
    shared: Arc<Shared<S>>,
}

pub(crate) struct Shared<S: Store> {
    pub(crate) ledger: Ledger<S>,
    waiting: Arc<Waiting>,
    /// The tenant of requests that nobody has authenticated.
    everyone: Option<String>,
}

impl<S: Store> Clone for Idempotency<S> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<S: Store> Idempotency<S> {
    /// For requests that carry a [`Principal`] in their extensions.
    #[must_use]
    pub fn new(ledger: Ledger<S>) -> Self {
        Self { shared: Arc::new(Shared { ledger, waiting: Arc::default(), everyone: None }) }
    }

    /// For a service that knows no users: all its requests share the keys of one tenant. Whoever can
    /// send a request can then get the stored answer of any key he can guess.
    #[must_use]
    pub fn for_everyone(ledger: Ledger<S>, tenant: impl Into<String>) -> Self {
        Self { shared: Arc::new(Shared { ledger, waiting: Arc::default(), everyone: Some(tenant.into()) }) }
    }

    /// The layer for a route.
    #[must_use]
    pub fn layer(&self, route: Route) -> IdempotencyLayer<S> {
        IdempotencyLayer { shared: self.shared.clone(), route: Arc::new(Bound { route, first: OnceLock::new() }) }
    }
}

/// The layer for a route; see [`Idempotency::layer`].
pub struct IdempotencyLayer<S: Store> {
    shared: Arc<Shared<S>>,
    route: Arc<Bound>,
}

/// A route that a layer has been made for.
pub(crate) struct Bound {
    route: Route,
    /// Most routes have one scope; making it anew for each request is a good part of what a replay from memory costs.
    first: OnceLock<First>,
}

/// The scope of a first request, and what it was made of.
struct First {
    tenant: String,
    method: Method,
    template: String,
    scope: Scope,
}

impl std::ops::Deref for Bound {
    type Target = Route;
    fn deref(&self) -> &Route {
        &self.route
    }
}

impl Bound {
    fn scope(&self, tenant: &str, method: &Method, template: &str) -> semel::Result<Scope> {
        let same = |first: &&First| first.tenant == tenant && first.method == method && first.template == template;
        if let Some(first) = self.first.get().filter(same) {
            return Ok(first.scope.clone());
        }
        let kind = match &self.kind {
            Some(kind) => kind.clone(),
            None => fitting(format!("{method} {template}"), 200),
        };
        let scope = Scope::new(tenant, &self.service, &kind)?;
        let (tenant, method, template) = (tenant.to_owned(), method.clone(), template.to_owned());
        let _ = self.first.set(First { tenant, method, template, scope: scope.clone() });
        Ok(scope)
    }
}

impl<S: Store> Clone for IdempotencyLayer<S> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), route: self.route.clone() }
    }
}

impl<S: Store, Inner> Layer<Inner> for IdempotencyLayer<S> {
    type Service = IdempotencyService<S, Inner>;

    fn layer(&self, inner: Inner) -> Self::Service {
        IdempotencyService { shared: self.shared.clone(), route: self.route.clone(), inner }
    }
}

/// A service whose requests take effect once.
pub struct IdempotencyService<S: Store, Inner> {
    pub(crate) shared: Arc<Shared<S>>,
    pub(crate) route: Arc<Bound>,
    pub(crate) inner: Inner,
}

impl<S: Store, Inner: Clone> Clone for IdempotencyService<S, Inner> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), route: self.route.clone(), inner: self.inner.clone() }
    }
}

impl<S, Inner, ReqBody, ResBody> Service<Request<ReqBody>> for IdempotencyService<S, Inner>
where
    S: Store,
    Inner: Service<Request<ReqBody>, Response = Response<ResBody>, Error: Send, Future: Send> + Clone + Send + 'static,
    ReqBody: HttpBody<Data: Send, Error: Send> + From<Bytes> + Send + 'static,
    ResBody: HttpBody<Data = Bytes, Error: Send> + Send + Unpin + 'static,
{
    type Response = Response<Body<ResBody>>;
    type Error = Inner::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<ReqBody>) -> Self::Future {
        // The one that is ready goes with the request, and its clone stays.
        let inner = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, inner);
        let service = Self { shared: self.shared.clone(), route: self.route.clone(), inner };
        // Only we may say so.
        for name in [REPLAYED, MISMATCH] {
            request.headers_mut().remove(name);
        }
        Box::pin(service.serve(request))
    }
}

/// What a keyed request asks of the ledger.
struct Asked {
    scope: Scope,
    key: Key,
    /// Where the same template leads to many resources: which of them.
    resource: Option<String>,
    /// The mark of its credentials, where the route wants them to be the same.
    credentials: Option<String>,
}

impl Asked {
    /// Whether an operation was begun with other credentials. One from before they were looked at has no mark.
    fn differs_from(&self, operation: &Operation) -> bool {
        let first = operation.labels.0[CREDENTIALS].as_ref();
        self.credentials.as_ref().zip(first).is_some_and(|(own, first)| own != first)
    }
}

impl<S: Store, Inner> IdempotencyService<S, Inner> {
    async fn serve<ReqBody, ResBody>(
        mut self,
        request: Request<ReqBody>,
    ) -> Result<Response<Body<ResBody>>, Inner::Error>
    where
        Inner: Service<Request<ReqBody>, Response = Response<ResBody>, Error: Send, Future: Send> + Send + 'static,
        ReqBody: HttpBody<Data: Send, Error: Send> + From<Bytes> + Send + 'static,
        ResBody: HttpBody<Data = Bytes, Error: Send> + Send + Unpin + 'static,
    {
        if !self.route.methods.contains(request.method()) {
            return Ok(self.inner.call(request).await?.map(Body::untouched));
        }
        let key = match key::read(request.headers(), self.route.strict) {
            Ok(Some(key)) => key,
            Ok(None) if self.route.required => return answered(Problem::new(&problem::KEY_MISSING)),
            Ok(None) if self.route.mode == Mode::Atomic => {
                // Before its transaction begins, which must not wait for a slow client.
                let (head, body) = request.into_parts();
                return match read_request(body, self.route.request_limit, self.route.request_patience).await {
                    Ok(body) => Box::pin(self.run_unkeyed(Request::from_parts(head, body.into()))).await,
                    Err(problem) => answered(problem),
                };
            }
            Ok(None) => return Ok(self.inner.call(request).await?.map(Body::untouched)),
            Err(problem) => return answered(problem),
        };
        let (mut head, body) = request.into_parts();
        if self.route.credentials.is_some() {
            // The handler, or the service behind it, is to read the cookies that are compared.
            join_cookies(&mut head.headers);
        }
        let body = match read_request(body, self.route.request_limit, self.route.request_patience).await {
            Ok(body) => body,
            Err(problem) => return answered(problem),
        };
        let (asked, work) = match self.shared.ask(&self.route, &head, key.clone(), &body) {
            Ok(asked) => asked,
            Err(problem) => return answered(problem),
        };
        let claim = self.shared.claim(&self.route, &head.headers, &asked, work).await;
        let other = match claim.map(Claim::acquired::<()>) {
            Ok(Ok(lease)) if asked.differs_from(lease.operation()) => {
                // The first did not take effect, but whoever sent it may still try again.
                put_back(lease).await;
                return answered(Problem::new(&problem::CREDENTIALS_DIFFER));
            }
            Ok(Ok(lease)) if resource_of(lease.operation()) == asked.resource.as_deref() => {
                // The representation that is kept must suit every client.
                head.headers.remove(header::ACCEPT_ENCODING);
                // In a box: a replay should not have to move the room for a run about.
                return Box::pin(self.run(lease, Request::from_parts(head, body.into()))).await;
            }
            Ok(Ok(lease)) => {
                // The key belongs to another resource, where it was refused or failed.
                put_back(lease).await;
                return answered(mismatch(None));
            }
            Ok(Err(other)) => other,
            Err(error) => return answered(claim_problem(&error, key.as_str())),
        };
        match other {
            // Before everything else: one who is not the first caller learns nothing about the first request.
            other if other.operation().is_some_and(|op| asked.differs_from(op)) => {
                answered(Problem::new(&problem::CREDENTIALS_DIFFER))
            }
            other if other.operation().is_some_and(|op| resource_of(op) != asked.resource.as_deref()) => {
                answered(mismatch(other.operation()))
            }
            Claim::Replay(replay) => Ok(replay_answer(&self.route, replay, head).await.map(Body::whole)),
            other => answered(refusal(&other)),
        }
    }
}

impl<S: Store> Shared<S> {
    /// What the request asks of the ledger, or what is wrong with it.
    fn ask(&self, route: &Bound, head: &Parts, key: Key, body: &[u8]) -> Result<(Asked, Work), Problem> {
        let tenant = match (head.extensions.get::<Principal>(), &self.everyone) {
            (Some(principal), _) => &principal.tenant,
            (None, Some(everyone)) => everyone,
            (None, None) => {
                tracing::error!("nobody says whose request this is: the layer belongs inside of authentication");
                return Err(Problem::new(&problem::INTERNAL));
            }
        };
        // A nested router sees a shorter path, without the parameters of the part that led to it.
        let uri = head.extensions.get::<axum::extract::OriginalUri>().map_or(&head.uri, |uri| &uri.0);
        let path = normal_path(uri.path());
        let template = head.extensions.get::<axum::extract::MatchedPath>();
        let template = template.map_or(&*path, axum::extract::MatchedPath::as_str);
        let unfit = |error: Error| {
            tracing::error!(%error, "a route cannot be named in the ledger");
            Problem::new(&problem::INTERNAL)
        };
        let scope = route.scope(tenant, &head.method, template).map_err(unfit)?;
        let resource =
            (route.kind.is_some() || template != path).then(|| fitting(path.clone().into_owned(), Labels::MAX_BYTES));
        let mut labels = Labels::default();
        labels.0[RESOURCE].clone_from(&resource);
        if route.kind.is_some() {
            labels.0[METHOD] = Some(method_label(&head.method).to_owned());
        }
        let credentials = route.credentials.as_ref().map(|credentials| credentials.mark(&head.headers));
        labels.0[CREDENTIALS].clone_from(&credentials);
        let mut policy = route.policy.clone();
        if let Some(adapt) = &route.adapt {
            adapt(head, &mut policy);
        }
        if policy.retention.is_some_and(|kept| kept < Route::SHORTEST_RETENTION) {
            tracing::error!(retention = ?policy.retention, "a route forgets its keys at once, which protects from nothing");
            return Err(Problem::new(&problem::INTERNAL));
        }
        let fingerprint = route.sameness.fingerprint(head, &path, body);
        let work = Work::new(scope.clone(), key.clone(), fingerprint).policy(policy).labels(labels);
        Ok((Asked { scope, key, resource, credentials }, work))
    }

    /// Claims; where the key is in flight and the route or the client wants to wait, waits.
    async fn claim(
        &self,
        route: &Route,
        headers: &HeaderMap,
        asked: &Asked,
        work: Work,
    ) -> semel::Result<Claim<Lease<S>>> {
        let wait = preferred_wait(headers).map_or(route.wait, |wait| wait.min(route.longest_wait));
        let mut place = None;
        let worth = |there: &Operation| {
            if resource_of(there) == asked.resource.as_deref() && !asked.differs_from(there) {
                place = self.waiting.enter(&asked.scope, &asked.key);
            }
            place.is_some()
        };
        // Counted as what the client is told.
        let refusal = |there: &Operation| asked.differs_from(there).then_some("credentials_differ");
        self.ledger.claim_or_refuse(work, wait, worth, refusal).await
    }
}

/// The answer of a request that took effect before.
async fn replay_answer(route: &Route, replay: Replay, head: Parts) -> Response<Bytes> {
    let Replay { outcome, mismatch, operation } = replay;
    if let (Some(rebuild), true) = (&route.rebuild, outcome.kept) {
        return mark(rebuild(Reference(outcome.body), head).await, mismatch);
    }
    match Answer::decode(outcome.body) {
        Some(answer) if outcome.kept => answer.replay(mismatch),
        answer => {
            let mut response = told(Problem::new(&problem::RESPONSE_NOT_KEPT), &operation).into_http();
            if let Some(location) = answer.as_ref().and_then(Answer::location) {
                response.headers_mut().insert(header::LOCATION, location.clone());
            }
            mark(response, mismatch)
        }
    }
}

/// Puts a lease back that is not this request's to use.
async fn put_back<S: Store>(lease: Lease<S>) {
    // In a task of its own: with the client it would be left to lapse.
    let put_back = tokio::spawn(lease.release(Duration::ZERO)).await;
    if !matches!(put_back, Ok(Ok(_))) {
        tracing::debug!(?put_back, "a lease could not be put back");
    }
}

/// The label that tells resources of one template apart.
const RESOURCE: usize = 3;

/// The label that tells callers apart, on routes that want [the same credentials](Route::same_credentials).
const CREDENTIALS: usize = 2;

/// The label that tells methods apart, where the kind is the same for all of them.
const METHOD: usize = 0;

/// A method as a label. It is a dimension of the counters, so whatever a client invents is one and the same.
fn method_label(method: &Method) -> &str {
    const KNOWN: [Method; 7] =
        [Method::POST, Method::PATCH, Method::PUT, Method::DELETE, Method::GET, Method::HEAD, Method::OPTIONS];
    if KNOWN.contains(method) { method.as_str() } else { OTHER_METHOD }
}

/// The label of a method that is none of the common ones.
pub const OTHER_METHOD: &str = "other";

fn resource_of(operation: &Operation) -> Option<&str> {
    operation.labels.0[RESOURCE].as_deref()
}

/// A text, or its hash where it is too long.
fn fitting(text: String, most: usize) -> String {
    if text.len() <= most { text } else { Fingerprint::of_bytes(text.as_bytes()).to_hex() }
}

/// How long the client wants to wait, from `Prefer: wait=N` (RFC 7240).
fn preferred_wait(headers: &HeaderMap) -> Option<Duration> {
    const PREFER: HeaderName = HeaderName::from_static("prefer");
    let mut preferences =
        headers.get_all(PREFER).iter().filter_map(|line| line.to_str().ok()).flat_map(|line| line.split(','));
    let seconds = preferences.find_map(|preference| {
        let (name, value) = preference.split(';').next()?.split_once('=')?;
        name.trim().eq_ignore_ascii_case("wait").then(|| value.trim().trim_matches('"').parse::<u32>().ok())?
    })?;
    Some(Duration::from_secs(seconds.into()))
}

pub(crate) fn answered<B: HttpBody, E>(problem: Problem) -> Result<Response<Body<B>>, E> {
    Ok(problem.into_http().map(Body::whole))
}

fn told(problem: Problem, operation: &Operation) -> Problem {
    problem.with("first_seen", operation.created_at.to_string())
}

fn mismatch(operation: Option<&Operation>) -> Problem {
    let problem = Problem::new(&problem::PAYLOAD_MISMATCH);
    operation.into_iter().fold(problem, told)
}

/// The problem of a claim that was not acquired and has nothing to replay.
fn refusal(claim: &Claim<()>) -> Problem {
    let (kind, retry_after) = match claim {
        Claim::InFlight(_) => (&problem::IN_FLIGHT, Some(SOON)),
        Claim::NotYet(later) => (&problem::BACKING_OFF, Some(later.retry_after)),
        Claim::Mismatch(_) => (&problem::PAYLOAD_MISMATCH, None),
        Claim::Exhausted(_) => (&problem::ATTEMPTS_EXHAUSTED, None),
        Claim::InDoubt(_) => (&problem::IN_DOUBT, None),
        Claim::Acquired(()) | Claim::Replay(_) => (&problem::INTERNAL, None),
    };
    let problem = claim.operation().into_iter().fold(Problem::new(kind), told);
    retry_after.into_iter().fold(problem, Problem::retry_after)
}

/// The problem of a claim that broke. Here alone it is known that nothing was done, and which row it is that cannot be
/// read: that of the key.
fn claim_problem(error: &Error, key: &str) -> Problem {
    if !matches!(error, Error::Corrupt(_)) {
        return store_problem(error);
    }
    tracing::warn!(%error, problem = problem::ROW_UNREADABLE.name, "the row of a request's key cannot be read");
    Problem::new(&problem::ROW_UNREADABLE).about(key)
}

/// The problem of a run that broke. A row that cannot be read now could be read when it was claimed, and the work was
/// done since: that must not be told as if nothing had been done.
pub(crate) fn run_problem(error: &Error) -> Problem {
    if !matches!(error, Error::Corrupt(_)) {
        return store_problem(error);
    }
    tracing::warn!(%error, problem = problem::OUTCOME_UNKNOWN.name, "the outcome of a keyed request could not be stored");
    Problem::new(&problem::OUTCOME_UNKNOWN)
        .detail(
            "The request was carried out, and its outcome could not be stored: the row of its key cannot be read. It may \
             or may not have taken effect.",
        )
        .retry_after(SOON)
}

/// The problem of a store that did not answer as it should.
pub(crate) fn store_problem(error: &Error) -> Problem {
    let kind = match error {
        Error::Unavailable(_) | Error::Stopping => &problem::STORE_UNAVAILABLE,
        Error::OutcomeUnknown(_) => &problem::OUTCOME_UNKNOWN,
        _ => &problem::INTERNAL,
    };
    tracing::warn!(%error, problem = kind.name, "a keyed request could not be carried out");
    let problem = match error.reason() {
        Some(reason) if *kind == problem::STORE_UNAVAILABLE => {
            Problem::new(kind).detail(format!("Nothing was done: {reason}."))
        }
        _ => Problem::new(kind),
    };
    if kind.retryable { problem.retry_after(SOON) } else { problem }
}
