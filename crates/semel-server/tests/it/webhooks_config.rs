//! The laws of the sections `[webhooks.NAME]`.

use std::{
    io::Read as _,
    process::{Output, Stdio},
};

use serde_json::json;
use tempfile::TempDir;

use crate::support::{Process, semel, stderr, stdout};

fn run(text: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("semel.toml"), text).unwrap();
    let mut command = semel();
    command.args(arguments).args(["--config", "semel.toml"]).current_dir(&dir);
    command.envs(variables.iter().copied()).output().unwrap()
}

/// The mistakes, one per line.
fn mistakes(text: &str) -> Vec<String> {
    let output = run(text, &["config", "check"], &[("NO_SECRET", "")]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    stderr(&output).lines().skip(1).map(|line| line.trim().to_owned()).collect()
}

fn shown(text: &str, variables: &[(&str, &str)]) -> serde_json::Value {
    let output = run(text, &["config", "show", "--json"], variables);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stdout(&output).contains("geheim"), "{}", stdout(&output));
    serde_json::from_str::<serde_json::Value>(stdout(&output)).unwrap()["config"]["webhooks"].clone()
}

#[test]
fn a_source_needs_a_kind_and_a_secret_and_the_rest_has_defaults() {
    let text = "[webhooks.stripe]\nkind = 'stripe'\nsecrets = ['${STRIPE_SECRET}']\n";
    let expected = json!({ "stripe": {
        "kind": "stripe", "secrets": ["***"], "tolerance": "5m", "tenant": "default", "async": false,
        "max_attempts": 3, "max_crashes": 5, "lease": "5m", "max_run": "15m", "backoff": "10s", "backoff_cap": "10m",
        "max_body": "1MiB", "body_timeout": "10s", "dedup_per_function": false, "functions": [], "concurrency": 64,
        "livemode": "",
        "archive_after": "90days", "archive_at": "02:00", "time_zone": "UTC",
        "forward_timeout": "30s", "handlers": [],
    } });
    assert_eq!(shown(text, &[("STRIPE_SECRET", "geheim-geheim")]), expected);
}

#[test]
fn every_setting_of_a_source_is_read_and_shown() {
    let text = "
        [webhooks.my-shop]
        kind = 'hmac'
        secrets = ['geheim-geheim', 'geheim-geheim-2']
        header = 'x-sign'
        algorithm = 'sha512'
        encoding = 'base64'
        prefix = 'v0='
        signed = '{id}.{timestamp}.{body}'
        timestamp_header = 'x-time'
        id_header = 'x-id'
        type_pointer = '/what'
        time_zone = 'America/Sao_Paulo'
        archive_at = '03:30'
        async = true
        dedup_per_function = true
        functions = ['connect', 'billing']
        [[webhooks.my-shop.handlers]]
        type = 'invoice.*'
        forward = 'https://me:geheim@app.example.com/hooks?token=geheim'
        [[webhooks.my-shop.handlers]]
        type = 'charge.*'
        do = 'outbox'
        topic = 'charges'
        [[webhooks.my-shop.handlers]]
        handler = 'mine'
    ";
    let shop = shown(text, &[("SEMEL_WEBHOOKS_MY_SHOP_TENANT", "acme")])["my-shop"].clone();
    let handlers = json!([
        { "type": "invoice.*", "forward": "https://app.example.com/***" },
        { "type": "charge.*", "do": "outbox", "topic": "charges" },
        { "type": "*", "handler": "mine" },
    ]);
    assert_eq!(shop["handlers"], handlers);
    assert_eq!((&shop["tenant"], &shop["time_zone"]), (&json!("acme"), &json!("America/Sao_Paulo")));
    assert_eq!((&shop["algorithm"], &shop["signed"]), (&json!("sha512"), &json!("{id}.{timestamp}.{body}")));
    assert_eq!(shop["functions"], json!(["billing", "connect"]));
    let told = shown(text, &[("SEMEL_WEBHOOKS_MY_SHOP_FUNCTIONS", "a, b")])["my-shop"]["functions"].clone();
    assert_eq!(told, json!(["a", "b"]));
    let toml = run(text, &["config", "show"], &[]);
    let again = |text: &str| run(text, &["config", "show", "--json"], &[]);
    assert!(!again(stdout(&toml)).status.success(), "what stands for a secret is none");
    let again = again(&stdout(&toml).replace("\"***\"", "\"geheim-geheim\""));
    assert!(again.status.success(), "what is shown can be read: {}", stderr(&again));
}

