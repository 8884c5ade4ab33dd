//! Mails by SMTP, one recipient each.
//!
//! The server takes responsibility for a mail with its reply to the final dot (RFC 5321, 4.2.5). Until the first byte
//! of the message is sent, nothing can have been delivered. From then until that reply, everything can.

use std::{error::Error as _, sync::Arc, time::Duration};

use lettre::{
    Address,
    transport::smtp::{
        client::AsyncSmtpConnection,
        commands::{Data, Mail, Rcpt},
        extension::{Extension, MailBodyParameter, MailParameter},
        response::Response,
    },
};

use super::{
    message::Outgoing,
    smtp_pool::Pool,
    transport::MAY_NOT,
    transport_url::Smtp,
    verdict::{Sent, is_certificate, reason},
};
use crate::http::held::Held;

/// Why a command got no positive reply.
#[derive(Debug)]
pub(super) enum Failed {
    /// The server replied with 4xx or 5xx.
    Code(u16, String),
    /// No reply: the connection was lost or too slow, or the reply was not SMTP.
    Lost(String),
    /// The server cannot be used with this configuration.
    Unusable(String),
}

impl From<lettre::transport::smtp::Error> for Failed {
    fn from(error: lettre::transport::smtp::Error) -> Self {
        let text = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        match error.status() {
            Some(code) => Self::Code(code.into(), text),
            // lettre's words for the end of the stream.
            None if text == "incomplete response" => Self::Lost("the connection was closed without a reply".to_owned()),
            None => Self::Lost(text),
        }
    }
}

/// The step of a mail that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Connect,
    Mail,
    Recipient,
    Data,
    Message,
}

/// A mail server.
pub(super) struct Server {
    pool: Arc<Pool>,
}

impl Server {
    /// At most so many connections at a time; the time limit is for each step.
    pub(super) fn new(target: Smtp, timeout: Duration, connections: usize) -> Result<Self, String> {
        Ok(Self { pool: Arc::new(Pool::new(target, timeout, connections)?) })
    }

    /// Sends a mail, if its lease is held right before the message itself.
    pub(super) async fn send(&self, mail: &Outgoing, bytes: Vec<u8>, held: &Held) -> Sent {
        let Ok(text) = String::from_utf8(bytes) else {
            return Sent::Refused { why: "the message is not UTF-8".to_owned() };
        };
        let Some(_permit) = self.pool.permit().await else {
            return Sent::Away { why: "the transport was closed".to_owned() };
        };
        let result = match self.begun(mail, &text).await {
            Ok(connection) => self.finish(connection, mail, &text, held).await,
            Err(failed) => Err(failed),
        };
        match result {
            Ok(response) => Sent::Accepted { external_id: queued_as(&response) },
            Err(Stopped::At(step, failed)) => verdict(step, failed, self.pool.secret()),
            Err(Stopped::NotSupported(why)) => Sent::Refused { why },
            Err(Stopped::MayNot) => Sent::Away { why: MAY_NOT.to_owned() },
        }
    }

    /// A connection on which MAIL FROM was accepted. If an idle one turns out to be closed, a new one is opened: at
    /// this step nothing of the mail was sent.
    async fn begun(&self, mail: &Outgoing, text: &str) -> Result<AsyncSmtpConnection, Stopped> {
        if let Some(mut connection) = self.pool.take() {
            match self.mail(&mut connection, mail, text).await {
                Ok(()) => return Ok(connection),
                Err(Stopped::At(_, Failed::Lost(_) | Failed::Code(421, _))) => {}
                Err(stopped) => {
                    self.reset(connection, &stopped).await;
                    return Err(stopped);
                }
            }
        }
        let mut connection = self.pool.connect().await.map_err(|failed| Stopped::At(Step::Connect, failed))?;
        match self.mail(&mut connection, mail, text).await {
            Ok(()) => Ok(connection),
            Err(stopped) => {
                self.reset(connection, &stopped).await;
                Err(stopped)
            }
        }
    }

    async fn mail(&self, connection: &mut AsyncSmtpConnection, mail: &Outgoing, text: &str) -> Result<(), Stopped> {
        let mut parameters = Vec::new();
        let info = connection.server_info();
        let is_ascii = |address: &Address| AsRef::<str>::as_ref(address).is_ascii();
        if !is_ascii(&mail.from.email) || !is_ascii(&mail.to) {
            if !info.supports_feature(Extension::SmtpUtfEight) {
                return Err(Stopped::NotSupported("the server does not support SMTPUTF8 addresses".to_owned()));
            }
            parameters.push(MailParameter::SmtpUtfEight);
        }
        if !text.is_ascii() {
            if !info.supports_feature(Extension::EightBitMime) {
                return Err(Stopped::NotSupported("the server does not support 8BITMIME".to_owned()));
            }
            parameters.push(MailParameter::Body(MailBodyParameter::EightBitMime));
        }
        let command = Mail::new(Some(mail.from.email.clone()), parameters);
        self.step(Step::Mail, connection.command(command)).await.map(drop)
    }

    /// RCPT, DATA and the message.
    async fn finish(
        &self,
        mut connection: AsyncSmtpConnection,
        mail: &Outgoing,
        text: &str,
        held: &Held,
    ) -> Result<Response, Stopped> {
        match self.conversation(&mut connection, mail, text, held).await {
            Ok(response) => {
                self.pool.give(connection);
                Ok(response)
            }
            Err(stopped) => {
                self.reset(connection, &stopped).await;
                Err(stopped)
            }
        }
    }

