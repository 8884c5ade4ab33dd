//! The laws of `semel work`, and of the server's signs of life and schedules.

use rustix::process::Signal;
use semel::{Fingerprint, Key, Ledger, Options, Scope, Work};
use serde_json::Value;

use crate::{
    desk::{Desk, serve},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, eventually, stderr},
};

on_both_databases! {
    kinds_are_listed_paused_and_resumed
    a_pending_operation_is_cancelled_by_key_and_by_number
    a_server_is_listed_as_a_node_and_runs_its_schedules
    a_server_without_the_role_worker_is_listed_as_a_node
}

/// Work that no server has a handler for.
fn enqueue(place: &Place, key: &str) -> i64 {
    let desk = Desk::at(place);
    let work = Work::new(Scope::parse("shop/mail").unwrap(), Key::new(key).unwrap(), Fingerprint::of_bytes(b""));
    desk.block(async {
        let ledger = Ledger::new(desk.database.clone(), Options::default()).unwrap();
        ledger.enqueue(work).await.unwrap().operation().id
    })
}

fn items(listing: &Value) -> Vec<Value> {
    listing["items"].as_array().unwrap().clone()
}

fn kinds_are_listed_paused_and_resumed(place: &Place) {
    enqueue(place, "a");
    let list = || items(&place.json(["work", "list", "--json"]));
    let [mail] = &list()[..] else { panic!("{:?}", list()) };
    assert_eq!((&mail["service"], &mail["kind"]), (&"shop".into(), &"mail".into()));
    assert_eq!(
        (&mail["waiting"], &mail["due"], &mail["running"], &mail["more"]),
        (&1.into(), &1.into(), &0.into(), &false.into())
    );
    assert!(mail["oldestSeconds"].is_u64() && mail["paused"].is_null(), "{mail}");

    let unpaused = place.run(["work", "resume", "shop", "mail", "--reason", "r"]);
    assert_eq!(unpaused.status.code(), Some(1));
    assert!(stderr(&unpaused).contains("shop mail is not paused; no kind is"), "{}", stderr(&unpaused));
    let said = place.say(["work", "pause", "shop", "mail", "--reason", "the server is away"]);
    assert_eq!(said, "shop/mail is paused: no worker starts it\n");
    let again = place.say(["work", "pause", "shop", "mail", "--reason", "something else"]);
    assert!(again.starts_with("nothing was changed: shop/mail is paused since 20"), "{again}");
    assert!(
        again.contains(" by ana@") && again.contains(", because: the server is away; semel work resume"),
        "{again}"
    );
    let said = place.say(["work", "pause", "shop", "male", "--reason", "a slip"]);
    assert!(said.contains("no node runs this kind at present, and nothing of it waits"), "{said}");
    let mail = list().into_iter().find(|kind| kind["kind"] == "mail").unwrap();
    assert_eq!(mail["paused"]["reason"], "the server is away");
    assert!(mail["paused"]["by"].as_str().unwrap().starts_with("ana@"), "{mail}");
    let table = place.say(["work", "list"]);
    assert!(table.contains("shop/mail") && table.contains(": the server is away"), "{table}");
    let other = place.run(["work", "resume", "shop", "print", "--reason", "r"]);
    assert!(stderr(&other).contains("shop print is not paused; paused: shop mail, shop male"), "{}", stderr(&other));
    for kind in ["mail", "male"] {
        assert_eq!(place.say(["work", "resume", "shop", kind, "--reason", "r"]), format!("shop/{kind} is resumed\n"));
    }
    assert_eq!(list().len(), 1);
    let audit = rows(place, "SELECT action || ' ' || subject FROM semel_audit ORDER BY id");
    let told = ["work.pause shop/mail", "work.pause shop/male", "work.resume shop/mail", "work.resume shop/male"];
    assert_eq!(audit, told);
    for wrong in [&["shop/x", "mail"][..], &["", "mail"]] {
        let wrong = place.run([&["work", "pause"], wrong, &["--reason", "r"]].concat());
        assert!(stderr(&wrong).contains("service: "), "{}", stderr(&wrong));
    }
    let several = place.run(["work", "pause", "shop", "*", "--reason", "r"]);
    assert!(stderr(&several).contains("'*' is not a kind"), "{}", stderr(&several));
}

