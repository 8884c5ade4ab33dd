//! The problems that only this service answers with.

use axum::http::StatusCode;

use crate::http::problem::Kind;

/// All of them.
pub static ALL: [&Kind; 12] = [
    &FILENAME_REUSED,
    &CONTENT_REUSED,
    &MESSAGE_DIFFERS,
    &INVALID_UPLOAD,
    &INVALID_FILE,
    &FILE_TOO_LARGE,
    &TOO_MANY_UPLOADS,
    &NOT_IN_THIS_STATE,
    &ENTRY_NOT_IN_DOUBT,
    &NO_ENTRIES,
    &TEST_NOT_RENDERED,
    &TEST_NOT_SENT,
];

/// The file name belongs to another content.
pub static FILENAME_REUSED: Kind = Kind {
    name: "filename-reused",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The file name is known with another content",
    meaning: "A mailing with this file name exists, and its file had another content. Nothing was stored.",
    remedy: "Give the new list another name, or choose with identity: filename (the existing mailing is meant) or \
             filename+content (this is a new mailing).",
};

/// The content is known under another name.
pub static CONTENT_REUSED: Kind = Kind {
    name: "content-reused",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The content is known under another file name",
    meaning: "A mailing with exactly this content exists under another file name. Nothing was stored.",
    remedy: "If the same people should get another mail, choose identity=filename+content. If the file was only renamed, \
             choose identity=content: the answer is then the existing mailing.",
};

/// The message differs.
pub static MESSAGE_DIFFERS: Kind = Kind {
    name: "message-differs",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The same file was uploaded with another message",
    meaning: "This file is a mailing already, with another subject, sender, body, policy, column or sendAt. Nothing was \
              stored or changed.",
    remedy: "To send another message to the same list, upload the file under another name with \
             identity=filename+content. To repeat the upload, send the same fields; policy and sendAt may be left out.",
};

/// Fields of the upload are wrong.
pub static INVALID_UPLOAD: Kind = Kind {
    name: "invalid-upload",
    status: StatusCode::UNPROCESSABLE_ENTITY,
    retryable: false,
    title: "The upload is wrong",
    meaning: "One or more fields of the upload are missing, unknown or break a rule. Nothing was stored.",
    remedy: "The member errors lists every wrong field with the reason.",
};

/// The file is no list of addresses.
pub static INVALID_FILE: Kind = Kind {
    name: "invalid-file",
    status: StatusCode::UNPROCESSABLE_ENTITY,
    retryable: false,
    title: "The file cannot be read as a list",
    meaning: "The beginning of the file shows that it is not a CSV list of addresses in UTF-8. Nothing was stored.",
    remedy: "The member code names the reason and the member line the place, where one is known. Save the list as CSV in \
             UTF-8, with a column named email; or name the column with the field column.",
};

/// The file is too large.
pub static FILE_TOO_LARGE: Kind = Kind {
    name: "file-too-large",
    status: StatusCode::PAYLOAD_TOO_LARGE,
    retryable: false,
    title: "The file is too large",
    meaning: "The file is larger than mailings.max_file. Nothing was stored.",
    remedy: "Split the list, or raise mailings.max_file.",
};

/// Too many lists arrive.
pub static TOO_MANY_UPLOADS: Kind = Kind {
    name: "too-many-uploads",
    status: StatusCode::SERVICE_UNAVAILABLE,
    retryable: true,
    title: "Too many uploads at a time",
    meaning: "This node receives as many lists as it can, or the tenant has half of the places, or another dry run is \
              under way. Nothing was stored.",
    remedy: "Send it again after the time in Retry-After.",
};

/// The mailing's status does not allow it.
pub static NOT_IN_THIS_STATE: Kind = Kind {
    name: "mailing-not-in-this-state",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "Not possible in this state",
    meaning: "The status of the mailing does not allow this action. Nothing was changed.",
    remedy: "The member mailingStatus has the present status; the detail says what is possible.",
};

/// The entry is not in doubt.
pub static ENTRY_NOT_IN_DOUBT: Kind = Kind {
    name: "entry-not-in-doubt",
    status: StatusCode::CONFLICT,
    retryable: false,
    title: "The entry is not in doubt",
    meaning: "Only an entry in doubt can be resolved. Nothing was changed.",
    remedy: "The member entryStatus has the present status. To send failed entries again, retry the mailing.",
};

/// There is no entry to be tested.
pub static NO_ENTRIES: Kind = Kind {
    name: "no-entries",
    status: StatusCode::CONFLICT,
    retryable: true,
    title: "The mailing has no entries",
    meaning: "A test mail is made of the first entry, and the mailing has none. Nothing was sent.",
    remedy: "If the member retryable is true, the import has not begun: try again. Otherwise all rows were refused: see \
             rejects.csv.",
};

/// The test mail cannot be made.
pub static TEST_NOT_RENDERED: Kind = Kind {
    name: "test-not-rendered",
    status: StatusCode::UNPROCESSABLE_ENTITY,
    retryable: false,
    title: "The test mail cannot be made",
    meaning: "The templates cannot be rendered with the first entry, or the sender is wrong. Nothing was sent.",
    remedy: "The detail has the mistake. Upload the list with another message.",
};

/// The test mail was not sent.
pub static TEST_NOT_SENT: Kind = Kind {
    name: "test-not-sent",
    status: StatusCode::BAD_GATEWAY,
    retryable: false,
    title: "The test mail was not sent",
    meaning: "The mail server did not accept the test mail.",
    remedy: "The detail has its answer. If the member retryable is true, try again later. Otherwise check mail_transport \
             and the sender.",
};
