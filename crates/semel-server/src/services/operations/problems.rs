//! The problems that only this service answers with.

use axum::http::StatusCode;

use crate::http::problem::Kind;

/// All of them.
pub static ALL: [&Kind; 2] = [&OPERATION_RUNNING, &OPERATION_COMPLETED];

/// A decision about an operation that runs.
pub static OPERATION_RUNNING: Kind = Kind {
    name: "operation-running",
    status: StatusCode::CONFLICT,
    retryable: true,
    title: "The operation runs",
    meaning: "A worker holds the lease of this operation, so nothing can be decided about it now.",
    remedy: "Wait until it is settled or its lease has expired, or ask it to stop: POST /v1/operations/{id}/cancel.",
};

/// A decision about an operation that has taken effect.
pub static OPERATION_COMPLETED: Kind = Kind {
    name: "operation-completed",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The operation has taken effect",
    meaning: "This operation has completed, so there is nothing left to decide.",
    remedy: "Its resultData is what every repeat gets. To have it run once more as a new operation, delete it first.",
};
