//! The problems that only this service answers with.

use axum::http::StatusCode;

use crate::http::problem::Kind;

/// All of them.
pub static ALL: [&Kind; 4] = [&EVENT_MISMATCH, &TOO_MANY_STREAMS, &DELIVERY_SETTLED, &DELIVERY_RUNNING];

/// The id belongs to another event.
pub static EVENT_MISMATCH: Kind = Kind {
    name: "event-mismatch",
    status: StatusCode::UNPROCESSABLE_ENTITY,
    retryable: false,
    title: "The eventId belongs to another event",
    meaning: "An event with this eventId was accepted before, and it had another body.",
    remedy: "An eventId names one event. For another one, make a new eventId; to repeat an event, send it as it was. Of \
             this request nothing was stored, and the member errors lists the events whose ids are taken.",
};

/// The tenant has too many open streams.
pub static TOO_MANY_STREAMS: Kind = Kind {
    name: "too-many-streams",
    status: StatusCode::TOO_MANY_REQUESTS,
    retryable: true,
    title: "Too many streams",
    meaning: "This tenant has as many streams open at this node as allowed.",
    remedy: "Close unused streams, or set notifications.streams higher. Until then, read \
             GET /notifications?unread=true now and then.",
};

/// The delivery cannot be decided in this way.
pub static DELIVERY_SETTLED: Kind = Kind {
    name: "delivery-settled",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "Nothing to decide about the delivery",
    meaning: "The delivery of this notification cannot be decided in this way: it was sent, or it runs without a decision.",
    remedy: "The member notificationStatus is its present status. A sent notification cannot be withdrawn.",
};

/// The notification is being delivered.
pub static DELIVERY_RUNNING: Kind = Kind {
    name: "delivery-running",
    status: StatusCode::CONFLICT,
    retryable: true,
    title: "The delivery is running",
    meaning: "This notification is being delivered at this moment.",
    remedy: "Wait for its end. Then decide, if it still needs a decision.",
};
