//! The protocol: from a request's key to its answer.

use bytes::Bytes;
use http::{Request, Response, header, request::Parts};
use http_body::Body as HttpBody;
use semel::{Claim, Store};
use tower::Service;

use crate::{
    Body, Mode, Problem, Route,
    body::read_request,
    claim::release,
    cookies::join_cookies,
    key,
    layer::IdempotencyService,
    problem,
    refusal::{SOON, problem_of},
    replay::replay,
};

/// The answer to a request, or the service's own error.
pub(crate) type Served<ResBody, Error> = Result<Response<Body<ResBody>>, Error>;

impl<S: Store, Inner> IdempotencyService<S, Inner> {
    /// Serves a request.
    ///
    /// # Errors
    /// The problem that the layer answers with.
    pub(crate) async fn serve<ReqBody, ResBody>(
        self,
        request: Request<ReqBody>,
    ) -> Result<Served<ResBody, Inner::Error>, Problem>
    where
        Inner: Service<Request<ReqBody>, Response = Response<ResBody>, Error: Send, Future: Send> + Send + 'static,
        ReqBody: HttpBody<Data: Send, Error: Send> + From<Bytes> + Send + 'static,
        ResBody: HttpBody<Data = Bytes, Error: Send> + Send + Unpin + 'static,
    {
        if !self.route.methods.contains(request.method()) {
            return Ok(self.pass_on(request).await);
        }
        let key = match key::read(request.headers(), self.route.strict)? {
            Some(key) => key,
            None if self.route.required => return Err(Problem::new(&problem::KEY_MISSING)),
            None => return self.serve_unkeyed(request).await,
        };
        let (mut head, body) = read(request, &self.route).await?;
        if self.route.credentials.is_some() {
            // The handler, or the service behind it, must read the cookies that are compared.
            join_cookies(&mut head.headers);
        }
        let (asked, work) = self.shared.ask(&self.route, &head, key, &body)?;
        let claim = self.shared.claim(&self.route, &head.headers, &asked, work).await?;
        if let Some(conflict) = asked.conflict(&claim) {
            if let Claim::Acquired(lease) = claim {
                // The first request did not take effect, but its caller may still retry.
                release(lease).await;
            }
            return Err(conflict);
        }
        match claim {
            Claim::Acquired(lease) => {
                // The stored representation must suit every client.
                head.headers.remove(header::ACCEPT_ENCODING);
                // Boxed, so that a replay does not move the large future of a run.
                Box::pin(self.run(lease, Request::from_parts(head, body.into()))).await
            }
            Claim::Replay(stored) => Ok(Ok(replay(&self.route, stored, head).await.map(Body::whole))),
            Claim::InFlight(there) => Err(problem_of(&problem::IN_FLIGHT, &there.operation).retry_after(SOON)),
            Claim::NotYet(later) => {
                Err(problem_of(&problem::BACKING_OFF, &later.operation).retry_after(later.retry_after))
            }
            Claim::Mismatch(operation) => Err(problem_of(&problem::PAYLOAD_MISMATCH, &operation)),
            Claim::Exhausted(operation) => Err(problem_of(&problem::ATTEMPTS_EXHAUSTED, &operation)),
            Claim::InDoubt(operation) => Err(problem_of(&problem::IN_DOUBT, &operation)),
        }
    }

    /// A request without a key. Nothing is stored about it.
    async fn serve_unkeyed<ReqBody, ResBody>(
        self,
        request: Request<ReqBody>,
    ) -> Result<Served<ResBody, Inner::Error>, Problem>
    where
        Inner: Service<Request<ReqBody>, Response = Response<ResBody>, Error: Send, Future: Send> + Send + 'static,
        ReqBody: HttpBody<Data: Send, Error: Send> + From<Bytes> + Send + 'static,
        ResBody: HttpBody<Data = Bytes, Error: Send> + Send + Unpin + 'static,
    {
        match self.route.mode {
            Mode::Leased => Ok(self.pass_on(request).await),
            Mode::Atomic => {
                // Before the transaction begins, because it must not wait for a slow client.
                let (head, body) = read(request, &self.route).await?;
                Box::pin(self.run_unkeyed(Request::from_parts(head, body.into()))).await
            }
        }
    }

    /// Leaves a request to the service.
    async fn pass_on<ReqBody, ResBody>(mut self, request: Request<ReqBody>) -> Served<ResBody, Inner::Error>
    where
        Inner: Service<Request<ReqBody>, Response = Response<ResBody>>,
        ResBody: HttpBody,
    {
        Ok(self.inner.call(request).await?.map(Body::untouched))
    }
}

/// Reads a request's body.
async fn read<B: HttpBody>(request: Request<B>, route: &Route) -> Result<(Parts, Bytes), Problem> {
    let (head, body) = request.into_parts();
    let body = read_request(body, route.request_limit, route.request_patience).await?;
    Ok((head, body))
}