#[test]
fn a_source_with_unsafe_settings_prevents_the_start() {
    for (field, told) in [
        ("secrets = []", "secrets (semel.toml, line 3): must have at least one secret"),
        ("secrets = ['']", "secrets (semel.toml, line 3): must not be empty"),
        ("secrets = ['a good secret', '']", "secrets (semel.toml, line 3): must not be empty"),
        ("secrets = 'a good secret,'", "secrets (semel.toml, line 3): must not be empty"),
        ("secrets = 'a good secret,${NO_SECRET}'", "secrets (semel.toml, line 3): must not be empty"),
        (
            "secrets = ['a good secret']\ndedup_per_function = true",
            "functions (default): must name the functions, because dedup_per_function is set",
        ),
        (
            "secrets = ['a good secret']\nfunctions = ['a', 'b/c']",
            "functions (semel.toml, line 4): must be names of 1 to 64 letters",
        ),
        ("secrets = [' a good secret']", "secrets (semel.toml, line 3): must not begin or end with white space"),
        ("secrets = ['1234567']", "secrets (semel.toml, line 3): must have 8 bytes or more"),
        ("secrets = ['$STRIPE_SECRET']", "secrets (semel.toml, line 3): must not be the name of a variable"),
        ("secrets = ['$${STRIPE_SECRET}']", "secrets (semel.toml, line 3): must not be the name of a variable"),
        ("secrets = ['\u{200b}\u{200b}']", "secrets (semel.toml, line 3): must not contain invisible characters"),
        ("secrets = ['a good secret']\ntolerance = '0s'", "tolerance (semel.toml, line 4): must be at least 1s"),
        (
            "secrets = ['a good secret']\ntolerance = '2days'",
            "tolerance (semel.toml, line 4): must be at least 1s and at most 1day",
        ),
    ] {
        for kind in ["stripe", "github"] {
            let text = format!("[webhooks.s]\nkind = '{kind}'\n{field}\n");
            let all = mistakes(&text);
            assert!(all.len() == 1 && all[0].starts_with(&format!("webhooks.s.{told}")), "{all:?}");
        }
    }
    for secrets in ["a good secret,", ",a good secret", "a good secret,,another good one", " "] {
        let output =
            run("[webhooks.s]\nkind = 'stripe'\n", &["config", "check"], &[("SEMEL_WEBHOOKS_S_SECRETS", secrets)]);
        assert!(!output.status.success() && stderr(&output).contains("must not be empty"), "{secrets:?} {output:?}");
    }
}

/// Compose files pass `${NAME}` on unchanged if it is not set: then that text would be the secret.
#[test]
fn no_server_starts_with_a_secret_that_is_easy_to_guess() {
    for (secrets, told) in [
        ("", "must have at least one secret"),
        ("1234567", "must have 8 bytes or more"),
        ("whsec_1234567", "must have 8 bytes or more"),
        ("a good secret,short", "must have 8 bytes or more"),
        ("$STRIPE_SECRET", "must not be the name of a variable"),
        ("${STRIPE_SECRET}", "must not be the name of a variable"),
        ("whsec_${STRIPE_SECRET}", "must not be the name of a variable"),
    ] {
        let dir = TempDir::new().unwrap();
        let mut command = semel();
        command.args(["serve", "--listen", "127.0.0.1:0"]).current_dir(&dir);
        command.envs([("SEMEL_WEBHOOKS_S_KIND", "stripe"), ("SEMEL_WEBHOOKS_S_SECRETS", secrets)]);
        let mut server = Process::start(command.stdout(Stdio::null()).stderr(Stdio::piped()));
        assert_eq!(server.end().code(), Some(1), "{secrets:?}");
        let mut said = String::new();
        server.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("webhooks.s.secrets") && said.contains(told), "{secrets:?}: {said}");
    }
}

