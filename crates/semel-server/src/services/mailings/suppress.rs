//! Addresses that get no mail: unsubscribed by their link, or suppressed by a person.

use std::sync::Arc;

use axum::{
    Extension,
    extract::{FromRequest as _, Request, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use futures_util::TryStreamExt as _;
use semel::prelude::*;
use semel_http::Principal;
use semel_store::Audit;
use serde_json::json;

use super::{
    Service,
    command::{By, Imported},
    intake::Pace,
    list::address::Email,
    tables::{entries, suppressions},
};
use crate::http::{
    answers::{Page, missing, patiently, shown},
    fields::{Fields, reason},
    path::Id,
    principal::Actor,
    problem::{BODY_INCOMPLETE, Problem, of_store},
    query::Query,
    room,
};

/// The most addresses of one request.
const MOST: usize = 10_000;

/// How many links of deleted mailings a transaction removes, and how many transactions a sweep.
const FORGOTTEN_AT_ONCE: i64 = 2_000;
const FORGETTING: usize = 20;

/// The default length of a page.
const PAGE: i64 = 50;

/// `GET /suppressions`. The cursor is the last address of the page before.
pub(super) async fn list(
    State(service): State<Arc<Service>>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let email = query.take("email", |text| Email::parse(text).map_err(|_| "must be an address"));
    let after = query.take("cursor", |text| Ok(text.to_owned())).unwrap_or_default();
    let limit = query.take("limit", |text| {
        text.parse().ok().filter(|limit| (1..=500).contains(limit)).ok_or("must be a number from 1 to 500")
    });
    query.finish()?;
    let (limit, email) = (limit.unwrap_or(PAGE), email.map(|email| email.normal).unwrap_or_default());
    let tenant = principal.tenant.as_str();
    let page = service.database.read(async |conn| suppressions::page(conn, tenant, &after, &email, limit + 1).await);
    let mut items = patiently(page).await?;
    let more = items.len() > usize::try_from(limit).unwrap_or(usize::MAX);
    items.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    let next = items.last().filter(|_| more).map(|last| last.email.clone());
    Ok(shown(&Page { items, next }))
}

/// Addresses of a JSON array, or what is wrong with them.
fn emails(raw: &str) -> Result<Vec<Email>, String> {
    let texts: Vec<String> = serde_json::from_str(raw).map_err(|_| "must be a list of addresses".to_owned())?;
    if texts.is_empty() || texts.len() > MOST {
        return Err(format!("must have 1 to {MOST} addresses"));
    }
    let wrong: Vec<String> = texts.iter().filter(|text| Email::parse(text).is_err()).take(20).cloned().collect();
    if !wrong.is_empty() {
        return Err(format!("has texts that are no addresses: {}", wrong.join(", ")));
    }
    Ok(texts.iter().filter_map(|text| Email::parse(text).ok()).collect())
}

/// `POST /suppressions` `{emails, reason}`, or a list as `text/csv`: adds addresses. Known ones stay as they are.
pub(super) async fn add(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Extension(held): Extension<room::Held>,
    query: Query,
    request: Request,
) -> Result<Response, Problem> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("text/csv")) {
        // The addresses are stored as they arrive.
        held.stream();
        return import(&service, &principal, query, request).await;
    }
    query.finish()?;
    let mut fields = Fields::from_request(request, &()).await?;
    let (emails, why) = (fields.must("emails", emails), fields.may("reason", reason).unwrap_or_default());
    fields.finish()?;
    let Some(emails) = emails else { return Err(missing()) };
    let given = emails.len();
    let added = service.suppress(&principal.tenant, &principal.subject, emails, &why).await.map_err(of_store)?;
    Ok(shown(&json!({ "added": added, "known": given - added })))
}

/// Adds the addresses of a list of any length. If it breaks off, those before stay: a repeat finds them known.
async fn import(
    service: &Service,
    principal: &Principal,
    mut query: Query,
    request: Request,
) -> Result<Response, Problem> {
    let column = query.take("column", |text| Ok(text.to_owned()));
    let why = query.take("reason", |text| match text.len() {
        1..=1000 => Ok(text.to_owned()),
        _ => Err("must have 1 to 1000 bytes"),
    });
    query.finish()?;
    let _slot = service.intake.begin(&principal.tenant).await?;
    let (request, watch) = Pace::LISTS.watch(request);
    let cut_off = |error: axum::Error| {
        Problem::new(&BODY_INCOMPLETE).detail(format!("The list cannot be read: {error}. The addresses before stay."))
    };
    let parts = request.into_body().into_data_stream().map_err(cut_off);
    let why = why.unwrap_or_default();
    let by = By { tenant: &principal.tenant, actor: &principal.subject, reason: &why };
    let mut imported = Imported::default();
    let done = service.import_suppressions(by, parts, column.as_deref(), &mut imported).await;
    let Imported { added, known, refused, first } = imported;
    done.map_err(|problem| watch.problem(problem).with("added", added).with("known", known))?;
    let rejects: Vec<_> = first.iter().map(|(line, why)| json!({ "line": line, "error": why })).collect();
    Ok(shown(&json!({ "added": added, "known": known, "rejectedRows": refused, "rejects": rejects })))
}

