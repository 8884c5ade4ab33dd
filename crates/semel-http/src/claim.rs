//! The claim of a request, and its wait for a key in flight.

use std::time::Duration;

use http::{HeaderMap, HeaderName};
use semel::{Claim, Lease, Operation, Store, Work};

use crate::{Problem, Route, ask::Asked, headers::items, layer::Shared, refusal::claim_problem};

impl<S: Store> Shared<S> {
    /// Claims. If the key is in flight and the route or the client wants to wait, waits.
    pub(crate) async fn claim(
        &self,
        route: &Route,
        headers: &HeaderMap,
        asked: &Asked,
        work: Work,
    ) -> Result<Claim<Lease<S>>, Problem> {
        let wait = preferred_wait(headers).map_or(route.wait, |wait| wait.min(route.longest_wait));
        let mut place = None;
        let worth = |there: &Operation| {
            if asked.is_about(there) && !asked.differs_from(there) {
                place = self.waiting.enter(&asked.scope, &asked.key);
            }
            place.is_some()
        };
        // Counted under the answer that the client gets.
        let refusal = |there: &Operation| asked.differs_from(there).then_some("credentials_differ");
        let claim = self.ledger.claim_or_refuse(work, wait, worth, refusal).await;
        claim.map_err(|error| claim_problem(&error, asked.key.as_str()))
    }
}

/// The wait that the client asks for with `Prefer: wait=N` (RFC 7240).
fn preferred_wait(headers: &HeaderMap) -> Option<Duration> {
    const PREFER: HeaderName = HeaderName::from_static("prefer");
    let seconds = items(headers, &PREFER).find_map(|preference| {
        let (name, value) = preference.split(';').next()?.split_once('=')?;
        name.trim().eq_ignore_ascii_case("wait").then(|| value.trim().trim_matches('"').parse::<u32>().ok())?
    })?;
    Some(Duration::from_secs(seconds.into()))
}

/// Releases a lease that this request must not use.
pub(crate) async fn release<S: Store>(lease: Lease<S>) {
    // In a separate task: if the client disconnects, the lease must not be left to expire.
    let release = tokio::spawn(lease.release(Duration::ZERO)).await;
    if !matches!(release, Ok(Ok(_))) {
        tracing::debug!(?release, "a lease could not be released");
    }
}
