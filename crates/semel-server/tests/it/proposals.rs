//! The laws of the proposals service, and what its tests share. The other files of this name have the rest.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
};

use serde_json::{Value, json};
use sqlx::{ConnectOptions as _, postgres::PgConnectOptions, sqlite::SqliteConnectOptions};

use crate::{
    place::{Place, on_both_databases},
    support::{Answer, SOON, Server},
};

on_both_databases! {
    the_whole_source_document_works
    a_repeat_shows_the_entity_as_it_is_now
    another_body_under_the_key_changes_nothing
    strictness_can_be_requested_in_the_query
    strictness_can_be_configured
    an_invalid_query_of_a_change_is_refused
    a_refused_request_does_not_use_up_its_key
    a_key_is_per_kind_of_operation
    a_key_belongs_to_one_proposal
    without_a_key_each_post_creates
    a_submission_is_kept_as_it_was
    an_expired_key_is_free_again
    old_submissions_are_cleaned_up
}

/// A server on a place's database, and requests to it.
pub(crate) struct Api {
    pub(crate) server: Server,
}

impl Api {
    pub(crate) fn start(place: &Place) -> Self {
        Self::start_with(place, &[])
    }

    pub(crate) fn start_with(place: &Place, variables: &[(&str, &str)]) -> Self {
        let mut command = place.semel(["serve", "--listen", "127.0.0.1:0"]);
        Self { server: Server::start_with(command.envs(variables.iter().copied())) }
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.server.get(&format!("/api/v1{path}"))
    }

    pub(crate) fn post(&self, path: &str, key: Option<&str>, body: &str) -> Answer {
        call(self.server.address, "POST", path, key, body).expect("an answer")
    }

    pub(crate) fn patch(&self, path: &str, key: Option<&str>, body: &str) -> Answer {
        call(self.server.address, "PATCH", path, key, body).expect("an answer")
    }

    /// Makes a client.
    pub(crate) fn cliente(&self, email: &str) -> i64 {
        let made = self.post("/clientes", None, &json!({ "nome": "Ana", "email": email }).to_string());
        assert_eq!(made.status, 201, "{}", made.body);
        made.json()["id"].as_i64().unwrap()
    }

    /// Makes a client and a proposal for it; the path of the proposal.
    pub(crate) fn proposta(&self) -> String {
        let email = format!("c{}@example.com", next_number());
        let body = json!({ "cliente_id": self.cliente(&email), "valor": 10 }).to_string();
        let made = self.post("/propostas", None, &body);
        assert_eq!(made.status, 201, "{}", made.body);
        format!("/propostas/{}", made.json()["id"])
    }
}

/// A number that is unique in this process.
fn next_number() -> u32 {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// A request, and its answer if the server lived to give one.
pub(crate) fn call(address: SocketAddr, method: &str, path: &str, key: Option<&str>, body: &str) -> Option<Answer> {
    let mut connection = TcpStream::connect(address).ok()?;
    let key = key.map(|key| format!("idempotency-key: {key}\r\n")).unwrap_or_default();
    let length = body.len();
    let text = format!(
        "{method} /api/v1{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nprefer: wait=30\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n{key}\r\n{body}"
    );
    connection.write_all(text.as_bytes()).ok()?;
    connection.set_read_timeout(Some(SOON * 2)).ok()?;
    let mut text = String::new();
    connection.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() })
}

/// What a query finds, as text.
pub(crate) fn rows(place: &Place, sql: &'static str) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match place.url.strip_prefix("sqlite:") {
            Some(path) => {
                let mut connection = SqliteConnectOptions::new().filename(path).connect().await.unwrap();
                sqlx::query_scalar(sql).fetch_all(&mut connection).await.unwrap()
            }
            None => {
                let mut connection = place.url.parse::<PgConnectOptions>().unwrap().connect().await.unwrap();
                sqlx::query_scalar(sql).fetch_all(&mut connection).await.unwrap()
            }
        }
    })
}

pub(crate) fn replayed(answer: &Answer) -> bool {
    answer.header("idempotent-replayed") == Some("true")
}

pub(crate) fn mismatched(answer: &Answer) -> bool {
    answer.header("idempotency-mismatch") == Some("true")
}

