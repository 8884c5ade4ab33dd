//! The laws of readiness: a node whose writes fail is not ready, and reports why.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output},
    sync::Barrier,
    thread,
};

use rustix::process::{Resource, Rlimit, prlimit};
use semel_testkit::faults::Server as Postgres;
use serde_json::json;

use crate::{
    hooks::{command, deliver, event, status},
    place::Place,
    proposals::call,
    serve_faults::{ALL, log, logged},
    support::{SOON, Server, eventually, semel, stderr},
};

/// Runs the program as a user without write permission: root may write everything, unless that capability is dropped.
fn as_a_user(command: &Command) -> Command {
    let mut user = Command::new("setpriv");
    user.args(["--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", "--"]);
    if !rustix::process::geteuid().is_root() {
        user = Command::new("env");
    }
    user.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => user.env(name, value),
            None => user.env_remove(name),
        };
    }
    user
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

fn serve(place: &Place) -> Output {
    as_a_user(semel().args(["serve", "--listen", "127.0.0.1:0", "--database-url", &place.url])).output().unwrap()
}

#[test]
fn a_file_or_directory_that_cannot_be_written_is_refused_at_the_start() {
    let place = Place::sqlite();
    place.say(["once", "--key", "k", "--", "true"]);
    let file = place.path("semel.db");
    mode(&file, 0o444);
    let output = serve(&place);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let said = stderr(&output);
    assert!(said.contains("semel.db cannot be written") && said.contains("read-only"), "{said}");

    mode(&file, 0o644);
    mode(place.dir.path(), 0o555);
    let output = serve(&place);
    mode(place.dir.path(), 0o755);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("semel.db cannot be ") && said.contains("its directory"), "{said}");
}

/// Mounts a directory read-only, then runs a command.
const READ_ONLY: &str = "mount --bind \"$0\" \"$0\" && mount -o remount,bind,ro \"$0\" && exec \"$@\"";

/// A way to mount something that only a process and its children see. Root may do so at once. Any other user becomes
/// root in a user namespace, which a host or a container can forbid.
fn own_mounts(mounted: &Path) -> &'static [&'static str] {
    let mut refused = String::new();
    for way in [&["--mount"][..], &["--map-root-user", "--mount"]] {
        let output = Command::new("unshare").args(way).args(["sh", "-c", READ_ONLY]).arg(mounted).arg("true").output();
        let output = output.expect("this test needs `unshare` (util-linux)");
        if output.status.success() {
            return way;
        }
        refused.push_str(&format!("\nunshare {}: {}", way.join(" "), stderr(&output).trim()));
    }
    panic!(
        "this test mounts a directory read-only, and may not: run it as root with CAP_SYS_ADMIN (docker run --privileged) \
         or where users may make user namespaces{refused}"
    )
}

/// `semel serve` with its data in a read-only mount, visible to this process and its children only.
fn serve_read_only(way: &[&str], mounted: &Path, data_dir: &Path) -> Output {
    let mut command = semel();
    command.args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(data_dir);
    let mut apart = Command::new("unshare");
    apart.args(way).args(["sh", "-c", READ_ONLY]).arg(mounted);
    apart.arg(command.get_program()).args(command.get_args()).output().unwrap()
}

#[test]
fn a_read_only_mount_is_reported_with_the_remedy() {
    let place = Place::sqlite();
    let dir = place.dir.path();
    let way = own_mounts(dir);
    for (data_dir, file) in [(dir.join("new"), false), (dir.to_owned(), false), (dir.to_owned(), true)] {
        if file {
            place.say(["once", "--key", "k", "--", "true"]);
        }
        let output = serve_read_only(way, dir, &data_dir);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("mounted read-only") && said.contains("mount it for writing, or "), "{said}");
        assert!(!said.contains("must be allowed"), "no permission would help: {said}");
    }
}

fn ready(server: &Server) -> (u16, serde_json::Value) {
    let answer = server.get("/readyz");
    (answer.status, answer.json()["database"].clone())
}

/// A database that cannot be written is 503 on every route, and never 500.
fn nothing_is_taken(server: &Server) {
    let cliente = r#"{"nome":"Ana","email":"ana@example.com"}"#;
    let answer = call(server.address, "POST", "/clientes", Some("k-1"), cliente).unwrap();
    assert_eq!((answer.status, answer.problem().as_str()), (503, "store-unavailable"), "{answer:?}");
    let answer = deliver(server, &event("evt_2", 100, "two"));
    assert_eq!(answer.status, 503, "{answer:?}");
}

