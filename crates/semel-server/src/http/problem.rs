//! Every problem the server answers with: one registry, one shape (RFC 9457).

use std::{collections::BTreeMap, time::Duration};

use axum::{
    extract::rejection::BytesRejection,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// A kind of problem. Its name is part of the API: clients decide by it, so it never changes.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    /// The last part of the `type`, `/problems/<name>`.
    pub name: &'static str,
    /// The HTTP status.
    pub status: StatusCode,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// What it is, in a few words.
    pub title: &'static str,
    /// What is wrong, as a sentence; the `detail` when a problem has none of its own.
    pub meaning: &'static str,
    /// What to do about it.
    pub remedy: &'static str,
}

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

/// The body is longer than is read.
pub static BODY_TOO_LARGE: Kind = Kind {
    name: "body-too-large",
    status: StatusCode::PAYLOAD_TOO_LARGE,
    retryable: false,
    title: "Body too large",
    meaning: "The request's body is longer than this path takes.",
    remedy: "Send less in one request: most paths take 1 MiB.",
};

/// The body did not arrive whole.
pub static BODY_INCOMPLETE: Kind = Kind {
    name: "body-incomplete",
    status: StatusCode::BAD_REQUEST,
    retryable: true,
    title: "Body incomplete",
    meaning: "The request's body did not arrive whole.",
    remedy: "Nothing was done. Send the request again.",
};

/// The server broke one of its own rules.
pub static INTERNAL: Kind = Kind {
    name: "internal",
    status: StatusCode::INTERNAL_SERVER_ERROR,
    retryable: true,
    title: "Internal error",
    meaning: "The server made a mistake of its own.",
    remedy: "The server's log says more. Send the request again with the same key: it still takes effect once.",
};

/// Every kind there is.
pub static ALL: [&Kind; 7] =
    [&NOT_FOUND, &METHOD_NOT_ALLOWED, &HOST_NOT_ALLOWED, &CROSS_ORIGIN, &BODY_TOO_LARGE, &BODY_INCOMPLETE, &INTERNAL];

/// A problem as it is answered to one request.
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

    /// Says what is wrong with this very request.
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Says when it is worth trying again.
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// Adds a member of its own, such as `first_seen` or the list of wrong fields.
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.members.insert(name, value.into());
        self
    }

    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> &'static Kind {
        self.kind
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Kind { name, status, retryable, title, meaning, .. } = self.kind;
        let mut body = json!({
            "type": format!("/problems/{name}"),
            "title": title,
            "status": status.as_u16(),
            "detail": self.detail.as_deref().unwrap_or(meaning),
            "retryable": retryable,
        });
        for (name, value) in self.members {
            body[name] = value;
        }
        // Whole seconds, as the header wants them, and rounded up: a client that came early would only be sent away.
        let retry_after = self.retry_after.map(|wait| wait.as_secs() + u64::from(wait.subsec_nanos() > 0));
        if let Some(seconds) = retry_after {
            body["retry_after"] = seconds.into();
        }
        let mut response = (*status, body.to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

impl From<BytesRejection> for Problem {
    fn from(rejection: BytesRejection) -> Self {
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
            let response = Problem::new(&INTERNAL).retry_after(wait).into_response();
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
