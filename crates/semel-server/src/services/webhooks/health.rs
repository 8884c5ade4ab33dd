//! Health rules of a source's deliveries. The rules for any service are in [`crate::monitor`].

use super::monitor::Deliveries;
use crate::monitor::{Reason, degraded};

/// How many refusals are normal: the internet probes every server.
const KNOCKS: i64 = 10;

/// The problems of a source's deliveries.
pub(super) fn reasons(deliveries: &Deliveries) -> Vec<Reason> {
    [conflicts(deliveries), refusals(deliveries)].into_iter().flatten().collect()
}

/// Newer data supersedes older data, in any order of arrival: that is no problem. Of two versions of the same
/// age, one was not processed, and it may be the right one.
fn conflicts(deliveries: &Deliveries) -> Option<Reason> {
    let came = match deliveries.conflicts {
        0 if deliveries.more_conflicts => {
            "other data came under the ids of known events more often than this monitor reads"
        }
        0 => return None,
        1 => "other data, no newer and no older, came under the id of a known event",
        n => &format!("other data, no newer and no older, came under the ids of known events {n} times"),
    };
    degraded(format!("{came} in the last 24 hours"))
}

/// More refusals than deliveries: a changed secret or a wrong clock looks like this. So does an attacker, which is why
/// it only degrades.
fn refusals(deliveries: &Deliveries) -> Option<Reason> {
    if deliveries.refused <= KNOCKS || deliveries.refused <= deliveries.let_in {
        return None;
    }
    let (refused, let_in) = (deliveries.refused, deliveries.let_in);
    degraded(format!("{refused} deliveries were refused and {let_in} let in: has a secret changed?"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::Status;

    #[test]
    fn each_health_rule_has_its_threshold() {
        let none = Deliveries::default;
        for well in [none(), Deliveries { refused: 10, ..none() }, Deliveries { refused: 11, let_in: 11, ..none() }] {
            assert_eq!(reasons(&well), [], "{well:?}");
        }
        let worse = [
            (Deliveries { conflicts: 1, ..none() }, "of a known event in the last"),
            (Deliveries { conflicts: 3, ..none() }, "3 times"),
            (Deliveries { more_conflicts: true, ..none() }, "more often than this monitor reads"),
            (Deliveries { refused: 11, let_in: 10, ..none() }, "11 deliveries were refused and 10 let in"),
        ];
        for (deliveries, reason) in worse {
            let [(Status::Degraded, told)] = &reasons(&deliveries)[..] else { panic!("{deliveries:?}") };
            assert!(told.contains(reason), "{told}");
        }
    }
}