/// Section 5 of the source document, request by request.
fn the_whole_source_document_works(place: &Place) {
    let api = Api::start(place);
    let body = r#"{ "nome": "João Silva", "email": "joao@example.com", "documento": "123.456.789-00" }"#;
    let first = api.post("/clientes", Some("client-001"), body);
    assert_eq!((first.status, replayed(&first)), (201, false), "{}", first.body);
    let story = place.say(["why", "client-001"]);
    assert!(story.contains("\nThe request: POST /api/v1/clientes\n"), "{story}");
    assert_eq!(first.header("location"), Some("/api/v1/clientes/1"));
    let cliente = first.json();
    let expected = json!({
        "id": 1, "nome": "João Silva", "email": "joao@example.com", "documento": "123.456.789-00",
        "idempotencia_key": "client-001", "criado_em": cliente["criado_em"],
    });
    assert_eq!(cliente, expected);
    let time = cliente["criado_em"].as_str().unwrap();
    assert!(time.ends_with('Z') && time.len() == "2026-01-01T00:00:00.000000Z".len(), "{time}");

    let again = api.post("/clientes", Some("client-001"), body);
    assert_eq!((again.status, replayed(&again), mismatched(&again)), (200, true, false));
    assert_eq!(again.body, first.body);
    assert_eq!(again.header("location"), Some("/api/v1/clientes/1"));

    let first = api.post("/propostas", Some("proposta-001"), r#"{ "cliente_id": 1, "valor": 1500.00 }"#);
    assert_eq!(first.status, 201, "{}", first.body);
    assert!(first.body.contains(r#""valor":1500.00,"#), "{}", first.body);
    let proposta = first.json();
    let expected = json!({
        "id": 1, "cliente_id": 1, "valor": 1500.0, "estado": "rascunho", "versao": 1,
        "idempotencia_key": "proposta-001", "criado_em": proposta["criado_em"],
    });
    assert_eq!(proposta, expected);
    let other = api.post("/propostas", Some("proposta-001"), r#"{ "cliente_id": 1, "valor": 2000.00 }"#);
    assert_eq!((other.status, replayed(&other), mismatched(&other)), (200, true, true));
    assert_eq!(other.body, first.body, "the original value is kept");
    assert_eq!(
        (first.header("location"), other.header("location")),
        (Some("/api/v1/propostas/1"), first.header("location"))
    );

    let first = api.post("/propostas/1/submeter", Some("submit-001"), r#"{ "versao": 1 }"#);
    assert_eq!((first.status, replayed(&first)), (200, false), "{}", first.body);
    let submitted = first.json();
    assert_eq!(
        (&submitted["id"], &submitted["estado"], &submitted["versao"]),
        (&json!(1), &json!("enviada"), &json!(2))
    );
    let again = api.post("/propostas/1/submeter", Some("submit-001"), r#"{ "versao": 1 }"#);
    assert_eq!((again.status, replayed(&again)), (200, true));
    assert_eq!(again.body, first.body, "it is not submitted twice");
    assert_eq!((first.header("location"), again.header("location")), (None, None), "nothing was made");
    assert_eq!(api.post("/propostas/1/aceitar", None, r#"{ "versao": 2 }"#).status, 200);
    let again = api.post("/propostas/1/submeter", Some("submit-001"), r#"{ "versao": 1 }"#).json();
    assert_eq!((&again["estado"], &again["versao"]), (&json!("aceita"), &json!(3)), "the present state");

    // Section 6.1, and where the keys are (section 7.1).
    assert_eq!(api.post("/clientes", Some(""), body).problem(), "key-invalid");
    assert_eq!(api.post("/clientes", Some(&"k".repeat(256)), body).problem(), "key-invalid");
    assert_eq!(rows(place, "SELECT idempotencia_key FROM clientes"), ["client-001"]);
    assert_eq!(rows(place, "SELECT idempotencia_key FROM propostas"), ["proposta-001"]);
    let kept = "SELECT idempotencia_key || ' ' || tipo_operacao || ' ' || entidade_id FROM idempotencia_operacoes";
    assert_eq!(rows(place, kept), ["submit-001 submeter_proposta 1"]);
}

fn a_repeat_shows_the_entity_as_it_is_now(place: &Place) {
    let api = Api::start(place);
    let body = r#"{"nome":"Ana","email":"ana@example.com"}"#;
    let id = api.post("/clientes", Some("c"), body).json()["id"].clone();
    let renamed = api.patch(&format!("/clientes/{id}"), Some("p"), r#"{"nome":"Ana Maria","documento":"7"}"#);
    assert_eq!(renamed.status, 200, "{}", renamed.body);
    let again = api.post("/clientes", Some("c"), body);
    assert_eq!((again.status, replayed(&again)), (200, true));
    assert_eq!((&again.json()["nome"], &again.json()["documento"]), (&json!("Ana Maria"), &json!("7")));
    assert_eq!(again.body, api.get(&format!("/clientes/{id}")).body);
    assert_eq!(again.header("cache-control"), Some("no-store"));

    // A repeated change shows what came after it, and does not undo it.
    api.patch(&format!("/clientes/{id}"), None, r#"{"nome":"Bia"}"#);
    let again = api.patch(&format!("/clientes/{id}"), Some("p"), r#"{"nome":"Ana Maria","documento":"7"}"#);
    assert_eq!((again.status, replayed(&again), &again.json()["nome"]), (200, true, &json!("Bia")));

    let body = format!(r#"{{"cliente_id":{id},"valor":99.90}}"#);
    let path = format!("/propostas/{}", api.post("/propostas", Some("p"), &body).json()["id"]);
    api.post(&format!("{path}/submeter"), Some("s"), r#"{"versao":1}"#);
    api.post(&format!("{path}/aceitar"), Some("a"), r#"{"versao":2}"#);
    let now = api.get(&path).body;
    assert!(now.contains(r#""valor":99.90,"estado":"aceita","versao":3"#), "{now}");
    for (path, key, body) in [
        ("/propostas".to_owned(), "p", body.as_str()),
        (format!("{path}/submeter"), "s", r#"{"versao":1}"#),
        (format!("{path}/aceitar"), "a", r#"{"versao":2}"#),
    ] {
        let again = api.post(&path, Some(key), body);
        assert_eq!((again.status, replayed(&again), mismatched(&again)), (200, true, false), "{path}");
        assert_eq!(again.body, now, "{path}");
    }
}

fn another_body_under_the_key_changes_nothing(place: &Place) {
    let api = Api::start(place);
    let first = api.post("/clientes", Some("c"), r#"{"nome":"Ana","email":"ana@example.com"}"#);
    // Whether it is valid, breaks every rule, or is not JSON.
    for body in [r#"{"nome":"Bia","email":"bia@example.com"}"#, r#"{"nome":"","email":"x"}"#, "no JSON", ""] {
        let other = api.post("/clientes", Some("c"), body);
        assert_eq!((other.status, replayed(&other), mismatched(&other)), (200, true, true), "{body}");
        assert_eq!(other.body, first.body);
    }
    assert_eq!(api.get("/clientes").json()["itens"].as_array().unwrap().len(), 1);
    let path = api.proposta();
    api.post(&format!("{path}/submeter"), Some("s"), r#"{"versao":1}"#);
    let other = api.post(&format!("{path}/submeter"), Some("s"), r#"{"versao":2}"#);
    assert_eq!((other.status, mismatched(&other), &other.json()["versao"]), (200, true, &json!(2)));
}

fn strictness_can_be_requested_in_the_query(place: &Place) {
    let api = Api::start(place);
    let (body, other) = (r#"{"nome":"Ana","email":"ana@example.com"}"#, r#"{"nome":"Bia","email":"ana@example.com"}"#);
    assert_eq!(api.post("/clientes", Some("c"), body).status, 201);
    assert_eq!(api.post("/clientes?estrito=true", Some("c"), other).problem(), "payload-mismatch");
    let same = api.post("/clientes?estrito=true", Some("c"), body);
    assert_eq!((same.status, replayed(&same)), (200, true), "it is not part of what is compared");
    for off in ["false", "False", "0", "no", "NO", "%66alse"] {
        assert_eq!(api.post(&format!("/clientes?estrito={off}"), Some("c"), other).status, 200, "{off}");
    }
    // However it is spelled.
    for on in ["estrito", "estrito=", "estrito=1", "&&estrito=yes", "%65strito=true", "estr%69to"] {
        let path = format!("/clientes?{on}");
        assert_eq!(api.post(&path, Some("c"), other).problem(), "payload-mismatch", "{on}");
        let same = api.post(&path, Some("c"), body);
        assert_eq!((same.status, mismatched(&same)), (200, false), "{on}: {}", same.body);
    }
    // Also the reverse: a key first used with it.
    let body = r#"{"nome":"Cea","email":"cea@example.com"}"#;
    assert_eq!(api.post("/clientes?estrito=true", Some("d"), body).status, 201);
    assert_eq!(api.post("/clientes", Some("d"), body).status, 200);
    assert!(mismatched(&api.post("/clientes", Some("d"), other)));
}

fn strictness_can_be_configured(place: &Place) {
    let api = Api::start_with(place, &[("SEMEL_PROPOSALS_ESTRITO", "true")]);
    assert_eq!(api.post("/clientes", Some("c"), r#"{"nome":"Ana","email":"ana@example.com"}"#).status, 201);
    let other = r#"{"nome":"Bia","email":"bia@example.com"}"#;
    assert_eq!(api.post("/clientes", Some("c"), other).problem(), "payload-mismatch");
    assert_eq!(api.post("/clientes?estrito=false", Some("c"), other).problem(), "payload-mismatch");
}

fn an_invalid_query_of_a_change_is_refused(place: &Place) {
    let api = Api::start(place);
    let body = r#"{"nome":"Ana","email":"ana@example.com"}"#;
    for key in [None, Some("c")] {
        for query in ["estrit=true", "Estrito=true", "estrito=true&x", "estrito=true&%65strito=false", "limit=1"] {
            let refused = api.post(&format!("/clientes?{query}"), key, body);
            assert_eq!((refused.status, refused.problem().as_str()), (400, "invalid-query"), "{query}");
        }
    }
    let made = api.post("/clientes", Some("c"), body);
    assert_eq!(made.status, 201, "{}", made.body);
    assert_eq!(api.post("/clientes?estrit=true", Some("c"), body).problem(), "invalid-query", "of a repeat too");
    let cliente = format!("/clientes/{}?estrit", made.json()["id"]);
    assert_eq!(api.patch(&cliente, None, "{}").problem(), "invalid-query");
    let proposta = api.proposta();
    for acao in ["submeter", "aceitar", "recusar", "cancelar"] {
        let refused = api.post(&format!("{proposta}/{acao}?estrit=true"), None, r#"{"versao":1}"#);
        assert_eq!(refused.problem(), "invalid-query", "{acao}");
    }
    assert_eq!(api.get(&proposta).json()["versao"], 1);
}

fn a_refused_request_does_not_use_up_its_key(place: &Place) {
    for query in ["", "?estrito=true"] {
        let api = Api::start(place);
        let (key, email) = (format!("c{query}"), format!("ana{}@example.com", query.len()));
        let path = format!("/clientes{query}");
        let right = json!({ "nome": "Ana", "email": email }).to_string();
        assert_eq!(api.post(&path, Some(&key), r#"{"nome":""}"#).problem(), "invalid-fields");
        assert_eq!(api.post(&path, Some(&key), "{").problem(), "invalid-json");
        let taken = format!("taken{}@example.com", query.len());
        api.cliente(&taken);
        let used = json!({ "nome": "Ana", "email": taken }).to_string();
        assert_eq!(api.post(&path, Some(&key), &used).problem(), "email-em-uso");
        let made = api.post(&path, Some(&key), &right);
        assert_eq!((made.status, replayed(&made)), (201, false), "{}", made.body);

        let proposta = api.proposta();
        let path = format!("{proposta}/submeter{query}");
        assert_eq!(api.post(&path, Some(&key), r#"{"versao":9}"#).problem(), "versao-desatualizada");
        assert_eq!(api.post(&path, Some(&key), "{}").problem(), "invalid-fields");
        let done = api.post(&path, Some(&key), r#"{"versao":1}"#);
        assert_eq!((done.status, replayed(&done)), (200, false), "{}", done.body);
    }
}

fn a_key_is_per_kind_of_operation(place: &Place) {
    let api = Api::start(place);
    let k = Some("one-key");
    let cliente = api.post("/clientes", k, r#"{"nome":"Ana","email":"ana@example.com"}"#);
    let id = cliente.json()["id"].clone();
    let proposta = api.post("/propostas", k, &format!(r#"{{"cliente_id":{id},"valor":1}}"#));
    let path = format!("/propostas/{}", proposta.json()["id"]);
    let changed = api.patch(&format!("/clientes/{id}"), k, r#"{"documento":null}"#);
    let submitted = api.post(&format!("{path}/submeter"), k, r#"{"versao":1}"#);
    let accepted = api.post(&format!("{path}/aceitar"), k, r#"{"versao":2}"#);
    let all = [&cliente, &proposta, &changed, &submitted, &accepted];
    assert_eq!(all.map(|answer| answer.status), [201, 201, 200, 200, 200]);
    assert!(!all.iter().any(|answer| replayed(answer)));
    let kept = "SELECT tipo_operacao FROM idempotencia_operacoes ORDER BY id";
    assert_eq!(rows(place, kept), ["alterar_cliente", "submeter_proposta", "aceitar_proposta"]);
}

fn a_key_belongs_to_one_proposal(place: &Place) {
    let api = Api::start(place);
    let (one, other) = (api.proposta(), api.proposta());
    assert_eq!(api.post(&format!("{one}/submeter"), Some("s"), r#"{"versao":1}"#).status, 200);
    let refused = api.post(&format!("{other}/submeter"), Some("s"), r#"{"versao":1}"#);
    assert_eq!((refused.status, refused.problem().as_str()), (422, "payload-mismatch"));
    assert_eq!(api.get(&other).json()["estado"], "rascunho");
    // A key whose request was refused belongs to none.
    assert_eq!(api.post("/propostas/99/submeter", Some("t"), r#"{"versao":1}"#).problem(), "not-found");
    assert_eq!(api.post(&format!("{other}/submeter"), Some("t"), r#"{"versao":1}"#).status, 200);
}

fn without_a_key_each_post_creates(place: &Place) {
    let api = Api::start(place);
    let id = api.cliente("ana@example.com");
    let body = format!(r#"{{"cliente_id":{id},"valor":1}}"#);
    let made: Vec<Value> = (0..3).map(|_| api.post("/propostas", None, &body).json()).collect();
    assert!(made.iter().all(|proposta| proposta["idempotencia_key"].is_null()));
    assert_ne!(made[0]["id"], made[1]["id"]);
    assert_eq!(api.get("/propostas").json()["itens"].as_array().unwrap().len(), 3);
    let again = api.post("/clientes", None, r#"{"nome":"Ana","email":"ana@example.com"}"#);
    assert_eq!(again.problem(), "email-em-uso");
}

fn a_submission_is_kept_as_it_was(place: &Place) {
    let api = Api::start(place);
    let path = api.proposta();
    let then = api.post(&format!("{path}/submeter"), Some("s"), r#"{"versao":1}"#);
    api.post(&format!("{path}/recusar"), None, r#"{"versao":2}"#);
    let kept = rows(place, "SELECT CAST(resultado AS TEXT) FROM idempotencia_operacoes");
    assert!(kept[0].contains("10.00"), "{kept:?}");
    let kept: Vec<Value> = kept.iter().map(|text| serde_json::from_str(text).unwrap()).collect();
    assert_eq!(kept, [then.json()]);
    // A refused change stores nothing.
    api.post(&format!("{path}/submeter"), Some("t"), r#"{"versao":3}"#);
    assert_eq!(rows(place, "SELECT tipo_operacao FROM idempotencia_operacoes").len(), 1);
}

fn an_expired_key_is_free_again(place: &Place) {
    let api = Api::start_with(place, &[("SEMEL_PROPOSALS_RETENTION", "1s")]);
    let body = |email: &str| json!({ "nome": "Ana", "email": email }).to_string();
    let first = api.post("/clientes", Some("c"), &body("a@example.com")).json()["id"].clone();
    let path = api.proposta();
    assert_eq!(api.post(&format!("{path}/submeter"), Some("s"), r#"{"versao":1}"#).status, 200);
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let second = api.post("/clientes", Some("c"), &body("b@example.com"));
    assert_eq!((second.status, &second.json()["idempotencia_key"]), (201, &json!("c")), "{}", second.body);
    assert_eq!(api.get(&format!("/clientes/{first}")).json()["idempotencia_key"], Value::Null);
    let again = api.post(&format!("{path}/submeter"), Some("s"), r#"{"versao":1}"#);
    assert_eq!(again.problem(), "versao-desatualizada", "the versao still keeps it from being submitted twice");
}

fn old_submissions_are_cleaned_up(place: &Place) {
    let start = |retention: &str| {
        let variables = [("SEMEL_PROPOSALS_SUBMISSIONS_RETENTION", retention), ("SEMEL_SWEEP_EVERY", "100ms")];
        Api::start_with(place, &variables)
    };
    let api = start("1h");
    let id = api.post("/clientes", Some("c"), r#"{"nome":"Ana","email":"a@example.com"}"#).json()["id"].clone();
    let path = api.proposta();
    assert_eq!(api.post(&format!("{path}/submeter"), Some("s"), r#"{"versao":1}"#).status, 200);
    let kept = || rows(place, "SELECT tipo_operacao FROM idempotencia_operacoes").len();
    assert_eq!(kept(), 1, "a young one stays");
    drop(api);
    let api = start("1s");
    crate::support::eventually(SOON, "the submission is cleaned up", || kept() == 0);
    let again = api.post("/clientes", Some("c"), "{}");
    assert_eq!((again.status, &again.json()["id"]), (200, &id), "other keys do not expire");
}
