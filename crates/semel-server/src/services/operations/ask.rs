//! The body of `POST /v1/operations`: checks every field, and computes key and fingerprint.

use std::time::Duration;

use bytes::Bytes;
use semel::{Key, Labels, OnLost, Policy, Priority, Runner, Scope, Timestamp, Token, Work};
use uuid::Uuid;

use super::{
    SERVICE,
    config::{LEASES, MOST_RETRIES, Operations, TTLS},
    is_own,
    key::Parts,
};
use crate::http::{
    fields::{Fields, integer, moment, only_true, text},
    json::{DEEPEST, flaw},
    problem::{INVALID_FIELDS, Problem},
};
use crate::services::webhooks::pull;

/// The longest texts, in bytes: those of the source document.
const LONGEST_PROCESS: usize = 64;
const LONGEST_NAME: usize = 100;
const LONGEST_HASH: usize = 128;

/// The longest name of an event's operation: its prefix, source, function and type.
const LONGEST_EVENT: usize = 190;

/// What a request asks for.
pub(super) struct Asked {
    work: Work,
    pub(super) later: Option<Later>,
}

/// The terms of an enqueue.
#[derive(Default)]
pub(super) struct Later {
    input: Option<Bytes>,
    not_before: Option<Timestamp>,
    priority: Priority,
    policy: Policy,
}

impl Asked {
    /// The work of a claim.
    pub(super) fn claim(self) -> Work {
        self.work
    }

    /// The work of an enqueue. Its policy is stored with it.
    pub(super) fn enqueue(self) -> Work {
        let later = self.later.unwrap_or_default();
        let work = self.work.policy(Policy { runner: Runner::Worker, ..later.policy }).priority(later.priority);
        let work = later.input.into_iter().fold(work, Work::payload);
        later.not_before.into_iter().fold(work, Work::not_before)
    }

    /// Reads a request.
    pub(super) fn read(mut fields: Fields, tenant: &str, config: &Operations) -> Result<Self, Problem> {
        let name = fields.must("operationName", |raw| within(raw, LONGEST_NAME));
        let process = given(&mut fields, "processInstanceId", |raw| within(raw, LONGEST_PROCESS));
        let activity = given(&mut fields, "activityId", |raw| within(raw, Labels::MAX_BYTES));
        let service = given(&mut fields, "scope", scope);
        // One that is wrong is not also missing.
        let mut is_named = false;
        let input = given(&mut fields, "input", |raw| json(raw).inspect_err(|_| is_named = true));
        let hash = given(&mut fields, "inputHash", |raw| within(raw, LONGEST_HASH).inspect_err(|_| is_named = true));
        let has_key = fields.has("idempotencyKey");
        let key = given(&mut fields, "idempotencyKey", |raw| Key::new(&text(raw)?).map_err(|error| told(&error)));
        let token = given(&mut fields, "claimToken", uuid);
        let policy = policy(&mut fields, config);
        let is_later = fields.may("later", only_true).is_some();
        let not_before = given(&mut fields, "notBefore", moment);
        let priority = given(&mut fields, "priority", priority);
        if !is_later {
            for (name, given) in [("notBefore", not_before.is_some()), ("priority", priority.is_some())] {
                if given {
                    fields.note(name, "is only for an operation that is run later: add \"later\": true");
                }
            }
        } else if token.is_some() {
            fields.note("claimToken", "is only for a claim: enqueueing the same again is harmless without one");
        }
        let computed = match &input {
            Some((_, computed)) => {
                if hash.as_ref().is_some_and(|hash| hash != computed) {
                    fields.note("inputHash", "is not the hash of input: leave one of them out");
                }
                Some(computed.clone())
            }
            None => hash,
        };
        if computed.is_none() && !has_key && !is_named {
            fields.note(
                "input",
                "is missing, and so are inputHash and idempotencyKey: one of them must name the operation",
            );
        }
        let is_event = |name: &String| service.is_none() && name.starts_with(pull::PREFIX);
        if name.as_ref().is_some_and(is_event) {
            fields.note("operationName", "begins with webhook., which names events of webhooks");
        }
        fields.finish()?;
        let parts = Parts {
            process: process.clone().unwrap_or_default(),
            activity: activity.clone().unwrap_or_default(),
            name: name.unwrap_or_default(),
            input_hash: computed.unwrap_or_default(),
        };
        let key = match key {
            Some(key) => key,
            None => Key::new(&parts.key()).map_err(|error| wrong("idempotencyKey", &error))?,
        };
        let scope = Scope::new(tenant, service.as_deref().unwrap_or(SERVICE), &parts.name);
        let scope = scope.map_err(|error| wrong("operationName", &error))?;
        let work = Work::new(scope, key, parts.fingerprint())
            .labels(Labels([None, None, process, activity]))
            .policy(policy.clone());
        let token = token.map(|token| Token::named(&[tenant, &token.to_string()]));
        let input = input.map(|(text, _)| Bytes::from(text));
        let later = Later { input, not_before, priority: priority.unwrap_or_default(), policy };
        Ok(Self { work: token.into_iter().fold(work, Work::token), later: is_later.then_some(later) })
    }
}

