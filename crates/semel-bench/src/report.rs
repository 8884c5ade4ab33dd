//! The report: tables for people, JSON for programs.

use std::fmt;

use serde_json::{Value, json};

use crate::{
    load::Figure,
    site::Backend,
    verdict::{Bound, Verdict, verdicts},
};

/// The subject of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) section: &'static str,
    pub(crate) backend: Backend,
    pub(crate) how: &'static str,
    pub(crate) tasks: usize,
}

/// All figures, in the order of the run.
#[derive(Default)]
pub(crate) struct Report {
    /// Each subject with its figures, one per round.
    figures: Vec<(Subject, Vec<Figure>)>,
    remarks: Vec<String>,
}

impl Report {
    pub(crate) fn add(&mut self, subject: Subject, figure: Figure) {
        eprintln!(
            "  {} · {} · {} tasks: {:.0}/s, p50 {:.2} ms, p99 {:.2} ms",
            subject.backend, subject.how, subject.tasks, figure.rate, figure.p50, figure.p99
        );
        match self.figures.iter_mut().find(|(known, _)| *known == subject) {
            Some((_, figures)) => figures.push(figure),
            None => self.figures.push((subject, vec![figure])),
        }
    }

    pub(crate) fn say(&mut self, remark: String) {
        eprintln!("  {remark}");
        self.remarks.push(remark);
    }

    fn find(&self, subject: Subject) -> Option<&[Figure]> {
        self.figures.iter().find(|(known, _)| *known == subject).map(|(_, figures)| &figures[..])
    }

    /// The first's rate over the second's, and the same per CPU time. Both were measured one after the other in every
    /// round; the result is the median of the rounds' ratios, so that noise which lasts longer than a round cancels
    /// out.
    pub(crate) fn ratios(&self, ours: Subject, theirs: Subject) -> Option<(f64, f64)> {
        let both = || Some(self.find(ours)?.iter().zip(self.find(theirs)?));
        let rate = median(both()?.map(|(ours, theirs)| ours.rate / theirs.rate).collect());
        let per_cpu = median(both()?.map(|(ours, theirs)| ours.per_cpu / theirs.per_cpu).collect());
        Some((rate, per_cpu))
    }

    /// The median duration, in milliseconds.
    pub(crate) fn p50(&self, subject: Subject) -> Option<f64> {
        Some(middle(self.find(subject)?).p50)
    }

    /// The 99th percentile of the duration, in milliseconds.
    pub(crate) fn p99(&self, subject: Subject) -> Option<f64> {
        Some(median(self.find(subject)?.iter().map(|figure| figure.p99).collect()))
    }

    /// How much longer the first takes than the second, in milliseconds: the median and the 99th percentile. The median
    /// of the rounds, as with the ratios.
    pub(crate) fn added(&self, ours: Subject, theirs: Subject) -> Option<(f64, f64)> {
        let both = || Some(self.find(ours)?.iter().zip(self.find(theirs)?));
        let p50 = median(both()?.map(|(ours, theirs)| ours.p50 - theirs.p50).collect());
        let p99 = median(both()?.map(|(ours, theirs)| ours.p99 - theirs.p99).collect());
        Some((p50, p99))
    }

    /// How much more CPU time the first costs than the second, in milliseconds per operation.
    pub(crate) fn added_cpu(&self, ours: Subject, theirs: Subject) -> Option<f64> {
        let both = self.find(ours)?.iter().zip(self.find(theirs)?);
        Some(median(both.map(|(ours, theirs)| 1e3 / ours.per_cpu - 1e3 / theirs.per_cpu).collect()))
    }

