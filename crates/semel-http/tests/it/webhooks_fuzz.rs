//! Fuzzes signature headers; most of them are nearly right.

use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use fastrand::Rng;

use crate::{
    webhooks::{T, at},
    webhooks_naive::Sender,
};

/// Parts of headers, to be inserted at wrong places.
const PIECES: [&[u8]; 17] = [
    b",",
    b" ",
    b"\t",
    b"=",
    b"t=",
    b"v1=",
    b"v1,",
    b"v0=",
    b"v1a,",
    b"0",
    b"1700000000",
    b"+",
    b".",
    b"sha256=",
    b"sha1=",
    b"\xff",
    b"99999999999999999999",
];

fn mutate(value: &mut Vec<u8>, rng: &mut Rng) {
    let at = rng.usize(..=value.len());
    let range = |rng: &mut Rng| at..at + rng.usize(..=(value.len() - at).min(80));
    match rng.u8(..10) {
        0 if at < value.len() => value[at] ^= 1 << rng.u8(..8),
        1 if at < value.len() => value[at] = rng.u8(..),
        2 => {
            let range = range(rng);
            value.drain(range);
        }
        3 => {
            let copied = value[range(rng)].to_vec();
            let to = rng.usize(..=value.len());
            value.splice(to..to, copied);
        }
        4 => {
            let piece = PIECES[rng.usize(..PIECES.len())];
            value.splice(at..at, piece.iter().copied());
        }
        5 => value.make_ascii_uppercase(),
        6 if rng.u8(..16) == 0 => *value = value.repeat(rng.usize(1..150)),
        // A right signature under the name of another scheme.
        7 => {
            if let Some(at) = value.windows(2).position(|pair| pair == b"v1") {
                value[at + 1] = b"02a"[rng.usize(..3)];
            }
        }
        // Items of the list are shuffled, and one may be repeated.
        _ => {
            let separator = if value.contains(&b',') { b',' } else { b' ' };
            let mut items: Vec<Vec<u8>> = value.split(|byte| *byte == separator).map(<[u8]>::to_vec).collect();
            let again = items[rng.usize(..items.len())].clone();
            items.extend(rng.bool().then_some(again));
            rng.shuffle(&mut items);
            *value = items.join(&separator);
        }
    }
}

/// Runs for `SEMEL_FUZZ_SECONDS`, one unless set.
#[test]
fn fuzz_the_verifiers_agree_with_the_reference_on_mutated_headers() {
    let seconds = std::env::var("SEMEL_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let end = Instant::now() + Duration::from_secs(seconds);
    let seed = fastrand::u64(..);
    let mut rng = Rng::with_seed(seed);
    let verifiers = Sender::ALL.map(|sender| (sender, sender.verifier()));
    let (mut accepted, mut refused) = ([0_u64; 4], [0_u64; 4]);
    while Instant::now() < end || accepted.contains(&0) || refused.contains(&0) {
        let number = rng.usize(..4);
        let (sender, verifier) = &verifiers[number];
        let body: Vec<u8> = (0..rng.usize(..20)).map(|_| rng.u8(..)).collect();
        let (mut time, mut id) = ((T + rng.u64(..=610) - 305).to_string().into_bytes(), b"msg_1".to_vec());
        // Sometimes the sender itself writes an unusual value, and signs it.
        for text in [&mut time, &mut id] {
            if rng.u8(..4) == 0 {
                let (at, piece) = (rng.usize(..=text.len()), PIECES[rng.usize(..PIECES.len())]);
                text.splice(at..at, piece.iter().copied());
            }
        }
        let mut values = sender.sign(&time, &id, &body);
        for _ in 0..rng.usize(..5) {
            let which = rng.usize(..values.len());
            mutate(&mut values[which], &mut rng);
        }
        let line = |(name, value): (&&'static str, &Vec<u8>)| {
            Some((HeaderName::from_static(name), HeaderValue::from_bytes(value).ok()?))
        };
        // A value that is no valid header is skipped.
        let Some(headers) = sender.headers().iter().zip(&values).map(line).collect::<Option<HeaderMap>>() else {
            continue;
        };
        let verdict = verifier.verify(&headers, &body, at(T));
        let expected = sender.accepts(&values, &body);
        assert_eq!(verdict.is_ok(), expected, "seed {seed}, {sender:?}: {verdict:?} for {headers:?} and {body:?}");
        if expected { accepted[number] += 1 } else { refused[number] += 1 }
    }
}
