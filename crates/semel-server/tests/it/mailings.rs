//! What the tests of mailings share: a node that writes mails to files, and uploads.

use std::{
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    time::Duration,
};

use serde_json::Value;

use crate::{
    fleet::{ALL, Fleet, ask},
    mailings_kill::{SHORT, check_counts, count},
    support::{Answer, Server, eventually, send},
};

/// How long a small mailing may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The fields of a whole message.
pub(crate) const MESSAGE: [(&str, &str); 3] =
    [("subject", "News"), ("body", "Hello {{ email }}"), ("from", "News <news@example.com>")];

/// A server, and the directory of its mails.
pub(crate) struct Node {
    pub(crate) server: Server,
    pub(crate) mail: PathBuf,
}

impl Node {
    /// A node that does everything.
    pub(crate) fn start(fleet: &Fleet) -> Self {
        Self::start_as(fleet, ALL, &[])
    }

    /// A node with these roles. All nodes of a fleet write mails to the same directory, unless a variable says otherwise.
    pub(crate) fn start_as(fleet: &Fleet, roles: &str, variables: &[(&str, &str)]) -> Self {
        let mail = fleet.place.path("mail");
        std::fs::create_dir_all(&mail).unwrap();
        let transport = format!("file:{}", mail.display());
        let variables = [&SHORT[..], &[("SEMEL_MAIL_TRANSPORT", transport.as_str())], variables].concat();
        Self { server: fleet.start(roles, &variables), mail }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Uploads a file with these fields.
    pub(crate) fn upload(&self, name: &str, content: impl AsRef<[u8]>, fields: &[(&str, &str)]) -> Answer {
        upload(self.address(), name, content, fields)
    }

    /// The id of a new mailing with the usual message.
    pub(crate) fn mailing(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        created(&self.upload(name, content, &MESSAGE))
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        ask(self.address(), "GET", path, "").unwrap()
    }

    /// The JSON at a path that must exist.
    pub(crate) fn json(&self, path: &str) -> Value {
        let answer = self.get(path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        answer.json()
    }

    /// The items of one page.
    pub(crate) fn items(&self, path: &str) -> Vec<Value> {
        self.json(path)["items"].as_array().unwrap().clone()
    }

    pub(crate) fn shown(&self, id: &str) -> Value {
        self.json(&format!("/mailings/{id}"))
    }

    pub(crate) fn entries(&self, id: &str) -> Vec<Value> {
        self.items(&format!("/mailings/{id}/entries?limit=500"))
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Answer {
        ask(self.address(), "POST", path, body).unwrap()
    }

    /// Carries out an action that must be possible.
    pub(crate) fn act(&self, id: &str, action: &str) -> Value {
        let answer = self.post(&format!("/mailings/{id}/{action}"), "{}");
        assert_eq!(answer.status, 200, "{action}: {}", answer.body);
        answer.json()
    }

    /// Waits until a mailing fits; the counts must add up all the time.
    pub(crate) fn until(&self, id: &str, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        eventually(LIMIT, what, || {
            last = self.shown(id);
            check_counts(&last, count(&last, "total"));
            fits(&last)
        });
        last
    }

    pub(crate) fn until_status(&self, id: &str, status: &str) -> Value {
        self.until(id, status, |mailing| mailing["status"] == status)
    }

    pub(crate) fn completed(&self, id: &str) -> Value {
        self.until_status(id, "COMPLETED")
    }

    /// The mails that were written, in the order of their names.
    pub(crate) fn mails(&self) -> Vec<String> {
        let files = std::fs::read_dir(&self.mail).unwrap().flatten().map(|file| file.path());
        let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "eml")).collect();
        files.sort_unstable();
        files.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
    }
}

impl Fleet {
    /// How many parts of uploaded files are stored.
    pub(crate) fn parts(&self) -> usize {
        match self.place.url.starts_with("sqlite:") {
            true => std::fs::read_dir(self.place.path("uploads")).map_or(0, |files| files.flatten().count()),
            false => self.count("mailing_chunks"),
        }
    }
}

/// The body of an upload. The file comes last, as browsers and curl send it.
pub(crate) fn form(name: &str, content: impl AsRef<[u8]>, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in fields {
        let part = format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        body.extend_from_slice(part.as_bytes());
    }
    let head = format!("--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n");
    body.extend_from_slice(head.as_bytes());
    body.extend_from_slice(content.as_ref());
    body.extend_from_slice(b"\r\n--b--\r\n");
    body
}

/// The headers of an upload.
pub(crate) const FORM: [(&str, &str); 2] = [("host", "localhost"), ("content-type", "multipart/form-data; boundary=b")];

pub(crate) fn upload(address: SocketAddr, name: &str, content: impl AsRef<[u8]>, fields: &[(&str, &str)]) -> Answer {
    let mut connection = TcpStream::connect(address).unwrap();
    send(&mut connection, "POST", "/mailings", &FORM, &form(name, content, fields));
    Answer::read(connection)
}

/// The id of a mailing that an upload has created.
pub(crate) fn created(answer: &Answer) -> String {
    assert_eq!(answer.status, 201, "{}", answer.body);
    let made = answer.json();
    assert_eq!((&made["status"], &made["created"]), (&"QUEUED".into(), &true.into()));
    id(&made)
}

/// The id in an answer.
pub(crate) fn id(answer: &Value) -> String {
    answer["mailingId"].as_str().unwrap().to_owned()
}

/// A member of each item.
pub(crate) fn each(items: &[Value], member: &str) -> Vec<String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    items.iter().map(|item| text(&item[member])).collect()
}
