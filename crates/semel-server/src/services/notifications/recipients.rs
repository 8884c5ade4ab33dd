//! `/recipients`: the directory of recipients, their groups and addresses.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    extract::{FromRequestParts, Path, State},
    http::{StatusCode, request::Parts},
    response::{IntoResponse as _, Response},
};
use semel::{micros, prelude::*};
use semel_http::Principal;
use semel_store::{Audit, Database, Tx};
use serde::Serialize;
use serde_json::{json, value::RawValue};

use super::{
    Service,
    model::{Channel, Ident, Kind, LONGEST_IDENT},
    tables::recipients::{self, Addresses, Entry, Row},
};
use crate::http::{
    answers::{Page, damaged, missing, patiently, shown, time},
    fields::{Fields, text},
    json::{DEEPEST, flaw},
    principal::Actor,
    problem::{NOT_FOUND, Problem, of_store},
    query::Query,
};

/// How long past versions of an entry are kept at least: longer than any transaction, so that a fan-out that began
/// meanwhile still finds them.
const KEPT: Duration = Duration::from_secs(3600);

/// The longest address. A push service has URLs with long secrets.
const LONGEST_ADDRESS: usize = 2_048;

/// The kind in a path. Another word is a 404.
pub(super) struct OfKind(Kind);

impl<S: Send + Sync> FromRequestParts<S> for OfKind {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Path(name) = Path::<String>::from_request_parts(parts, state).await.map_err(|_| missing())?;
        parsed(&name).map(Self)
    }
}

/// Kind and user in a path.
pub(super) struct Named(Kind, String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((kind, user_id)) = path.map_err(|_| missing())?;
        let kind = parsed(&kind)?;
        if user_id.is_empty() || user_id.len() > LONGEST_IDENT || user_id.chars().any(char::is_control) {
            let rule = format!("A userId has 1 to {LONGEST_IDENT} bytes, none of them a control character.");
            return Err(Problem::new(&NOT_FOUND).detail(rule));
        }
        Ok(Self(kind, user_id))
    }
}

fn parsed(kind: &str) -> Result<Kind, Problem> {
    let kinds = Kind::ALL.map(Kind::name).join(", ");
    Kind::parse(kind).ok_or_else(|| Problem::new(&NOT_FOUND).detail(format!("The kinds of recipients are {kinds}.")))
}

/// A recipient in an answer.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Recipient {
    kind: Kind,
    user_id: String,
    group_id: String,
    channels: Vec<&'static str>,
    addresses: Addresses,
    #[serde(serialize_with = "time")]
    created_at: i64,
    /// In a list: why the addresses are not shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Recipient {
    fn new(kind: Kind, user_id: String, entry: Entry, created_at: i64) -> Self {
        let channels = entry.channels.into_iter().map(Channel::name).collect();
        Self { kind, user_id, group_id: entry.group_id, channels, addresses: entry.addresses, created_at, error: None }
    }

    fn of(kind: Kind, row: Row) -> semel::Result<Self> {
        let entry = row.entry()?;
        Ok(Self::new(kind, row.user_id, entry, row.created_at))
    }

    /// An item of a list. A list continues if the addresses of one item cannot be read.
    fn listed(kind: Kind, row: Row) -> Self {
        let (entry, error) = match row.entry() {
            Ok(entry) => (entry, None),
            Err(error) => (row.without_addresses(), Some(format!("unreadable: {error}"))),
        };
        Self { error, ..Self::new(kind, row.user_id, entry, row.created_at) }
    }
}

/// `PUT /recipients/{kind}/{userId}`
pub(super) async fn put(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Named(kind, user_id): Named,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let group_id = fields.must("groupId", Ident::read);
    let channels = fields.must("channels", channels);
    let wanted = channels.clone();
    let addresses = fields.may("addresses", addresses).map(|members| checked(members, wanted.as_deref(), &mut fields));
    fields.finish()?;
    let entry = Entry {
        group_id: group_id.map(|group| group.text).unwrap_or_default(),
        channels: channels.unwrap_or_default(),
        addresses: addresses.unwrap_or_default(),
    };
    // A repeat changes nothing and is not audited.
    if let Some(row) = patiently(find(&service, &principal.tenant, kind, &user_id)).await?
        // Putting a recipient again repairs unreadable addresses.
        && row.entry().is_ok_and(|stored| stored == entry)
    {
        return Ok(shown(&Recipient::of(kind, row).map_err(of_store)?));
    }
    let change = Change::new(&service, principal, kind, user_id.clone()).await?;
    let said = entry.clone();
    let created_at = service.ledger.transact(move |tx| async move { change.put(&tx, &said).await }).await;
    Ok(shown(&Recipient::new(kind, user_id, entry, created_at.map_err(of_store)?)))
}

