//! A keyed request as work for the ledger.

use http::{Method, request::Parts};
use semel::{Claim, Error, Fingerprint, Key, Labels, Lease, Operation, Scope, Store, Work};

use crate::{
    Principal, Problem, Route, bound::Bound, fingerprint::normal_path, layer::Shared, problem, refusal::problem_of,
};

/// The claim of a keyed request.
pub(crate) struct Asked {
    pub(crate) scope: Scope,
    pub(crate) key: Key,
    /// The resource, if the template matches many.
    resource: Option<String>,
    /// The mark of its credentials, if the route compares them.
    credentials: Option<String>,
}

impl Asked {
    /// Whether an operation was begun with other credentials. Operations from before the comparison have no mark.
    pub(crate) fn differs_from(&self, operation: &Operation) -> bool {
        let first = operation.labels.0[CREDENTIALS].as_ref();
        self.credentials.as_ref().zip(first).is_some_and(|(own, first)| own != first)
    }

    /// Whether an operation is of the same resource.
    pub(crate) fn is_about(&self, operation: &Operation) -> bool {
        operation.labels.0[RESOURCE] == self.resource
    }

    /// The problem, if the key belongs to another caller or to another resource of the template.
    pub(crate) fn conflict<S: Store>(&self, claim: &Claim<Lease<S>>) -> Option<Problem> {
        let there = match claim {
            Claim::Acquired(lease) => lease.operation(),
            other => other.operation()?,
        };
        // First of all: another caller must learn nothing about the first request.
        if self.differs_from(there) {
            return Some(Problem::new(&problem::CREDENTIALS_DIFFER));
        }
        if self.is_about(there) {
            return None;
        }
        Some(match claim {
            Claim::Acquired(_) => Problem::new(&problem::PAYLOAD_MISMATCH),
            _ => problem_of(&problem::PAYLOAD_MISMATCH, there),
        })
    }
}

impl<S: Store> Shared<S> {
    /// The work of a request, or a problem.
    pub(crate) fn ask(&self, route: &Bound, head: &Parts, key: Key, body: &[u8]) -> Result<(Asked, Work), Problem> {
        let tenant = match (head.extensions.get::<Principal>(), &self.everyone) {
            (Some(principal), _) => &principal.tenant,
            (None, Some(everyone)) => everyone,
            (None, None) => {
                tracing::error!("a request has no principal: the layer belongs inside of authentication");
                return Err(Problem::new(&problem::INTERNAL));
            }
        };
        // A nested router sees a shorter path, without the parameters of its prefix.
        let uri = head.extensions.get::<axum::extract::OriginalUri>().map_or(&head.uri, |uri| &uri.0);
        let path = normal_path(uri.path());
        let template = head.extensions.get::<axum::extract::MatchedPath>();
        let template = template.map_or(&*path, axum::extract::MatchedPath::as_str);
        let unfit = |error: Error| {
            tracing::error!(%error, "the scope of a route is not valid");
            Problem::new(&problem::INTERNAL)
        };
        let scope = route.scope(tenant, &head.method, template).map_err(unfit)?;
        let resource =
            (route.kind.is_some() || template != path).then(|| fitting(path.clone().into_owned(), LONGEST_PATH));
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
            tracing::error!(retention = ?policy.retention, "the retention of a route is too short to protect anything");
            return Err(Problem::new(&problem::INTERNAL));
        }
        let fingerprint = route.sameness.fingerprint(head, &path, body);
        let work = Work::new(scope.clone(), key.clone(), fingerprint).policy(policy).labels(labels);
        Ok((Asked { scope, key, resource, credentials }, work))
    }
}

/// The longest path that is a label; a longer one is a hash. It must not change: a retry is compared with the label of
/// the first request.
const LONGEST_PATH: usize = 128;

/// The label that distinguishes the resources of one template.
const RESOURCE: usize = 3;

/// The label that distinguishes callers, on routes with [`Route::same_credentials`].
const CREDENTIALS: usize = 2;

/// The label that distinguishes methods, if all share one kind.
const METHOD: usize = 0;

/// A method as a label. It is a dimension of the counters, so all unknown methods share one value.
fn method_label(method: &Method) -> &str {
    const KNOWN: [Method; 7] =
        [Method::POST, Method::PATCH, Method::PUT, Method::DELETE, Method::GET, Method::HEAD, Method::OPTIONS];
    if KNOWN.contains(method) { method.as_str() } else { OTHER_METHOD }
}

/// The label of an unknown method.
pub const OTHER_METHOD: &str = "other";

/// A text, or its hash if it is too long.
pub(crate) fn fitting(text: String, most: usize) -> String {
    if text.len() <= most { text } else { Fingerprint::of_bytes(text.as_bytes()).to_hex() }
}
