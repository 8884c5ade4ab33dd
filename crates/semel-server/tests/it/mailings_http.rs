//! Sending by the API of a mail service: what its answers mean for an entry, and for the mailing.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufReader, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex, atomic::AtomicUsize},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    fleet::{ALL, Fleet, on_every_fleet},
    mailings::{MESSAGE, Node, created, each},
    mailings_kill::{LIMIT, SHORT, check_counts, count, list, upload},
    support::eventually,
    upstream::read,
};

on_every_fleet! {
    a_lost_answer_is_repeated_with_the_same_key_and_the_mailing_completes_alone
    a_killed_node_sends_each_mail_under_one_key
    without_a_window_a_lost_answer_waits_for_a_person
    a_lost_answer_is_not_repeated_after_the_window
    a_refused_token_pauses_the_mailing_and_costs_no_attempt
    too_many_requests_wait_as_long_as_asked
    each_answer_has_its_own_state
    an_id_that_was_given_twice_is_shown_as_an_error
    a_repeat_that_would_come_after_the_window_is_in_doubt
    a_mailing_resumed_after_the_window_repeats_nothing
}

/// A request as the service sees it.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) key: String,
    pub(crate) to: String,
    pub(crate) body: Vec<u8>,
    pub(crate) at: Instant,
    /// How often the key has arrived, this time included.
    pub(crate) nth: usize,
}

/// What the service does with a request.
pub(crate) enum Reply {
    /// Status, further header lines, body.
    Answer(u16, &'static str, String),
    /// It closes the connection after it has the whole request.
    Lost,
}

/// It gives a mail the key as its id, so a repeat has the same one.
pub(crate) fn accepted(asked: &Asked) -> Reply {
    Reply::Answer(200, "", json!({ "id": asked.key }).to_string())
}

pub(crate) fn refused(status: u16, said: &str) -> Reply {
    Reply::Answer(status, "", json!({ "message": said }).to_string())
}

type Answers = dyn Fn(&Asked) -> Reply + Send + Sync;

/// A mail service. Its threads end with the process.
pub(crate) struct Provider {
    url: String,
    state: Arc<State>,
}

struct State {
    asked: Mutex<Vec<Asked>>,
    answers: Mutex<Arc<Answers>>,
}

impl Provider {
    /// A service that accepts every mail.
    pub(crate) fn start() -> Self {
        Self::that(accepted)
    }

    pub(crate) fn that(answers: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://geheim@{}/send", listener.local_addr().unwrap());
        let state = Arc::new(State { asked: Mutex::default(), answers: Mutex::new(Arc::new(answers)) });
        let shared = state.clone();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (connection, state) = (connection.unwrap(), shared.clone());
                thread::spawn(move || state.serve(&connection));
            }
        });
        Self { url, state }
    }

    /// The transport that uses it, with these options.
    pub(crate) fn transport(&self, options: &str) -> String {
        format!("{}?{options}", self.url)
    }

    pub(crate) fn now_accepts(&self) {
        *self.state.answers.lock().unwrap() = Arc::new(accepted);
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.state.asked.lock().unwrap().clone()
    }

    fn asked_for(&self, to: &str) -> Vec<Asked> {
        self.asked().into_iter().filter(|asked| asked.to.starts_with(to)).collect()
    }

    /// Asserts that each of so many addresses has one key, so that the service sends it one mail.
    pub(crate) fn assert_one_key_each(&self, addresses: usize) {
        let mut keys: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for asked in self.asked() {
            keys.entry(asked.to).or_default().insert(asked.key);
        }
        assert_eq!(keys.len(), addresses);
        assert!(keys.values().all(|keys| keys.len() == 1), "{keys:?}");
        assert_eq!(keys.values().flatten().collect::<BTreeSet<_>>().len(), addresses, "two addresses share a key");
    }
}

