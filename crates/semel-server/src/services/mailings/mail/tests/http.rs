use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    task::JoinHandle,
};

use super::super::verdict::{Sent, Settle};
use super::{mail, transport};
use crate::http::held::tests::{listener, lost_after};

/// Answers one request with these bytes and returns the request. An empty answer closes the connection.
async fn server(answer: String) -> (String, JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let request = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&request);
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
                if body.len() >= length.parse().unwrap() {
                    break;
                }
            }
            assert_ne!(stream.read_buf(&mut request).await.unwrap(), 0);
        }
        stream.write_all(answer.as_bytes()).await.unwrap();
        String::from_utf8(request).unwrap()
    });
    (url, request)
}

fn answer(status: u16, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status} X\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len())
}

async fn sent(query: &str, answer: String) -> Sent {
    let (url, _request) = server(answer).await;
    transport(&format!("{url}/{query}")).send(&mail("ana@example.com")).await
}

async fn request(user: &str, query: &str) -> (String, Value) {
    let (url, request) = server(answer(200, "", "{}")).await;
    let url = url.replace("http://", &format!("http://{user}"));
    let transport = transport(&format!("{url}{query}"));
    assert_eq!(transport.send(&mail("ana@example.com")).await, Sent::Accepted { external_id: None });
    let request = request.await.unwrap();
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), serde_json::from_str(body).unwrap())
}

#[tokio::test]
async fn the_generic_request_has_key_token_and_the_services_own_options() {
    let (head, body) = request("geheim@", "/send?a=1&window=24h").await;
    assert!(head.starts_with("POST /send?a=1 HTTP/1.1"), "{head}");
    assert!(head.contains("idempotency-key: mailing/1/ana@example.com"), "{head}");
    assert!(head.contains("authorization: Bearer geheim"), "{head}");
    let expected = json!({
        "from": "Semel <news@example.org>", "to": "ana@example.com", "subject": "Olá, José",
        "text": "Hello\n.\n..dots\nend", "html": "<p>Hello</p>", "messageId": "<m1.1@example.org>",
        "headers": {
            "List-Unsubscribe": "<https://example.org/u?t=abc>",
            "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
        },
    });
    assert_eq!(body, expected);
}

#[tokio::test]
async fn the_presets_speak_the_dialect_of_their_service() {
    let (head, body) = request("", "?preset=resend&token=geheim").await;
    assert!(head.starts_with("POST /emails HTTP/1.1") && head.contains("authorization: Bearer geheim"), "{head}");
    assert_eq!(body["to"], json!(["ana@example.com"]));
    let (head, body) = request("geheim@", "?preset=brevo").await;
    assert!(head.starts_with("POST /v3/smtp/email HTTP/1.1") && head.contains("api-key: geheim"), "{head}");
    assert_eq!(body["sender"], json!({ "name": "Semel", "email": "news@example.org" }));
    assert_eq!(body["to"], json!([{ "email": "ana@example.com" }]));
    let key = body["headers"]["idempotencyKey"].as_str().unwrap();
    assert_eq!((key.len(), &key[14..15]), (36, "8"), "a UUID");
}

