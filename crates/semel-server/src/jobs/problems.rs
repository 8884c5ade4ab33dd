//! The problems that only this service answers with.

use axum::http::StatusCode;

use crate::http::problem::Kind;

/// All of them.
pub static ALL: [&Kind; 1] = [&JOB_ENDED];

/// The job ended before it could be cancelled.
pub static JOB_ENDED: Kind = Kind {
    name: "job-ended",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The job has ended",
    meaning: "The job completed, failed or was cancelled before this request.",
    remedy: "GET /jobs/{id} shows how it ended. Its completed steps stay.",
};
