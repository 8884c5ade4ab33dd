//! The problems that only this service answers with.

use axum::http::StatusCode;

use crate::http::problem::Kind;

/// All of them.
pub static ALL: [&Kind; 3] = [&EMAIL_EM_USO, &VERSAO_DESATUALIZADA, &ESTADO_INVALIDO];

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
    remedy: "Read the proposta again, decide anew, and send the versao that it has now; the member versao has it.",
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