impl State {
    fn serve(&self, mut connection: &TcpStream) {
        let mut reader = BufReader::new(connection);
        while let Ok(Some(seen)) = read(&mut reader, &AtomicUsize::new(0)) {
            let body: Value = serde_json::from_slice(&seen.body).unwrap();
            assert_eq!(seen.header("authorization"), ["Bearer geheim"]);
            let (key, to) = (seen.header("idempotency-key")[0].to_owned(), body["to"].as_str().unwrap().to_owned());
            let asked = {
                let mut all = self.asked.lock().unwrap();
                let nth = all.iter().filter(|asked| asked.key == key).count() + 1;
                all.push(Asked { key, to, body: seen.body, at: Instant::now(), nth });
                all.last().unwrap().clone()
            };
            let answers = self.answers.lock().unwrap().clone();
            let Reply::Answer(status, headers, text) = answers(&asked) else {
                let _ = connection.shutdown(Shutdown::Both);
                return;
            };
            let length = text.len();
            let answer = format!("HTTP/1.1 {status} X\r\n{headers}content-length: {length}\r\n\r\n{text}");
            if connection.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    }
}

/// A node that sends to a service, one mail at a time, and the id of a mailing to so many users.
pub(crate) fn sending(fleet: &Fleet, provider: &Provider, options: &str, users: usize) -> (Node, String) {
    let transport = provider.transport(options);
    let variables = [("SEMEL_MAIL_TRANSPORT", transport.as_str()), ("SEMEL_MAILINGS_CONNECTIONS", "1")];
    let node = Node::start_as(fleet, ALL, &variables);
    let id = upload(node.address(), "list.csv", &list(users)).unwrap();
    (node, id)
}

pub(crate) fn waits(mailing: &Value) -> bool {
    mailing["waitingFor"] == "decision"
}

fn a_lost_answer_is_repeated_with_the_same_key_and_the_mailing_completes_alone(fleet: &mut Fleet) {
    let provider = Provider::that(|asked| match (asked.to.as_str(), asked.nth) {
        ("user1@example.com", 1) => Reply::Lost,
        _ => accepted(asked),
    });
    let (node, id) = sending(fleet, &provider, "window=1h", 3);
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "sent"), count(&mailing, "inDoubt")), (3, 0));
    provider.assert_one_key_each(3);
    let [first, second] = &provider.asked_for("user1@")[..] else { panic!("asked twice") };
    assert_eq!((&first.key, &first.body), (&second.key, &second.body), "a repeat is the same request");
    let entries = node.entries(&id);
    assert_eq!(each(&entries, "attempts"), ["1", "2", "1"]);
    assert_eq!(entries[1]["externalId"], json!(second.key));
}

fn a_killed_node_sends_each_mail_under_one_key(fleet: &mut Fleet) {
    let provider = Provider::start();
    let transport = provider.transport("window=1h");
    let variables = [&SHORT[..], &[("SEMEL_MAIL_TRANSPORT", transport.as_str())]].concat();
    let mut dying = fleet.start_dying(ALL, "mailing.sent:5", &variables);
    let id = upload(dying.address, "list.csv", &list(40)).unwrap();
    fleet.died_at("mailing.sent:5", &mut dying);
    let node = Node::start_as(fleet, ALL, &variables);
    let mailing = node.completed(&id);
    assert_eq!((count(&mailing, "sent"), count(&mailing, "inDoubt")), (40, 0), "{mailing}");
    provider.assert_one_key_each(40);
    assert!(provider.asked().iter().any(|asked| asked.nth > 1), "no mail was lost: this shows nothing");
}

fn without_a_window_a_lost_answer_waits_for_a_person(fleet: &mut Fleet) {
    let provider = Provider::that(|asked| match asked.to.as_str() {
        "user0@example.com" => Reply::Lost,
        "user1@example.com" => refused(502, "bad gateway"),
        _ => accepted(asked),
    });
    let (node, id) = sending(fleet, &provider, "", 3);
    let mailing = node.until(&id, "it waits for a decision", waits);
    assert_eq!((count(&mailing, "inDoubt"), count(&mailing, "sent")), (2, 1), "{mailing}");
    assert_eq!(provider.asked().len(), 3, "nothing is repeated");
    assert!(node.entries(&id)[1]["error"].as_str().unwrap().contains("502"));
}

fn a_lost_answer_is_not_repeated_after_the_window(fleet: &mut Fleet) {
    let provider = Provider::that(|_| Reply::Lost);
    let (node, id) = sending(fleet, &provider, "window=4s&timeout=1s", 1);
    let mailing = node.until(&id, "it waits for a decision", waits);
    assert_eq!(count(&mailing, "inDoubt"), 1);
    let asked = provider.asked();
    assert_eq!(asked.len(), 2, "it was repeated inside the window");
    assert!(asked[1].at - asked[0].at < Duration::from_secs(4), "{asked:?}");
}

