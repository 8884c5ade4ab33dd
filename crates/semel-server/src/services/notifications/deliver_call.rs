//! The call to the endpoint of a channel.

use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use semel::Context;
use semel_store::Database;
use serde::Serialize;
use serde_json::value::RawValue;

use super::channels;
use crate::{
    http::held::Held,
    services::call::{self, Called},
};

/// The step name for the derived key of a delivery.
const STEP: &str = "deliver";

/// The body of the call.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Told<'a> {
    pub(super) notification_id: i64,
    pub(super) event_id: &'a str,
    pub(super) aggregate_type: &'a str,
    pub(super) event_type: &'a str,
    pub(super) kind: &'a str,
    pub(super) user_id: &'a str,
    pub(super) notification_type: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) address: Option<String>,
    pub(super) payload: &'a RawValue,
}

/// Calls the endpoint of a channel.
pub(super) struct Caller {
    caller: call::Caller,
    config: channels::Channel,
}

impl Caller {
    /// # Errors
    /// When the system has no root certificates.
    pub(super) fn new(config: channels::Channel) -> semel::Result<Self> {
        let caller = call::Caller::new(config.url.clone(), config.timeout, config.concurrency)?;
        Ok(Self { caller, config })
    }

    pub(super) fn config(&self) -> &channels::Channel {
        &self.config
    }

    /// Calls with a key that is the same on every attempt.
    pub(super) async fn call(&self, context: &Context<Database>, told: &Told<'_>) -> Called {
        let key = context.derived_key(STEP);
        let (body, key) = match (serde_json::to_vec(told), HeaderValue::from_str(&key)) {
            (Ok(body), Ok(key)) => (body, key),
            (Err(error), _) => return Called::NotSent(error.to_string()),
            (_, Err(error)) => return Called::NotSent(error.to_string()),
        };
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert("idempotency-key", key);
        headers.insert("semel-fence", context.fence().0.into());
        self.caller.post(headers, body.into(), &Held::of(context)).await
    }
}
