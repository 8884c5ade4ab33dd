//! The shop of `orders.rs` as a real process: sent again, sent together, killed in the middle.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use semel_testkit::{Kind, Lab};

/// A shop that runs. It is killed when dropped.
struct Shop {
    child: Child,
    address: String,
}

impl Shop {
    fn open(url: &str, crash: Option<&str>) -> Self {
        let mut command = Command::new(program());
        command.args([url, "127.0.0.1:0"]).stdout(Stdio::piped());
        if let Some(point) = crash {
            command.env("SEMEL_CRASH", point);
        }
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line:?}")).to_owned();
        Self { child, address }
    }

    /// Sends an order; returns the answer, or nothing if the shop dies.
    fn order(&self, key: &str, item: &str) -> Option<String> {
        send(&self.address, key, item)
    }

    /// Waits for it to be killed.
    fn was_killed(mut self) {
        use std::os::unix::process::ExitStatusExt as _;
        assert_eq!(self.child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Cargo builds the examples before the tests, in the folder beside theirs.
fn program() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    here.parent().unwrap().parent().unwrap().join("examples/orders")
}

fn send(address: &str, key: &str, item: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    let length = item.len();
    let head = "POST /orders HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nPrefer: wait=20";
    write!(stream, "{head}\r\nIdempotency-Key: {key}\r\nContent-Length: {length}\r\n\r\n{item}").ok()?;
    let mut said = String::new();
    stream.read_to_string(&mut said).ok()?;
    (!said.is_empty()).then_some(said)
}

fn is_replay(answer: &str) -> bool {
    answer.contains("idempotent-replayed: true")
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}

/// Asks like a client until there is a final answer.
fn until_answered(shop: &Shop, key: &str, item: &str) -> String {
    let begun = Instant::now();
    loop {
        match shop.order(key, item) {
            Some(answer) if answer.starts_with("HTTP/1.1 201") => return answer,
            other => assert!(begun.elapsed() < Duration::from_secs(60), "{other:?}"),
        }
        thread::sleep(Duration::from_millis(200));
    }
}

async fn items(lab: &Lab) -> Vec<String> {
    lab.texts("SELECT item FROM orders ORDER BY id").await
}

macro_rules! on_both_databases {
    ($($test:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Lab::in_real_time(super::Kind::Sqlite).await).await;
            })+
        }
        mod postgres {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Lab::in_real_time(super::Kind::Postgres).await).await;
            })+
        }
    };
}

on_both_databases!(
    an_order_that_is_sent_twice_is_one_row,
    a_crowd_at_two_processes_makes_one_row,
    killed_before_the_commit_it_has_not_happened_and_is_done_once,
    killed_after_the_commit_it_has_happened_and_is_answered,
    a_shop_that_is_asked_to_stop_answers_first,
);

async fn an_order_that_is_sent_twice_is_one_row(lab: Lab) {
    let shop = Shop::open(&lab.url, None);
    let first = shop.order("k", "two lamps").unwrap();
    let again = shop.order("k", "two lamps").unwrap();
    assert!(first.starts_with("HTTP/1.1 201") && !is_replay(&first), "{first}");
    assert!(again.starts_with("HTTP/1.1 201") && is_replay(&again), "{again}");
    assert_eq!((body(&first), body(&again)), ("order 1: two lamps\n", "order 1: two lamps\n"));
    assert!(shop.order("k", "one lamp").unwrap().starts_with("HTTP/1.1 422"));
    assert_eq!(shop.order("other", "two lamps").map(|answer| is_replay(&answer)), Some(false));
    assert_eq!(items(&lab).await, ["two lamps", "two lamps"]);
}

async fn a_crowd_at_two_processes_makes_one_row(lab: Lab) {
    let shops = [Shop::open(&lab.url, None), Shop::open(&lab.url, None)];
    let clients: Vec<_> = (0..20)
        .map(|i| {
            let address = shops[i % 2].address.clone();
            thread::spawn(move || send(&address, "k", "a chair").unwrap())
        })
        .collect();
    let answers: Vec<String> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert!(answers.iter().all(|answer| body(answer) == body(&answers[0])), "{answers:?}");
    assert_eq!(answers.iter().filter(|answer| !is_replay(answer)).count(), 1);
    assert_eq!(items(&lab).await, ["a chair"]);
}

async fn killed_before_the_commit_it_has_not_happened_and_is_done_once(lab: Lab) {
    let shop = Shop::open(&lab.url, Some("atomic.before_commit:1"));
    assert_eq!(shop.order("k", "a desk"), None);
    shop.was_killed();
    assert_eq!(items(&lab).await.len(), 0);
    let shop = Shop::open(&lab.url, None);
    // Until its lease has expired, the order of the dead process is in flight.
    assert!(shop.order("k", "another desk").unwrap().starts_with("HTTP/1.1 422"));
    // Half a minute goes by.
    lab.execute("UPDATE semel_leases SET deadline = deadline - 30000000").await.unwrap();
    let answer = until_answered(&shop, "k", "a desk");
    assert!(!is_replay(&answer), "{answer}");
    let again = shop.order("k", "a desk").unwrap();
    assert!(is_replay(&again) && body(&again) == body(&answer), "{again}");
    assert_eq!(items(&lab).await, ["a desk"]);
}

async fn killed_after_the_commit_it_has_happened_and_is_answered(lab: Lab) {
    let shop = Shop::open(&lab.url, Some("atomic.after_commit:1"));
    assert_eq!(shop.order("k", "a desk"), None);
    shop.was_killed();
    assert_eq!(items(&lab).await, ["a desk"]);
    let shop = Shop::open(&lab.url, None);
    let again = shop.order("k", "a desk").unwrap();
    assert!(is_replay(&again) && body(&again) == "order 1: a desk\n", "{again}");
    assert_eq!(items(&lab).await, ["a desk"]);
}

async fn a_shop_that_is_asked_to_stop_answers_first(lab: Lab) {
    let mut shop = Shop::open(&lab.url, None);
    shop.order("k", "a bed").unwrap();
    kill_process(Pid::from_child(&shop.child), Signal::INT).unwrap();
    assert!(shop.child.wait().unwrap().success());
    let shop = Shop::open(&lab.url, None);
    assert!(is_replay(&shop.order("k", "a bed").unwrap()));
}
