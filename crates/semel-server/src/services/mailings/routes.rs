//! `/mailings`: upload, look, act.

use std::{collections::BTreeMap, convert::Infallible, panic::resume_unwind, sync::Arc};

use axum::{
    Extension,
    body::Body,
    extract::{FromRequestParts, Path, Request, State},
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::Response,
};
use bytes::Bytes;
use futures_util::stream;
use semel::{Timestamp, prelude::*};
use semel_http::Principal;
use tokio::sync::oneshot;
use tracing::Instrument as _;

use super::{
    Service,
    act::{Act, Who},
    form::Form,
    intake::Pace,
    list::{address::Email, cells::write_row},
    send::message_id,
    tables::{
        entries, imports,
        mailings::{self, Mailing},
    },
    upload::Outcome,
    view::{self, EntryView},
};
use crate::http::{
    answers::{Page, answer, missing, patiently, shown},
    fields::{Fields, reason, text},
    path::Id,
    principal::Actor,
    problem::{Problem, of_store},
    query::{Query, number},
    room,
};

/// How many rows of an export are read at a time.
const EXPORTED_AT_ONCE: i64 = 1_000;

/// `POST /mailings`
pub(super) async fn create(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Extension(held): Extension<room::Held>,
    request: Request,
) -> Result<Response, Problem> {
    let slot = service.intake.begin(&principal.tenant).await?;
    // The file is stored as it arrives.
    held.stream();
    // Dropped with this handler.
    let (_client, gone) = oneshot::channel::<Infallible>();
    let upload = async move {
        let _slot = slot;
        let (request, watch) = Pace::LISTS.watch(request);
        let received = match Form::of(request).await {
            Ok(form) => service.receive(form).await,
            Err(problem) => Err(problem),
        };
        let upload = received.map_err(|problem| watch.problem(problem))?;
        service.take(&principal.tenant, &principal.subject, upload, async { drop(gone.await) }).await
    };
    // In a task of its own: if the client hangs up, its file becomes a mailing or is removed, but does not stay.
    let outcome = match tokio::spawn(upload.in_current_span()).await {
        Ok(outcome) => outcome?,
        Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
        Err(_) => return Err(of_store(semel::Error::Stopping)),
    };
    let status = if matches!(outcome, Outcome::Created { .. }) { StatusCode::CREATED } else { StatusCode::OK };
    Ok(answer(status, &outcome.to_json()).map(Body::from))
}

