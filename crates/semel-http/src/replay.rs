//! The answer to a repeat of a request that took effect.

use bytes::Bytes;
use http::{Response, header, request::Parts};
use semel::Replay;

use crate::{
    Reference, Route,
    answer::{Answer, mark},
    problem,
    refusal::problem_of,
};

/// The stored answer.
pub(crate) async fn replay(route: &Route, replay: Replay, head: Parts) -> Response<Bytes> {
    let Replay { outcome, mismatch, operation } = replay;
    if let (Some(rebuild), true) = (&route.rebuild, outcome.kept) {
        return mark(rebuild(Reference(outcome.body), head).await, mismatch);
    }
    match Answer::decode(outcome.body) {
        Some(answer) if outcome.kept => answer.replay(mismatch),
        answer => {
            let mut response = problem_of(&problem::RESPONSE_NOT_KEPT, &operation).into_http();
            if let Some(location) = answer.as_ref().and_then(Answer::location) {
                response.headers_mut().insert(header::LOCATION, location.clone());
            }
            mark(response, mismatch)
        }
    }
}
