//! Several mailings at once: none waits for another one to end.

use std::time::{Duration, Instant};

use semel_testkit::{faults::torture, smtp::SmtpSink};

use crate::{
    fleet::{ALL, Fleet},
    mailings_kill::{LIMIT, SHORT, check_counts, count, is_over, list, shown, upload},
    support::eventually,
};

/// A list of so many addresses that no other list has.
fn list_of(name: &str, addresses: usize) -> String {
    list(addresses).replace("user", name)
}

/// Two mailings on two nodes: when one is over, the other is not far behind.
#[test]
fn two_mailings_on_two_nodes_both_progress() {
    let addresses = if torture() { 100_000 } else { 3_000 };
    let fleet = Fleet::postgres_rabbitmq();
    let sink = fleet.runtime.block_on(SmtpSink::start());
    let url = sink.url();
    let variables = [&SHORT[..], &[("SEMEL_MAIL_TRANSPORT", url.as_str())]].concat();
    let nodes = [(); 2].map(|()| fleet.start(ALL, &variables));
    let address = nodes[0].address;
    let ids = ["ana", "bo"].map(|name| upload_as(address, name, &list_of(name, addresses)));
    let sent = |id: &String| shown(address, id).map_or(0, |mailing| count(&mailing, "sent"));
    eventually(LIMIT, "one is over", || ids.iter().any(|id| shown(address, id).is_some_and(|m| is_over(&m))));
    let fewest = ids.iter().map(sent).min().unwrap();
    assert!(fewest > addresses / 4, "one had sent {fewest} of {addresses} when the other was over");
    eventually(LIMIT, "both are over", || ids.iter().all(|id| shown(address, id).is_some_and(|m| is_over(&m))));
    for id in &ids {
        let mailing = shown(address, id).unwrap();
        check_counts(&mailing, addresses);
        assert_eq!(count(&mailing, "sent"), addresses, "{mailing}");
    }
    assert_eq!(sink.count(), 2 * addresses);
}

/// A mailing of ten behind a long one, which is still being imported, is sent within seconds.
#[test]
fn a_mailing_of_ten_does_not_wait_for_a_long_one() {
    let addresses = if torture() { 1_000_000 } else { 30_000 };
    let fleet = Fleet::postgres_rabbitmq();
    let sink = fleet.runtime.block_on(SmtpSink::start());
    let url = sink.url();
    let variables = [&SHORT[..], &[("SEMEL_MAIL_TRANSPORT", url.as_str())]].concat();
    let node = fleet.start(ALL, &variables);
    let long = upload_as(node.address, "long", &list_of("long", addresses));
    for name in ["during_the_import", "during_the_sending"] {
        let begun = Instant::now();
        let short = upload_as(node.address, name, &list_of(name, 10));
        eventually(LIMIT, "the short one is sent", || shown(node.address, &short).is_some_and(|m| is_over(&m)));
        assert!(begun.elapsed() < Duration::from_secs(20), "{name}: {:?}", begun.elapsed());
        println!("{name}: ten were sent after {:?}", begun.elapsed());
        assert!(!is_over(&shown(node.address, &long).unwrap()), "the long one was over first: this shows nothing");
        eventually(LIMIT, "the long one is being sent", || {
            shown(node.address, &long).is_some_and(|mailing| count(&mailing, "sent") > 0)
        });
    }
}

fn upload_as(address: std::net::SocketAddr, name: &str, list: &str) -> String {
    upload(address, &format!("{name}.csv"), list).unwrap()
}