    async fn conversation(
        &self,
        connection: &mut AsyncSmtpConnection,
        mail: &Outgoing,
        text: &str,
        held: &Held,
    ) -> Result<Response, Stopped> {
        self.step(Step::Recipient, connection.command(Rcpt::new(mail.to.clone(), Vec::new()))).await?;
        let go_on = self.step(Step::Data, connection.command(Data)).await?;
        if !go_on.has_code(354) {
            return Err(Stopped::At(Step::Data, Failed::Lost(format!("unexpected reply {}", go_on.code()))));
        }
        if held.check().is_err() {
            return Err(Stopped::MayNot);
        }
        // One write for message and dot: in two, the dot would wait for the acknowledgement of the message.
        let response = self.step(Step::Message, connection.command(stuffed(text))).await?;
        if u16::from(response.code()) / 100 != 2 {
            return Err(Stopped::At(Step::Message, Failed::Lost(format!("unexpected reply {}", response.code()))));
        }
        Ok(response)
    }

    /// One command within the time limit.
    async fn step(
        &self,
        step: Step,
        reply: impl Future<Output = Result<Response, lettre::transport::smtp::Error>>,
    ) -> Result<Response, Stopped> {
        let limit = self.pool.timeout();
        let failed = match tokio::time::timeout(limit, reply).await {
            Ok(Ok(response)) => return Ok(response),
            Ok(Err(error)) => error.into(),
            Err(_) => Failed::Lost(format!("no reply within {}", humantime::format_duration(limit))),
        };
        Err(Stopped::At(step, failed))
    }

    /// Keeps the connection of a mail that the server refused. After any other failure its state is unknown, so it is
    /// dropped.
    async fn reset(&self, mut connection: AsyncSmtpConnection, stopped: &Stopped) {
        let is_open = match stopped {
            Stopped::NotSupported(_) => true,
            Stopped::At(_, Failed::Code(code, _)) => *code != 421,
            // After DATA the server waits for the message: only the end of the connection ends that.
            Stopped::At(..) | Stopped::MayNot => false,
        };
        if is_open
            && matches!(tokio::time::timeout(self.pool.timeout(), connection.command("RSET\r\n")).await, Ok(Ok(_)))
        {
            self.pool.give(connection);
        }
    }
}

/// Why a mail was not sent, or may not have been.
#[derive(Debug)]
enum Stopped {
    At(Step, Failed),
    /// The server lacks an extension that this mail needs.
    NotSupported(String),
    /// The lease was lost before the message was sent.
    MayNot,
}

/// The meaning of a failure at a step.
fn verdict(step: Step, failed: Failed, secret: Option<&str>) -> Sent {
    let (code, text) = match failed {
        Failed::Code(code, text) => (code, text),
        Failed::Unusable(why) => return Sent::ServerRefuses { why },
        Failed::Lost(why) => {
            let why = reason(&why, secret);
            return match step {
                Step::Message => Sent::Unknown { why },
                // The server is there: it has accepted the sender. One recipient that it cannot bear must not keep the
                // mailing waiting for ever, so the attempt counts.
                Step::Recipient | Step::Data => Sent::Failing { why, after: None },
                Step::Connect | Step::Mail if is_certificate(&why) => Sent::ServerRefuses { why },
                Step::Connect | Step::Mail => Sent::Away { why },
            };
        }
    };
    let why = reason(&format!("{} refused: {code} {text}", step.name()), secret);
    match (step, code) {
        // The server closes the connection. As a reply to the dot it refuses the message.
        (Step::Message, 421) => Sent::NotNow { why, after: None },
        (Step::Recipient | Step::Data, 421) => Sent::Failing { why, after: None },
        (_, 421) => Sent::Away { why },
        (Step::Connect, 400..=499) => Sent::Away { why },
        (Step::Mail, 400..=499) => Sent::TooMany { why, after: None },
        (Step::Connect | Step::Mail, _) => Sent::ServerRefuses { why },
        (_, 530..=538) => Sent::ServerRefuses { why },
        (_, 500..) if may_concern_us(&text) => Sent::RefusedOrUs { why },
        (_, 400..=499) => Sent::NotNow { why, after: None },
        _ => Sent::Refused { why },
    }
}

/// Whether a refusal may mean that the server does not serve us at all: it does not relay, or we are on a list of senders
/// that it blocks. Otherwise one wrong setting would refuse every recipient of a mailing for good.
fn may_concern_us(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    ["relay", "blocked using", "blacklist"].iter().any(|word| text.contains(word))
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::Connect => "the connection was",
            Self::Mail => "the sender was",
            Self::Recipient => "the recipient was",
            Self::Data => "DATA was",
            Self::Message => "the message was",
        }
    }
}

/// The message with its dots doubled, and the final dot (RFC 5321, 4.5.2). Its lines end with CRLF.
fn stuffed(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for line in text.split_inclusive("\r\n") {
        if line.starts_with('.') {
            out.push('.');
        }
        out.push_str(line);
    }
    if !out.ends_with("\r\n") {
        out.push_str("\r\n");
    }
    out.push_str(".\r\n");
    out
}

/// The queue id that many servers tell with their acceptance.
fn queued_as(response: &Response) -> Option<String> {
    let (_, id) = response.first_line()?.split_once("queued as ")?;
    let id = reason(id.split_whitespace().next()?, None);
    (!id.is_empty()).then_some(id)
}
