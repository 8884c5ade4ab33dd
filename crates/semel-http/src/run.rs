//! The run of a request that acquired the lease.

use std::future::poll_fn;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body::Body as HttpBody;
use parking_lot::Mutex;
use semel::{Context, Handed, Lease, NODE_STOPPED, OnLost, Outcome, Ran, Store, Unfinished};
use tower::Service;
use tracing::Instrument as _;

use crate::{
    Attempt, Body, Mode, Problem, Reason, Reference, Route, Verdict,
    answer::Answer,
    body::{Read, read_answer},
    caller::RequestTx,
    layer::IdempotencyService,
    problem,
    refusal::{run_problem, store_problem},
    serve::Served,
};

impl<S: Store, Inner> IdempotencyService<S, Inner> {
    /// Runs the request in a separate task: a client that disconnects stops neither the handler nor the settle.
    pub(crate) async fn run<ReqBody, ResBody>(
        self,
        lease: Lease<S>,
        request: Request<ReqBody>,
    ) -> Result<Served<ResBody, Inner::Error>, Problem>
    where
        Inner: Service<Request<ReqBody>, Response = Response<ResBody>, Error: Send, Future: Send> + Send + 'static,
        ReqBody: Send + 'static,
        ResBody: HttpBody<Data = Bytes, Error: Send> + Send + Unpin + 'static,
    {
        let Self { inner, route, .. } = self;
        // A request is carried out once: it has no newer data.
        let work = Mutex::new(Some((inner, request)));
        let mode = route.mode;
        let terms = lease.operation().lease.as_ref().map(|lease| lease.terms.on_lost);
        let doubts = mode == Mode::Leased && terms.is_some_and(OnLost::doubts);
        let handler = move |context: Context<S>, tx: Option<S::Tx>| {
            let (work, route) = (work.lock().take(), route.clone());
            async move {
                let Some((inner, mut request)) = work else {
                    return (Err(Unfinished::failed_for_good("a request is carried out once")), None);
                };
                request.extensions_mut().insert(Attempt::new(&context));
                if let Some(tx) = tx {
                    request.extensions_mut().insert(RequestTx::<S>(tx));
                }
                let (settle, response) = carry_out(inner, request, &route, doubts).await;
                (settle, Some(response))
            }
            .in_current_span()
        };
        let ran = match mode {
            Mode::Leased => lease.run_handing(move |context| handler(context, None)).await,
            Mode::Atomic => lease.run_atomic_handing(move |context, tx| handler(context, Some(tx))).await,
        };
        let problem = match ran {
            // The first caller gets the handler's answer only if its outcome was stored.
            Ok((_, Handed::Stored(Some(response)))) => return Ok(response),
            Ok((Ran::LeaseLost, _)) => Problem::new(&problem::LEASE_LOST),
            Ok((Ran::Released, _)) => {
                store_problem(&semel::Error::Unavailable("the run was released".into())).detail(RELEASED)
            }
            Ok((Ran::Doubted(why), _)) => cut_off(&why),
            // Why is in the log, by the ledger.
            Ok((Ran::Failed(_), Handed::NotStored)) => Problem::new(&problem::NOT_COMMITTED),
            Ok(_) => Problem::new(&problem::INTERNAL),
            Err(error) => run_problem(&error),
        };
        Err(problem)
    }

    /// A request without a key on an atomic route: it gets a transaction, and nothing is stored about it.
    pub(crate) async fn run_unkeyed<ReqBody, ResBody>(
        self,
        mut request: Request<ReqBody>,
    ) -> Result<Served<ResBody, Inner::Error>, Problem>
    where
        Inner: Service<Request<ReqBody>, Response = Response<ResBody>, Error: Send, Future: Send> + Send + 'static,
        ReqBody: Send + 'static,
        ResBody: HttpBody<Data = Bytes, Error: Send> + Send + Unpin + 'static,
    {
        let Self { mut inner, shared, route } = self;
        let done = shared.ledger.transact(move |tx| {
            request.extensions_mut().insert(RequestTx::<S>(tx));
            async move {
                let (head, body) = call(&mut inner, request).await.map_err(Undone::Failed)?.into_parts();
                // As with a key: without a final answer the transaction rolls back.
                let kept = keeps(head.status) && verdict_of(&head, &route) == Verdict::Complete;
                let response = Response::from_parts(head, body);
                if kept { Ok(response) } else { Err(Undone::Answered(response)) }
            }
            .in_current_span()
        });
        match done.await {
            Ok(response) | Err(Undone::Answered(response)) => Ok(Ok(response.map(Body::untouched))),
            Err(Undone::Failed(error)) => Ok(Err(error)),
            Err(Undone::Store(semel::Error::Refused(error))) => {
                tracing::warn!(error, "a request was not committed");
                Err(Problem::new(&problem::NOT_COMMITTED))
            }
            Err(Undone::Store(error)) => Err(store_problem(&error)),
        }
    }
}

