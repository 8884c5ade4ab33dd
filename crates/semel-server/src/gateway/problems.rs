//! The problems that only the gateway answers with.

use axum::http::StatusCode;

use crate::http::problem::Kind;

/// All of them.
pub(crate) static ALL: [&Kind; 5] =
    [&UPSTREAM_UNREACHABLE, &UPSTREAM_LOST, &UPSTREAM_TIMEOUT, &UPSTREAM_INVALID, &TENANT_UNKNOWN];

/// The upstream is unreachable.
pub(crate) static UPSTREAM_UNREACHABLE: Kind = Kind {
    name: "upstream-unreachable",
    status: StatusCode::BAD_GATEWAY,
    retryable: true,
    title: "Upstream unreachable",
    meaning: "The service behind the gateway cannot be reached. The request was not sent to it, and nothing was done.",
    remedy: "Send it again later, with the same key if it has one: the key is free.",
};

/// The connection to the upstream was lost.
pub(crate) static UPSTREAM_LOST: Kind = Kind {
    name: "upstream-lost",
    status: StatusCode::BAD_GATEWAY,
    retryable: false,
    title: "Upstream lost",
    meaning: "The connection to the service behind the gateway was lost after the request was sent, and before there \
              was an answer: it may or may not have taken effect.",
    remedy: "First find out whether it did. A request with a key may be sent again with the same key: \
             the gateway never runs it twice unless it was configured to.",
};

/// The upstream did not answer in time.
pub(crate) static UPSTREAM_TIMEOUT: Kind = Kind {
    name: "upstream-timeout",
    status: StatusCode::GATEWAY_TIMEOUT,
    retryable: false,
    title: "Upstream timeout",
    meaning: "The service behind the gateway got the request and did not answer in time: it may or may not have taken \
              effect.",
    remedy: "First find out whether it did. A request with a key may be sent again with the same key: \
             the gateway never runs it twice unless it was configured to.",
};

/// The upstream's answer is not valid HTTP.
pub(crate) static UPSTREAM_INVALID: Kind = Kind {
    name: "upstream-invalid",
    status: StatusCode::BAD_GATEWAY,
    retryable: false,
    title: "Upstream's answer invalid",
    meaning: "The service behind the gateway got the request, and its answer breaks the rules of HTTP, so that it \
              cannot be passed on: the request may or may not have taken effect.",
    remedy: "First find out whether it did, and fix the service: the gateway's log has the reason. \
             A request with a key may be sent again with the same key: the gateway never runs it twice unless it was \
             configured to.",
};

/// The tenant of the request is unknown.
pub(crate) static TENANT_UNKNOWN: Kind = Kind {
    name: "tenant-unknown",
    status: StatusCode::FORBIDDEN,
    retryable: false,
    title: "Tenant unknown",
    meaning: "A request with a key must name its tenant in a header that only a trusted proxy may set.",
    remedy: "Send it through the proxy. Its address must be in gateway.trusted_proxies, and it must set the header \
             that gateway.tenant_header names, once, to 1 to 64 bytes without a slash or a comma.",
};