/// The rules that a request brings, or the configured ones.
fn policy(fields: &mut Fields, config: &Operations) -> Policy {
    let policy = config.policy();
    let lease = given(fields, "leaseSeconds", |raw| seconds(raw, LEASES));
    let ttl = given(fields, "ttlSeconds", |raw| seconds(raw, TTLS));
    let retries = given(fields, "maxRetries", |raw| {
        let most = i64::try_from(MOST_RETRIES).unwrap_or(i64::MAX);
        let retries = integer(raw)?;
        let retries = u32::try_from(retries).ok().filter(|_| retries <= most);
        retries.ok_or_else(|| format!("must be 0 to {MOST_RETRIES}"))
    });
    let on_lost = given(fields, "onLost", |raw| match &*text(raw)? {
        "hold" => Ok(OnLost::Hold),
        "rerun" => Ok(OnLost::Rerun),
        _ => Err("must be hold or rerun".to_owned()),
    });
    let lease = lease.unwrap_or(policy.lease);
    Policy {
        lease,
        max_run: policy.max_run.max(lease),
        retention: ttl.or(policy.retention),
        max_attempts: retries.map(|retries| retries + 1).or(policy.max_attempts),
        on_lost: on_lost.unwrap_or(policy.on_lost),
        ..policy
    }
}

/// Takes an optional field. Programs also write null for what they leave out.
pub(super) fn given<T, E: Into<String>>(
    fields: &mut Fields,
    name: &str,
    read: impl FnOnce(&str) -> Result<T, E>,
) -> Option<T> {
    let read = |raw: &str| if raw == "null" { Ok(None) } else { read(raw).map(Some) };
    fields.may(name, read).flatten()
}

/// Reads a text of a length from 1 to `most` bytes.
fn within(raw: &str, most: usize) -> Result<String, String> {
    let text = text(raw)?;
    match text.len() {
        0 => Err("must not be empty".to_owned()),
        length if length > most => Err(format!("must have at most {most} bytes, and has {length}")),
        _ => Ok(text),
    }
}

/// Reads the name of operations that are asked for. Those of events have the types of their senders.
pub(super) fn name(raw: &str) -> Result<String, String> {
    let is_event = text(raw)?.starts_with(pull::PREFIX);
    within(raw, if is_event { LONGEST_EVENT } else { LONGEST_NAME })
}

/// Reads the service that operations belong to.
pub(super) fn scope(raw: &str) -> Result<String, String> {
    service(&text(raw)?)
}

/// Checks the service that operations belong to.
pub(super) fn service(name: &str) -> Result<String, String> {
    match Scope::new(Scope::DEFAULT_TENANT, name, "operation") {
        Ok(_) if is_own(name) => Err("is one of Semel's own services, which have routes of their own".to_owned()),
        Ok(_) => Ok(name.to_owned()),
        Err(error) => Err(told(&error)),
    }
}

/// Reads a whole number of seconds within bounds.
pub(super) fn seconds(raw: &str, (least, most): (Duration, Duration)) -> Result<Duration, String> {
    let seconds = integer(raw)?;
    let time = u64::try_from(seconds).ok().map(Duration::from_secs).filter(|time| (least..=most).contains(time));
    time.ok_or_else(|| format!("must be {} to {} seconds", least.as_secs(), most.as_secs()))
}

