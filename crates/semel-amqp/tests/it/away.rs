//! Errors about an unreachable RabbitMQ.

use std::{net::TcpListener, time::Duration};

use semel::messaging::{Broker as _, Queue};
use semel_amqp::{Amqp, Options};

/// The error names the broker, not the database, so that a reader of the log looks at the right one.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_an_unreachable_server_names_rabbitmq_and_no_password() {
    // A port without a listener.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let options = Options { timeout: Duration::from_millis(200), ..Options::default() };
    let amqp = Amqp::connect(&format!("amqp://ann:s3same@127.0.0.1:{port}/"), options).unwrap();
    let declared = amqp.declare(vec![Queue::new("news")]).await.unwrap_err();
    let consumed = amqp.consume("news", 1).await.err().unwrap();
    for error in [declared, consumed] {
        let text = error.to_string();
        assert!(text.starts_with(&format!("the broker is unavailable: RabbitMQ at 127.0.0.1:{port}: ")), "{text}");
        assert!(error.is_transient() && !text.contains("s3same") && !text.contains("ann"), "{text}");
    }
    amqp.close().await;
}
