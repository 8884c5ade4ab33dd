//! A call to an external endpoint, and the meaning of its answer.

use std::{error::Error as _, sync::Once, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use reqwest::{
    Body, Client, Response, StatusCode,
    header::{HeaderMap, RETRY_AFTER},
    redirect, retry,
};

use crate::{
    config::Endpoint,
    http::held::{Held, WhileHeld},
};

/// How long a connection may be idle. A call that meets the endpoint's closing of an idle connection may or may not
/// have arrived, so it would be in doubt for nothing. This is below the shortest idle time of common servers (2 s).
const IDLE: Duration = Duration::from_secs(1);

/// The time limit of connecting. Until then nothing was sent.
const CONNECT: Duration = Duration::from_secs(5);

/// How much of an answer is read and discarded, so that its connection can be reused.
const MOST_OF_AN_ANSWER: usize = 64 << 10;

/// The longest Retry-After that is honoured.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// The result of a call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Called {
    /// The endpoint accepted it.
    Taken(StatusCode),
    /// The endpoint refused it for good.
    Refused(StatusCode),
    /// The endpoint did not accept it now.
    NotNow(StatusCode, Option<Duration>),
    /// The endpoint is processing the same key.
    InFlight(Option<Duration>),
    /// Not a byte of the request was sent.
    NotSent(String),
    /// The lease was lost before a byte was sent.
    LeaseLost,
    /// It may have arrived; there is no answer.
    Unknown(String),
}

/// A client for calls that take effect, with a time limit per call; so many idle connections are kept.
///
/// # Errors
/// The reason, when the system has no root certificates.
pub(crate) fn client(timeout: Duration, connections: usize, is_https: bool) -> Result<Client, String> {
    static PROVIDER: Once = Once::new();
    PROVIDER.call_once(|| {
        // An error means that a provider is installed already; any will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    let client = Client::builder()
        .timeout(timeout)
        .connect_timeout(timeout.min(CONNECT))
        .pool_idle_timeout(IDLE)
        .pool_max_idle_per_host(connections)
        // No redirects: keys and tokens are for this endpoint only. No retries: the ledger retries.
        .redirect(redirect::Policy::none())
        .retry(retry::never())
        .no_proxy();
    // A plain HTTP endpoint must work on a system without certificates.
    let client = if is_https { client } else { client.tls_certs_only([]) };
    client.build().map_err(|error| root(&error))
}

/// Calls one endpoint.
pub(crate) struct Caller {
    client: Client,
    url: Endpoint,
    timeout: Duration,
}

impl Caller {
    /// Calls this endpoint with a time limit per call; so many idle connections are kept.
    ///
    /// # Errors
    /// When the system has no root certificates.
    pub(crate) fn new(url: Endpoint, timeout: Duration, connections: usize) -> semel::Result<Self> {
        let client = client(timeout, connections, url.is_https());
        let client = client.map_err(|why| semel::Error::Invalid(format!("{url} cannot be called: {why}")))?;
        Ok(Self { client, url, timeout })
    }

    /// The endpoint's name in a log, without the secret parts of its URL. Endpoints of one server share it: they are
    /// unreachable together.
    pub(crate) fn target(&self) -> String {
        self.url.to_string()
    }

    /// Posts a body with its headers and its key, while the lease is held.
    pub(crate) async fn post(&self, headers: HeaderMap, body: Bytes, held: &Held) -> Called {
        let body = Body::wrap(WhileHeld::new(Full::new(body), held.clone()));
        let request = self.client.post(self.url.expose().clone()).headers(headers).body(body);
        match request.send().await {
            Ok(response) => {
                let called = read(response.status(), wait(&response));
                tokio::spawn(drain(response));
                called
            }
            Err(_) if held.has_stopped() => Called::LeaseLost,
            Err(error) if error.is_connect() || error.is_builder() => Called::NotSent(root(&error)),
            Err(error) if error.is_timeout() => {
                let limit = humantime::format_duration(self.timeout);
                Called::Unknown(format!("the endpoint did not answer within {limit}"))
            }
            Err(error) => Called::Unknown(format!("the connection was lost before the answer: {}", root(&error))),
        }
    }
}

/// The meaning of a status. Redirects are not followed, so they are refusals.
fn read(status: StatusCode, wait: Option<Duration>) -> Called {
    match status {
        StatusCode::CONFLICT => Called::InFlight(wait),
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS => {
            Called::NotNow(status, wait)
        }
        _ if status.is_success() => Called::Taken(status),
        _ if status.is_server_error() => Called::NotNow(status, wait),
        _ => Called::Refused(status),
    }
}

/// The Retry-After of an answer.
fn wait(response: &Response) -> Option<Duration> {
    asked(response.headers().get(RETRY_AFTER)?.to_str().ok()?)
}

/// A Retry-After in seconds: a date would depend on the endpoint's clock. A number too large to parse counts as a long
/// time.
fn asked(text: &str) -> Option<Duration> {
    let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let seconds = || text.parse().map_or(LONGEST_WAIT, Duration::from_secs);
    is_number.then(|| seconds().min(LONGEST_WAIT))
}

/// Reads an answer to its end, so that its connection can be reused; not if it is long.
async fn drain(mut response: Response) {
    let mut read = 0;
    while let Ok(Some(chunk)) = response.chunk().await {
        read += chunk.len();
        if read > MOST_OF_AN_ANSWER {
            return;
        }
    }
}

/// The root cause of an error. Outer errors contain the URL, which may contain a secret.
fn root(error: &reqwest::Error) -> String {
    let mut cause = error.source();
    let mut said = "the request could not be made".to_owned();
    while let Some(below) = cause {
        said = below.to_string();
        cause = below.source();
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::held::tests::{listener, lost_after};

    #[tokio::test]
    async fn a_call_whose_lease_is_lost_while_it_connects_is_not_made() {
        let (address, came) = listener().await;
        let caller = Caller::new(Endpoint::at(address), Duration::from_secs(60), 1).unwrap();
        let called = caller.post(HeaderMap::new(), Bytes::from_static(b"{}"), &lost_after(0)).await;
        assert_eq!(called, Called::LeaseLost);
        drop(caller);
        assert_eq!(came.await.unwrap(), b"");
    }

    #[test]
    fn each_status_of_an_endpoint_has_one_meaning() {
        let means = |code| read(StatusCode::from_u16(code).unwrap(), None);
        for code in [200, 201, 202, 204] {
            assert!(matches!(means(code), Called::Taken(_)), "{code}");
        }
        for code in [301, 302, 304, 400, 401, 403, 404, 410, 413, 422] {
            assert!(matches!(means(code), Called::Refused(_)), "{code}");
        }
        for code in [408, 425, 429, 500, 502, 503, 504] {
            assert!(matches!(means(code), Called::NotNow(..)), "{code}");
        }
        assert_eq!(means(409), Called::InFlight(None));
    }

    #[test]
    fn a_retry_after_is_capped() {
        for (text, waits) in [("0", 0), ("7", 7), ("3600", 3600), ("3601", 3600), ("18446744073709551616", 3600)] {
            assert_eq!(asked(text), Some(Duration::from_secs(waits)), "{text}");
        }
        for text in ["", "-1", "+1", "1.5", "soon", "Wed, 21 Oct 2026 07:28:00 GMT"] {
            assert_eq!(asked(text), None, "{text}");
        }
    }
}
