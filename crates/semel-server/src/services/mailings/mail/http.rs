//! Mails by the JSON API of a mail service.

use std::{
    error::Error as _,
    time::{Duration, SystemTime},
};

use http_body_util::Full;
use reqwest::{
    Body, Client, Response, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, DATE, HeaderMap, HeaderValue, RETRY_AFTER},
};
use serde_json::Value;

use super::{
    http_body,
    message::Outgoing,
    transport::MAY_NOT,
    transport_url::{Http, Preset},
    verdict::{Sent, is_certificate, reason, retry_after},
};
use crate::{
    http::held::{Held, WhileHeld},
    services::call::client,
};

/// How much of an answer is read.
const LONGEST_ANSWER: usize = 64 << 10;

/// A mail service.
pub(super) struct Service {
    client: Client,
    target: Http,
    headers: HeaderMap,
    timeout: Duration,
}

impl Service {
    /// Calls a service with a time limit per request; so many idle connections are kept.
    pub(super) fn new(mut target: Http, timeout: Duration, connections: usize) -> Result<Self, String> {
        let is_https = target.url.scheme() == "https";
        let client = client(timeout, connections, is_https)
            .map_err(|why| format!("the service cannot be called: {}", reason(&why, None)))?;
        let headers = headers(&target)?;
        if target.url.path() == "/" {
            target.url.set_path(match target.preset {
                Preset::Generic => "/",
                Preset::Resend => "/emails",
                Preset::Brevo => "/v3/smtp/email",
            });
        }
        Ok(Self { client, target, headers, timeout })
    }

    /// How long the service remembers a key, if it says so.
    pub(super) fn window(&self) -> Option<Duration> {
        self.target.window
    }

    /// The account whose keys the service remembers.
    pub(super) fn account(&self) -> &str {
        &self.target.account
    }

    /// The time limit of a request.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sends a mail, if its lease is held when the connection is ready.
    pub(super) async fn send(&self, mail: &Outgoing, held: &Held) -> Sent {
        let (body, key) = match (http_body::body(self.target.preset, mail), HeaderValue::from_str(&mail.key)) {
            (Ok(body), Ok(key)) => (body, key),
            (Err(why), _) => return Sent::Refused { why },
            (_, Err(_)) => return Sent::Refused { why: "the key has characters that a header cannot have".to_owned() },
        };
        let mut headers = self.headers.clone();
        headers.insert("idempotency-key", key);
        let body = Body::wrap(WhileHeld::new(Full::from(body), held.clone()));
        match self.client.post(self.target.url.clone()).headers(headers).body(body).send().await {
            Ok(response) => self.read(response).await,
            Err(_) if held.has_stopped() => Sent::Away { why: MAY_NOT.to_owned() },
            Err(error) if error.is_builder() => Sent::Refused { why: root(&error) },
            Err(error) if error.is_connect() => match root(&error) {
                why if is_certificate(&why) => Sent::ServerRefuses { why },
                why => Sent::Away { why },
            },
            Err(error) if error.is_timeout() => {
                let limit = humantime::format_duration(self.timeout);
                Sent::Unknown { why: format!("the service did not answer within {limit}") }
            }
            Err(error) => Sent::Unknown { why: format!("the connection was lost before the answer: {}", root(&error)) },
        }
    }

    async fn read(&self, mut response: Response) -> Sent {
        let header = |name| response.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let after = header(RETRY_AFTER).and_then(|text| retry_after(text, header(DATE), SystemTime::now()));
        let status = response.status();
        // The status decides. A lost rest of the answer costs its explanation only.
        let mut text = Vec::new();
        while let Ok(Some(chunk)) = response.chunk().await {
            text.extend_from_slice(&chunk);
            if text.len() > LONGEST_ANSWER {
                text.truncate(LONGEST_ANSWER);
                break;
            }
        }
        let said = String::from_utf8_lossy(&text);
        let answer = Answer { status, after, json: serde_json::from_slice(&text).unwrap_or_default(), text: &said };
        answer.verdict(&self.target)
    }
}

/// What a service answered.
struct Answer<'a> {
    status: StatusCode,
    after: Option<Duration>,
    json: Value,
    text: &'a str,
}

impl Answer<'_> {
    /// The meaning of an answer. Only 400, 413 and 422 are about one mail: with any other 4xx the address or the account is
    /// wrong, which would otherwise refuse every recipient for good. A redirect may come after the mail was accepted.
    fn verdict(&self, target: &Http) -> Sent {
        let why = self.why(target.token.as_deref());
        let after = self.after;
        match self.status.as_u16() {
            200..=299 => Sent::Accepted { external_id: self.id() },
            // Brevo processes a key once and refuses each further request, so the first one was accepted.
            400 if target.preset == Preset::Brevo && self.field("code") == Some("duplicate_parameter") => {
                Sent::Accepted { external_id: None }
            }
            409 if self.is_other_content() => Sent::KeyConflict { why },
            409 => Sent::InFlight { why, after },
            422 if self.text.to_ascii_lowercase().contains("idempot") => Sent::KeyConflict { why },
            400 | 413 | 422 => Sent::Refused { why },
            408 | 425 => Sent::NotNow { why, after },
            429 => Sent::TooMany { why, after },
            // The service does not know the method or the protocol: no mail will work.
            501 | 505 => Sent::ServerRefuses { why },
            // The same key makes a repeat harmless.
            500..=599 if target.window.is_some() => Sent::Failing { why, after },
            // A service that asks for a later repeat has refused on purpose. Any other 5xx may come from a proxy that
            // lost the service's answer, 503 as well.
            503 if after.is_some() => Sent::Failing { why, after },
            500..=599 => Sent::Unknown { why },
            400..=499 => Sent::ServerRefuses { why },
            _ => Sent::Strange { why },
        }
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.json.get(name)?.as_str()
    }

    fn id(&self) -> Option<String> {
        let id = self.field("id").or_else(|| self.field("messageId"))?;
        Some(reason(id, None)).filter(|id| !id.is_empty())
    }

    /// Whether a 409 means that the key was used for another content; otherwise the key is in flight. Resend names
    /// them `invalid_idempotent_request` and `concurrent_idempotent_requests`.
    fn is_other_content(&self) -> bool {
        let text = self.text.to_ascii_lowercase();
        !text.contains("concurrent") && ["invalid_idempotent", "different", "mismatch"].iter().any(|w| text.contains(w))
    }

    fn why(&self, secret: Option<&str>) -> String {
        let said = ["message", "detail", "title", "error"].iter().find_map(|name| self.field(name));
        reason(&format!("HTTP {}: {}", self.status.as_u16(), said.unwrap_or(self.text)), secret)
    }
}

fn headers(target: &Http) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(token) = &target.token {
        let is_brevo = target.preset == Preset::Brevo;
        let value = if is_brevo { token.clone() } else { format!("Bearer {token}") };
        let mut value = HeaderValue::from_str(&value).map_err(|_| "the token cannot be a header".to_owned())?;
        value.set_sensitive(true);
        if is_brevo {
            headers.insert("api-key", value);
        } else {
            headers.insert(AUTHORIZATION, value);
        }
    }
    Ok(headers)
}

/// The root cause of an error. Outer errors contain the URL, which may contain a secret.
fn root(error: &reqwest::Error) -> String {
    let mut cause = error.source();
    let mut said = "the request could not be made".to_owned();
    while let Some(below) = cause {
        said = below.to_string();
        cause = below.source();
    }
    reason(&said, None)
}
