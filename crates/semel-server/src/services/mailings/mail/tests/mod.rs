//! Laws of composing and sending mails.

mod dkim;
mod file;
mod http;
mod message;
mod smtp;
mod smtp_faults;
mod template;
mod url;

use std::time::{Duration, SystemTime};

use super::{
    message::{Outgoing, address},
    template::Rendered,
    transport::{Options, Transport},
    transport_url::TransportUrl,
};

/// A mail to `to` with a text and an HTML part.
fn mail(to: &str) -> Outgoing {
    Outgoing {
        id: format!("m1-{}", to.replace('@', "-at-")),
        key: format!("mailing/1/{to}"),
        from: "Semel <news@example.org>".parse().unwrap(),
        to: address(to).unwrap(),
        message_id: "m1.1@example.org".to_owned(),
        date: SystemTime::UNIX_EPOCH + Duration::from_secs(1_790_000_000),
        rendered: Rendered {
            subject: "Olá, José".to_owned(),
            text: Some("Hello\n.\n..dots\nend".to_owned()),
            html: Some("<p>Hello</p>".to_owned()),
        },
        unsubscribe: Some("https://example.org/u?t=abc".to_owned()),
    }
}

fn transport(url: &str) -> Transport {
    Transport::of(&TransportUrl::parse(url).unwrap(), Options::default()).unwrap()
}
