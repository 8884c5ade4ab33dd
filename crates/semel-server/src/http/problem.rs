//! The registry of all problem types of the server. Those of one service are in its folder.

use std::time::Duration;

use axum::http::StatusCode;
pub use semel_http::problem::{
    BODY_INCOMPLETE, BODY_TIMEOUT, BODY_TOO_LARGE, INTERNAL, Kind, OUTCOME_UNKNOWN, Problem, ROW_UNREADABLE,
    STORE_UNAVAILABLE,
};

use crate::{gateway, services};

/// There is nothing at this path.
pub static NOT_FOUND: Kind = Kind {
    name: "not-found",
    status: StatusCode::NOT_FOUND,
    retryable: false,
    title: "Not found",
    meaning: "There is nothing at this path.",
    remedy: "Check the spelling of the path. The resource may also have been deleted after its retention.",
};

/// The path does not accept this method.
pub static METHOD_NOT_ALLOWED: Kind = Kind {
    name: "method-not-allowed",
    status: StatusCode::METHOD_NOT_ALLOWED,
    retryable: false,
    title: "Method not allowed",
    meaning: "This path does not accept this method.",
    remedy: "The Allow header of the answer lists the methods that the path accepts.",
};

/// The request is for another host.
pub static HOST_NOT_ALLOWED: Kind = Kind {
    name: "host-not-allowed",
    status: StatusCode::FORBIDDEN,
    retryable: false,
    title: "Host not allowed",
    meaning: "The Host header names another machine. No API tokens are configured, so only loopback is served.",
    remedy: "Call the server as localhost, 127.0.0.1 or [::1]. Without this rule, any web page whose name \
             resolves to 127.0.0.1 could use the server through a browser on this machine.",
};

/// The request was sent by a page of another origin.
pub static CROSS_ORIGIN: Kind = Kind {
    name: "cross-origin",
    status: StatusCode::FORBIDDEN,
    retryable: false,
    title: "Cross-origin request",
    meaning: "The Origin header names another site. No API tokens are configured, so only the server's own pages may call it.",
    remedy: "Call the server from a program rather than from a page of another origin; another port of this machine \
             is another origin too.",
};

/// The body is not a JSON object.
pub static INVALID_JSON: Kind = Kind {
    name: "invalid-json",
    status: StatusCode::BAD_REQUEST,
    retryable: false,
    title: "Not a JSON object",
    meaning: "The request's body is not a JSON object.",
    remedy: "Send one JSON object in UTF-8. The detail of the answer says where reading it failed. Nothing was done.",
};

/// Fields of the body break the rules.
pub static INVALID_FIELDS: Kind = Kind {
    name: "invalid-fields",
    status: StatusCode::UNPROCESSABLE_ENTITY,
    retryable: false,
    title: "Fields are wrong",
    meaning: "One or more fields of the request are missing, unknown or break a rule.",
    remedy: "The member errors lists the wrong fields, the first twenty of them with the reason. Nothing was done, and the key is still free.",
};

/// The query breaks the rules.
pub static INVALID_QUERY: Kind = Kind {
    name: "invalid-query",
    status: StatusCode::BAD_REQUEST,
    retryable: false,
    title: "The query is wrong",
    meaning: "One or more parameters after the question mark break a rule.",
    remedy: "The member errors lists the wrong parameters, the first twenty of them with the reason. A cursor must be used as a page returned it.",
};

/// The transfer coding is not supported.
pub static TRANSFER_CODING: Kind = Kind {
    name: "transfer-coding",
    status: StatusCode::NOT_IMPLEMENTED,
    retryable: false,
    title: "Transfer coding not supported",
    meaning: "The request's body was sent in a transfer coding other than chunked.",
    remedy: "Send it in chunks or with its length. To compress it, use Content-Encoding.",
};

/// There is no memory for the body.
pub static NO_ROOM: Kind = Kind {
    name: "no-room",
    status: StatusCode::SERVICE_UNAVAILABLE,
    retryable: true,
    title: "No room for the body",
    meaning: "The bodies of other requests use all the memory that this node has for \
              them. Nothing was done.",
    remedy: "Send it again after the time in Retry-After, with the same key if it has one. If this lasts, a client \
             may be sending long bodies slowly: limit requests per address at the proxy, or raise http.body_budget.",
};

