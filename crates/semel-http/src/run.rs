//! The course of a request that is the one to be carried out.

use std::{
    future::poll_fn,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body::Body as HttpBody;
use semel::{Context, Lease, NODE_STOPPED, OnLost, Outcome, Ran, Store, Unfinished};
use tower::Service;
use tracing::Instrument as _;

use crate::{
    Attempt, Body, Mode, Problem, Reason, Reference, Route, Verdict,
    answer::Answer,
    body::{Read, read_answer},
    caller::Handed,
    layer::{IdempotencyService, answered, run_problem, store_problem},
    problem,
};

/// What the handler said, for the first caller: nobody else gets it from here.
struct Said<B: HttpBody, E> {
    verdict: Verdict,
    response: Result<Response<Body<B>>, E>,
}

type Slot<B, E> = Arc<Mutex<Option<Said<B, E>>>>;

fn take<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl<S: Store, Inner> IdempotencyService<S, Inner> {
    /// Carries the request out, in a task of its own: a client that goes away stops neither the handler
    /// nor the settling of its outcome.
    pub(crate) async fn run<ReqBody, ResBody>(
        self,
        lease: Lease<S>,
        request: Request<ReqBody>,
    ) -> Result<Response<Body<ResBody>>, Inner::Error>
    where
        Inner: Service<Request<ReqBody>, Response = Response<ResBody>, Error: Send, Future: Send> + Send + 'static,
        ReqBody: Send + 'static,
        ResBody: HttpBody<Data = Bytes, Error: Send> + Send + Unpin + 'static,
    {
        let Self { inner, route, .. } = self;
        let said: Slot<ResBody, Inner::Error> = Arc::default();
        let work = Arc::new(Mutex::new(Some((inner, request))));
        let mode = route.mode;
        let terms = lease.operation().lease.as_ref().map(|lease| lease.terms.on_lost);
        let doubts = mode == Mode::Leased && terms.is_some_and(OnLost::doubts);
        let handler = {
            let said = said.clone();
            move |context: Context<S>, tx: Option<S::Tx>| {
                let (work, said, route) = (take(&work), said.clone(), route.clone());
                async move {
                    let Some((inner, mut request)) = work else {
                        return Err(Unfinished::failed_for_good("a request is carried out once"));
                    };
                    request.extensions_mut().insert(Attempt::new(&context));
                    if let Some(tx) = tx {
                        request.extensions_mut().insert(Handed::<S>(tx));
                    }
                    let (now, settle) = carry_out(inner, request, &route, doubts).await;
                    *said.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
                    settle
                }
                .in_current_span()
            }
        };
        let ran = match mode {
            Mode::Leased => lease.run(move |context| handler(context, None)).await,
            Mode::Atomic => lease.run_atomic(move |context, tx| handler(context, Some(tx))).await,
        };
        let said = take(&said);
        // The first caller gets the handler's answer only if what it says is what is stored.
        let so = |verdict: Verdict| said.as_ref().is_some_and(|said| said.verdict == verdict);
        let problem = match &ran {
            Ok(Ran::Completed(_)) if so(Verdict::Final) => None,
            Ok(Ran::Failed(_)) if so(Verdict::Fail) => None,
            Ok(Ran::Released) if so(Verdict::Release) => None,
            Ok(Ran::Doubted(_)) if so(Verdict::Doubt) => None,
            Ok(Ran::LeaseLost) => Some(Problem::new(&problem::LEASE_LOST)),
            Ok(Ran::Released) => {
                Some(store_problem(&semel::Error::Unavailable("the run was put back".into())).detail(PUT_BACK))
            }
            Ok(Ran::Doubted(why)) => Some(cut_off(why)),
            // Why is in the log, by the ledger.
            Ok(Ran::Failed(_)) if said.is_some() => Some(Problem::new(&problem::NOT_COMMITTED)),
            Ok(_) => Some(Problem::new(&problem::INTERNAL)),
            Err(error) => Some(run_problem(error)),
        };
        match (problem, said) {
            (None, Some(said)) => said.response,
            (problem, _) => answered(problem.unwrap_or_else(|| Problem::new(&problem::INTERNAL))),
        }
    }

    /// A request without a key on an atomic route: its transaction all the same, and nothing remembered.
    pub(crate) async fn run_unkeyed<ReqBody, ResBody>(
        self,
        mut request: Request<ReqBody>,
    ) -> Result<Response<Body<ResBody>>, Inner::Error>
    where
        Inner: Service<Request<ReqBody>, Response = Response<ResBody>, Error: Send, Future: Send> + Send + 'static,
        ReqBody: Send + 'static,
        ResBody: HttpBody<Data = Bytes, Error: Send> + Send + Unpin + 'static,
    {
        let Self { mut inner, shared, route } = self;
        let done = shared.ledger.transact(move |tx| {
            request.extensions_mut().insert(Handed::<S>(tx));
            async move {
                let (head, body) = match call(&mut inner, request).await {
                    Ok(response) => response.into_parts(),
                    Err(error) => return Err(Err(error)),
                };
                // As with a key: what is not final has not happened.
                let kept = keeps(head.status) && verdict_of(&head, &route) == Verdict::Final;
                let response = Ok(Response::from_parts(head, body));
                if kept { Ok(response) } else { Err(response) }
            }
            .in_current_span()
        });
        match done.await {
            Ok(response) => Ok(response?.map(Body::untouched)),
            Err(semel::Error::Refused(error)) => {
                tracing::warn!(error, "a request was not committed");
                answered(Problem::new(&problem::NOT_COMMITTED))
            }
            Err(error) => answered(store_problem(&error)),
        }
    }
}

/// What the first caller is told of a run that was put back before it ended.
const PUT_BACK: &str = "The request was put back before it ended: the server stops, or the database could not commit. \
                        Sent again with the same key, it is carried out.";

/// The problem of a run that ended without an answer, where it may have had an effect: the node stopped, or the handler
/// panicked. Sent again, it is not carried out again.
fn cut_off(why: &str) -> Problem {
    let (kind, what) = match why {
        NODE_STOPPED => (&problem::IN_DOUBT, "The server stopped"),
        _ => (&problem::INTERNAL, "The server made a mistake of its own"),
    };
    let detail = format!("{what} while this request was being carried out: it may or may not have taken effect.");
    Problem::new(kind).detail(detail).with("retryable", false)
}

/// What an answer means: what the handler says, else what its status says.
fn verdict_of(head: &http::response::Parts, route: &Route) -> Verdict {
    head.extensions.get::<Verdict>().copied().unwrap_or_else(|| (route.verdict)(head.status))
}

/// Whether what was written in a request's transaction is kept.
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

/// Calls the handler: what it says to its caller, and what that means for its key. `doubts` says whether work that
/// ended without an answer may have had an effect that must not be repeated.
async fn carry_out<Inner, ReqBody, ResBody>(
    mut inner: Inner,
    request: Request<ReqBody>,
    route: &Route,
    doubts: bool,
) -> (Said<ResBody, Inner::Error>, Result<Outcome, Unfinished>)
where
    Inner: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: HttpBody<Data = Bytes> + Unpin,
{
    let silent = "the service gave no answer";
    let response = match call(&mut inner, request).await {
        Ok(response) => response,
        // A time-out inside of us, say: whatever was begun may have been done.
        Err(error) if doubts => {
            let said = Said { verdict: Verdict::Doubt, response: Err(error) };
            return (said, Err(Unfinished::Unknown(silent.into())));
        }
        Err(error) => {
            let said = Said { verdict: Verdict::Fail, response: Err(error) };
            return (said, Err(Unfinished::failed(silent)));
        }
    };
    let (mut head, body) = response.into_parts();
    let status = head.status;
    let verdict = match verdict_of(&head, route) {
        // Where doubt is not kept (atomic mode, or a route that may run again) it is one more failure.
        Verdict::Doubt if !doubts && head.extensions.get::<Verdict>().is_none() => Verdict::Fail,
        verdict => verdict,
    };
    let reference = head.extensions.remove::<Reference>();
    let reason = head.extensions.remove::<Reason>().map(|Reason(reason)| reason);
    let reason = || reason.unwrap_or_else(|| format!("answered {status}"));
    let (body, outcome) = if verdict != Verdict::Final {
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
                // In reference mode there is nothing to rebuild from without a reference.
                let outcome = if route.rebuild.is_none() { answer.kept() } else { answer.not_kept() };
                (Body::whole(bytes), Some(outcome))
            }
            Read::Passing(body) => (body, Some(Answer::new(status, &head.headers, Bytes::new()).not_kept())),
        }
    };
    let settle = match (verdict, outcome) {
        (Verdict::Final, Some(outcome)) if route.mode == Mode::Atomic && !keeps(status) => {
            Err(Unfinished::Declined(outcome))
        }
        (Verdict::Final, outcome) => Ok(outcome.unwrap_or_else(|| Outcome::not_kept(""))),
        (Verdict::Release, _) => Err(Unfinished::NotYet(std::time::Duration::ZERO)),
        (Verdict::Fail, _) => Err(Unfinished::failed(reason())),
        (Verdict::Doubt, _) => Err(Unfinished::Unknown(reason())),
    };
    (Said { verdict, response: Ok(Response::from_parts(head, body)) }, settle)
}

/// An answer that goes on, or becomes another protocol, cannot be kept.
fn streams(status: StatusCode, content_type: Option<&HeaderValue>) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS
        || content_type.is_some_and(|value| value.as_bytes().to_ascii_lowercase().starts_with(b"text/event-stream"))
}
