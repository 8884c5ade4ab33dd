//! The tower layer of a route, and the service that it makes.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use semel::{Ledger, Store};
use tower::{Layer, Service};

use crate::{
    Body, BoxFuture, Route,
    bound::Bound,
    headers::{MISMATCH, REPLAYED},
    waiting::Waiting,
};

/// Idempotency for the routes of a service. Cheap to clone.
pub struct Idempotency<S: Store> {
    shared: Arc<Shared<S>>,
}

pub(crate) struct Shared<S: Store> {
    pub(crate) ledger: Ledger<S>,
    pub(crate) waiting: Arc<Waiting>,
    /// The tenant of requests without a principal.
    pub(crate) everyone: Option<String>,
}

impl<S: Store> Clone for Idempotency<S> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<S: Store> Idempotency<S> {
    /// For requests that carry a [`Principal`](crate::Principal) in their extensions.
    #[must_use]
    pub fn new(ledger: Ledger<S>) -> Self {
        Self { shared: Arc::new(Shared { ledger, waiting: Arc::default(), everyone: None }) }
    }

    /// For a service without users: all requests share the keys of one tenant. A caller can then get the
    /// stored answer of any key that it can guess.
    #[must_use]
    pub fn for_everyone(ledger: Ledger<S>, tenant: impl Into<String>) -> Self {
        Self { shared: Arc::new(Shared { ledger, waiting: Arc::default(), everyone: Some(tenant.into()) }) }
    }

    /// The layer for a route.
    #[must_use]
    pub fn layer(&self, route: Route) -> IdempotencyLayer<S> {
        IdempotencyLayer { shared: self.shared.clone(), route: Arc::new(Bound::new(route)) }
    }
}

/// The layer for a route; see [`Idempotency::layer`].
pub struct IdempotencyLayer<S: Store> {
    shared: Arc<Shared<S>>,
    route: Arc<Bound>,
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

/// The service with the layer: its requests take effect once.
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
        // The service that is ready serves the request; its clone stays.
        let inner = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, inner);
        let service = Self { shared: self.shared.clone(), route: self.route.clone(), inner };
        // Only the layer may set these headers.
        for name in [REPLAYED, MISMATCH] {
            request.headers_mut().remove(name);
        }
        Box::pin(async move {
            let served = service.serve(request).await;
            served.unwrap_or_else(|refused| Ok(refused.into_http().map(Body::whole)))
        })
    }
}
