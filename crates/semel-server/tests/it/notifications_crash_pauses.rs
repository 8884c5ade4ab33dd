//! Servers that are suspended past their leases, and then continue as if nothing had happened.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use rustix::process::Signal;

use crate::{
    fleet::{ALL, Fleet, events},
    support::{SOON, Server, eventually},
};

/// Longer than any lease of a fleet, and than RabbitMQ waits for a heartbeat of [`HEARTBEAT`].
const LONG: Duration = Duration::from_secs(4);
const HEARTBEAT: &str = "?heartbeat=1";

/// One is suspended at a point while the other goes on; when it wakes up, its work belongs to the other.
fn one_is_suspended(fleet: &mut Fleet, point: &str) {
    if fleet.rabbitmq.is_some() {
        fleet.broker.push_str(HEARTBEAT);
    }
    let still = fleet.start_dying(ALL, &format!("{point}:2:stop"), &[]);
    fleet.invite(&still);
    let (fleet, other) = (&*fleet, fleet.start(ALL, &[]));
    let stood_still = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // It may be suspended with a request in flight.
            for round in (0..100).take_while(|_| !stood_still.load(Ordering::SeqCst)) {
                fleet.try_send(still.address, &events(&format!("r{round}"), 8));
                thread::sleep(Duration::from_millis(50));
            }
        });
        eventually(SOON, "it stands still", || is_still(&still));
        stood_still.store(true, Ordering::SeqCst);
        thread::sleep(LONG);
        still.process.signal(Signal::CONT);
    });
    let events: Vec<_> = fleet.events.lock().unwrap().clone().into_iter().collect();
    fleet.send(other.address, &events);
    fleet.all_is_well(vec![other, still]);
}

pub(crate) fn is_still(server: &Server) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.process.pid().as_raw_pid())).unwrap();
    stat.rsplit_once(')').unwrap().1.trim_start().starts_with('T')
}

macro_rules! with {
    ($($fleet:ident)+) => {
        $(mod $fleet {
            use super::*;

            #[test]
            fn a_relay_suspended_with_rows_publishes_nothing_late() {
                one_is_suspended(&mut Fleet::$fleet(), "relay.taken");
            }

            #[test]
            fn a_relay_suspended_before_its_mark_marks_no_row_of_another() {
                one_is_suspended(&mut Fleet::$fleet(), "relay.published");
            }

            #[test]
            fn a_listener_suspended_before_its_commit_has_no_second_effect() {
                one_is_suspended(&mut Fleet::$fleet(), "consumer.before_commit");
            }

            #[test]
            fn a_listener_suspended_before_its_ack_has_no_second_effect() {
                one_is_suspended(&mut Fleet::$fleet(), "consumer.after_commit");
            }
        })+
    };
}
with!(sqlite postgres postgres_rabbitmq);
