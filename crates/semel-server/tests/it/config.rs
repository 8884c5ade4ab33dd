//! The laws of the configuration.

use std::process::{Command, Output};

use tempfile::TempDir;

use crate::support::{semel, stderr, stdout};

/// A directory with a file `semel.toml` in it.
fn with_file(text: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("semel.toml"), text).unwrap();
    dir
}

fn in_dir(dir: &TempDir, arguments: &[&str]) -> Command {
    let mut command = semel();
    command.args(arguments).current_dir(dir);
    command
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap()
}

fn shown(command: &mut Command) -> serde_json::Value {
    let output = run(command);
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_str(stdout(&output)).unwrap()
}

/// The lines of stderr after the first, which counts them.
fn mistakes(command: &mut Command) -> Vec<String> {
    let output = run(command);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    stderr(&output).lines().skip(1).map(|line| line.trim().to_owned()).collect()
}

#[test]
fn without_any_setting_the_defaults_hold() {
    let shown = shown(semel().args(["config", "show", "--json"]));
    let channel = serde_json::json!({ "url": "", "timeout": "10s", "on_lost": "hold", "max_attempts": 5, "backoff": "10s",
        "concurrency": 16 });
    assert_eq!(
        shown["config"],
        serde_json::json!({
            "listen": "127.0.0.1:8080",
            "data_dir": "./semel-data",
            "database_url": "sqlite:./semel-data/semel.db",
            "broker_url": "embedded",
            "roles": ["api", "relay", "worker", "sweeper"],
            "http": { "head_timeout": "30s", "max_connections": 4096, "body_budget": "256MiB", "log_requests": false },
            "mail_transport": "",
            "public_url": "",
            "mailings": {
                "at_once": 8,
                "backoff": "1m",
                "body": "",
                "connections": 16,
                "dkim_domain": "",
                "dkim_key": "",
                "dkim_selector": "",
                "from": "",
                "html": "",
                "lease": "30s",
                "max_attempts": 4,
                "max_file": "4GiB",
                "message_domain": "semel.invalid",
                "rate": "",
                "subject": "",
                "timeout": "30s",
            },
            "sweep": { "every": "15s" },
            "messages": {
                "lease": "10s",
                "poll": "1s",
                "prefetch": 256,
                "max_attempts": 10,
                "max_crashes": 5,
            },
            "proposals": { "estrito": false, "retention": "forever", "submissions_retention": "forever" },
            "operations": { "backoff": "1s", "backoff_cap": "5m", "lease": "1m", "max_attempts": 4, "max_crashes": 5,
                "max_run": "1day", "retention": "1day" },
            "notifications": {
                "routes": ["RESTAURANT/*=restaurant", "CUSTOMER/*=customer", "AGENCY/*=agency", "ADMIN/*=admin"],
                "chunk": 1000,
                "streams": 1000,
                "channels": { "PUSH": channel, "EMAIL": channel, "SMS": channel },
            },
            "gateway": {
                "upstream": "",
                "tenant": "default",
                "tenant_header": "",
                "trusted_proxies": [],
                "shared": false,
                "cookies": [],
                "on_lost": "hold",
                "pinned": false,
                "not_executed_statuses": [503],
                "timeout": "1m",
                "connect_timeout": "5s",
                "wait": "0s",
                "request_limit": "1MiB",
                "answer_limit": "1MiB",
                "lease": "30s",
                "retention": "1day",
            },
        })
    );
    assert!(shown["origins"].as_object().unwrap().values().all(|origin| origin == "default"));
}

#[test]
fn a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default() {
    let dir = with_file("listen = '127.0.0.1:3'\ndata_dir = 'three'\n\nroles = ['api']\n");
    let mut command = in_dir(&dir, &["config", "show", "--json", "--config", "semel.toml", "--listen", "127.0.0.1:1"]);
    let shown = shown(command.env("SEMEL_LISTEN", "127.0.0.1:2").env("SEMEL_DATA_DIR", "two"));
    assert_eq!(shown["config"]["listen"], "127.0.0.1:1");
    assert_eq!(shown["config"]["data_dir"], "two");
    assert_eq!(shown["config"]["roles"], serde_json::json!(["api"]));
    assert_eq!(shown["config"]["database_url"], "sqlite:two/semel.db");
    for (field, origin) in [
        ("listen", "--listen"),
        ("data_dir", "SEMEL_DATA_DIR"),
        ("database_url", "default"),
        ("broker_url", "default"),
        ("roles", "semel.toml, line 4"),
        ("sweep.every", "default"),
    ] {
        assert_eq!(shown["origins"][field], origin);
    }
}

#[test]
fn the_file_can_be_named_by_the_environment_and_an_empty_variable_is_unset() {
    let dir = with_file("[sweep]\nevery = '1m'\n");
    let mut command = in_dir(&dir, &["config", "show", "--json"]);
    let shown = shown(command.env("SEMEL_CONFIG", "semel.toml").env("SEMEL_LISTEN", ""));
    assert_eq!(shown["config"]["sweep"]["every"], "1m");
    assert_eq!(shown["origins"]["listen"], "default");
}

