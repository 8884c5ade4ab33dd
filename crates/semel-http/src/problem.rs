//! Problems: one form for every error (RFC 9457), and the problem types of the layer.

use std::{collections::BTreeMap, time::Duration};

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

/// A problem type. Its name is part of the API, so it never changes.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    /// The last part of the `type`, `/problems/<name>`.
    pub name: &'static str,
    /// The HTTP status.
    pub status: StatusCode,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// A few words.
    pub title: &'static str,
    /// The meaning, as a sentence; the default `detail`.
    pub meaning: &'static str,
    /// The remedy.
    pub remedy: &'static str,
}

/// The route requires a key.
pub static KEY_MISSING: Kind = Kind {
    name: "key-missing",
    status: StatusCode::BAD_REQUEST,
    retryable: false,
    title: "Idempotency-Key missing",
    meaning: "This path requires an Idempotency-Key.",
    remedy: "Send a header such as Idempotency-Key: 4f7c2a9e, with a new value for each operation and the same \
             value for each retry of it. Use a random UUID.",
};

/// The key cannot be parsed.
pub static KEY_INVALID: Kind = Kind {
    name: "key-invalid",
    status: StatusCode::BAD_REQUEST,
    retryable: false,
    title: "Idempotency-Key invalid",
    meaning: "The Idempotency-Key is not one key of 1 to 255 visible ASCII characters.",
    remedy: "Send the header once, with one key, with or without quotes. Nothing was done.",
};

/// Another caller holds the lease.
pub static IN_FLIGHT: Kind = Kind {
    name: "in-flight",
    status: StatusCode::CONFLICT,
    retryable: true,
    title: "In flight",
    meaning: "A request with this key is being executed.",
    remedy: "Send it again after Retry-After, or with the header Prefer: wait=10, to get the answer of the first.",
};

/// It failed, and its backoff is not over.
pub static BACKING_OFF: Kind = Kind {
    name: "backing-off",
    status: StatusCode::CONFLICT,
    retryable: true,
    title: "Backing off",
    meaning: "The last attempt with this key failed, and its backoff is not over.",
    remedy: "Send it again after Retry-After.",
};

/// The key belongs to another request.
pub static PAYLOAD_MISMATCH: Kind = Kind {
    name: "payload-mismatch",
    status: StatusCode::UNPROCESSABLE_ENTITY,
    retryable: false,
    title: "The key belongs to another request",
    meaning: "This key was used before for a request with other contents or for another resource.",
    remedy: "Nothing was done. Use a new key for another operation.",
};

/// The key belongs to another caller.
pub static CREDENTIALS_DIFFER: Kind = Kind {
    name: "credentials-differ",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "Other credentials than the first request's",
    meaning: "This key was used before, with other credentials than those of this request. Nothing was done, and nothing \
              is disclosed about that request.",
    remedy: "Send it with the credentials of the first request. If those are not valid any more (an access token that \
             was refreshed between two tries, say), ask the service what became of the request, and send it with a new key \
             only if it did not take effect. Use a new key for another operation.",
};

/// It took effect, but the answer is not stored.
pub static RESPONSE_NOT_KEPT: Kind = Kind {
    name: "response-not-kept",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "Completed, but the answer was not kept",
    meaning: "The request with this key took effect, but its answer is not stored: it was too large, was streamed or \
              broke off, or an operator resolved the request as completed.",
    remedy: "Do not send it under another key: it would take effect again. If the answer has a Location, the result is there.",
};

/// It may or may not have taken effect.
pub static IN_DOUBT: Kind = Kind {
    name: "in-doubt",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "In doubt",
    meaning: "The request with this key was begun, and it is not known whether it took effect.",
    remedy: "Find out whether it did. An operator then resolves it with semel operations resolve.",
};

/// No attempts are left.
pub static ATTEMPTS_EXHAUSTED: Kind = Kind {
    name: "attempts-exhausted",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "Attempts exhausted",
    meaning: "The request with this key has no attempts left, or an operator resolved it as failed.",
    remedy: "An operator can let it run again with semel operations resolve.",
};

/// The lease expired.
pub static LEASE_LOST: Kind = Kind {
    name: "lease-lost",
    status: StatusCode::CONFLICT,
    retryable: true,
    title: "Lease lost",
    meaning: "The lease of this request expired while it ran.",
    remedy: "Send it again with the same key: the answer shows its result.",
};

/// The database is unavailable.
pub static STORE_UNAVAILABLE: Kind = Kind {
    name: "store-unavailable",
    status: StatusCode::SERVICE_UNAVAILABLE,
    retryable: true,
    title: "Store unavailable",
    meaning: "The database cannot be reached, or cannot be written at the moment. Nothing was done.",
    remedy: "Send it again after Retry-After, with the same key.",
};

/// The database was lost while the outcome was stored.
pub static OUTCOME_UNKNOWN: Kind = Kind {
    name: "outcome-unknown",
    status: StatusCode::SERVICE_UNAVAILABLE,
    retryable: true,
    title: "Outcome unknown",
    meaning: "The database was lost while the outcome was being stored: it may or may not have taken effect.",
    remedy: "Send it again with the same key: it takes effect once, and the answer shows its result.",
};

/// The transaction rolled back.
pub static NOT_COMMITTED: Kind = Kind {
    name: "not-committed",
    status: StatusCode::INTERNAL_SERVER_ERROR,
    retryable: true,
    title: "Not committed",
    meaning: "The request ran in a transaction that the database did not commit. Nothing took effect.",
    remedy: "Send it again with the same key. The server's log has the reason.",
};

