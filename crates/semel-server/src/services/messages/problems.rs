//! The problems that only this service answers with.

use axum::http::StatusCode;

use crate::http::problem::Kind;

/// All of them.
pub static ALL: [&Kind; 1] = [&NOT_HELD];

/// The message changed before the action.
pub static NOT_HELD: Kind = Kind {
    name: "not-held",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The message is not held",
    meaning: "No message of this id is held in the outbox: it was published, is about to be, waits behind another, \
              or never existed.",
    remedy: "Look for it in /outbox. Only parked and unroutable messages can be skipped. These, and messages that wait for \
             a time, can be re-driven.",
};