#[test]
fn every_mistake_is_reported_at_once_with_its_field_and_place() {
    let dir = with_file(
        "lisen = '127.0.0.1:1'\n\
         data_dir = 7\n\
         database_url = 'mysql://ana:geheim@db/x'\n\
         roles = ['api', 'boss']\n\
         [sweeep]\n\
         every = '1s'\n\
         [sweep]\n\
         every = '1ms'\n",
    );
    let mut command = in_dir(&dir, &["config", "check", "--config", "semel.toml"]);
    let told = mistakes(command.env("SEMEL_LISTEN", "8080").env("SEMEL_BROKER_URL", "kafka://mq"));
    let expected = [
        "listen (SEMEL_LISTEN): must be an address",
        "data_dir (semel.toml, line 2): must be a string such as \"./semel-data\", not an integer",
        "database_url (semel.toml, line 3): must begin with",
        "broker_url (SEMEL_BROKER_URL): must be the word embedded",
        "roles (semel.toml, line 4): may only name api, relay, worker, sweeper, not \"boss\"",
        "sweep.every (semel.toml, line 8): must be at least 100ms",
        "lisen (semel.toml, line 1): there is no such field; did you mean listen?",
        "sweeep.every (semel.toml, line 6): there is no such field; did you mean sweep.every?",
    ];
    assert_eq!(told.len(), expected.len(), "{told:#?}");
    for (told, expected) in told.iter().zip(expected) {
        assert!(told.starts_with(expected), "{told}");
    }
}

#[test]
fn a_value_for_a_section_a_quoted_path_and_an_unknown_section_are_refused() {
    let dir = with_file("sweep = '1s'\n\"sweep.every\" = '1s'\n[empty]\n");
    let told = mistakes(&mut in_dir(&dir, &["config", "check", "--config", "semel.toml"]));
    assert_eq!(told.len(), 3, "{told:#?}");
    assert!(told.iter().any(|line| line.contains("is a section: write [sweep]")), "{told:#?}");
    assert!(told.iter().any(|line| line.starts_with("\"sweep.every\" (")), "{told:#?}");
    assert!(told.iter().any(|line| line.starts_with("empty (semel.toml, line 3)")), "{told:#?}");
}

#[test]
fn variables_in_the_file_are_filled_in_and_a_missing_one_is_named() {
    let dir = with_file("data_dir = '${HERE}/$${kept}'\nbroker_url = 'amqp://${WHO}:${PASS}@mq'\n");
    let told = mistakes(in_dir(&dir, &["config", "check", "--config", "semel.toml"]).env("HERE", "/srv"));
    assert_eq!(
        told,
        [
            "broker_url (semel.toml, line 2): the environment variable WHO is not set: set it where semel is started, or write the value here",
            "broker_url (semel.toml, line 2): the environment variable PASS is not set: set it where semel is started, or write the value here",
        ]
    );
    let mut command = in_dir(&dir, &["config", "show", "--json", "--config", "semel.toml"]);
    let shown = shown(command.envs([("HERE", "/srv"), ("WHO", "ana"), ("PASS", "geheim")]));
    assert_eq!(shown["config"]["data_dir"], "/srv/${kept}");
    assert_eq!(shown["config"]["broker_url"], "amqp://ana:***@mq");
}

#[test]
fn the_shown_configuration_reads_back_as_the_same() {
    let dir = with_file("data_dir = 'a\"b $${x} # ü'\nroles = 'worker'\nlisten = '[::1]:0'\nsweep.every = '90s'\n");
    let first = run(&mut in_dir(&dir, &["config", "show", "--config", "semel.toml"]));
    assert!(first.status.success(), "{}", stderr(&first));
    std::fs::write(dir.path().join("again.toml"), &first.stdout).unwrap();
    let config = |file| shown(&mut in_dir(&dir, &["config", "show", "--json", "--config", file]))["config"].clone();
    assert_eq!(config("semel.toml"), config("again.toml"));
    assert_eq!(config("again.toml")["sweep"]["every"], "1m 30s");
}

#[test]
fn no_password_is_ever_printed() {
    let secrets = ["geheim", "s3cret"];
    let dir = with_file("database_url = 'postgres://ana:geheim@db/x?sslpassword=s3cret'\n");
    let broken = with_file("database_url = 'postgres://ana:geheim@db:port/x'\nbroker_url = 'amqp//ana:s3cret@mq'\n");
    let torn = with_file("database_url = 'postgres://ana:geheim@db s3cret\n");
    let arguments = ["--config", "semel.toml"];
    for output in [
        run(in_dir(&dir, &["config", "show"]).args(arguments)),
        run(in_dir(&dir, &["config", "show", "--json"]).args(arguments)),
        run(in_dir(&broken, &["config", "check"]).args(arguments)),
        run(in_dir(&torn, &["config", "check"]).args(arguments)),
    ] {
        let said = format!("{}{}", stdout(&output), stderr(&output));
        assert!(!said.is_empty() && !secrets.iter().any(|secret| said.contains(secret)), "{said}");
    }
}