fn a_refused_token_pauses_the_mailing_and_costs_no_attempt(fleet: &mut Fleet) {
    let provider = Provider::that(|_| refused(401, "the token geheim is wrong"));
    let (node, id) = sending(fleet, &provider, "window=1h", 20);
    let mailing = node.until_status(&id, "PAUSED");
    assert_eq!(mailing["error"], "HTTP 401: the token *** is wrong");
    assert_eq!((count(&mailing, "pending"), provider.asked().len()), (20, 1));
    provider.now_accepts();
    node.act(&id, "resume");
    let mailing = node.completed(&id);
    check_counts(&mailing, 20);
    assert!(mailing["error"].is_null(), "{mailing}");
    assert!(each(&node.entries(&id), "attempts").iter().all(|attempts| attempts == "1"));
    provider.assert_one_key_each(20);
}

fn too_many_requests_wait_as_long_as_asked(fleet: &mut Fleet) {
    let provider = Provider::that(|asked| match (asked.to.as_str(), asked.nth) {
        ("user1@example.com", 1) => Reply::Answer(429, "retry-after: 3\r\n", String::new()),
        _ => accepted(asked),
    });
    let (node, id) = sending(fleet, &provider, "window=1h", 4);
    eventually(LIMIT, "it has asked for a wait", || !provider.asked_for("user1@").is_empty());
    // Also by a mailing that begins meanwhile.
    let other = node.mailing("other.csv", "email\nana@example.com\n");
    node.completed(&other);
    node.completed(&id);
    let asked = provider.asked();
    assert_eq!(asked.len(), 6);
    let limited = asked.iter().position(|asked| asked.to == "user1@example.com").unwrap();
    let pause = asked[limited + 1].at - asked[limited].at;
    assert!(pause > Duration::from_millis(2900), "the next request of any mail came after {pause:?}");
    assert!(each(&node.entries(&id), "attempts").iter().all(|attempts| attempts == "1"));
}

fn each_answer_has_its_own_state(fleet: &mut Fleet) {
    let provider = Provider::that(|asked| match (asked.to.as_str(), asked.nth) {
        ("user0@example.com", _) => refused(400, "no such address"),
        ("user1@example.com", _) => refused(422, "the Idempotency-Key was used for another request"),
        ("user2@example.com", 1) => Reply::Answer(409, "retry-after: 1\r\n", String::new()),
        ("user3@example.com", _) => Reply::Answer(200, "", String::new()),
        ("user4@example.com", 1) => refused(503, "later"),
        ("user5@example.com", _) => refused(500, "never"),
        _ => accepted(asked),
    });
    let transport = provider.transport("window=1h");
    let variables = [("SEMEL_MAIL_TRANSPORT", transport.as_str()), ("SEMEL_MAILINGS_MAX_ATTEMPTS", "2")];
    let node = Node::start_as(fleet, ALL, &variables);
    let id = upload(node.address(), "list.csv", &list(6)).unwrap();
    let mailing = node.until(&id, "it waits for decisions", waits);
    assert_eq!(["sent", "invalid", "inDoubt"].map(|name| count(&mailing, name)), [3, 1, 2], "{mailing}");
    let entries = node.entries(&id);
    // A service that knows the key, or failed to the end, may have sent the mail.
    assert_eq!(each(&entries, "status"), ["INVALID", "IN_DOUBT", "SENT", "SENT", "SENT", "IN_DOUBT"]);
    assert_eq!(each(&entries, "attempts"), ["1", "1", "2", "1", "2", "2"]);
    let errors = ["HTTP 400: no such", "HTTP 422: the Idem", "null", "null", "null", "HTTP 500: never"];
    for (error, expected) in each(&entries, "error").iter().zip(errors) {
        assert!(error.starts_with(expected), "{error}");
    }
    assert!(entries[3]["externalId"].is_null());
    // A retry repeats what failed, and nothing else.
    provider.now_accepts();
    node.act(&id, "retry");
    let mailing = node.until(&id, "it waits again", |mailing| waits(mailing) && count(mailing, "sent") == 4);
    assert_eq!((count(&mailing, "inDoubt"), &mailing["run"]), (2, &json!(2)), "{mailing}");
    assert_eq!(provider.asked_for("user3@").len(), 1);
    provider.assert_one_key_each(6);
}

