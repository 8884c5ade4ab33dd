//! The registry: every kind of problem the server answers with.

use std::time::Duration;

use axum::http::StatusCode;
pub use semel_http::problem::{
    BODY_INCOMPLETE, BODY_TIMEOUT, BODY_TOO_LARGE, INTERNAL, Kind, OUTCOME_UNKNOWN, Problem, ROW_UNREADABLE,
    STORE_UNAVAILABLE,
};

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

/// The body cannot be read as what every body is.
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
    remedy: "The member errors lists the wrong parameters, the first twenty of them with the reason. A cursor is good only as a page gave it.",
};

/// Another client has the email.
pub static EMAIL_EM_USO: Kind = Kind {
    name: "email-em-uso",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The email is in use",
    meaning: "Another cliente has this email.",
    remedy: "Use that cliente, or another address. Nothing was done, and the key is still free.",
};

/// The proposal has changed since it was read.
pub static VERSAO_DESATUALIZADA: Kind = Kind {
    name: "versao-desatualizada",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The versao is out of date",
    meaning: "The proposta has another versao than the one that was sent: it has changed since it was read.",
    remedy: "Read the proposta again, decide anew, and send the versao that it has now; the member versao tells it.",
};

/// The proposal's state does not allow the change.
pub static ESTADO_INVALIDO: Kind = Kind {
    name: "estado-invalido",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The estado does not allow it",
    meaning: "A proposta in this estado cannot be changed in this way.",
    remedy: "A rascunho can be submitted or cancelled, an enviada accepted, refused or cancelled; the others are final.",
};

/// The id belongs to another event.
pub static EVENT_MISMATCH: Kind = Kind {
    name: "event-mismatch",
    status: StatusCode::UNPROCESSABLE_ENTITY,
    retryable: false,
    title: "The eventId belongs to another event",
    meaning: "An event with this eventId was accepted before, and it had another body.",
    remedy: "An eventId names one event. For another one, make a new eventId; to repeat an event, send it as it was. Of \
             this request nothing was stored, and the member errors lists the events that are in the way.",
};

/// A tenant listens too often.
pub static TOO_MANY_STREAMS: Kind = Kind {
    name: "too-many-streams",
    status: StatusCode::TOO_MANY_REQUESTS,
    retryable: true,
    title: "Too many streams",
    meaning: "This tenant has as many streams open at this node as it may.",
    remedy: "Close streams that nobody reads, or set notifications.streams higher. Until then, read \
             GET /notifications?unread=true now and then.",
};

/// The service behind the gateway is away.
pub static UPSTREAM_UNREACHABLE: Kind = Kind {
    name: "upstream-unreachable",
    status: StatusCode::BAD_GATEWAY,
    retryable: true,
    title: "Upstream unreachable",
    meaning: "The service behind the gateway cannot be reached. The request was not sent to it, and nothing was done.",
    remedy: "Send it again later, with the same key if it has one: the key is free.",
};

/// The service behind the gateway went away in the middle.
pub static UPSTREAM_LOST: Kind = Kind {
    name: "upstream-lost",
    status: StatusCode::BAD_GATEWAY,
    retryable: false,
    title: "Upstream lost",
    meaning: "The connection to the service behind the gateway was lost after the request was sent, and before there \
              was an answer: it may or may not have taken effect.",
    remedy: "Find out whether it did before anything else. A request with a key may be sent again with the same key: \
             the gateway never runs it twice unless it was configured to.",
};

/// The service behind the gateway says nothing.
pub static UPSTREAM_TIMEOUT: Kind = Kind {
    name: "upstream-timeout",
    status: StatusCode::GATEWAY_TIMEOUT,
    retryable: false,
    title: "Upstream timeout",
    meaning: "The service behind the gateway got the request and did not answer in time: it may or may not have taken \
              effect.",
    remedy: "Find out whether it did before anything else. A request with a key may be sent again with the same key: \
             the gateway never runs it twice unless it was configured to.",
};

/// The service behind the gateway answers what is no answer.
pub static UPSTREAM_INVALID: Kind = Kind {
    name: "upstream-invalid",
    status: StatusCode::BAD_GATEWAY,
    retryable: false,
    title: "Upstream's answer invalid",
    meaning: "The service behind the gateway got the request, and its answer breaks the rules of HTTP, so that it \
              cannot be passed on: the request may or may not have taken effect.",
    remedy: "Find out whether it did before anything else, and mend the service: the gateway's log says what is wrong. \
             A request with a key may be sent again with the same key: the gateway never runs it twice unless it was \
             configured to.",
};