#[test]
fn a_missing_variable_is_reported_once_beside_all_other_mistakes() {
    for secrets in ["['${NO_SUCH_VARIABLE}']", "['${NO_SUCH_VARIABLE}', 'long enough']", "'${NO_SUCH_VARIABLE}'"] {
        let told = mistakes(&format!("[webhooks.s]\nkind = 'stripe'\nsecrets = {secrets}\n"));
        let said = "webhooks.s.secrets (semel.toml, line 3): the environment variable NO_SUCH_VARIABLE is not set: set it \
                    where semel is started, or write the value here";
        assert_eq!(told, [said], "{secrets}");
    }
    let text = "[webhooks.s]\nkind = 'stripe'\nsecrets = ['${ONE}', 'short', '${TWO}', '$THREE_OF_THEM']\n";
    let told = mistakes(text);
    for said in ["variable ONE is not set", "variable TWO is not set", "8 bytes or more", "the name of a variable"] {
        assert_eq!(told.iter().filter(|line| line.contains(said)).count(), 1, "{said}: {told:#?}");
    }
    assert_eq!(told.len(), 4, "{told:#?}");
}

#[test]
fn every_mistake_of_every_source_is_reported_at_once() {
    let text = "
[webhooks.Shop]
kind = 'stripe'
secrets = ['geheim-geheim']
[webhooks.a]
kind = 'paypal'
[webhooks.b]
secrets = ['geheim-geheim']
[webhooks.c]
kind = 'stripe'
secrets = ['geheim-geheim']
tolerence = '5m'
header = 'x-sign'
max_attempts = 0
max_body = '2MiB'
lease = '1h'
time_zone = 'Mars/Olympus'
archive_at = '25:00'
handlers = [{ type = 'a', do = 'dance' }, { forward = 'geheim' }]
[webhooks.d]
kind = 'hmac'
secrets = ['geheim-geheim']
signed = '{timestamp}{body}'
[webhooks.e]
kind = 'github'
secrets = ['geheim-geheim']
livemode = true
max_body = '2MiB'
handlers = ['*=https://app.example.com/']
[webhooks.f]
kind = 'stripe'
secrets = ['geheim-geheim']
max_body = '2MiB'
handlers = ['*=outbox']
";
    let all = mistakes(text);
    assert!(!all.join("").contains("geheim"), "{all:#?}");
    for told in [
        "webhooks.Shop.kind (semel.toml, line 3): belongs to a source whose name is not 1 to 64 of a-z",
        "webhooks.a.kind (semel.toml, line 6): must be one of stripe, standard, github, shopify, hmac, not \"paypal\"",
        "webhooks.a.secrets (default): must have at least one secret",
        "webhooks.b.kind (default): is required",
        "webhooks.c.tolerence (semel.toml, line 12): there is no such field; did you mean webhooks.c.tolerance?",
        "webhooks.c.header (semel.toml, line 13): there is no such field",
        "webhooks.c.max_attempts (semel.toml, line 14): must be 1 to 1000",
        "webhooks.f.max_body (semel.toml, line 33): must be at most 1MiB if events go to the outbox",
        "webhooks.c.max_run (default): must be at least 1h",
        "webhooks.c.time_zone (semel.toml, line 17): must be a time zone",
        "webhooks.c.archive_at (semel.toml, line 18): must be a time of the day",
        "webhooks.c.handlers (semel.toml, line 19): has a rule that does \"dance\"",
        "webhooks.d.header (default): must not be empty",
        "webhooks.d.signed (semel.toml, line 23): must have a separator",
        "webhooks.e.livemode (semel.toml, line 27): is for Stripe's events only",
    ] {
        assert!(all.iter().any(|line| line.starts_with(told)), "{told}\n{all:#?}");
    }
    assert!(!all.iter().any(|line| line.contains("webhooks.e.max_body")), "a forwarded event may be larger: {all:#?}");
}

#[test]
fn an_unknown_handler_prevents_the_start() {
    let text = "[webhooks.s]\nkind = 'stripe'\nsecrets = ['geheim-geheim']\nhandlers = ['*=handler:mine']\n";
    let started = run(text, &["serve", "--listen", "127.0.0.1:0"], &[]);
    assert!(!started.status.success());
    assert!(stderr(&started).contains("there is no handler called \"mine\""), "{}", stderr(&started));
    let checked = run(text, &["config", "check"], &[]);
    assert_eq!(checked.status.code(), Some(1), "a check finds what keeps the server from starting");
    let told = "webhooks.s.handlers (semel.toml, line 4): there is no handler called \"mine\"";
    assert!(stderr(&checked).contains(told), "{}", stderr(&checked));
}