/// `GET /recipients/{kind}/{userId}`
pub(super) async fn show(
    State(service): State<Arc<Service>>,
    principal: Principal,
    Named(kind, user_id): Named,
) -> Result<Response, Problem> {
    let row = patiently(find(&service, &principal.tenant, kind, &user_id)).await?.ok_or_else(missing)?;
    let help = "put the recipient again, with all addresses";
    Ok(shown(&Recipient::of(kind, row).map_err(|error| damaged(error, &user_id, help))?))
}

/// `DELETE /recipients/{kind}/{userId}`
pub(super) async fn delete(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Named(kind, user_id): Named,
) -> Result<Response, Problem> {
    let change = Change::new(&service, principal, kind, user_id).await?;
    let removed = service.ledger.transact(move |tx| async move { change.remove(&tx).await }).await;
    if !removed.map_err(of_store)? {
        return Err(missing());
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// A change of one recipient. The audit is written in its transaction.
struct Change {
    database: Database,
    tenant: String,
    actor: String,
    kind: Kind,
    user_id: String,
    now: i64,
}

impl Change {
    async fn new(service: &Service, principal: Principal, kind: Kind, user_id: String) -> Result<Self, Problem> {
        let database = service.database.clone();
        let now = database.now().await.map_err(of_store)?.as_micros();
        Ok(Self { database, tenant: principal.tenant, actor: principal.subject, kind, user_id, now })
    }

    fn who(&self) -> (&str, Kind, &str) {
        (&self.tenant, self.kind, &self.user_id)
    }

    /// Stores a new version of the recipient; returns when the first one was made.
    async fn put(&self, tx: &Tx, entry: &Entry) -> semel::Result<i64> {
        let (before, created_at) = {
            let mut held = tx.connection().await?;
            let mut conn = held.get()?;
            let revision = recipients::next_revision(&mut conn, &self.tenant).await?;
            let before = recipients::find(&mut conn, &self.tenant, self.kind, &self.user_id).await?;
            recipients::end(&mut conn, self.who(), revision, self.now).await?;
            let created_at = before.as_ref().map_or(self.now, |row| row.created_at);
            recipients::insert(&mut conn, self.who(), entry, revision, created_at).await?;
            recipients::forget(&mut conn, self.who(), self.now.saturating_sub(micros(KEPT))).await?;
            (before, created_at)
        };
        self.audit(tx, "recipients.put", before.as_ref(), Some(entry)).await?;
        Ok(created_at)
    }

    /// Ends the present version; returns whether there was one.
    async fn remove(&self, tx: &Tx) -> semel::Result<bool> {
        let before = {
            let mut held = tx.connection().await?;
            let mut conn = held.get()?;
            if recipients::find(&mut conn, &self.tenant, self.kind, &self.user_id).await?.is_none() {
                return Ok(false);
            }
            let revision = recipients::next_revision(&mut conn, &self.tenant).await?;
            // Again, under the lock: another request may have changed it meanwhile.
            let before = recipients::find(&mut conn, &self.tenant, self.kind, &self.user_id).await?;
            let Some(before) = before else { return Ok(false) };
            if !recipients::end(&mut conn, self.who(), revision, self.now).await? {
                return Ok(false);
            }
            recipients::forget(&mut conn, self.who(), self.now.saturating_sub(micros(KEPT))).await?;
            before
        };
        self.audit(tx, "recipients.delete", Some(&before), None).await?;
        Ok(true)
    }

    /// Audits the change. The audit is kept longer than addresses may be, so it has none.
    async fn audit(
        &self,
        tx: &Tx,
        action: &'static str,
        before: Option<&Row>,
        after: Option<&Entry>,
    ) -> semel::Result<()> {
        let told = |entry: &Entry| {
            let channels: Vec<_> = entry.channels.iter().map(|channel| channel.name()).collect();
            json!({ "groupId": entry.group_id, "channels": channels })
        };
        let subject = format!("{}/{}", self.kind.name(), self.user_id);
        let audit = Audit { tenant: &self.tenant, actor: &self.actor, action, subject: &subject, reason: "" };
        let before = before.map(|row| told(&row.without_addresses()));
        self.database.audit_in(tx, audit, before, after.map(told)).await
    }
}

/// `GET /recipients/{kind}`
pub(super) async fn list(
    State(service): State<Arc<Service>>,
    principal: Principal,
    OfKind(kind): OfKind,
    mut query: Query,
) -> Result<Response, Problem> {
    let group_id = query.take("groupId", |text| Ok(text.to_owned()));
    let place = query.place();
    query.finish()?;
    let rows = patiently(
        service
            .database
            .read(async |conn| recipients::list(conn, &principal.tenant, kind, group_id.as_deref(), place).await),
    );
    let (rows, next) = place.cut(rows.await?, |row| row.id);
    let items = rows.into_iter().map(|row| Recipient::listed(kind, row)).collect();
    Ok(shown(&Page::<Recipient> { items, next }))
}

async fn find(service: &Service, tenant: &str, kind: Kind, user_id: &str) -> semel::Result<Option<Row>> {
    service.database.read(async |conn| recipients::find(conn, tenant, kind, user_id).await).await
}

fn channels(raw: &str) -> Result<Vec<Channel>, String> {
    let wrong =
        || format!("must be a list of one or more of {}, each once", Channel::ALL.map(Channel::name).join(", "));
    let names: Vec<String> = serde_json::from_str(raw).map_err(|_| wrong())?;
    let mut channels = names.iter().map(|name| Channel::parse(name)).collect::<Option<Vec<_>>>().ok_or_else(wrong)?;
    channels.sort();
    channels.dedup();
    if channels.is_empty() || channels.len() != names.len() { Err(wrong()) } else { Ok(channels) }
}

fn addresses(raw: &str) -> Result<BTreeMap<String, Box<RawValue>>, String> {
    if let Some(flaw) = flaw(raw, DEEPEST) {
        return Err(format!("has {flaw}"));
    }
    serde_json::from_str(raw).map_err(|_| "must be an object with a text for some of the channels".to_owned())
}

/// Checks each address by itself and reports mistakes under its name.
fn checked(members: BTreeMap<String, Box<RawValue>>, channels: Option<&[Channel]>, fields: &mut Fields) -> Addresses {
    let mut addresses = Addresses::new();
    for (name, raw) in members {
        let used = Channel::parse(&name).is_some_and(|channel| channels.is_none_or(|used| used.contains(&channel)));
        let read = match text(raw.get()) {
            _ if !used => Err("is for none of the channels".to_owned()),
            Ok(address) if address.is_empty() || address.len() > LONGEST_ADDRESS => {
                Err(format!("must have 1 to {LONGEST_ADDRESS} bytes"))
            }
            read => read,
        };
        match read {
            Ok(address) => drop(addresses.insert(name, address)),
            Err(message) => fields.note(&format!("addresses.{name}"), message),
        }
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_a_set_that_is_not_empty() {
        assert_eq!(channels(r#"["SMS","PUSH"]"#), Ok(vec![Channel::Push, Channel::Sms]));
        for wrong in ["[]", r#"["PUSH","PUSH"]"#, r#"["push"]"#, r#""PUSH""#, "null", "[1]"] {
            assert!(channels(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_address_is_for_a_channel_that_is_used_and_a_wrong_one_is_named() {
        let told = |body: &str| {
            let mut fields = Fields::parse(body.as_bytes()).unwrap();
            let members = fields.may("addresses", addresses);
            let read = members.map(|members| checked(members, Some(&[Channel::Email]), &mut fields));
            let wrong = fields.finish().err().map(|problem| problem.said().to_string());
            wrong.map_or_else(|| Ok(read.unwrap_or_default()), Err)
        };
        assert_eq!(told(r#"{"addresses":{"EMAIL":"a@example.com"}}"#).unwrap()["EMAIL"], "a@example.com");
        for (addresses, wrong) in [
            (r#"{"EMAIL":"a@example.com","EMAIL":"b@example.com"}"#, "addresses has EMAIL twice."),
            (r#"{"SMS":"+1"}"#, "addresses.SMS is for none of the channels."),
            (r#"{"FAX":"1"}"#, "addresses.FAX is for none of the channels."),
            (r#"{"EMAIL":3}"#, "addresses.EMAIL must be a text."),
            (r#"{"EMAIL":""}"#, "addresses.EMAIL must have 1 to"),
            ("[]", "addresses must be an object"),
        ] {
            let told = told(&format!(r#"{{"addresses":{addresses}}}"#)).unwrap_err();
            assert!(told.starts_with(wrong), "{told}");
        }
    }
}