#[test]
fn a_node_whose_disk_is_full_is_not_ready_until_there_is_room() {
    let place = Place::sqlite();
    // A file that may not grow is an error, and does not end the server.
    let server = Server::start_with(&mut command(&place, ALL, &[]));
    assert_eq!(ready(&server), (200, json!("ok")));
    let limit = |bytes| {
        let limit = Rlimit { current: bytes, maximum: None };
        prlimit(Some(server.process.pid()), Resource::Fsize, limit).unwrap();
    };
    limit(Some(0));
    let full = (503, json!("the disk of the database is full or broken"));
    eventually(SOON, "a full disk is noticed", || ready(&server) == full);
    nothing_is_taken(&server);
    limit(None);
    eventually(SOON, "room is noticed", || ready(&server) == (200, json!("ok")));
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "one"))), "processed");
}

#[test]
fn a_node_whose_postgres_takes_no_writes_is_not_ready_until_it_does() {
    let postgres = Postgres::start("max_connections = 40\n");
    let place = Place::at(postgres.url());
    let server = Server::start_with(&mut command(&place, ALL, &[]));
    assert_eq!(ready(&server), (200, json!("ok")));
    // Like a server that was demoted to a standby.
    postgres.set("default_transaction_read_only = on");
    eventually(SOON, "it is noticed", || ready(&server) == (503, json!("the database is read-only")));
    nothing_is_taken(&server);
    postgres.set("default_transaction_read_only = off");
    eventually(SOON, "the end of it is noticed", || ready(&server) == (200, json!("ok")));
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "one"))), "processed");
}

#[test]
fn a_node_without_a_connection_to_postgres_is_not_ready() {
    let postgres = Postgres::start("max_connections = 40\n");
    let place = Place::at(postgres.url());
    let server = Server::start_with(&mut command(&place, ALL, &[]));
    assert_eq!(ready(&server), (200, json!("ok")));
    let none = (503, json!("the database server has no connection left"));
    // Idle connections of the node would still answer, so they are terminated.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let others = runtime.block_on(async {
        use sqlx::Connection as _;
        let mut others = Vec::new();
        let mut first = sqlx::PgConnection::connect(&place.url).await.unwrap();
        // Connections that the node closes are taken at once, until none is free.
        let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'semel'";
        let begun = std::time::Instant::now();
        while begun.elapsed() < SOON && others.len() < 60 {
            sqlx::raw_sql(end).execute(&mut first).await.unwrap();
            match sqlx::PgConnection::connect(&place.url).await {
                Ok(other) => others.push(other),
                // Not for another reason: while a connection is being terminated, the node may get its place back.
                Err(_) if ready(&server) == none => break,
                Err(_) => {}
            }
        }
        others.push(first);
        others
    });
    eventually(SOON, "it is noticed", || ready(&server) == none);
    drop(others);
    drop(runtime);
    eventually(SOON, "the end of it is noticed", || ready(&server) == (200, json!("ok")));
}

/// A node with all roles on a server that allows 14 connections, three of which are reserved for superusers.
fn on_few_connections() -> (Postgres, Place, Server) {
    let postgres = Postgres::start("max_connections = 14\n");
    let place = Place::at(postgres.url());
    let mut command = command(&place, ALL, &[]);
    logged(&mut command, &place);
    let server = Server::start_with(&mut command);
    (postgres, place, server)
}

#[test]
fn a_node_with_too_few_allowed_connections_logs_it_at_the_start() {
    let (_postgres, place, _server) = on_few_connections();
    let warning = "WARN semel_store::postgres::schema: PostgreSQL allows fewer connections than this node may use";
    let lines = log(&place);
    let line = lines.lines().find(|line| line.contains(warning)).unwrap_or_else(|| panic!("no warning in {lines}"));
    assert!(line.contains("allowed=11 wanted=37"), "{line}");
}

#[test]
fn heavy_no_request_of_a_burst_on_few_connections_is_refused() {
    const AT_ONCE: usize = 50;
    let (_postgres, place, server) = on_few_connections();
    // A burst that needed no more connections than there are would show nothing.
    let few = || log(&place).contains("PostgreSQL has no further connection for this node");
    let mut round = 0;
    while round < 3 || !few() {
        round += 1;
        assert!(round < 50, "the server has connections enough: {}", log(&place));
        let begin = Barrier::new(AT_ONCE);
        thread::scope(|scope| {
            for n in 0..AT_ONCE {
                let (begin, server) = (&begin, &server);
                scope.spawn(move || {
                    let name = format!("{round}-{n}");
                    begin.wait();
                    let (answer, status) = match n % 2 {
                        0 => {
                            let body = json!({ "nome": "Ana", "email": format!("ana{name}@example.com") }).to_string();
                            (call(server.address, "POST", "/clientes", Some(&name), &body).unwrap(), 201)
                        }
                        _ => (deliver(server, &event(&format!("evt_{name}"), 100, "one")), 200),
                    };
                    assert_eq!(answer.status, status, "{name}: {answer:?}");
                });
            }
        });
    }
    assert!(!log(&place).contains("at line"), "it tells a line of PostgreSQL's source code: {}", log(&place));
}