/// Reads a UUID that a client has made.
pub(super) fn uuid(raw: &str) -> Result<Uuid, String> {
    let uuid = Uuid::parse_str(&text(raw)?).ok().filter(|uuid| !uuid.is_nil());
    uuid.ok_or_else(|| "must be a UUID that is new for every claim".to_owned())
}

fn priority(raw: &str) -> Result<Priority, String> {
    Priority::new(integer(raw)?).map_err(|_| "must be -2 to 2".to_owned())
}

/// Reads any JSON that is stored, with the hash of its canonical form.
fn json(raw: &str) -> Result<(String, String), String> {
    let text = stored(raw)?;
    let hash = semel::json_hash(text.as_bytes()).map_err(|error| format!("has no canonical form: {error}"))?;
    Ok((text, hash))
}

/// Reads any JSON that is stored.
pub(super) fn stored(raw: &str) -> Result<String, String> {
    match flaw(raw, DEEPEST) {
        Some(flaw) => Err(format!("has {flaw}")),
        None => Ok(raw.to_owned()),
    }
}

/// The mistake in an error of the library, without the name of the field.
fn told(error: &semel::Error) -> String {
    let told = error.to_string();
    told.split_once(": ").map_or(told.clone(), |(_, why)| why.to_owned())
}

fn wrong(field: &str, error: &semel::Error) -> Problem {
    let mut wrong = crate::http::fields::Wrong::default();
    wrong.note(field, told(error));
    wrong.problem(&INVALID_FIELDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<Asked, String> {
        let fields = Fields::parse(body.as_bytes()).unwrap();
        Asked::read(fields, "acme", &Operations::default())
            .map_err(|problem| String::from_utf8(problem.into_http().into_body().to_vec()).unwrap())
    }

    #[test]
    fn every_wrong_field_is_named_at_once() {
        let Err(said) = read(
            r#"{"processInstanceId":"","activityId":7,"scope":"webhooks","leaseSeconds":0,"ttlSeconds":-1,"maxRetries":1001,
                "onLost":"probe","claimToken":"x","notBefore":"2026-01-31T12:00:00Z","priority":3,"idempotencyKy":"k"}"#,
        ) else {
            panic!()
        };
        for field in [
            "operationName is missing",
            "processInstanceId",
            "activityId",
            "scope",
            "leaseSeconds",
            "ttlSeconds",
            "maxRetries",
            "onLost",
            "claimToken",
            "notBefore",
            "priority",
            "input is missing",
            "idempotencyKy",
        ] {
            assert!(said.contains(field), "{field}: {said}");
        }
    }

    #[test]
    fn longer_fields_are_refused_by_name() {
        for (field, most) in [("processInstanceId", 64), ("activityId", 255), ("operationName", 100)] {
            let body = |length| {
                let name = if field == "operationName" { "" } else { r#""operationName":"n","# };
                format!(r#"{{{name}"input":1,"{field}":"{}"}}"#, "a".repeat(length))
            };
            assert!(read(&body(most)).is_ok(), "{field}");
            let said = read(&body(most + 1)).err().unwrap();
            assert!(said.contains(&format!("{field} must have at most {most} bytes")), "{said}");
        }
    }

    #[test]
    fn an_input_that_readers_would_read_differently_is_refused() {
        for input in [r#"{"a":1,"a":2}"#, "12345678901234567890", r#""\ud800""#] {
            let said = read(&format!(r#"{{"operationName":"n","input":{input}}}"#)).err().unwrap();
            assert!(said.contains("input has"), "{said}");
        }
    }

    #[test]
    fn null_counts_as_left_out() {
        assert!(read(r#"{"operationName":"n","activityId":null,"input":null,"idempotencyKey":"k"}"#).is_ok());
        assert!(read(r#"{"operationName":"n","input":null}"#).is_err());
    }

    #[test]
    fn a_hash_that_is_not_that_of_the_input_is_refused() {
        let hash = semel::json_hash(b"{}").unwrap();
        assert!(read(&format!(r#"{{"operationName":"n","input":{{}},"inputHash":"{hash}"}}"#)).is_ok());
        assert!(read(r#"{"operationName":"n","input":{},"inputHash":"abc"}"#).is_err());
        assert!(read(r#"{"operationName":"n","inputHash":"abc"}"#).is_ok());
    }
}
