//! The stored form of a run: its exit code and its output.
//!
//! One line of JSON, then the output as it was. So a person with a database client can read it, and binary output
//! survives.

use bytes::Bytes;
use semel::Outcome;
use serde::{Deserialize, Serialize};

/// How much of the output is kept. Larger reports belong in a file, not in the ledger.
pub const MAX_OUTPUT: usize = 1 << 20;

/// The version of the stored form.
const VERSION: u32 = 1;

/// The first line of the stored form.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    semel_once: u32,
    exit_code: u8,
    /// The length of the whole output; larger than the stored part if it was cut.
    printed: u64,
}

/// The output of a command, as far as it is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Printed {
    /// The beginning, up to [`MAX_OUTPUT`].
    pub kept: Vec<u8>,
    /// How much there was in all.
    pub total: u64,
}

impl Printed {
    /// Adds more output.
    pub fn add(&mut self, chunk: &[u8]) {
        let room = MAX_OUTPUT - self.kept.len();
        self.kept.extend_from_slice(&chunk[..chunk.len().min(room)]);
        self.total += chunk.len() as u64;
    }

    /// Whether a part was not kept.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.total > self.kept.len() as u64
    }
}

/// A run that took effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The exit code: 0, because other codes are not final.
    pub exit_code: u8,
    /// Its output.
    pub printed: Printed,
}

impl Stored {
    /// The outcome to be kept.
    #[must_use]
    pub fn encode(&self) -> Outcome {
        let head = Head { semel_once: VERSION, exit_code: self.exit_code, printed: self.printed.total };
        // Numbers only, so this cannot fail; even without its first line the outcome could be replayed.
        let mut body = serde_json::to_vec(&head).unwrap_or_default();
        body.push(b'\n');
        body.extend_from_slice(&self.printed.kept);
        Outcome { kept: !self.printed.is_cut(), body: body.into() }
    }

    /// Reads an outcome. One in another form was given by a person and counts as output.
    #[must_use]
    pub fn decode(body: &Bytes) -> Self {
        Self::read(body).unwrap_or_else(|| {
            let mut printed = Printed::default();
            printed.add(body);
            Self { exit_code: 0, printed }
        })
    }

    /// Reads an outcome in the stored form.
    #[must_use]
    pub fn read(body: &Bytes) -> Option<Self> {
        let end = body.iter().position(|byte| *byte == b'\n')?;
        let head: Head = serde_json::from_slice(&body[..end]).ok()?;
        (head.semel_once == VERSION).then(|| Self {
            exit_code: head.exit_code,
            printed: Printed { kept: body[end + 1..].to_vec(), total: head.printed },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(printed: &[u8]) -> Stored {
        let mut all = Printed::default();
        all.add(printed);
        Stored { exit_code: 0, printed: all }
    }

    #[test]
    fn output_is_read_back_byte_for_byte() {
        for printed in [&b""[..], b"a\nb\n", b"\0\xff\n{", b"\n\n"] {
            let outcome = stored(printed).encode();
            assert!(outcome.kept);
            assert_eq!(Stored::decode(&outcome.body), stored(printed));
        }
    }

    #[test]
    fn output_over_a_mebibyte_is_cut_and_marked_as_not_kept() {
        let mut printed = Printed::default();
        for _ in 0..3 {
            printed.add(&[b'x'; 500_000]);
        }
        assert_eq!((printed.kept.len(), printed.total, printed.is_cut()), (MAX_OUTPUT, 1_500_000, true));
        let outcome = Stored { exit_code: 0, printed: printed.clone() }.encode();
        assert!(!outcome.kept);
        assert_eq!(Stored::decode(&outcome.body).printed, printed);
    }

    #[test]
    fn an_outcome_from_a_person_counts_as_output() {
        for text in ["done by hand\n", "", "{}\nx", "{\"semelOnce\":99,\"exitCode\":0,\"printed\":1}\nx"] {
            let read = Stored::decode(&Bytes::from_static(text.as_bytes()));
            assert_eq!((read.exit_code, read.printed.kept), (0, text.as_bytes().to_vec()));
            assert!(Stored::read(&Bytes::from_static(text.as_bytes())).is_none());
        }
    }
}