/// Nobody says whose request it is.
pub static TENANT_UNKNOWN: Kind = Kind {
    name: "tenant-unknown",
    status: StatusCode::FORBIDDEN,
    retryable: false,
    title: "Tenant unknown",
    meaning: "A request with a key must say whose it is, by a header that only a trusted proxy may set.",
    remedy: "Send it through the proxy. Its address must be in gateway.trusted_proxies, and it must set the header \
             that gateway.tenant_header names, once, to 1 to 64 bytes without a slash or a comma.",
};

/// The body is in a coding that is not undone here.
pub static TRANSFER_CODING: Kind = Kind {
    name: "transfer-coding",
    status: StatusCode::NOT_IMPLEMENTED,
    retryable: false,
    title: "Transfer coding not supported",
    meaning: "The request's body was sent in a transfer coding other than chunked.",
    remedy: "Send it in chunks or with its length. To compress it, use Content-Encoding.",
};

/// More bodies are on their way in than there is room for.
pub static NO_ROOM: Kind = Kind {
    name: "no-room",
    status: StatusCode::SERVICE_UNAVAILABLE,
    retryable: true,
    title: "No room for the body",
    meaning: "The bodies of other requests that are on their way in have taken all the memory that this node has for \
              them. Nothing was done.",
    remedy: "Send it again after the time that Retry-After tells, with the same key if it has one. If it lasts, somebody \
             may be sending long bodies slowly: limit what one address may do at the proxy, or raise http.body_budget.",
};

/// The principal may only look.
pub static ROLE_NOT_ALLOWED: Kind = Kind {
    name: "role-not-allowed",
    status: StatusCode::FORBIDDEN,
    retryable: false,
    title: "Role not allowed",
    meaning: "This principal may look, but not act.",
    remedy: "Ask somebody whose role allows it. Nothing was done.",
};

/// The message moved on before the person's action.
pub static NOT_HELD: Kind = Kind {
    name: "not-held",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The message is not held",
    meaning: "No message of this id is held back in the outbox: it was published, is about to be, waits behind another, \
              or never was there.",
    remedy: "Look for it in /outbox. Only what is parked or unroutable can be skipped, and only that or what waits for \
             a time can be re-driven.",
};

/// The notification cannot be decided about.
pub static DELIVERY_SETTLED: Kind = Kind {
    name: "delivery-settled",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "Nothing to decide about the delivery",
    meaning: "There is nothing to decide about the delivery of this notification in this way: it was sent, or goes its ordinary way.",
    remedy: "The member notificationStatus tells how it stands now. What was sent cannot be taken back.",
};

/// The notification is being delivered.
pub static DELIVERY_RUNNING: Kind = Kind {
    name: "delivery-running",
    status: StatusCode::CONFLICT,
    retryable: true,
    title: "The delivery is running",
    meaning: "This notification is being delivered at this moment.",
    remedy: "Wait for the outcome, and decide then if there is still something to decide.",
};

/// A webhook is not signed.
pub static SIGNATURE_REFUSED: Kind = Kind {
    name: "signature-refused",
    status: StatusCode::BAD_REQUEST,
    retryable: false,
    title: "Signature refused",
    meaning: "The delivery has no signature of its source, a wrong one, or one of another time.",
    remedy: "The member reason says in a word what is wrong. Compare the secret with the sender's, and the clocks of both \
             machines. A proxy between the two must not change the body. Nothing was stored.",
};

/// A webhook is signed, and makes no sense.
pub static EVENT_MALFORMED: Kind = Kind {
    name: "event-malformed",
    status: StatusCode::BAD_REQUEST,
    retryable: false,
    title: "Not an event",
    meaning: "The delivery is signed, but is not what events of this source look like.",
    remedy: "The member errors lists everything that is wrong. Check that the source's kind is that of the sender, and \
             that it sends JSON. Nothing was stored.",
};

/// A test event for a live source, or the other way round.
pub static LIVEMODE_MISMATCH: Kind = Kind {
    name: "livemode-mismatch",
    status: StatusCode::BAD_REQUEST,
    retryable: false,
    title: "Event of the other mode",
    meaning: "This source takes live events only, or test events only, and this is one of the others.",
    remedy: "Give each mode a source and a secret of its own, or leave livemode out of the source. Nothing was stored.",
};

/// The body is compressed.
pub static BODY_ENCODED: Kind = Kind {
    name: "body-encoded",
    status: StatusCode::UNSUPPORTED_MEDIA_TYPE,
    retryable: false,
    title: "Body encoded",
    meaning: "The body has a Content-Encoding. The signature is over the bytes as they are sent, and nothing is \
              inflated before it was looked at.",
    remedy: "Send the body as it is, without Content-Encoding.",
};