pub(crate) const STATUSES: [&str; 7] =
    ["PENDING", "QUEUED", "PROCESSING", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"];
const ENTRY_STATUSES: [&str; 8] =
    ["PENDING", "SENDING", "SENT", "FAILED", "INVALID", "SUPPRESSED", "CANCELLED", "IN_DOUBT"];

fn one_of<const N: usize>(all: [&'static str; N], text: &str) -> Option<&'static str> {
    all.into_iter().find(|known| *known == text)
}

/// `GET /mailings`
pub(super) async fn list(
    State(service): State<Arc<Service>>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let status = query.take("status", |text| one_of(STATUSES, text).ok_or("must be a status such as PROCESSING"));
    let filename = query.take("filename", |text| Ok(text.to_owned())).unwrap_or_default();
    let place = query.place();
    query.finish()?;
    let (tenant, status) = (principal.tenant.as_str(), status.unwrap_or_default());
    let page = service.database.read(async |conn| mailings::page(conn, tenant, status, &filename, place).await);
    let (items, next) = place.cut(patiently(page).await?, |mailing| mailing.number);
    let now = patiently(service.database.now()).await?.as_micros();
    let items = items.iter().map(|mailing| view::mailing(mailing, now, None)).collect();
    Ok(shown(&Page { items, next }))
}

impl Service {
    pub(super) async fn find(&self, tenant: &str, id: &str) -> Result<Mailing, Problem> {
        let found = patiently(self.database.read(async |conn| mailings::find(conn, tenant, id).await)).await?;
        found.ok_or_else(missing)
    }

    /// A mailing as JSON.
    pub(super) async fn show(&self, mailing: &Mailing) -> Result<serde_json::Value, Problem> {
        let same = patiently(self.database.read(async |conn| mailings::same_list(conn, mailing).await)).await?;
        let now = patiently(self.database.now()).await?.as_micros();
        Ok(view::mailing(mailing, now, same))
    }
}

/// `GET /mailings/{id}`
pub(super) async fn show(
    State(service): State<Arc<Service>>,
    principal: Principal,
    Id(id): Id,
) -> Result<Response, Problem> {
    let mailing = service.find(&principal.tenant, &id).await?;
    Ok(shown(&service.show(&mailing).await?))
}

/// `GET /mailings/{id}/entries`
pub(super) async fn entries(
    State(service): State<Arc<Service>>,
    principal: Principal,
    Id(id): Id,
    mut query: Query,
) -> Result<Response, Problem> {
    let status = query.take("status", |text| one_of(ENTRY_STATUSES, text).ok_or("must be a status such as IN_DOUBT"));
    let email = query.take("email", |text| Email::parse(text).map_err(|_| "must be an address"));
    let place = query.place();
    query.finish()?;
    let mailing = service.find(&principal.tenant, &id).await?;
    let status = status.unwrap_or_default();
    let (items, next) = match email {
        Some(email) => {
            let found =
                service.database.read(async |conn| entries::by_email(conn, mailing.number, &email.normal).await);
            let found = patiently(found).await?.into_iter();
            (found.filter(|entry| status.is_empty() || entry.status == status).collect(), None)
        }
        None => service.entries_of(mailing.number, status, place).await?,
    };
    let items = items.into_iter().map(|entry| EntryView::of(entry, &mailing)).collect();
    Ok(shown(&Page { items, next }))
}

/// `GET /mailings/{id}/duplicates`
pub(super) async fn duplicates(
    State(service): State<Arc<Service>>,
    principal: Principal,
    Id(id): Id,
    mut query: Query,
) -> Result<Response, Problem> {
    let place = query.place();
    query.finish()?;
    let mailing = service.find(&principal.tenant, &id).await?;
    let found = service
        .database
        .read(async |conn| imports::duplicate_lines(conn, mailing.number, place.after, place.limit + 1).await);
    let (items, next) = place.cut(patiently(found).await?, |row| row.line);
    Ok(shown(&Page { items, next }))
}

/// `GET /mailings/{id}/rejects.csv`
pub(super) async fn rejects(
    State(service): State<Arc<Service>>,
    principal: Principal,
    Id(id): Id,
) -> Result<Response, Problem> {
    let mailing = service.find(&principal.tenant, &id).await?;
    let head = ["line", "column", "code", "value"];
    let pages = stream::try_unfold((service, mailing, 0_i64), |(service, mailing, after)| async move {
        let number = mailing.number;
        let page = service.database.read(async |conn| imports::rejects(conn, number, after, EXPORTED_AT_ONCE).await);
        let page = service.exported(&mailing, page.await).await?;
        let mut out = Vec::new();
        for row in &page {
            let line = row.line.to_string();
            write_row(&mut out, &[&line, row.column.as_deref().unwrap_or_default(), &row.code, &row.value]);
        }
        let next = page.last().map(|row| row.line);
        Ok::<_, std::io::Error>(next.map(|next| (Bytes::from(out), (service, mailing, next))))
    });
    Ok(as_csv(&format!("{id}-rejects.csv"), Body::from_stream(prefixed(&head, pages))))
}

/// `GET /mailings/{id}/export.csv`
pub(super) async fn export(
    State(service): State<Arc<Service>>,
    principal: Principal,
    Id(id): Id,
) -> Result<Response, Problem> {
    let mailing = service.find(&principal.tenant, &id).await?;
    let head = ["line", "email", "status", "attempts", "time", "messageId", "externalId", "error"];
    let pages = stream::try_unfold((service, mailing, 0_i64), |(service, mailing, after)| async move {
        let number = mailing.number;
        let page = service
            .database
            .read(async |conn| entries::page(conn, number, (after, i64::MAX), "", EXPORTED_AT_ONCE).await);
        let page = service.exported(&mailing, page.await).await?;
        let mut out = Vec::new();
        for entry in &page {
            let [line, attempts] = [entry.line, entry.attempts].map(|number| number.to_string());
            let time = Timestamp::from_micros(entry.updated_at).to_string();
            let message_id = message_id(&mailing.id, entry.line, &mailing.message_domain);
            let email = entry.original.as_deref().unwrap_or(&entry.email);
            let [external, error] = [&entry.external_id, &entry.error].map(|text| text.as_deref().unwrap_or_default());
            write_row(&mut out, &[&line, email, &entry.status, &attempts, &time, &message_id, external, error]);
        }
        let next = page.last().map(|entry| entry.line);
        Ok::<_, std::io::Error>(next.map(|next| (Bytes::from(out), (service, mailing, next))))
    });
    Ok(as_csv(&format!("{id}.csv"), Body::from_stream(prefixed(&head, pages))))
}

impl Service {
    /// A page of a CSV file. If it cannot be read, the client sees a body that ends too early, and no reason. So it does
    /// if the mailing was deleted meanwhile: an empty page would look as if the file were whole.
    async fn exported<T>(&self, mailing: &Mailing, page: semel::Result<Vec<T>>) -> std::io::Result<Vec<T>> {
        let page = match page {
            Ok(page) if page.is_empty() => {
                let (tenant, id) = (&mailing.tenant, &mailing.id);
                let found = self.database.read(async |conn| mailings::find(conn, tenant, id).await).await;
                found.and_then(|found| {
                    found.map(|_| page).ok_or_else(|| semel::Error::Refused("the mailing was deleted".to_owned()))
                })
            }
            page => page,
        };
        page.map_err(|error| {
            tracing::warn!(%error, mailing = mailing.id, "a CSV file broke off, because its rows could not be read");
            std::io::Error::other(error.to_string())
        })
    }
}

/// The pages of a CSV file after its head.
fn prefixed<E, S>(head: &[&str], pages: S) -> impl stream::Stream<Item = Result<Bytes, E>> + use<E, S>
where
    S: stream::Stream<Item = Result<Bytes, E>>,
{
    let mut first = Vec::new();
    write_row(&mut first, head);
    futures_util::StreamExt::chain(stream::once(async move { Ok(Bytes::from(first)) }), pages)
}

fn as_csv(name: &str, body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/csv; charset=utf-8"));
    if let Ok(value) = HeaderValue::from_str(&format!("attachment; filename=\"{name}\"")) {
        headers.insert(header::CONTENT_DISPOSITION, value);
    }
    response
}

/// Carries out an action of a person on a mailing.
async fn act(
    service: &Service,
    principal: &Principal,
    id: &str,
    mut fields: Fields,
    act: Act,
) -> Result<Response, Problem> {
    let why = fields.may("reason", reason).unwrap_or_default();
    fields.finish()?;
    let who = Who { tenant: &principal.tenant, actor: &principal.subject, reason: &why };
    let mailing = service.act(id, &who, act).await?;
    Ok(shown(&service.show(&mailing).await?))
}

/// `POST /mailings/{id}/pause`
pub(super) async fn pause(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Id(id): Id,
    fields: Fields,
) -> Result<Response, Problem> {
    act(&service, &principal, &id, fields, Act::Pause).await
}

/// `POST /mailings/{id}/resume`
pub(super) async fn resume(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Id(id): Id,
    fields: Fields,
) -> Result<Response, Problem> {
    act(&service, &principal, &id, fields, Act::Resume).await
}

/// `POST /mailings/{id}/retry`
pub(super) async fn retry(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Id(id): Id,
    fields: Fields,
) -> Result<Response, Problem> {
    act(&service, &principal, &id, fields, Act::Retry).await
}

/// `POST /mailings/{id}/cancel`
pub(super) async fn cancel(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Id(id): Id,
    fields: Fields,
) -> Result<Response, Problem> {
    act(&service, &principal, &id, fields, Act::Cancel).await
}

/// `DELETE /mailings/{id}`
pub(super) async fn delete(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Id(id): Id,
    fields: Fields,
) -> Result<Response, Problem> {
    act(&service, &principal, &id, fields, Act::Delete).await
}

/// The mailing and the entry that a path names.
pub(super) struct Entry(String, i64);

impl<S: Send + Sync> FromRequestParts<S> for Entry {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let path = Path::<BTreeMap<String, String>>::from_request_parts(parts, state).await;
        let Path(names) = path.map_err(|_| missing())?;
        let named = names.get("id").zip(names.get("entryId"));
        let named = named.and_then(|(id, entry)| Some(Self(id.clone(), number(entry)?)));
        named.filter(|Self(id, _)| !id.contains('\0')).ok_or_else(missing)
    }
}

/// `POST /mailings/{id}/entries/{entryId}/resolve`
pub(super) async fn resolve(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Entry(id, line): Entry,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let said = fields.must("as", |raw| match text(raw)?.as_str() {
        "sent" => Ok(false),
        "resend" => Ok(true),
        _ => Err("must be sent or resend".to_owned()),
    });
    match said {
        Some(resend) => act(&service, &principal, &id, fields, Act::Resolve { line, resend }).await,
        None => Err(fields.finish().err().unwrap_or_else(missing)),
    }
}

/// `POST /mailings/{id}/test`
pub(super) async fn test(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Id(id): Id,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let to = fields.must("email", |raw| Email::parse(&text(raw)?).map_err(|error| error.to_string()));
    fields.finish()?;
    let mailing = service.find(&principal.tenant, &id).await?;
    let Some(to) = to else { return Err(missing()) };
    Ok(shown(&service.send_test(&mailing, &principal.subject, to).await?))
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;
    use crate::services::mailings::fixture::Fixture;

    #[tokio::test]
    async fn an_export_of_a_mailing_that_is_deleted_meanwhile_does_not_end_as_if_it_were_whole() {
        let fixture = Fixture::new().await;
        let service = &fixture.service;
        let upload = fixture.upload("email\nana@example.com\n").await;
        let outcome = service.take("default", "ana", upload, pending()).await.unwrap();
        let Outcome::Created { id } = outcome else { panic!("{}", outcome.to_json()) };
        let mailing = service.find("default", &id).await.unwrap();
        let last = async || service.exported(&mailing, Ok(Vec::<()>::new())).await;
        assert!(last().await.unwrap().is_empty());
        let number = mailing.number;
        let deleted = service
            .ledger
            .transact(move |tx| async move { mailings::delete(&mut tx.connection().await?.get()?, number, 1).await });
        deleted.await.unwrap();
        assert!(last().await.unwrap_err().to_string().contains("deleted"));
    }
}