/// The body exceeds the limit.
pub static BODY_TOO_LARGE: Kind = Kind {
    name: "body-too-large",
    status: StatusCode::PAYLOAD_TOO_LARGE,
    retryable: false,
    title: "Body too large",
    meaning: "The request's body is longer than this path accepts.",
    remedy: "Send less in one request: most paths accept 1 MiB.",
};

/// The body did not arrive completely.
pub static BODY_INCOMPLETE: Kind = Kind {
    name: "body-incomplete",
    status: StatusCode::BAD_REQUEST,
    retryable: true,
    title: "Body incomplete",
    meaning: "The request's body did not arrive completely.",
    remedy: "Nothing was done. Send the request again.",
};

/// The body did not arrive in time.
pub static BODY_TIMEOUT: Kind = Kind {
    name: "body-timeout",
    status: StatusCode::REQUEST_TIMEOUT,
    retryable: true,
    title: "Body timeout",
    meaning: "The request's body did not arrive in time.",
    remedy: "Nothing was done. Send the request again, with the same key.",
};

/// A stored row is damaged.
pub static ROW_UNREADABLE: Kind = Kind {
    name: "row-unreadable",
    status: StatusCode::INTERNAL_SERVER_ERROR,
    retryable: false,
    title: "A stored row cannot be read",
    meaning: "The row with this id or key cannot be read: it was damaged, or written by another version. Nothing \
              was done, and no other row is affected.",
    remedy: "Sending it again does not help, and with another key it might take effect twice. An operator \
             finds the row with semel operations show, restores it from a backup or starts the version that wrote it, or \
             frees the key with semel operations purge.",
};

/// A bug of the server.
pub static INTERNAL: Kind = Kind {
    name: "internal",
    status: StatusCode::INTERNAL_SERVER_ERROR,
    retryable: true,
    title: "Internal error",
    meaning: "The server failed in an unexpected way.",
    remedy: "The server's log has the details. Send the request again with the same key: it still takes effect once.",
};

/// All problem types of the layer.
pub static ALL: [&Kind; 18] = [
    &KEY_MISSING,
    &KEY_INVALID,
    &IN_FLIGHT,
    &BACKING_OFF,
    &PAYLOAD_MISMATCH,
    &CREDENTIALS_DIFFER,
    &RESPONSE_NOT_KEPT,
    &IN_DOUBT,
    &ATTEMPTS_EXHAUSTED,
    &LEASE_LOST,
    &STORE_UNAVAILABLE,
    &OUTCOME_UNKNOWN,
    &NOT_COMMITTED,
    &BODY_TOO_LARGE,
    &BODY_INCOMPLETE,
    &BODY_TIMEOUT,
    &ROW_UNREADABLE,
    &INTERNAL,
];

/// A problem as the answer to one request.
#[derive(Clone, Debug)]
#[must_use]
pub struct Problem {
    kind: &'static Kind,
    detail: Option<String>,
    retry_after: Option<Duration>,
    members: BTreeMap<&'static str, Value>,
}

impl Problem {
    /// A problem of this kind.
    pub fn new(kind: &'static Kind) -> Self {
        Self { kind, detail: None, retry_after: None, members: BTreeMap::new() }
    }

    /// Sets the detail for this request.
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Sets when a retry makes sense.
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// Adds a member, such as `first_seen` or the list of wrong fields.
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.members.insert(name, value.into());
        self
    }

    /// Names the unreadable row.
    pub fn about(self, id: impl ToString) -> Self {
        if *self.kind == ROW_UNREADABLE { self.with("id", id.to_string()) } else { self }
    }

    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> &'static Kind {
        self.kind
    }

    /// The detail, or the meaning of its type.
    #[must_use]
    pub fn said(&self) -> &str {
        self.detail.as_deref().unwrap_or(self.kind.meaning)
    }

    /// The problem as an answer.
    #[must_use]
    pub fn into_http(self) -> http::Response<Bytes> {
        let Kind { name, status, retryable, title, .. } = self.kind;
        let mut body = json!({
            "type": format!("/problems/{name}"),
            "title": title,
            "status": status.as_u16(),
            "detail": self.said(),
            "retryable": retryable,
        });
        for (name, value) in self.members {
            body[name] = value;
        }
        // Whole seconds, as the header requires, rounded up: an early retry would be refused.
        let retry_after = self.retry_after.map(|wait| wait.as_secs() + u64::from(wait.subsec_nanos() > 0));
        if let Some(seconds) = retry_after {
            body["retry_after"] = seconds.into();
        }
        let mut response = http::Response::new(Bytes::from(body.to_string()));
        *response.status_mut() = *status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        self.into_http().map(axum::body::Body::from)
    }
}

impl From<axum::extract::rejection::BytesRejection> for Problem {
    fn from(rejection: axum::extract::rejection::BytesRejection) -> Self {
        match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => Self::new(&BODY_TOO_LARGE),
            _ => Self::new(&BODY_INCOMPLETE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_time_is_rounded_up_to_whole_seconds() {
        let header = |wait| {
            let response = Problem::new(&INTERNAL).retry_after(wait).into_http();
            response.headers()[header::RETRY_AFTER].to_str().unwrap().to_owned()
        };
        assert_eq!(header(Duration::from_millis(1)), "1");
        assert_eq!(header(Duration::from_secs(2)), "2");
        assert_eq!(header(Duration::from_millis(2001)), "3");
    }

    #[test]
    fn no_two_kinds_share_a_name() {
        let names: std::collections::BTreeSet<_> = ALL.iter().map(|kind| kind.name).collect();
        assert_eq!(names.len(), ALL.len());
    }
}
