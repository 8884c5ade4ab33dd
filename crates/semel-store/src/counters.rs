//! Counters: rows in, sums out.

use std::collections::BTreeMap;

use semel::look::{Count, Counted, Group};
use serde_json::Value;

use crate::{from_row, rows};

/// A row of the counters or of the deltas.
#[derive(Debug)]
pub(crate) struct CountRow {
    tenant: String,
    service: String,
    kind: String,
    label1: String,
    label2: String,
    hour: i64,
    from_state: String,
    to_state: String,
    answer: String,
    bucket: i64,
    n: i64,
}

from_row!(CountRow { tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n });

impl CountRow {
    fn group(&self) -> Group {
        Group {
            tenant: self.tenant.clone(),
            service: self.service.clone(),
            kind: self.kind.clone(),
            label1: self.label1.clone(),
            label2: self.label2.clone(),
        }
    }

    pub(crate) fn read(self) -> Count {
        let group = self.group();
        let what = if self.answer.is_empty() {
            let bucket = i32::try_from(self.bucket).unwrap_or(i32::MAX);
            Counted::Change { from: self.from_state, to: self.to_state, bucket }
        } else {
            Counted::Answer(self.answer)
        };
        Count { group, hour: self.hour, what, n: self.n }
    }
}

/// Adds up equal counts, in key order, so that two nodes that fold at once do not deadlock.
pub(crate) fn fold(rows: Vec<CountRow>) -> Vec<Value> {
    let mut sums: BTreeMap<Count, i64> = BTreeMap::new();
    for row in rows {
        let count = row.read();
        let n = count.n;
        let sum = sums.entry(Count { n: 0, ..count }).or_default();
        *sum = sum.saturating_add(n);
    }
    let row = |(count, n): (&Count, &i64)| {
        let (from, to, answer, bucket) = match &count.what {
            Counted::Change { from, to, bucket } => (from.as_str(), to.as_str(), "", *bucket),
            Counted::Answer(answer) => ("", "", answer.as_str(), 0),
        };
        rows::delta(&count.group, count.hour, from, to, answer, bucket, *n)
    };
    sums.iter().map(row).collect()
}
