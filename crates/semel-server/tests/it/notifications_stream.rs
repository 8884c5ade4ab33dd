//! The laws of the stream: IN_APP notifications arrive in order, and a client that reconnects misses none.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
};

use rustix::process::Signal;
use serde_json::Value;

use crate::{
    notifications::{Api, of_restaurant},
    place::{Place, on_both_databases},
    serve_faults::{log, logged},
    support::{SOON, Server},
};

on_both_databases! {
    a_notification_in_the_app_is_sent_by_the_stream
    a_client_that_reconnects_continues_where_it_was
    a_stream_on_another_node_gets_the_notification
    the_streams_of_a_tenant_are_limited
    streams_end_when_the_server_stops
    a_stream_needs_a_user
}

/// An open stream.
struct Stream(BufReader<TcpStream>);

/// One event of it.
#[derive(Debug)]
struct Event {
    id: i64,
    data: Value,
}

impl Stream {
    /// Opens a stream; waits for the server's greeting.
    fn open(api: &Api, query: &str, last: Option<i64>) -> (Self, i64) {
        let mut stream = Self::ask(api, query, last);
        let status = stream.line();
        assert!(status.contains(" 200 "), "{status}");
        while !stream.line().is_empty() {}
        let greeting = stream.event(false);
        (stream, greeting.id)
    }

    fn ask(api: &Api, query: &str, last: Option<i64>) -> Self {
        let mut connection = TcpStream::connect(api.server.address).unwrap();
        connection.set_read_timeout(Some(SOON)).unwrap();
        let last = last.map(|last| format!("last-event-id: {last}\r\n")).unwrap_or_default();
        // With HTTP/1.0, in which a body has no chunks.
        let text = format!("GET /notifications/stream?{query} HTTP/1.0\r\nhost: localhost\r\n{last}\r\n");
        connection.write_all(text.as_bytes()).unwrap();
        Self(BufReader::new(connection))
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end_matches(['\r', '\n']).to_owned()
    }

    /// The next event, with or without data.
    fn event(&mut self, with_data: bool) -> Event {
        let (mut id, mut data) = (None, None);
        loop {
            let line = self.line();
            if let Some(text) = line.strip_prefix("id:") {
                id = text.trim().parse().ok();
            }
            if let Some(text) = line.strip_prefix("data:") {
                data = serde_json::from_str(text).ok();
            }
            if let Some(id) = id.filter(|_| line.is_empty() && data.is_some() == with_data) {
                return Event { id, data: data.unwrap_or(Value::Null) };
            }
        }
    }

    fn next(&mut self) -> Event {
        self.event(true)
    }

    /// Reads to the end.
    fn rest(mut self) -> String {
        let mut text = String::new();
        self.0.read_to_string(&mut text).unwrap();
        text
    }
}

const ANA: &str = "kind=restaurant&userId=ana";

fn with_ana(place: &Place, variables: &[(&str, &str)]) -> Api {
    let api = Api::start_with(place, variables);
    api.recipient("restaurant", "ana", "5", &["IN_APP", "EMAIL"]);
    api.recipient("restaurant", "bob", "6", &["IN_APP"]);
    api
}

fn a_notification_in_the_app_is_sent_by_the_stream(place: &Place) {
    let api = with_ana(place, &[]);
    api.event(&of_restaurant("before", 5));
    let (mut early, place) = Stream::open(&api, &format!("{ANA}&from=0"), None);
    assert_eq!((place, early.next().data["eventId"].clone()), (0, "before".into()));
    let (mut stream, _) = Stream::open(&api, ANA, None);
    let (mut bobs, _) = Stream::open(&api, "kind=restaurant&userId=bob", None);
    api.event(&of_restaurant("one", 5));
    api.event(&of_restaurant("bobs", 6));
    let one = stream.next();
    assert_eq!(one.data["eventId"], "one", "from now on");
    assert_eq!((&one.data["status"], &one.data["notificationType"]), (&"SENT".into(), &"IN_APP".into()));
    assert_eq!(early.next().id, one.id);
    assert_eq!(bobs.next().data["eventId"], "bobs", "a stream has only its own user's notifications");
    api.event(&of_restaurant("two", 5));
    let two = stream.next();
    assert!(two.id > one.id && two.data["eventId"] == "two");
    let sent = api.notifications("kind=restaurant&userId=ana");
    let status =
        |channel: &str| sent.iter().filter(|n| n["notificationType"] == channel).all(|n| n["status"] == "SENT");
    assert!(status("IN_APP") && !status("EMAIL"), "{sent:?}");
}