#[tokio::test]
async fn each_status_of_a_service_has_one_meaning() {
    let why = |status: u16| format!("HTTP {status}: no");
    for (status, with_window, without) in [
        (400, Sent::Refused { why: why(400) }, None),
        (401, Sent::ServerRefuses { why: why(401) }, None),
        (402, Sent::ServerRefuses { why: why(402) }, None),
        (403, Sent::ServerRefuses { why: why(403) }, None),
        (404, Sent::ServerRefuses { why: why(404) }, None),
        // The service may have accepted the mail before it redirects.
        (302, Sent::Strange { why: why(302) }, None),
        (303, Sent::Strange { why: why(303) }, None),
        (600, Sent::Strange { why: why(600) }, None),
        (408, Sent::NotNow { why: why(408), after: None }, None),
        (409, Sent::InFlight { why: why(409), after: None }, None),
        (413, Sent::Refused { why: why(413) }, None),
        (422, Sent::Refused { why: why(422) }, None),
        (429, Sent::TooMany { why: why(429), after: None }, None),
        (500, Sent::Failing { why: why(500), after: None }, Some(Sent::Unknown { why: why(500) })),
        (501, Sent::ServerRefuses { why: why(501) }, None),
        (502, Sent::Failing { why: why(502), after: None }, Some(Sent::Unknown { why: why(502) })),
        (503, Sent::Failing { why: why(503), after: None }, Some(Sent::Unknown { why: why(503) })),
        (504, Sent::Failing { why: why(504), after: None }, Some(Sent::Unknown { why: why(504) })),
    ] {
        let answer = answer(status, "", r#"{"message":"no"}"#);
        assert_eq!(sent("", answer.clone()).await, without.unwrap_or_else(|| with_window.clone()), "{status}");
        assert_eq!(sent("?window=24h", answer).await, with_window, "{status}");
    }
}

#[tokio::test]
async fn a_service_can_ask_for_a_later_repeat() {
    let after = Some(Duration::from_secs(7));
    let later = |status| sent("", answer(status, "Retry-After: 7\r\n", ""));
    assert!(matches!(later(429).await, Sent::TooMany { after: a, .. } if a == after));
    assert!(matches!(later(503).await, Sent::Failing { after: a, .. } if a == after));
    assert!(matches!(later(409).await, Sent::InFlight { after: a, .. } if a == after));
    let date = "Date: Wed, 21 Oct 2026 07:28:00 GMT\r\nRetry-After: Wed, 21 Oct 2026 07:28:07 GMT\r\n";
    assert!(matches!(sent("", answer(429, date, "")).await, Sent::TooMany { after: a, .. } if a == after));
}

#[tokio::test]
async fn the_dialects_of_keys_are_understood() {
    let resend = "?preset=resend&token=t";
    let conflict =
        answer(409, "", r#"{"name":"invalid_idempotent_request","message":"used with a different payload"}"#);
    assert!(matches!(sent(resend, conflict).await, Sent::KeyConflict { .. }));
    let busy = answer(409, "", r#"{"name":"concurrent_idempotent_requests","message":"in progress"}"#);
    assert!(matches!(sent(resend, busy).await, Sent::InFlight { after: None, .. }));
    let conflict = answer(422, "", r#"{"title":"Idempotency-Key is already used"}"#);
    assert!(matches!(sent("", conflict).await, Sent::KeyConflict { .. }));
    let duplicate = answer(400, "", r#"{"code":"duplicate_parameter","message":"x"}"#);
    assert_eq!(sent("?preset=brevo&token=t", duplicate).await, Sent::Accepted { external_id: None });
}

#[tokio::test]
async fn the_services_id_is_kept_and_its_absence_is_no_failure() {
    let id = |id: &str| Sent::Accepted { external_id: Some(id.to_owned()) };
    assert_eq!(sent("", answer(200, "", r#"{"id":"49a3"}"#)).await, id("49a3"));
    assert_eq!(sent("", answer(201, "", r#"{"messageId":"<1@x>"}"#)).await, id("<1@x>"));
    for body in ["", "ok", "[]", r#"{"id":7}"#, &"x".repeat(200_000)] {
        assert_eq!(sent("", answer(200, "", body)).await, Sent::Accepted { external_id: None });
    }
    // The answer ends early: the status has said enough.
    let cut = "HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\n{".to_owned();
    assert_eq!(sent("", cut).await, Sent::Accepted { external_id: None });
}

#[tokio::test]
async fn reasons_are_short_and_without_the_token() {
    let body = format!("bad token geheim {}", "x".repeat(1000));
    let Sent::ServerRefuses { why } = sent("?token=geheim", answer(401, "", &body)).await else { panic!() };
    assert!(why.starts_with("HTTP 401: bad token ***") && why.len() == 500, "{why}");
}

#[tokio::test]
async fn a_request_without_answer_is_unknown_and_one_without_connection_is_away() {
    assert!(matches!(sent("", String::new()).await, Sent::Unknown { .. }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/?timeout=200ms", listener.local_addr().unwrap());
    assert!(matches!(transport(&url).send(&mail("ana@example.com")).await, Sent::Unknown { .. }));
    drop(listener);
    assert!(matches!(transport(&url).send(&mail("ana@example.com")).await, Sent::Away { .. }));
}

#[tokio::test]
async fn a_lost_request_is_repeated_only_inside_the_window() {
    let mail = mail("ana@example.com");
    let keyed = transport("http://127.0.0.1:1/?window=1h&timeout=10s");
    assert_eq!(keyed.settle(&mail.id, Duration::from_secs(3580)).await, Settle::Resend);
    assert_eq!(keyed.settle(&mail.id, Duration::from_secs(3590)).await, Settle::Unknown, "it could arrive too late");
    assert_eq!(keyed.settle(&mail.id, Duration::MAX).await, Settle::Unknown);
    assert_eq!(transport("http://127.0.0.1:1/").settle(&mail.id, Duration::ZERO).await, Settle::Unknown);
}

#[tokio::test]
async fn a_mail_whose_lease_is_lost_while_it_connects_is_not_sent() {
    let (address, came) = listener().await;
    let transport = transport(&format!("http://{address}/?window=1h"));
    let sent = transport.send_while(&mail("ana@example.com"), &lost_after(0)).await;
    assert!(matches!(sent, Sent::Away { .. }), "{sent:?}");
    drop(transport);
    assert_eq!(came.await.unwrap(), b"");
}
