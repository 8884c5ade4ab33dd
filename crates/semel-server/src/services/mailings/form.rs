//! The form of an upload: its fields, one after the other, in bounded memory.
//!
//! multer keeps what belongs to no field in memory, whatever its length: the text before the first field, and the head
//! of each. It also reads on as long as bytes are there, before it gives any of them. So the body pauses after
//! [`OUTSIDE`] bytes until the reader has used some, and breaks off if there was nothing to use.

use std::{
    borrow::Cow,
    error::Error as StdError,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use axum::{
    body::Body,
    extract::{
        FromRequest as _, Multipart, Request,
        multipart::{Field, MultipartError},
    },
    http::header::CONTENT_DISPOSITION,
};
use bytes::Bytes;
use futures_util::{Stream, TryStreamExt as _, stream};

use super::{
    check::{LONGEST_TEXT, without_file},
    problems::INVALID_UPLOAD,
};
use crate::http::{
    fields::Wrong,
    problem::{BODY_INCOMPLETE, Problem},
};

/// How many bytes of a form may belong to no field. The head of a field has some 200 bytes.
const OUTSIDE: usize = 64 << 10;

/// A form that arrives.
pub(super) struct Form {
    parts: Multipart,
    state: Arc<State>,
}

/// What the reader of a form and its body know of one another.
#[derive(Default)]
struct State {
    /// The bytes that have arrived, without the content that the reader has got.
    unused: AtomicUsize,
    /// How often the reader got a field or some content.
    steps: AtomicUsize,
    /// Whether too much belonged to no field.
    is_shapeless: AtomicBool,
}

impl State {
    fn used(&self, bytes: usize) {
        self.unused.fetch_sub(bytes, Ordering::Relaxed);
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until there is room for more.
    async fn room(&self) -> Result<(), axum::Error> {
        while self.unused.load(Ordering::Relaxed) > OUTSIDE {
            let steps = self.steps.load(Ordering::Relaxed);
            // The reader now looks at what it has; it asks again when it has used that, or needs more.
            tokio::task::yield_now().await;
            if self.steps.load(Ordering::Relaxed) == steps {
                self.is_shapeless.store(true, Ordering::Relaxed);
                return Err(axum::Error::new(Shapeless));
            }
        }
        Ok(())
    }

    fn problem(&self, error: &MultipartError) -> Problem {
        if self.is_shapeless.load(Ordering::Relaxed) {
            let mut wrong = Wrong::default();
            wrong.note("…", format!("has more than {} KiB that belong to no field", OUTSIDE >> 10));
            return wrong.problem(&INVALID_UPLOAD);
        }
        Problem::new(&BODY_INCOMPLETE)
            .detail(format!("The upload cannot be read: {}. Nothing was stored.", error.body_text()))
    }
}

impl Form {
    /// The form in a request.
    pub(super) async fn of(request: Request) -> Result<Self, Problem> {
        let state = Arc::new(State::default());
        let (head, body) = request.into_parts();
        let watched = state.clone();
        let parts = stream::try_unfold(body.into_data_stream(), move |mut parts| {
            let state = watched.clone();
            async move {
                state.room().await?;
                let part = parts.try_next().await?;
                state.unused.fetch_add(part.as_ref().map_or(0, Bytes::len), Ordering::Relaxed);
                Ok::<_, axum::Error>(part.map(|part| (part, parts)))
            }
        });
        let request = Request::from_parts(head, Body::from_stream(parts));
        let parts = Multipart::from_request(request, &()).await.map_err(|_| without_file(Wrong::default()))?;
        Ok(Self { parts, state })
    }

    /// The next field.
    pub(super) async fn next(&mut self) -> Result<Option<Part<'_>>, Problem> {
        let state = self.state.clone();
        let field = self.parts.next_field().await.map_err(|error| state.problem(&error))?;
        state.used(0);
        Ok(field.map(|field| Part::new(field, state)))
    }
}

/// A field that arrives.
pub(super) struct Part<'a> {
    field: Field<'a>,
    state: Arc<State>,
    pub(super) name: String,
    pub(super) filename: Option<String>,
}

impl<'a> Part<'a> {
    fn new(field: Field<'a>, state: Arc<State>) -> Self {
        let value =
            field.headers().get(CONTENT_DISPOSITION).and_then(|value| std::str::from_utf8(value.as_bytes()).ok());
        let Disposition { name, filename } = Disposition::parse(value.unwrap_or_default());
        Self { field, state, name: name.unwrap_or_default(), filename }
    }