/// Why the transaction of a request without a key was not committed.
enum Undone<R, E> {
    /// The answer is not final.
    Answered(R),
    /// The handler failed.
    Failed(E),
    /// The store could not.
    Store(semel::Error),
}

impl<R, E> From<semel::Error> for Undone<R, E> {
    fn from(error: semel::Error) -> Self {
        Self::Store(error)
    }
}

/// The detail for the first caller of a run that was released.
const RELEASED: &str = "The request was released before it ended: the server stops, or the database could not commit. \
                        Send it again with the same key, and it is executed.";

/// The problem for a run without an answer that may have had an effect: the node stopped, or the handler panicked. A
/// repeat is not executed.
fn cut_off(why: &str) -> Problem {
    let (kind, what) = match why {
        NODE_STOPPED => (&problem::IN_DOUBT, "The server stopped"),
        _ => (&problem::INTERNAL, "The server failed"),
    };
    let detail = format!("{what} while it executed this request: it may or may not have taken effect.");
    Problem::new(kind).detail(detail).with("retryable", false)
}

/// The verdict of an answer: the handler's, else that of its status.
fn verdict_of(head: &http::response::Parts, route: &Route) -> Verdict {
    head.extensions.get::<Verdict>().copied().unwrap_or_else(|| (route.verdict)(head.status))
}

/// Whether the request's transaction commits.
fn keeps(status: StatusCode) -> bool {
    status.as_u16() < 400
}

async fn call<Inner, ReqBody>(inner: &mut Inner, request: Request<ReqBody>) -> Result<Inner::Response, Inner::Error>
where
    Inner: Service<Request<ReqBody>>,
{
    poll_fn(|context| inner.poll_ready(context)).await?;
    inner.call(request).await
}

/// Calls the handler: what is to be stored under its key, and what its caller is answered. `doubts` says whether work that
/// ended without an answer may have had an effect that must not be repeated.
async fn carry_out<Inner, ReqBody, ResBody>(
    mut inner: Inner,
    request: Request<ReqBody>,
    route: &Route,
    doubts: bool,
) -> (Result<Outcome, Unfinished>, Result<Response<Body<ResBody>>, Inner::Error>)
where
    Inner: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: HttpBody<Data = Bytes> + Unpin,
{
    let silent = "the service gave no answer";
    let response = match call(&mut inner, request).await {
        Ok(response) => response,
        // A time-out inside of us, say: the work may have been done.
        Err(error) if doubts => return (Err(Unfinished::Doubted(silent.into())), Err(error)),
        Err(error) => return (Err(Unfinished::failed(silent)), Err(error)),
    };
    let (mut head, body) = response.into_parts();
    let status = head.status;
    let verdict = match verdict_of(&head, route) {
        // Without `hold` (atomic mode, or a route that reruns) a doubt is a failure.
        Verdict::Doubt if !doubts && head.extensions.get::<Verdict>().is_none() => Verdict::Fail,
        verdict => verdict,
    };
    let reference = head.extensions.remove::<Reference>();
    let reason = head.extensions.remove::<Reason>().map(|Reason(reason)| reason);
    let reason = || reason.unwrap_or_else(|| format!("answered {status}"));
    let (body, outcome) = if verdict != Verdict::Complete {
        (Body::untouched(body), None)
    } else if let Some(Reference(name)) = reference.filter(|_| route.rebuild.is_some()) {
        (Body::untouched(body), Some(Outcome::kept(name)))
    } else if streams(status, head.headers.get(header::CONTENT_TYPE)) {
        let answer = Answer::new(status, &head.headers, Bytes::new());
        (Body::untouched(body), Some(answer.not_kept()))
    } else {
        match read_answer(body, route.answer_limit, route.answer_patience).await {
            Read::Whole(bytes) => {
                let answer = Answer::new(status, &head.headers, bytes.clone());
                // In reference mode nothing can be rebuilt without a reference.
                let outcome = if route.rebuild.is_none() { answer.kept() } else { answer.not_kept() };
                (Body::whole(bytes), Some(outcome))
            }
            Read::Passing(body) => (body, Some(Answer::new(status, &head.headers, Bytes::new()).not_kept())),
        }
    };
    let settle = match (verdict, outcome) {
        (Verdict::Complete, Some(outcome)) if route.mode == Mode::Atomic && !keeps(status) => {
            Err(Unfinished::Declined(outcome))
        }
        (Verdict::Complete, outcome) => Ok(outcome.unwrap_or_else(|| Outcome::not_kept(""))),
        (Verdict::Release, _) => Err(Unfinished::released(std::time::Duration::ZERO)),
        (Verdict::Fail, _) => Err(Unfinished::failed(reason())),
        (Verdict::Doubt, _) => Err(Unfinished::Doubted(reason())),
    };
    (settle, Ok(Response::from_parts(head, body)))
}

/// A streamed answer, or an upgrade, cannot be stored.
fn streams(status: StatusCode, content_type: Option<&HeaderValue>) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS
        || content_type.is_some_and(|value| value.as_bytes().to_ascii_lowercase().starts_with(b"text/event-stream"))
}