#[test]
fn an_invalid_or_missing_file_is_shown_with_its_place() {
    let dir = with_file("listen = '127.0.0.1:1'\nroles = [\n");
    let told = mistakes(&mut in_dir(&dir, &["config", "check", "--config", "semel.toml"]));
    assert!(told[0].starts_with("semel.toml, line ") && told[0].contains("not valid TOML"), "{told:?}");
    let told = mistakes(&mut in_dir(&dir, &["config", "check", "--config", "none.toml"]));
    assert!(told[0].starts_with("config (--config): cannot read none.toml"), "{told:?}");
}

#[test]
fn only_loopback_is_served_while_there_are_no_api_tokens() {
    for command in [&["config", "check"][..], &["serve"]] {
        let told = mistakes(semel().args(command).args(["--listen", "0.0.0.0:0"]));
        assert!(told[0].contains("no API tokens are configured, so only loopback is served"), "{told:?}");
    }
    let output = run(semel().args(["config", "check", "--listen", "localhost:0"]));
    assert_eq!(stdout(&output), "the configuration is valid\n");
}

#[test]
fn an_empty_variable_is_unset_and_an_empty_database_url_is_refused() {
    let mut command = semel();
    assert!(run(command.args(["config", "check"]).env("SEMEL_LISTEN", "")).status.success());
    let told = mistakes(command.env("SEMEL_DATABASE_URL", ""));
    assert_eq!(told, ["database_url (SEMEL_DATABASE_URL): is set and empty: give it a value, or unset it"]);
}

#[test]
fn a_wrongly_spelled_variable_is_warned_about_but_kubernetes_is_not() {
    let mut command = semel();
    command.args(["config", "check"]).envs([
        ("SEMEL_DATABSE_URL", "sqlite:x"),
        ("SEMEL_QUUX", "1"),
        ("SEMEL_SERVICE_HOST", "10.0.0.1"),
        ("SEMEL_PORT", "tcp://10.0.0.1:80"),
        ("SEMEL_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("SEMEL_TEST_POSTGRES_URL", "postgres://localhost/x"),
        ("SEMEL_SERVER_DIR", "target/servers"),
    ]);
    let output = run(&mut command);
    assert!(output.status.success());
    let warnings: Vec<_> = stderr(&output).lines().collect();
    assert_eq!(
        warnings,
        [
            "semel: the environment variable SEMEL_DATABSE_URL is not used by Semel; did you mean SEMEL_DATABASE_URL?",
            "semel: the environment variable SEMEL_QUUX is not used by Semel",
        ]
    );
}

#[test]
fn a_check_as_json_has_every_mistake_with_its_field_and_place() {
    let dir = with_file("listen = \"nowhere\"\n[gateway]\nlease = \"banana\"\n");
    let output = run(&mut in_dir(&dir, &["config", "check", "--json", "--config", "semel.toml"]));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let told: serde_json::Value = serde_json::from_str(stdout(&output)).unwrap();
    assert_eq!(told["ok"], false);
    let fields: Vec<_> = told["mistakes"].as_array().unwrap().iter().map(|it| it["field"].as_str().unwrap()).collect();
    assert_eq!(fields, ["listen", "gateway.lease"]);
    assert_eq!(told["mistakes"][1]["origin"], "semel.toml, line 3");
    assert!(told["mistakes"][1]["message"].as_str().unwrap().contains("must be a duration such as"));
    let right = shown(&mut in_dir(&TempDir::new().unwrap(), &["config", "check", "--json"]));
    assert_eq!((&right["ok"], right["mistakes"].as_array().unwrap().len()), (&true.into(), 0));
}

#[test]
fn a_former_name_of_a_field_is_read_with_a_warning_that_names_the_present_one() {
    let dir = with_file("[messages]\nmax_failures = 7\nrelay_lease = \"20s\"\nvisibility = \"40s\"\n");
    let output = run(&mut in_dir(&dir, &["config", "show", "--json", "--config", "semel.toml"]));
    assert!(output.status.success());
    let shown: serde_json::Value = serde_json::from_str(stdout(&output)).unwrap();
    assert_eq!(shown["config"]["messages"]["max_attempts"], 7);
    assert_eq!(shown["config"]["messages"]["lease"], "40s", "of several former names, the largest value counts");
    let told = stderr(&output);
    for (former, name) in [
        ("messages.max_failures", "messages.max_attempts"),
        ("messages.relay_lease", "messages.lease"),
        ("messages.visibility", "messages.lease"),
    ] {
        assert!(
            told.lines().any(|line| line.contains(former) && line.contains(&format!("now called {name}"))),
            "{told}"
        );
    }
}

#[test]
fn a_wrong_value_under_a_former_name_is_a_mistake_at_its_place() {
    let dir = with_file("[messages]\nmax_failures = \"many\"\n");
    let told = mistakes(&mut in_dir(&dir, &["config", "check", "--config", "semel.toml"]));
    assert!(
        told.iter().any(|line| line.starts_with("messages.max_failures (semel.toml, line 2): must be")),
        "{told:?}"
    );
}