/// More bodies are on their way in than there is room for.
pub static TOO_MANY_DELIVERIES: Kind = Kind {
    name: "too-many-deliveries",
    status: StatusCode::SERVICE_UNAVAILABLE,
    retryable: true,
    title: "Too many deliveries",
    meaning: "More deliveries to this source are on their way in than this node has room for.",
    remedy: "Send it again after the time that Retry-After tells. Nothing was stored. If it lasts, somebody may be opening \
             connections and sending nothing: limit what one address may do at the proxy.",
};

/// An event was stored, and processing it failed.
pub static WEBHOOK_FAILED: Kind = Kind {
    name: "webhook-failed",
    status: StatusCode::INTERNAL_SERVER_ERROR,
    retryable: true,
    title: "The event was not processed",
    meaning: "The event is stored, but this attempt to process it failed.",
    remedy: "It is tried again after a while, and at once when it is sent again, as long as it has attempts left. What \
             went wrong is told at GET /webhooks/{source}/events/{id}.",
};

/// An event is being processed.
pub static EVENT_RUNNING: Kind = Kind {
    name: "event-running",
    status: StatusCode::CONFLICT,
    retryable: true,
    title: "The event is being processed",
    meaning: "This event is being processed at this moment, or has moved on since it was looked at.",
    remedy: "Look at it again. If it has not completed by then, ask again.",
};

/// An event has taken effect.
pub static EVENT_COMPLETED: Kind = Kind {
    name: "event-completed",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The event has taken effect",
    meaning: "This event was processed, and what took effect is not done again by mistake.",
    remedy: "What it led to is in its processing_result. An event that was only stored runs again through the present \
             rules. To have any other run once more all the same, and its effect happen twice, name its result: \
             {\"reason\": \"…\", \"result\": \"forwarded\"}, or --result forwarded on the command line.",
};

/// No rule takes an event.
pub static EVENT_WITHOUT_RULE: Kind = Kind {
    name: "event-without-rule",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "No rule takes this event",
    meaning: "The event is stored, and no rule of its source takes its type now either: running it again would change nothing.",
    remedy: "Add a rule for its type to the source's handlers, restart the server, and ask again.",
};

/// The server's own kinds.
static OWN: [&Kind; 32] = [
    &EVENT_WITHOUT_RULE,
    &TOO_MANY_DELIVERIES,
    &EVENT_RUNNING,
    &EVENT_COMPLETED,
    &SIGNATURE_REFUSED,
    &EVENT_MALFORMED,
    &LIVEMODE_MISMATCH,
    &BODY_ENCODED,
    &WEBHOOK_FAILED,
    &ROLE_NOT_ALLOWED,
    &NOT_HELD,
    &DELIVERY_SETTLED,
    &DELIVERY_RUNNING,
    &NOT_FOUND,
    &METHOD_NOT_ALLOWED,
    &HOST_NOT_ALLOWED,
    &CROSS_ORIGIN,
    &INVALID_JSON,
    &INVALID_FIELDS,
    &INVALID_QUERY,
    &EMAIL_EM_USO,
    &VERSAO_DESATUALIZADA,
    &ESTADO_INVALIDO,
    &EVENT_MISMATCH,
    &TOO_MANY_STREAMS,
    &UPSTREAM_UNREACHABLE,
    &UPSTREAM_LOST,
    &UPSTREAM_TIMEOUT,
    &UPSTREAM_INVALID,
    &NO_ROOM,
    &TENANT_UNKNOWN,
    &TRANSFER_CODING,
];

/// When to send a request again that the database did not answer.
const SOON: Duration = Duration::from_secs(1);

/// The problem of a store that did not answer as it should. A row that cannot be read is a mistake of the server here: only
/// where one row is asked for by its id is it known which row that is, and that nothing was done
/// ([`damaged`](super::answers::damaged)).
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

    #[test]
    fn a_store_that_is_unavailable_is_told_with_its_reason_and_no_more() {
        let error = format!("{}: for 5 s, by process 4711", semel::reasons::FILE_HELD);
        let response = of_store(semel::Error::Unavailable(error)).into_http();
        let body = String::from_utf8_lossy(response.body()).into_owned();
        assert!(body.contains("another process holds the database") && !body.contains("4711"), "{body}");
    }

    #[test]
    fn what_names_no_row_advises_nobody_to_purge_one() {
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
    fn a_row_that_was_asked_for_and_cannot_be_read_is_named() {
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
    fn a_commit_whose_end_is_unknown_is_told_as_such() {
        let response = of_store(semel::Error::OutcomeUnknown("the connection was lost".into())).into_http();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(response.headers().contains_key("retry-after"));
        assert!(String::from_utf8_lossy(response.body()).contains("/problems/outcome-unknown"));
    }
}
