//! The registry: every kind of problem the server answers with.

use axum::http::StatusCode;
pub use semel_http::problem::{BODY_INCOMPLETE, BODY_TOO_LARGE, INTERNAL, Kind, Problem};

/// Nothing is at this path.
pub static NOT_FOUND: Kind = Kind {
    name: "not-found",
    status: StatusCode::NOT_FOUND,
    retryable: false,
    title: "Not found",
    meaning: "Nothing is at this path.",
    remedy: "Check the path for a slip of spelling. What was there may also have been purged after its retention.",
};

/// The path is there, but not for this method.
pub static METHOD_NOT_ALLOWED: Kind = Kind {
    name: "method-not-allowed",
    status: StatusCode::METHOD_NOT_ALLOWED,
    retryable: false,
    title: "Method not allowed",
    meaning: "This path does not take this method.",
    remedy: "The Allow header of the answer lists the methods that the path takes.",
};

/// The request is for another host.
pub static HOST_NOT_ALLOWED: Kind = Kind {
    name: "host-not-allowed",
    status: StatusCode::FORBIDDEN,
    retryable: false,
    title: "Host not allowed",
    meaning: "The Host header names another machine. No tokens are configured, so only loopback is served.",
    remedy: "Call the server as localhost, 127.0.0.1 or [::1]. Without this rule, any web page whose name is made to \
             lead to 127.0.0.1 could use the server through a browser on this machine.",
};

/// The request was sent by a page of another origin.
pub static CROSS_ORIGIN: Kind = Kind {
    name: "cross-origin",
    status: StatusCode::FORBIDDEN,
    retryable: false,
    title: "Cross-origin request",
    meaning: "The Origin header names another site. No tokens are configured, so only the server's own pages may call it.",
    remedy: "Call the server from a program rather than from a page of another origin; another port of this machine \
             is another origin too.",
};

/// The server's own kinds.
static OWN: [&Kind; 4] = [&NOT_FOUND, &METHOD_NOT_ALLOWED, &HOST_NOT_ALLOWED, &CROSS_ORIGIN];

/// Every kind there is.
pub fn all() -> impl Iterator<Item = &'static Kind> {
    OWN.into_iter().chain(semel_http::problem::ALL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_kinds_share_a_name() {
        let names: std::collections::BTreeSet<_> = all().map(|kind| kind.name).collect();
        assert_eq!(names.len(), all().count());
    }
}
