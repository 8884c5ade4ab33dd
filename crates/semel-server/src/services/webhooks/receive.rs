//! `POST /webhooks/{source}` and `POST /webhooks/{source}/{function}`.

use std::{net::SocketAddr, time::Duration};

use axum::{
    body::Body,
    extract::{ConnectInfo, Path, Request, State, rejection::PathRejection},
    http::{StatusCode, header, request::Parts},
    response::{IntoResponse as _, Response},
};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use semel_http::webhooks::Refused;
use serde_json::json;

use super::{
    Receiver,
    event::{Event, NoEvent, read},
    problems::{BODY_ENCODED, EVENT_MALFORMED, LIVEMODE_MISMATCH, SIGNATURE_REFUSED, TOO_MANY_DELIVERIES},
    refusals::Reason,
    source::{Source, is_function},
    status::Status,
};
use crate::http::{
    answers::{answer, missing},
    loopback,
    problem::{BODY_INCOMPLETE, BODY_TIMEOUT, BODY_TOO_LARGE, HOST_NOT_ALLOWED, INTERNAL, Problem},
    room::{Held, NoRoom, Room},
};

/// `POST /webhooks/{source}`
pub(super) async fn at_source(
    State(receiver): State<Receiver>,
    path: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Response, Problem> {
    let Path(source) = path.map_err(|_| missing())?;
    let function = source.clone();
    receive(receiver, &source, &function, request).await
}

/// `POST /webhooks/{source}/{function}`
pub(super) async fn at_function(
    State(receiver): State<Receiver>,
    path: Result<Path<(String, String)>, PathRejection>,
    request: Request,
) -> Result<Response, Problem> {
    let Path((source, function)) = path.map_err(|_| missing())?;
    if !is_function(&function) {
        let rule = "A function's name is 1 to 64 letters, digits, '.', '_' and '-'; events and monitor are taken.";
        return Err(missing().detail(rule));
    }
    receive(receiver, &source, &function, request).await
}

async fn receive(receiver: Receiver, source: &str, function: &str, request: Request) -> Result<Response, Problem> {
    let source = receiver.source(source).ok_or_else(|| missing().detail("There is no source of this name."))?.clone();
    let (head, body) = request.into_parts();
    let (event, room) = match admit(&receiver, &source, function, &head, body).await {
        Ok(admitted) => admitted,
        Err(refusal) => return Err(refuse(&receiver, &source, function, refusal)),
    };
    // In its own task: a sender that disconnects ends neither the run nor the settling of its outcome.
    let room = (room, head.extensions.get::<Held>().cloned());
    let delivered = tokio::spawn(async move {
        let _room = room;
        receiver.deliver(source, event).await
    });
    let status = delivered.await.map_err(|error| {
        tracing::error!(%error, "a delivery ended early");
        Problem::new(&INTERNAL)
    })??;
    Ok(said(status))
}

fn said(status: Status) -> Response {
    answer(StatusCode::OK, &json!({ "status": status.word() })).map(Body::from).into_response()
}

/// Why a delivery is refused: for the counter and for the answer.
struct Refusal {
    reason: Reason,
    problem: Problem,
}

impl Refusal {
    fn new(reason: Reason, problem: Problem) -> Self {
        Self { reason, problem }
    }
}

/// Counts and logs a refusal.
fn refuse(receiver: &Receiver, source: &Source, function: &str, refusal: Refusal) -> Problem {
    let Refusal { reason, problem } = refusal;
    // The path is not signed: counted by any function in it, the counters would grow without limit.
    let function = if reason.is_proved() && source.names(function) { function } else { "" };
    receiver.0.refusals.count(&source.config.tenant, &source.name, function, reason);
    if reason == Reason::OtherMode {
        tracing::warn!(source = source.name, "an event of the other mode was signed with this source's secret");
    } else {
        tracing::debug!(source = source.name, reason = reason.word(), "a delivery was refused");
    }
    problem
}

/// Reads a delivery, and accepts it if it is complete, signed and an event.
async fn admit(
    receiver: &Receiver,
    source: &Source,
    function: &str,
    head: &Parts,
    body: Body,
) -> Result<(Event, Room), Refusal> {
    if source.is_unsigned() {
        only_this_machine(head).map_err(|problem| Refusal::new(Reason::Foreign, problem))?;
    }
    // The path is not signed, so a third party could replay a delivery to any function.
    if !source.knows(function) {
        let problem = missing().detail("The source has no function of this name.");
        return Err(Refusal::new(Reason::Function, problem));
    }
    // The signature covers the bytes on the wire, and nothing is decompressed before it is verified.
    if head.headers.get_all(header::CONTENT_ENCODING).iter().any(|coding| !is_plain(coding.as_bytes())) {
        return Err(Refusal::new(Reason::Encoded, Problem::new(&BODY_ENCODED)));
    }
    let most = source.config.max_body;
    let length = head.headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    // A body that announces too great a length need not be sent.
    if length.is_some_and(|length: usize| length > most) {
        return Err(too_large(most));
    }
    // Each source has its own room within that of the process: a full source blocks no other.
    let mut room = Room::of(source.room.clone());
    let body = match tokio::time::timeout(source.config.body_timeout, whole(body, most, &mut room)).await {
        Ok(read) => read?,
        // It waited for the others, not for its sender.
        Err(_) if !room.has_some() => return Err(busy()),
        Err(_) => return Err(Refusal::new(Reason::Slow, Problem::new(&BODY_TIMEOUT))),
    };
    let id = match &source.verifier {
        None => None,
        Some(verifier) => verifier.verify(&head.headers, &body, (receiver.0.clock)()).map_err(unsigned)?.id,
    };
    let event = read(source, function, id, &head.headers, body).map_err(|no_event| match no_event {
        NoEvent::Malformed(wrong) => Refusal::new(Reason::NoEvent, wrong.problem(&EVENT_MALFORMED)),
        NoEvent::OtherMode => Refusal::new(Reason::OtherMode, Problem::new(&LIVEMODE_MISMATCH)),
    })?;
    Ok((event, room))
}

fn unsigned(refused: Refused) -> Refusal {
    let problem = Problem::new(&SIGNATURE_REFUSED).detail(format!("The signature is refused: {refused}."));
    Refusal::new(Reason::Signature(refused.word()), problem.with("reason", refused.word()))
}

fn is_plain(coding: &[u8]) -> bool {
    let coding = coding.trim_ascii();
    coding.is_empty() || coding.eq_ignore_ascii_case(b"identity")
}

/// For an unsigned source: refuses requests from other machines, from pages of other origins, and without a sender's
/// address.
fn only_this_machine(head: &Parts) -> Result<(), Problem> {
    loopback::check(&head.uri, &head.headers)?;
    let peer = head.extensions.get::<ConnectInfo<SocketAddr>>();
    match peer.is_some_and(|ConnectInfo(peer)| peer.ip().is_loopback()) {
        true => Ok(()),
        false => Err(Problem::new(&HOST_NOT_ALLOWED)),
    }
}

fn busy() -> Refusal {
    Refusal::new(Reason::Busy, Problem::new(&TOO_MANY_DELIVERIES).retry_after(Duration::from_secs(1)))
}

fn too_large(most: usize) -> Refusal {
    let detail = format!("The body is longer than the {most} bytes that this source accepts.");
    Refusal::new(Reason::TooLarge, Problem::new(&BODY_TOO_LARGE).detail(detail))
}

/// A body of at most so many bytes.
async fn whole(body: Body, most: usize, room: &mut Room) -> Result<Bytes, Refusal> {
    room.begin().await.map_err(|_| busy())?;
    let mut chunks = body.into_data_stream();
    let mut read = BytesMut::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| match NoRoom::is_why(&error) {
            true => busy(),
            false => Refusal::new(Reason::Incomplete, Problem::new(&BODY_INCOMPLETE)),
        })?;
        if read.len() + chunk.len() > most {
            return Err(too_large(most));
        }
        room.grow(read.len() + chunk.len()).map_err(|_| busy())?;
        if read.is_empty() {
            // Most bodies arrive in one chunk, which is not copied.
            read = chunk.try_into_mut().unwrap_or_else(|chunk| BytesMut::from(&*chunk));
        } else {
            read.extend_from_slice(&chunk);
        }
    }
    Ok(read.freeze())
}