#[test]
fn a_node_whose_log_is_deleted_is_not_ready_takes_nothing_and_loses_nothing() {
    let place = Place::sqlite();
    let mut server = Server::start_with(&mut command(&place, ALL, &[]));
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "one"))), "processed");
    assert_eq!(ready(&server).0, 200);
    fs::remove_file(place.path("semel.db-wal")).unwrap();
    let lost = (503, json!("a file of the database is gone"));
    eventually(SOON, "it is noticed", || ready(&server) == lost);
    nothing_is_taken(&server);
    // Not even by a killed one.
    server.process.0.kill().unwrap();
    server.process.end();
    let server = Server::start_with(&mut command(&place, ALL, &[]));
    assert_eq!(ready(&server), (200, json!("ok")));
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "one"))), "skipped");
}

#[test]
fn after_a_server_and_a_command_have_ended_the_file_alone_is_the_database() {
    let place = Place::sqlite();
    let mut server = Server::start_with(&mut command(&place, ALL, &[]));
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "one"))), "processed");
    let alone = || !place.path("semel.db-wal").exists() && !place.path("semel.db-shm").exists();
    place.say(["operations", "list"]);
    assert!(!alone(), "the server has it open");
    server.process.signal(rustix::process::Signal::TERM);
    assert_eq!(server.process.end().code(), Some(0));
    assert!(alone(), "the server has left its log behind");
    for arguments in [vec!["sweep"], vec!["once", "--key", "k", "--", "true"], vec!["why", "k"], vec!["clock", "show"]]
    {
        place.say(&arguments);
        assert!(alone(), "{arguments:?} has left its log behind");
    }
    let copy = Place::sqlite();
    fs::copy(place.path("semel.db"), copy.path("semel.db")).unwrap();
    assert_eq!(copy.state("k"), "completed");
}

#[test]
fn a_clock_that_was_ahead_is_reported_and_can_be_repaired() {
    let place = Place::sqlite();
    place.say(["once", "--key", "k", "--", "true"]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        use sqlx::Connection as _;
        let mut prompt = sqlx::SqliteConnection::connect(&place.url).await.unwrap();
        let ahead = "UPDATE semel_meta SET clock = clock + 3600000000 * 24";
        sqlx::raw_sql(ahead).execute(&mut prompt).await.unwrap();
        prompt.close().await.unwrap();
    });
    let mut server = Server::start_with(&mut command(&place, ALL, &[]));
    let answer = server.get("/readyz");
    let told = answer.json()["degraded"][0].as_str().unwrap().to_owned();
    assert_eq!(answer.status, 200);
    assert!(told.contains("23h 59m") || told.contains("1day"), "{told}");
    assert!(told.contains("semel clock show"), "{told}");

    let repair = ["clock", "repair", "--reason", "the battery was empty"];
    let refused = place.run(repair);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("another process has"), "{}", stderr(&refused));
    server.process.signal(rustix::process::Signal::TERM);
    server.process.end();
    assert!(place.say(["clock", "show"]).contains("ahead of this host's clock"));
    let told = place.json(["clock", "show", "--json"]);
    let millis = |name: &str| told[name].as_u64().unwrap();
    assert!(told["now"].is_string() && told["ahead"] == true, "{told}");
    assert!(millis("aheadMillis") > 1_000 && millis("caughtUpInMillis") >= 9 * millis("aheadMillis"), "{told}");
    eventually(SOON, "nothing is leased any more", || place.run(repair).status.success());
    assert!(place.say(["clock", "show"]).contains("It is not ahead"));
    let told = place.json(["clock", "show", "--json"]);
    assert_eq!(
        (&told["ahead"], &told["aheadMillis"], &told["caughtUpInMillis"]),
        (&json!(false), &json!(0), &json!(0))
    );
    let server = Server::start_with(&mut command(&place, ALL, &[]));
    assert_eq!(server.get("/readyz").json()["degraded"], json!([]));
}