#[test]
fn a_mail_that_is_in_flight_for_ever_waits_for_a_person() {
    let fleet = Fleet::sqlite();
    let provider = Provider::that(|_| refused(409, "no"));
    let transport = provider.transport("");
    let variables = [("SEMEL_MAIL_TRANSPORT", transport.as_str()), ("SEMEL_MAILINGS_MAX_ATTEMPTS", "3")];
    let node = Node::start_as(&fleet, ALL, &variables);
    // Without a window never-twice does not repeat it at all.
    for (policy, user, asked) in [("never-twice", "ana@", 1), ("never-miss", "bob@", 3)] {
        let fields = [&MESSAGE[..], &[("policy", policy)]].concat();
        let id = created(&node.upload(policy, format!("email\n{user}example.com\n"), &fields));
        let mailing = node.until(&id, "it waits for a decision", waits);
        assert_eq!((count(&mailing, "inDoubt"), provider.asked_for(user).len()), (1, asked), "{mailing}");
        assert_eq!(policy == "never-miss", node.entries(&id)[0]["error"] == "HTTP 409: no", "{policy}");
    }
}

fn an_id_that_was_given_twice_is_shown_as_an_error(fleet: &mut Fleet) {
    let provider = Provider::that(|asked| match asked.to.as_str() {
        "user2@example.com" => accepted(asked),
        _ => Reply::Answer(200, "", r#"{"id":"same"}"#.to_owned()),
    });
    let (node, id) = sending(fleet, &provider, "window=1h", 3);
    // The service has accepted all of them.
    assert_eq!(count(&node.completed(&id), "sent"), 3);
    let entries = node.entries(&id);
    let (with, without): (Vec<_>, Vec<_>) = entries[..2].iter().partition(|entry| entry["externalId"] == "same");
    assert_eq!((with.len(), with[0]["error"].clone()), (1, json!(null)), "{entries:?}");
    assert!(without[0]["error"].as_str().unwrap().contains("the id same"), "{entries:?}");
    // The id is known in later mailings, too.
    let other = created(&node.upload("other.csv", "email\nuser0@example.com\n", &MESSAGE));
    node.completed(&other);
    assert!(node.entries(&other)[0]["error"].as_str().unwrap().contains("the id same"));
}

/// The provider's window is over before the backoff is.
fn a_repeat_that_would_come_after_the_window_is_in_doubt(fleet: &mut Fleet) {
    let provider = Provider::that(|asked| if asked.nth == 1 { Reply::Lost } else { accepted(asked) });
    let transport = provider.transport("window=3s&timeout=1s");
    let variables = [("SEMEL_MAIL_TRANSPORT", transport.as_str()), ("SEMEL_MAILINGS_BACKOFF", "5s")];
    let node = Node::start_as(fleet, ALL, &variables);
    let id = upload(node.address(), "list.csv", &list(1)).unwrap();
    let over = |mailing: &Value| waits(mailing) || mailing["status"] == "COMPLETED";
    let mailing = node.until(&id, "it is over", over);
    assert_eq!(provider.asked().len(), 1, "the service may have sent the mail and forgotten its key");
    assert_eq!(count(&mailing, "inDoubt"), 1, "{mailing}");
}

fn a_mailing_resumed_after_the_window_repeats_nothing(fleet: &mut Fleet) {
    let provider = Provider::that(|asked| if asked.nth == 1 { Reply::Lost } else { accepted(asked) });
    let (node, id) = sending(fleet, &provider, "window=3s&timeout=1s", 1);
    node.until(&id, "the answer was lost", |_| !provider.asked().is_empty());
    node.act(&id, "pause");
    std::thread::sleep(Duration::from_secs(4));
    node.act(&id, "resume");
    let over = |mailing: &Value| waits(mailing) || mailing["status"] == "COMPLETED";
    let mailing = node.until(&id, "it is over", over);
    assert_eq!(provider.asked().len(), 1, "{mailing}");
}
