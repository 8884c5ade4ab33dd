//! The problems that only this service answers with.

use axum::http::StatusCode;

use crate::http::problem::Kind;

/// All of them.
pub static ALL: [&Kind; 9] = [
    &SIGNATURE_REFUSED,
    &EVENT_MALFORMED,
    &LIVEMODE_MISMATCH,
    &BODY_ENCODED,
    &TOO_MANY_DELIVERIES,
    &WEBHOOK_FAILED,
    &EVENT_RUNNING,
    &EVENT_COMPLETED,
    &EVENT_WITHOUT_RULE,
];

/// A delivery without a valid signature.
pub static SIGNATURE_REFUSED: Kind = Kind {
    name: "signature-refused",
    status: StatusCode::BAD_REQUEST,
    retryable: false,
    title: "Signature refused",
    meaning: "The delivery has no signature of its source, a wrong one, or one outside the tolerance.",
    remedy: "The member reason names the mistake. Compare the secret with the sender's, and the clocks of both \
             machines. A proxy between the two must not change the body. Nothing was stored.",
};

/// A signed delivery that is not an event.
pub static EVENT_MALFORMED: Kind = Kind {
    name: "event-malformed",
    status: StatusCode::BAD_REQUEST,
    retryable: false,
    title: "Not an event",
    meaning: "The delivery is signed, but does not have the form of this source's events.",
    remedy: "The member errors lists everything that is wrong. Check that the source's kind is that of the sender, and \
             that it sends JSON. Nothing was stored.",
};

/// A test event for a live source, or the reverse.
pub static LIVEMODE_MISMATCH: Kind = Kind {
    name: "livemode-mismatch",
    status: StatusCode::BAD_REQUEST,
    retryable: false,
    title: "Event of the other mode",
    meaning: "This source accepts only live events or only test events, and this is one of the other mode.",
    remedy: "Give each mode its own source and secret, or leave livemode out of the source. Nothing was stored.",
};

/// The body is compressed.
pub static BODY_ENCODED: Kind = Kind {
    name: "body-encoded",
    status: StatusCode::UNSUPPORTED_MEDIA_TYPE,
    retryable: false,
    title: "Body encoded",
    meaning: "The body has a Content-Encoding. The signature covers the bytes as they are sent, and \
              nothing is decompressed before it is verified.",
    remedy: "Send the body as it is, without Content-Encoding.",
};

/// The source has no memory for the body.
pub static TOO_MANY_DELIVERIES: Kind = Kind {
    name: "too-many-deliveries",
    status: StatusCode::SERVICE_UNAVAILABLE,
    retryable: true,
    title: "Too many deliveries",
    meaning: "The bodies of other deliveries to this source use all the memory that this node has for them.",
    remedy: "Send it again after the time in Retry-After. Nothing was stored. If this lasts, a client may be opening \
             connections and sending nothing: limit requests per address at the proxy.",
};

/// The event is stored, and its run failed.
pub static WEBHOOK_FAILED: Kind = Kind {
    name: "webhook-failed",
    status: StatusCode::INTERNAL_SERVER_ERROR,
    retryable: true,
    title: "The event was not processed",
    meaning: "The event is stored, but this attempt to process it failed.",
    remedy: "It runs again after a backoff, and at once if it is sent again, as long as it has attempts left. GET \
             /webhooks/{source}/events/{id} shows the error.",
};

/// The event is being processed.
pub static EVENT_RUNNING: Kind = Kind {
    name: "event-running",
    status: StatusCode::CONFLICT,
    retryable: true,
    title: "The event is being processed",
    meaning: "This event is being processed at this moment, or has changed since it was read.",
    remedy: "Read it again. If it has not completed, try again.",
};

/// The event has taken effect.
pub static EVENT_COMPLETED: Kind = Kind {
    name: "event-completed",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The event has taken effect",
    meaning: "This event has completed. To repeat its effect, name its result.",
    remedy: "Its processing_result shows the effect. An event that was only stored runs again through the present \
             rules. To run any other again and repeat its effect, name its result: \
             {\"reason\": \"…\", \"result\": \"forwarded\"}, or --result forwarded on the command line.",
};

/// No rule matches the event.
pub static EVENT_WITHOUT_RULE: Kind = Kind {
    name: "event-without-rule",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "No rule matches this event",
    meaning: "The event is stored, and no present rule of its source matches its type: running it again would change nothing.",
    remedy: "Add a rule for its type to the source's handlers, restart the server, and try again.",
};
