//! `GET /notifications/stream`: server-sent events, each with its position in the stream as its id.

use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Duration};

use axum::{
    extract::State,
    http::{HeaderMap, header},
    response::{
        IntoResponse as _, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::stream;
use semel_http::Principal;
use semel_store::Database;

use super::{
    Service,
    feed::Seat,
    list::kind,
    model::Kind,
    problems::TOO_MANY_STREAMS,
    tables::{
        listing::{self, Streamed},
        notifications,
    },
};
use crate::http::{
    answers::patiently,
    fields::Wrong,
    problem::{INVALID_QUERY, Problem},
    query::{Query, number},
};

/// The header with the last event that a client received.
const LAST_EVENT_ID: &str = "last-event-id";

/// The heartbeat of an idle stream: proxies commonly cut connections that are idle for a minute.
const ALIVE: Duration = Duration::from_secs(15);

/// How many notifications are read at once. A slow client keeps so many in memory.
const PAGE: i64 = 100;

/// The longest time without a read of the database, even if nothing wakes the stream.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);

/// `GET /notifications/stream`
pub(super) async fn open(
    State(service): State<Arc<Service>>,
    principal: Principal,
    headers: HeaderMap,
    mut query: Query,
) -> Result<Response, Problem> {
    let (of, user_id) = (query.take("kind", kind), query.take("userId", |text| Ok(text.to_owned())));
    let place = |text: &str| number(text).filter(|place| *place >= 0).ok_or("must be a place in the stream, or 0");
    let from = query.take("from", place);
    query.finish()?;
    let (Some(of), Some(user_id)) = (of, user_id) else {
        return Err(wrong("kind, userId", "are required: a stream belongs to one user"));
    };
    let last = match headers.get(LAST_EVENT_ID) {
        Some(value) => {
            let last = value.to_str().ok().and_then(number).filter(|place| *place >= 0);
            Some(last.ok_or_else(|| wrong("Last-Event-ID", "must be the id of an event of this stream"))?)
        }
        None => from,
    };
    let seat = service
        .feed
        .join(&principal.tenant, of, &user_id)
        .ok_or_else(|| Problem::new(&TOO_MANY_STREAMS).retry_after(Duration::from_secs(5)))?;
    let after = match last {
        Some(last) => last,
        None => patiently(now(&service.database)).await?,
    };
    let reading = Reading {
        database: service.database.clone(),
        seat,
        who: (principal.tenant, of, user_id),
        after,
        read: VecDeque::new(),
        // A client that is cut off before the first notification continues from here, not from the time of its return.
        greeting: Some(Event::default().id(after.to_string()).comment("notifications")),
    };
    let events =
        stream::unfold(
            reading,
            |mut reading| async move { Some((Ok::<_, Infallible>(reading.next().await?), reading)) },
        );
    let headers = [(header::CACHE_CONTROL, "no-store"), (header::HeaderName::from_static("x-accel-buffering"), "no")];
    Ok((headers, Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE))).into_response())
}

fn wrong(field: &str, message: &str) -> Problem {
    let mut wrong = Wrong::default();
    wrong.note(field, message);
    wrong.problem(&INVALID_QUERY)
}

async fn now(database: &Database) -> semel::Result<i64> {
    database.read(async |conn| notifications::last_place(conn).await).await
}

/// An open stream.
struct Reading {
    database: Database,
    seat: Seat,
    who: (String, Kind, String),
    /// The last position that was read.
    after: i64,
    read: VecDeque<Streamed>,
    greeting: Option<Event>,
}

impl Reading {
    async fn next(&mut self) -> Option<Event> {
        if let Some(greeting) = self.greeting.take() {
            return Some(greeting);
        }
        loop {
            if self.seat.has_ended() {
                return None;
            }
            if let Some(streamed) = self.read.pop_front() {
                let event = Event::default().id(streamed.stream_seq.to_string());
                match event.json_data(&streamed.notification) {
                    Ok(event) => return Some(event),
                    Err(error) => tracing::error!(%error, "a notification cannot be written as JSON"),
                }
                continue;
            }
            let most = match self.page().await {
                Ok(page) if page.is_empty() => LONGEST_SLEEP,
                Ok(page) => {
                    self.after = page.last().map_or(self.after, |last| last.stream_seq);
                    self.read = page.into();
                    continue;
                }
                Err(error) => {
                    tracing::debug!(%error, "a stream could not be read; it tries again");
                    Duration::from_secs(1)
                }
            };
            if !self.seat.wait(most).await {
                return None;
            }
        }
    }

    async fn page(&self) -> semel::Result<Vec<Streamed>> {
        let (tenant, kind, user_id) = &self.who;
        self.database.read(async |conn| listing::stream(conn, (tenant, *kind, user_id), self.after, PAGE).await).await
    }
}