    pub(crate) fn to_json(&self) -> Value {
        let figure =
            |f: &Figure| json!({ "rate": f.rate, "p50_ms": f.p50, "p99_ms": f.p99, "per_cpu_second": f.per_cpu });
        let figures = self.figures.iter().map(|(subject, figures)| {
            json!({
                "section": subject.section,
                "database": subject.backend.to_string(),
                "how": subject.how,
                "tasks": subject.tasks,
                "rounds": figures.iter().map(figure).collect::<Vec<_>>(),
                "median": figure(&middle(figures)),
            })
        });
        let verdict = |v: &Verdict| {
            let bound = bound(v.bound);
            json!({ "aim": v.aim, "bound": bound, "ratio": v.ratio, "cpu_ratio": v.cpu_ratio, "met": v.is_met() })
        };
        json!({
            "figures": figures.collect::<Vec<_>>(),
            "verdict": verdicts(self).iter().map(verdict).collect::<Vec<_>>(),
            "remarks": self.remarks,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (section, title) in [
            ("pairs", "Claim + complete of new keys (1 op = both, each durable)"),
            ("replays", "Claims of completed keys, next to claim + complete of new ones"),
            ("http", "Requests through the HTTP layer, and the same server without it"),
            ("gateway", "Requests through the gateway, its bare hop, and the upstream itself"),
            ("messages", "Messages: the relay, a bare publisher, the wait for an idle relay, events from end to end"),
            ("webhooks", "Webhooks: new, again, and the same handler without deduplication"),
            (
                "worker",
                "The worker: no-op jobs next to pgbench and graphile_worker, batches, from the commit to the start",
            ),
            ("mailings", "Mailings: imports next to a bare COPY, sending next to the bare transport in a loop"),
            (
                "operations",
                "Operations over HTTP: pairs next to pgbench; next with 100,000 waiting (durations of next alone)",
            ),
            ("growth", "Claim + complete by the size of the table"),
        ] {
            let rows = self.figures.iter().filter(|(subject, _)| subject.section == section);
            let rows: Vec<_> = rows.map(|(subject, figures)| row(subject, &middle(figures))).collect();
            if !rows.is_empty() {
                writeln!(f, "\n## {title}\n")?;
                table(f, &["database", "how", "tasks", "ops/s", "p50 ms", "p99 ms", "ops/CPU-s"], rows)?;
            }
        }
        for remark in &self.remarks {
            writeln!(f, "\n{remark}.")?;
        }
        let verdicts = verdicts(self);
        writeln!(f, "\n## Verdict\n")?;
        table(f, &["aim", "bound", "measured", "per CPU", ""], verdicts.iter().map(verdict_row).collect())
    }
}

/// Single operations may not have been timed.
fn millis(ms: f64) -> String {
    if ms.is_nan() { "-".to_owned() } else { format!("{ms:.2}") }
}

fn row(subject: &Subject, figure: &Figure) -> Vec<String> {
    vec![
        subject.backend.to_string(),
        subject.how.to_owned(),
        subject.tasks.to_string(),
        format!("{:.0}", figure.rate),
        millis(figure.p50),
        millis(figure.p99),
        format!("{:.0}", figure.per_cpu),
    ]
}

fn verdict_row(verdict: &Verdict) -> Vec<String> {
    let number = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
    let word = match verdict.is_met() {
        Some(true) => "met",
        Some(false) => "not met",
        None => "not measured",
    };
    vec![verdict.aim.clone(), bound(verdict.bound), number(verdict.ratio), number(verdict.cpu_ratio), word.to_owned()]
}

fn bound(bound: Bound) -> String {
    match bound {
        Bound::AtLeast(bound) => format!("≥ {bound}"),
        Bound::AtMost(bound) => format!("≤ {bound}"),
    }
}

/// A Markdown table with aligned columns.
fn table(f: &mut fmt::Formatter<'_>, heads: &[&str], rows: Vec<Vec<String>>) -> fmt::Result {
    let heads: Vec<String> = heads.iter().map(|head| (*head).to_owned()).collect();
    let width = |column: usize| rows.iter().chain([&heads]).map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let line = |row: &[String]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!(" {cell:<width$} "));
        format!("|{}|", cells.collect::<Vec<_>>().join("|"))
    };
    writeln!(f, "{}", line(&heads))?;
    writeln!(f, "|{}|", widths.iter().map(|width| "-".repeat(width + 2)).collect::<Vec<_>>().join("|"))?;
    rows.iter().try_for_each(|row| writeln!(f, "{}", line(row)))
}

/// The round with the median rate.
fn middle(figures: &[Figure]) -> Figure {
    let mut sorted = figures.to_vec();
    sorted.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    sorted[sorted.len() / 2]
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}