fn a_client_that_reconnects_continues_where_it_was(place: &Place) {
    let api = with_ana(place, &[]);
    let (mut stream, _) = Stream::open(&api, ANA, None);
    for n in 0..3 {
        api.event(&of_restaurant(&format!("e{n}"), 5));
    }
    let heard: Vec<_> = (0..3).map(|_| stream.next()).collect();
    assert!(heard.is_sorted_by(|a, b| a.id < b.id));
    drop(stream);
    // More than a page, in one go.
    let list: Vec<_> = (3..300).map(|n| of_restaurant(&format!("e{n}"), 5)).collect();
    assert_eq!(api.post("/events", &Value::Array(list)).status, 202);
    let (mut stream, greeted) = Stream::open(&api, ANA, Some(heard[0].id));
    assert_eq!(greeted, heard[0].id);
    let mut again: Vec<_> = (1..300).map(|_| stream.next()).collect();
    assert_eq!((again[0].id, again[1].id), (heard[1].id, heard[2].id));
    assert!(again.is_sorted_by(|a, b| a.id < b.id));
    let mut events: Vec<_> = again.drain(..).map(|event| event.data["eventId"].as_str().unwrap().to_owned()).collect();
    events.push(heard[0].data["eventId"].as_str().unwrap().to_owned());
    events.sort();
    let mut all: Vec<_> = (0..300).map(|n| format!("e{n}")).collect();
    all.sort();
    assert_eq!(events, all, "each once");
    let (mut whole, _) = Stream::open(&api, ANA, Some(0));
    assert_eq!(whole.next().id, heard[0].id, "0 is the beginning");
}

fn a_stream_on_another_node_gets_the_notification(place: &Place) {
    let api = with_ana(place, &[]);
    let other = Api::start_with(place, &[("SEMEL_ROLES", "api")]);
    let (mut stream, _) = Stream::open(&other, ANA, None);
    api.event(&of_restaurant("e", 5));
    assert_eq!(stream.next().data["eventId"], "e");
}

fn the_streams_of_a_tenant_are_limited(place: &Place) {
    let api = with_ana(place, &[("SEMEL_NOTIFICATIONS_STREAMS", "2")]);
    let first = Stream::open(&api, ANA, None);
    let _second = Stream::open(&api, ANA, None);
    let refused = api.get(&format!("/notifications/stream?{ANA}"));
    assert_eq!((refused.status, refused.problem().as_str()), (429, "too-many-streams"));
    drop(first);
    // The server notices the disconnect with the next write: the event's.
    api.event(&of_restaurant("e", 5));
    crate::support::eventually(SOON, "there is room again", || Stream::ask(&api, ANA, None).line().contains(" 200 "));
}

fn streams_end_when_the_server_stops(place: &Place) {
    let mut command = place.semel(["serve", "--listen", "127.0.0.1:0"]);
    logged(&mut command, place);
    let mut api = Api { server: Server::start_with(&mut command) };
    let (stream, _) = Stream::open(&api, ANA, None);
    api.server.process.signal(Signal::TERM);
    stream.rest();
    assert!(api.server.process.end().success());
    let log = log(place);
    assert!(log.contains("every request was answered"), "the stream was cut off: {log}");
}

fn a_stream_needs_a_user(place: &Place) {
    let api = with_ana(place, &[]);
    for wrong in ["", "kind=restaurant", "userId=ana", "kind=boss&userId=ana", "kind=restaurant&userId=ana&from=-1"] {
        assert_eq!(api.get(&format!("/notifications/stream?{wrong}")).problem(), "invalid-query", "{wrong}");
    }
    let mut stream = Stream::ask(&api, ANA, Some(-1));
    assert!(stream.line().contains(" 400 "));
}
