//! The rules of clients and proposals.

use serde_json::{Value, json};

use crate::{
    place::{Place, on_both_databases},
    proposals::{Api, rows},
};

on_both_databases! {
    every_wrong_field_is_reported_at_once
    fields_have_their_limits
    bodies_have_their_limits
    an_email_belongs_to_one_client
    money_is_exact
    a_client_can_be_changed
    only_allowed_state_changes_are_made
    a_change_needs_the_present_version
    of_two_changes_at_once_one_wins
    a_missing_entity_is_reported
    every_change_is_in_the_history
    pages_show_everything_once
    a_wrong_query_is_refused
}

/// The names of the wrong fields.
fn wrong(problem: &Value) -> Vec<&str> {
    problem["errors"].as_array().unwrap().iter().map(|error| error["field"].as_str().unwrap()).collect()
}

fn every_wrong_field_is_reported_at_once(place: &Place) {
    let api = Api::start(place);
    let refused =
        api.post("/clientes", None, r#"{"nome":"","email":"x","documento":"123456789012345678901","nmoe":1}"#);
    assert_eq!((refused.status, refused.problem().as_str()), (422, "invalid-fields"));
    assert_eq!(wrong(&refused.json()), ["nome", "email", "documento", "nmoe"]);
    let refused = api.post("/propostas", None, r#"{"valor":-1}"#);
    assert_eq!(wrong(&refused.json()), ["cliente_id", "valor"]);
    let refused = api.post("/propostas", None, r#"{"cliente_id":99,"valor":1}"#);
    assert_eq!((refused.status, wrong(&refused.json())), (422, vec!["cliente_id"]));
    for body in ["", "{", "[]", "nome=Ana", "\"x\""] {
        let refused = api.post("/clientes", None, body);
        assert_eq!((refused.status, refused.problem().as_str()), (400, "invalid-json"), "{body}");
    }
    assert_eq!(rows(place, "SELECT nome FROM clientes"), [""; 0]);
}

fn fields_have_their_limits(place: &Place) {
    let api = Api::start(place);
    let nome = |n: usize| json!({ "nome": "é".repeat(n), "email": format!("n{n}@example.com") }).to_string();
    assert_eq!(api.post("/clientes", None, &nome(255)).status, 201, "characters are counted, not bytes");
    assert_eq!(api.post("/clientes", None, &nome(256)).status, 422);
    let documento =
        |n: usize| json!({ "nome": "A", "email": format!("d{n}@example.com"), "documento": "é".repeat(n) }).to_string();
    assert_eq!(api.post("/clientes", None, &documento(20)).status, 201);
    assert_eq!(api.post("/clientes", None, &documento(21)).status, 422);
    let email = |n: usize| {
        let labels = "a23456789.".repeat(24);
        json!({ "nome": "A", "email": format!("{}@{labels}com", "x".repeat(n - labels.len() - 4)) }).to_string()
    };
    assert_eq!(api.post("/clientes", None, &email(255)).status, 201);
    assert_eq!(api.post("/clientes", None, &email(256)).status, 422);
    for body in [
        json!({ "nome": "a\u{0}b", "email": "z@example.com" }),
        json!({ "nome": " ", "email": "z@example.com" }),
        json!({ "nome": "\u{200b}", "email": "z@example.com" }),
        json!({ "nome": "\u{3164}", "email": "z@example.com" }),
        json!({ "nome": "Ana \u{202e}anA", "email": "z@example.com" }),
        json!({ "nome": "A", "email": "z\u{212a}@example.com" }),
        json!({ "nome": "A", "email": "z@example.com", "documento": "1\u{200b}" }),
        json!({ "nome": null, "email": "z@example.com" }),
        json!({ "nome": 1, "email": "z@example.com" }),
        json!({ "nome": "A", "email": ["z@example.com"] }),
    ] {
        assert_eq!(api.post("/clientes", None, &body.to_string()).problem(), "invalid-fields", "{body}");
    }
    let made = api.post("/clientes", None, r#"{"nome":"A","email":"y@example.com","documento":null}"#);
    assert_eq!((made.status, &made.json()["documento"]), (201, &Value::Null));
}

fn bodies_have_their_limits(place: &Place) {
    let api = Api::start(place);
    let right = r#"{"nome":"Ana","email":"ana@example.com"}"#;
    for key in [None, Some("k")] {
        // Refused by its length, before any of it is sent.
        let mut headers = vec![("host", "localhost"), ("content-length", "65537")];
        headers.extend(key.map(|key| ("idempotency-key", key)));
        for path in ["/clientes", "/propostas", "/propostas/1/submeter"] {
            let refused = api.server.request("POST", &format!("/api/v1{path}"), &headers);
            assert_eq!((refused.status, refused.problem().as_str()), (413, "body-too-large"), "{path}");
        }
        let members: Vec<_> = (0..5_000).map(|i| format!("\"f{i}\":1")).collect();
        let refused = api.post("/clientes", key, &format!("{{{}}}", members.join(",")));
        assert_eq!((refused.status, refused.problem().as_str()), (422, "invalid-fields"));
        assert!(refused.body.len() < 4_000, "{} bytes", refused.body.len());
        assert_eq!(refused.json()["errors"].as_array().unwrap().len(), 21);
    }
    let longest = format!("{right}{}", " ".repeat((64 << 10) - right.len()));
    assert_eq!(api.post("/clientes", Some("k"), &longest).status, 201);
}

fn an_email_belongs_to_one_client(place: &Place) {
    let api = Api::start(place);
    api.cliente("ana@example.com");
    for (key, email) in [(None, "ana@example.com"), (Some("k"), "Ana@Example.com")] {
        let refused = api.post("/clientes", key, &json!({ "nome": "B", "email": email }).to_string());
        assert_eq!((refused.status, refused.problem().as_str()), (409, "email-em-uso"), "{email}");
    }
    let id = api.cliente("bia@example.com");
    for key in [None, Some("k")] {
        let refused = api.patch(&format!("/clientes/{id}"), key, r#"{"email":"ana@example.com"}"#);
        assert_eq!(refused.problem(), "email-em-uso");
    }
    let own = api.patch(&format!("/clientes/{id}"), Some("k"), r#"{"email":"BIA@example.com"}"#);
    assert_eq!((own.status, &own.json()["email"]), (200, &json!("BIA@example.com")), "its own it may keep");
}

fn money_is_exact(place: &Place) {
    let api = Api::start(place);
    let id = api.cliente("ana@example.com");
    let with = |valor: &str| api.post("/propostas", None, &format!(r#"{{"cliente_id":{id},"valor":{valor}}}"#));
    for (valor, written) in [
        ("1500.00", "1500.00"),
        ("1500", "1500.00"),
        ("1.5e3", "1500.00"),
        ("0.01", "0.01"),
        ("0.1", "0.10"),
        ("0.29", "0.29"),
        ("99999999.99", "99999999.99"),
        ("16777217.17", "16777217.17"),
    ] {
        let made = with(valor);
        assert_eq!(made.status, 201, "{valor}: {}", made.body);
        let path = format!("/propostas/{}", made.json()["id"]);
        for body in [made.body, api.get(&path).body] {
            assert!(body.contains(&format!(r#""valor":{written},"#)), "{valor}: {body}");
        }
    }
    for valor in ["0", "-1", "0.001", "1.005", "100000000", "1e99", "1e99999", "0e99999", "\"1\"", "null"] {
        let refused = with(valor);
        assert_eq!((refused.status, wrong(&refused.json())), (422, vec!["valor"]), "{valor}");
    }
}

fn a_client_can_be_changed(place: &Place) {
    let api = Api::start(place);
    let id = api.cliente("ana@example.com");
    let path = format!("/clientes/{id}");
    let changed = api.patch(&path, None, r#"{"nome":"Bia","email":"bia@example.com","documento":"1"}"#).json();
    assert_eq!((&changed["nome"], &changed["email"]), (&json!("Bia"), &json!("bia@example.com")));
    let changed = api.patch(&path, None, r#"{"nome":"Cea"}"#).json();
    assert_eq!((&changed["email"], &changed["documento"]), (&json!("bia@example.com"), &json!("1")), "the rest stays");
    assert_eq!(api.patch(&path, None, r#"{"documento":null}"#).json()["documento"], Value::Null);
    assert_eq!(api.patch(&path, None, "{}").status, 200);
    assert_eq!(wrong(&api.patch(&path, None, r#"{"nome":null,"id":7}"#).json()), ["nome", "id"]);
    api.cliente("ana@example.com");
}

fn only_allowed_state_changes_are_made(place: &Place) {
    let api = Api::start(place);
    // The actions that lead to a state, and the actions that it allows.
    type Allowed = &'static [(&'static str, &'static str)];
    let states: [(&str, &[&str], Allowed); 5] = [
        ("rascunho", &[], &[("submeter", "enviada"), ("cancelar", "cancelada")]),
        ("enviada", &["submeter"], &[("aceitar", "aceita"), ("recusar", "recusada"), ("cancelar", "cancelada")]),
        ("aceita", &["submeter", "aceitar"], &[]),
        ("recusada", &["submeter", "recusar"], &[]),
        ("cancelada", &["cancelar"], &[]),
    ];
    for (estado, way, allowed) in states {
        for acao in ["submeter", "aceitar", "recusar", "cancelar"] {
            let path = api.proposta();
            for (step, versao) in way.iter().zip(1..) {
                assert_eq!(api.post(&format!("{path}/{step}"), None, &format!(r#"{{"versao":{versao}}}"#)).status, 200);
            }
            let versao = way.len() + 1;
            let answer = api.post(&format!("{path}/{acao}"), None, &format!(r#"{{"versao":{versao}}}"#));
            match allowed.iter().find(|(name, _)| *name == acao) {
                Some((_, to)) => {
                    let json = answer.json();
                    assert_eq!(
                        (answer.status, &json["estado"], &json["versao"]),
                        (200, &json!(to), &json!(versao + 1))
                    );
                }
                None => {
                    assert_eq!((answer.status, answer.problem().as_str()), (409, "estado-invalido"), "{acao} {estado}");
                    assert_eq!(answer.json()["estado"], estado);
                    assert_eq!(api.get(&path).json()["versao"], versao);
                }
            }
        }
    }
}

fn a_change_needs_the_present_version(place: &Place) {
    let api = Api::start(place);
    let path = format!("{}/submeter", api.proposta());
    for versao in ["2", "0", "-1"] {
        let refused = api.post(&path, None, &format!(r#"{{"versao":{versao}}}"#));
        assert_eq!((refused.status, refused.problem().as_str()), (409, "versao-desatualizada"));
        assert_eq!(refused.json()["versao"], 1, "the present one is told");
    }
    for body in ["{}", r#"{"versao":"1"}"#, r#"{"versao":1.0}"#, r#"{"versao":1,"versao":1}"#] {
        assert_eq!(wrong(&api.post(&path, None, body).json()), ["versao"], "{body}");
    }
    assert_eq!(api.post(&path, None, r#"{"versao":1}"#).status, 200);
    assert_eq!(api.post(&path, None, r#"{"versao":1}"#).json()["versao"], 2);
}

fn of_two_changes_at_once_one_wins(place: &Place) {
    let api = Api::start(place);
    for round in 0..5 {
        let path = api.proposta();
        api.post(&format!("{path}/submeter"), None, r#"{"versao":1}"#);
        let mut statuses: Vec<u16> = std::thread::scope(|scope| {
            let calls: Vec<_> = ["aceitar", "recusar", "cancelar"]
                .into_iter()
                .map(|acao| {
                    let (api, path) = (&api, format!("{path}/{acao}"));
                    let key = format!("{acao}-{round}");
                    scope.spawn(move || api.post(&path, Some(&key), r#"{"versao":2}"#).status)
                })
                .collect();
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        });
        statuses.sort_unstable();
        assert_eq!(statuses, [200, 409, 409]);
        let history = api.get(&format!("{path}/historico")).json();
        assert_eq!(history["itens"].as_array().unwrap().len(), 3);
    }
}

fn a_missing_entity_is_reported(place: &Place) {
    let api = Api::start(place);
    for path in ["/clientes/1", "/clientes/x", "/clientes/01", "/propostas/1", "/propostas/1/historico", "/nothing"] {
        let missing = api.get(path);
        assert_eq!((missing.status, missing.problem().as_str()), (404, "not-found"), "{path}");
    }
    assert_eq!(api.patch("/clientes/1", Some("k"), "{}").problem(), "not-found");
    assert_eq!(api.post("/propostas/1/submeter", Some("k"), r#"{"versao":1}"#).problem(), "not-found");
    assert_eq!(api.patch("/propostas/1", None, "{}").problem(), "method-not-allowed");
    // The key is still free: once the proposal exists, it works.
    assert_eq!(api.proposta(), "/propostas/1");
    assert_eq!(api.post("/propostas/1/submeter", Some("k"), r#"{"versao":1}"#).status, 200);
}

fn every_change_is_in_the_history(place: &Place) {
    let api = Api::start(place);
    let path = api.proposta();
    api.post(&format!("{path}/submeter"), Some("s"), r#"{"versao":1}"#);
    api.post(&format!("{path}/submeter"), Some("s"), r#"{"versao":1}"#);
    api.post(&format!("{path}/aceitar"), None, r#"{"versao":2}"#);
    let history = api.get(&format!("{path}/historico")).json();
    let changes = history["itens"].as_array().unwrap();
    let told: Vec<_> = changes.iter().map(|c| (&c["de"], &c["para"], &c["versao"], &c["usuario"])).collect();
    let (rascunho, enviada, aceita) = (json!("rascunho"), json!("enviada"), json!("aceita"));
    let (one, two, three) = (json!(1), json!(2), json!(3));
    let null = Value::Null;
    assert_eq!(
        told,
        [(&null, &rascunho, &one, &null), (&rascunho, &enviada, &two, &null), (&enviada, &aceita, &three, &null)]
    );
    assert!(changes.iter().all(|change| change["quando"].as_str().unwrap().ends_with('Z')));
    let page = api.get(&format!("{path}/historico?limit=2")).json();
    let next = page["proximo"].as_str().unwrap();
    let rest = api.get(&format!("{path}/historico?limit=2&cursor={next}")).json();
    assert_eq!((rest["itens"].as_array().unwrap().len(), &rest["proximo"]), (1, &Value::Null));
}

fn pages_show_everything_once(place: &Place) {
    let api = Api::start(place);
    let (ana, bia) = (api.cliente("ana@example.com"), api.cliente("bia@example.com"));
    for i in 0..7 {
        let cliente = if i % 2 == 0 { ana } else { bia };
        let made = api.post("/propostas", None, &format!(r#"{{"cliente_id":{cliente},"valor":{}}}"#, i + 1)).json();
        if i < 3 {
            api.post(&format!("/propostas/{}/submeter", made["id"]), None, r#"{"versao":1}"#);
        }
    }
    let ids = |filter: &str, limit: usize| {
        let (mut ids, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = api.get(&format!("/propostas?limit={limit}{filter}{cursor}")).json();
            let items = page["itens"].as_array().unwrap();
            assert!(items.len() <= limit);
            ids.extend(items.iter().map(|item| item["valor"].as_f64().unwrap()));
            match page["proximo"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return ids,
            }
        }
    };
    for limit in [1, 2, 7, 500] {
        assert_eq!(ids("", limit), [1., 2., 3., 4., 5., 6., 7.]);
        assert_eq!(ids(&format!("&cliente_id={ana}"), limit), [1., 3., 5., 7.]);
        assert_eq!(ids("&estado=enviada", limit), [1., 2., 3.]);
        assert_eq!(ids(&format!("&cliente_id={ana}&estado=rascunho"), limit), [5., 7.]);
        assert_eq!(ids("&cliente_id=99", limit), [0.; 0]);
    }
    let clientes = api.get("/clientes?limit=1").json();
    assert_eq!((clientes["itens"].as_array().unwrap().len(), clientes["proximo"].is_string()), (1, true));
}

fn a_wrong_query_is_refused(place: &Place) {
    let api = Api::start(place);
    for query in ["limit=0", "limit=501", "limit=x", "cursor=x", "cursor=0", "cursor=1&cursor=2", "cursr=1"] {
        for path in ["clientes", "propostas"] {
            let refused = api.get(&format!("/{path}?{query}"));
            assert_eq!((refused.status, refused.problem().as_str()), (400, "invalid-query"), "{path}?{query}");
        }
    }
    for query in ["cliente_id=x", "cliente_id=%2B1", "cliente_id=01", "estado=feliz"] {
        assert_eq!(api.get(&format!("/propostas?{query}")).problem(), "invalid-query", "{query}");
    }
}