fn a_pending_operation_is_cancelled_by_key_and_by_number(place: &Place) {
    let (_, b) = (enqueue(place, "a"), enqueue(place, "b").to_string());
    let listed = items(&place.json(["operations", "list", "--service", "shop", "--json"]));
    assert!(listed.iter().all(|op| op["attempt"] == 0), "none of them has run: {listed:?}");
    let table = place.say(["operations", "list", "--service", "shop"]);
    assert!(table.lines().skip(1).all(|line| line.split_whitespace().nth(2) == Some("0")), "{table}");
    let cancel = |which: &[&str]| place.run([&["work", "cancel"], which, &["--reason", "not needed"]].concat());
    let elsewhere = cancel(&["a"]);
    assert!(stderr(&elsewhere).contains("use --scope default/shop/mail"), "{}", stderr(&elsewhere));
    let elsewhere = cancel(&["--id", &b, "--scope", "shop/print"]);
    assert_eq!(elsewhere.status.code(), Some(1));
    let said = stderr(&elsewhere);
    let told =
        format!("nothing was changed: operation {b} is not in the scope default/shop/print, but in default/shop/mail");
    assert!(said.contains(&told), "{said}");
    assert_eq!(rows(place, "SELECT action FROM semel_audit"), [""; 0]);
    for which in [&["a", "--scope", "shop/mail"][..], &["--id", &b]] {
        let done = cancel(which);
        assert!(done.status.success(), "{}", stderr(&done));
    }
    let listed = items(&place.json(["operations", "list", "--service", "shop", "--json"]));
    assert!(listed.iter().all(|op| op["error"] == "cancelled" && op["state"] == "failed"), "{listed:?}");
    assert_eq!(listed.len(), 2);
    assert_eq!(place.ends("done", &[], "true").0, 0);
    let late = cancel(&["done"]);
    assert!(stderr(&late).contains("nothing was changed: it is too late"), "{}", stderr(&late));
    let unknown = cancel(&["unknown", "--scope", "shop/mail"]);
    assert!(stderr(&unknown).contains("is not known"), "{}", stderr(&unknown));
    assert_eq!(rows(place, "SELECT action FROM semel_audit"), ["operations.cancel"; 2]);
}

fn a_server_is_listed_as_a_node_and_runs_its_schedules(place: &Place) {
    let variables = [("SEMEL_PROPOSALS_SUBMISSIONS_RETENTION", "10s")];
    let mut server = serve(place, "api,worker", &variables);
    let nodes = || items(&place.json(["work", "nodes", "--json"]));
    eventually(SOON, "it is there", || nodes().len() == 1);
    let node = nodes().remove(0);
    assert_eq!(node["roles"], serde_json::json!(["api", "worker"]));
    assert!(node["kinds"].as_array().unwrap().contains(&"proposals/clean-up".into()), "{node}");
    assert_eq!(node["version"], env!("CARGO_PKG_VERSION"));
    let schedules = || items(&place.json(["work", "schedules", "--json"]));
    eventually(SOON, "a clean-up has run", || schedules().iter().any(|one| one["last"]["state"] == "completed"));
    let clean_up = schedules().remove(0);
    assert_eq!((&clean_up["name"], &clean_up["when"]), (&"clean-up".into(), &"every 1s".into()));
    assert!(clean_up["next"].as_str() > clean_up["last"]["due"].as_str(), "{clean_up}");
    // Between its due time and its start, the next run is due now.
    eventually(SOON, "its next run is in the future", || {
        let table = place.say(["work", "schedules"]);
        table.contains("default/proposals/clean-up") && table.contains("(in ")
    });
    assert!(place.say(["work", "nodes"]).contains(" ago"));

    server.process.signal(Signal::TERM);
    assert!(server.process.end().success());
    assert_eq!(nodes().len(), 0, "one that stopped in order is not listed");
}

fn a_server_without_the_role_worker_is_listed_as_a_node(place: &Place) {
    let mut server = serve(place, "sweeper", &[]);
    let nodes = || items(&place.json(["work", "nodes", "--json"]));
    eventually(SOON, "it is there", || nodes().len() == 1);
    assert_eq!(nodes()[0]["roles"], serde_json::json!(["sweeper"]));
    server.process.signal(Signal::KILL);
    let _ = server.process.end();
    assert_eq!(nodes().len(), 1, "one that was killed stays, with its age");
}
