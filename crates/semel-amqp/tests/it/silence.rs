//! Payloads and passwords are not logged.

use std::{
    fmt::Write as _,
    sync::{Arc, Mutex},
};

use semel::messaging::{Broker as _, Published};
use semel_amqp::{Amqp, Options};
use semel_testkit::conformance::brokers::{BrokerLab as _, envelope, publish};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use crate::lab::RabbitLab;

/// Records all log lines, at every level.
#[derive(Clone, Default)]
struct Everything(Arc<Mutex<String>>);

impl Visit for Everything {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = writeln!(self.0.lock().unwrap(), "{field}={value:?}");
    }
}

impl Subscriber for Everything {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        attributes.record(&mut self.clone());
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, values: &span::Record<'_>) {
        values.record(&mut self.clone());
    }
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// lapin would log a returned message with its payload, and the URL contains a password.
#[tokio::test(flavor = "multi_thread")]
async fn neither_payloads_nor_passwords_are_logged() {
    let log = Everything::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let lab = RabbitLab::new().await;
    let (amqp, nowhere) = (lab.amqp().await, lab.name());
    let mut secret = envelope(&nowhere, "the-secret-body");
    secret.message.headers.insert("note".into(), "the-secret-header".into());
    let answers = publish(&amqp, vec![secret]).await;
    assert!(matches!(answers[..], [Published::Unroutable(_)]), "{answers:?}");
    lab.wire.cut();

    let wrong = Amqp::connect("amqp://me:the-secret-word@127.0.0.1:1/x", Options::default()).unwrap();
    assert!(!format!("{wrong:?}").contains("the-secret"));
    let error = wrong.declare(Vec::new()).await.unwrap_err().to_string();
    assert!(!error.contains("the-secret"), "{error}");
    for url in ["amqp:me:the-secret-word", "http://me:the-secret-word@host/", "amqp://me:the-secret-word@host:x/"] {
        let error = Amqp::connect(url, Options::default()).unwrap_err().to_string();
        assert!(!error.contains("the-secret"), "{error}");
    }
    amqp.close().await;
    let said = log.0.lock().unwrap();
    assert!(said.contains("connected to RabbitMQ"), "this test records nothing");
    let leak = said.lines().find(|line| line.contains("the-secret"));
    assert_eq!(leak, None);
}