/// `DELETE /suppressions/{email}`
pub(super) async fn remove(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Id(email): Id,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let why = fields.may("reason", reason).unwrap_or_default();
    fields.finish()?;
    let email = Email::parse(&email).map_err(|_| missing())?;
    match service.unsuppress(&principal.tenant, &principal.subject, &email, &why).await.map_err(of_store)? {
        true => Ok(shown(&json!({ "removed": true }))),
        false => Err(missing()),
    }
}

impl Service {
    /// Adds addresses; returns how many were new. The audit has their number: it is kept longer than they are.
    pub(super) async fn suppress(
        &self,
        tenant: &str,
        actor: &str,
        mut emails: Vec<Email>,
        reason: &str,
    ) -> semel::Result<usize> {
        emails.sort_unstable_by(|a, b| a.normal.cmp(&b.normal));
        emails.dedup_by(|a, b| a.normal == b.normal);
        let now = self.database.now().await?.as_micros();
        let mut added = 0;
        // Short transactions: on SQLite each holds the only writer.
        for part in emails.chunks(500) {
            let (store, part) = (self.database.clone(), part.to_vec());
            let [tenant, actor, reason] = [tenant, actor, reason].map(str::to_owned);
            let done = self.ledger.transact(move |tx| async move {
                let mut new = 0;
                {
                    let mut held = tx.connection().await?;
                    let mut conn = held.get()?;
                    for email in &part {
                        let is_new = suppressions::add(&mut conn, &tenant, &email.normal, &reason, now).await?;
                        new += usize::from(is_new);
                    }
                }
                let subject = format!("{new} addresses");
                let audit = Audit {
                    tenant: &tenant,
                    actor: &actor,
                    action: "suppressions.add",
                    subject: &subject,
                    reason: &reason,
                };
                if new > 0 {
                    store.audit_in(&tx, audit, None, None).await?;
                }
                Ok::<_, semel::Error>(new)
            });
            added += done.await?;
        }
        Ok(added)
    }

    /// Removes an address; false if it was not there.
    pub(super) async fn unsuppress(
        &self,
        tenant: &str,
        actor: &str,
        email: &Email,
        reason: &str,
    ) -> semel::Result<bool> {
        let store = self.database.clone();
        let [tenant, actor, reason, email] = [tenant, actor, reason, &email.normal].map(str::to_owned);
        let done = self.ledger.transact(move |tx| async move {
            let removed = suppressions::remove(&mut tx.connection().await?.get()?, &tenant, &email).await?;
            if removed {
                let audit = Audit {
                    tenant: &tenant,
                    actor: &actor,
                    action: "suppressions.remove",
                    subject: "1 address",
                    reason: &reason,
                };
                store.audit_in(&tx, audit, None, None).await?;
            }
            Ok::<_, semel::Error>(removed)
        });
        done.await
    }

    /// Removes the links of mailings that were deleted long ago.
    pub(super) async fn forget_links(&self) -> semel::Result<()> {
        let now = self.database.now().await?.as_micros();
        for _ in 0..FORGETTING {
            let forgotten = self.ledger.transact(move |tx| async move {
                entries::forget_links(&mut tx.connection().await?.get()?, now, FORGOTTEN_AT_ONCE).await
            });
            if forgotten.await? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// The tenant and the address that a link names, if its token is right.
    async fn named(&self, token: &str) -> Result<(String, String), Problem> {
        let mut parts = token.splitn(3, '-');
        let mut next = || parts.next().ok_or_else(missing);
        let (mailing, line, secret) = (next()?, next()?, next()?);
        let parsed = mailing.parse().ok().zip(line.parse().ok()).zip(hex::decode(secret).ok());
        let ((mailing, line), secret): ((i64, i64), Vec<u8>) = parsed.ok_or_else(missing)?;
        // The sweep moves the links of a deleted mailing from its entries to a table of their own.
        let found = self.database.read(async |conn| match entries::by_token(conn, mailing, line).await? {
            None => entries::kept_link(conn, mailing, line).await,
            found => Ok(found),
        });
        let (tenant, email, expected) = patiently(found).await?.ok_or_else(missing)?;
        // The time of the comparison must not tell how much of a guess is right.
        let differing = expected.iter().zip(&secret).fold(0, |all, (a, b)| all | (a ^ b));
        match expected.len() == secret.len() && differing == 0 {
            true => Ok((tenant, email)),
            false => Err(missing()),
        }
    }
}

/// `GET /u/{token}`: a page with a button. It changes nothing: mail scanners open every link.
pub(super) async fn page(State(service): State<Arc<Service>>, Id(token): Id) -> Result<Response, Problem> {
    service.named(&token).await?;
    Ok(html(
        "<p>Do you want to get no more mails from this sender?</p>\
         <form method=\"post\"><button type=\"submit\">Unsubscribe</button></form>",
    ))
}

/// `POST /u/{token}`: one-click unsubscribe (RFC 8058). Twice is once.
pub(super) async fn unsubscribe(State(service): State<Arc<Service>>, Id(token): Id) -> Result<Response, Problem> {
    let (tenant, email) = service.named(&token).await?;
    let email = Email::parse(&email).map_err(|_| missing())?;
    service.suppress(&tenant, "recipient", vec![email], "unsubscribed by link").await.map_err(of_store)?;
    Ok(html("<p>You are unsubscribed.</p>"))
}

fn html(content: &str) -> Response {
    let page = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>Unsubscribe</title>\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"robots\" content=\"noindex\"></head><body>{content}</body></html>"
    );
    let mut response = (StatusCode::OK, page).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("default-src 'none'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"),
    );
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