/// The principal may only read.
pub static ROLE_NOT_ALLOWED: Kind = Kind {
    name: "role-not-allowed",
    status: StatusCode::FORBIDDEN,
    retryable: false,
    title: "Role not allowed",
    meaning: "This principal may read, but not act.",
    remedy: "Use a principal whose role allows it. Nothing was done.",
};

/// The server's own kinds.
static OWN: [&Kind; 10] = [
    &ROLE_NOT_ALLOWED,
    &NOT_FOUND,
    &METHOD_NOT_ALLOWED,
    &HOST_NOT_ALLOWED,
    &CROSS_ORIGIN,
    &INVALID_JSON,
    &INVALID_FIELDS,
    &INVALID_QUERY,
    &NO_ROOM,
    &TRANSFER_CODING,
];

/// When to retry a request that the database did not answer.
const SOON: Duration = Duration::from_secs(1);

/// The problem of a store error. An unreadable row is an internal error here: only a read by id knows which row it is,
/// and that nothing was done ([`damaged`](super::answers::damaged)).
#[expect(clippy::needless_pass_by_value, reason = "it is given to map_err")]
pub fn of_store(error: semel::Error) -> Problem {
    tracing::warn!(%error, "a request could not be answered");
    match error {
        semel::Error::Unavailable(_) | semel::Error::Stopping => {
            let problem = Problem::new(&STORE_UNAVAILABLE).retry_after(SOON);
            match error.reason() {
                Some(reason) => problem.detail(format!("Nothing was done: {reason}.")),
                None => problem,
            }
        }
        semel::Error::OutcomeUnknown(_) => Problem::new(&OUTCOME_UNKNOWN).retry_after(SOON),
        _ => Problem::new(&INTERNAL),
    }
}

/// All problem types.
pub fn all() -> impl Iterator<Item = &'static Kind> {
    let of_services = services::ALL.into_iter().flat_map(|service| service.problems.iter().copied());
    OWN.into_iter().chain(semel_http::problem::ALL).chain(gateway::problems::ALL).chain(of_services)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_kinds_share_a_name() {
        let names: std::collections::BTreeSet<_> = all().map(|kind| kind.name).collect();
        assert_eq!(names.len(), all().count());
    }

    #[test]
    fn an_unavailable_store_is_shown_with_its_reason_and_without_details() {
        let error = format!("{}: for 5 s, by process 4711", semel::reasons::FILE_HELD);
        let response = of_store(semel::Error::Unavailable(error)).into_http();
        let body = String::from_utf8_lossy(response.body()).into_owned();
        assert!(body.contains("another process holds the database") && !body.contains("4711"), "{body}");
    }

    #[test]
    fn an_error_without_a_row_does_not_advise_a_purge() {
        let errors = [
            semel::Error::Corrupt("a row that is not the one asked for"),
            semel::Error::Contradiction("semel_meta has no row"),
            semel::Error::Refused("no such column".into()),
        ];
        for error in errors {
            assert_eq!(*of_store(error).kind(), INTERNAL);
        }
    }

    #[test]
    fn a_requested_row_that_is_unreadable_is_named() {
        let damaged = |error| crate::http::answers::damaged(error, 7, "restore it");
        let problem = damaged(semel::Error::Corrupt("a payload of another version or key"));
        let body = String::from_utf8_lossy(problem.into_http().body()).into_owned();
        assert!(
            body.contains("row-unreadable") && body.contains(r#""id":"7""#) && body.contains("restore it"),
            "{body}"
        );
        assert_eq!(*damaged(semel::Error::Contradiction("semel_meta has no row")).kind(), INTERNAL);
    }

    #[test]
    fn a_commit_with_an_unknown_result_is_answered_outcome_unknown() {
        let response = of_store(semel::Error::OutcomeUnknown("the connection was lost".into())).into_http();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(response.headers().contains_key("retry-after"));
        assert!(String::from_utf8_lossy(response.body()).contains("/problems/outcome-unknown"));
    }
}