    async fn more(&mut self) -> Result<Option<Bytes>, Problem> {
        let more = self.field.chunk().await.map_err(|error| self.state.problem(&error))?;
        self.state.used(more.as_ref().map_or(0, Bytes::len));
        Ok(more)
    }

    /// Its content as it arrives.
    pub(super) fn content(self) -> impl Stream<Item = Result<Bytes, Problem>> + use<'a> {
        stream::try_unfold(self, |mut part| async move { Ok(part.more().await?.map(|bytes| (bytes, part))) })
    }

    /// Its content as a text, or what is wrong with it.
    pub(super) async fn text(&mut self) -> Result<Result<String, &'static str>, Problem> {
        let mut bytes = Vec::new();
        while let Some(part) = self.more().await? {
            bytes.extend_from_slice(&part);
            if bytes.len() > LONGEST_TEXT {
                break;
            }
        }
        Ok(text(bytes))
    }

    /// Reads over the rest; false if it is long, and not worth it.
    pub(super) async fn skip(mut self) -> Result<bool, Problem> {
        let mut skipped = 0;
        while let Some(part) = self.more().await? {
            skipped += part.len();
            if skipped > LONGEST_TEXT {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A text field, by the rules of an upload.
pub(super) fn text(bytes: Vec<u8>) -> Result<String, &'static str> {
    if bytes.len() > LONGEST_TEXT {
        return Err("must have at most 1 MiB");
    }
    match String::from_utf8(bytes) {
        Ok(text) if text.contains('\0') => Err("must not have a NUL character"),
        Ok(text) => Ok(text),
        Err(_) => Err("is not UTF-8"),
    }
}

/// The names in a Content-Disposition. Ours, because multer finds no file name if `filename*` comes first or alone.
#[derive(Debug, Default, PartialEq, Eq)]
struct Disposition {
    name: Option<String>,
    filename: Option<String>,
}

impl Disposition {
    fn parse(value: &str) -> Self {
        let (mut found, mut plain) = (Self::default(), None);
        let mut rest = value.split_once(';').map_or("", |(_, rest)| rest);
        while let Some((name, value, after)) = parameter(rest) {
            rest = after;
            // Of two equal ones the first counts, as for browsers.
            let slot = match name.to_ascii_lowercase().as_str() {
                "name" => &mut found.name,
                "filename" => &mut plain,
                "filename*" => {
                    found.filename = found.filename.or_else(|| extended(&value));
                    continue;
                }
                _ => continue,
            };
            if slot.is_none() {
                *slot = Some(value.into_owned());
            }
        }
        // RFC 6266: the extended form is the better one.
        found.filename = found.filename.or(plain);
        found
    }
}

/// The next parameter: its name, its value, and what follows.
fn parameter(text: &str) -> Option<(&str, Cow<'_, str>, &str)> {
    let (name, rest) = text.split_once('=')?;
    // Parameters without a value before it are passed over.
    let name = name.rsplit(';').next().unwrap_or(name).trim();
    let rest = rest.trim_start();
    let Some(quoted) = rest.strip_prefix('"') else {
        let (value, after) = rest.split_once(';').unwrap_or((rest, ""));
        return Some((name, value.trim_end().into(), after));
    };
    // Only a quote is escaped. Other backslashes stay: old browsers send whole paths of Windows.
    let mut is_escaped = false;
    let end = quoted.char_indices().find(|&(_, c)| {
        let ends = c == '"' && !is_escaped;
        is_escaped = c == '\\';
        ends
    });
    let end = end?.0;
    let after = quoted[end + 1..].split_once(';').map_or("", |(_, after)| after);
    Some((name, quoted[..end].replace("\\\"", "\"").into(), after))
}

/// A value such as `UTF-8''caf%C3%A9.csv` (RFC 8187).
fn extended(value: &str) -> Option<String> {
    let mut parts = value.splitn(3, '\'');
    let (charset, _, text) = (parts.next()?, parts.next()?, parts.next()?);
    charset.trim().eq_ignore_ascii_case("utf-8").then_some(())?;
    let (mut bytes, mut parts) = (Vec::with_capacity(text.len()), text.split('%'));
    bytes.extend_from_slice(parts.next()?.as_bytes());
    for part in parts {
        let digits = part.get(..2)?;
        bytes.push(*hex::decode(digits).ok()?.first()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

#[derive(Debug)]
struct Shapeless;

impl fmt::Display for Shapeless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the form has too much that belongs to no field")
    }
}

impl StdError for Shapeless {}

#[cfg(test)]
#[path = "form_tests.rs"]
mod tests;
