//! Money: DECIMAL(10,2), exact from the digits of the request to the digits of the answer.

use serde::{Serialize, Serializer, ser::Error as _};
use serde_json::value::RawValue;

/// An amount above zero, in cents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Valor(i64);

/// Digits before the point: ten in all, two of them after it.
const WHOLE_DIGITS: usize = 8;

impl Valor {
    /// An amount from a table.
    pub(super) const fn from_cents(cents: i64) -> Self {
        Self(cents)
    }

    pub(super) const fn cents(self) -> i64 {
        self.0
    }

    /// Parses a JSON number from its text: as a float, 0.29 would be 28.999… cents.
    pub(super) fn parse(number: &str) -> Result<Self, &'static str> {
        const NO_NUMBER: &str = "must be a number such as 1500.00";
        let (number, below_zero) = match number.strip_prefix('-') {
            Some(rest) => (rest, true),
            None => (number, false),
        };
        let (number, exponent) = match number.split_once(['e', 'E']) {
            Some((number, exponent)) => (number, power(exponent).ok_or(NO_NUMBER)?),
            None => (number, 0),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let digits = [whole, fraction].concat();
        if whole.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return Err(NO_NUMBER);
        }
        // The value is 0.d1d2d3… times ten to the power of `point`, without leading or trailing zeros.
        let leading = digits.len() - digits.trim_start_matches('0').len();
        let point = whole.len() as i64 - leading as i64 + exponent;
        let digits = digits.trim_matches('0');
        if digits.is_empty() || below_zero {
            return Err("must be above 0");
        }
        if digits.len() as i64 - point > 2 {
            return Err("must have at most two decimals");
        }
        if point > WHOLE_DIGITS as i64 {
            return Err("must be at most 99999999.99");
        }
        // At most ten digits are left, and as many places up to the cents.
        let places = usize::try_from(point + 2).map_err(|_| NO_NUMBER)?;
        format!("{digits:0<places$}").parse().map(Self).map_err(|_| NO_NUMBER)
    }
}

/// Parses an exponent. One beyond any number of digits is clamped.
fn power(exponent: &str) -> Option<i64> {
    const BEYOND: i64 = 1 << 40;
    let (sign, digits) = match exponent.as_bytes().first()? {
        b'-' => (-1, &exponent[1..]),
        b'+' => (1, &exponent[1..]),
        _ => (1, exponent),
    };
    let right = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    right.then(|| sign * digits.parse().unwrap_or(BEYOND).min(BEYOND))
}

/// As a JSON number with two decimals.
impl Serialize for Valor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = format!("{}.{:02}", self.0 / 100, self.0 % 100);
        RawValue::from_string(text).map_err(S::Error::custom)?.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(text: &str) -> Result<String, &'static str> {
        Valor::parse(text).map(|valor| serde_json::to_string(&valor).unwrap())
    }

    #[test]
    fn every_way_to_write_an_amount_gives_the_same_amount() {
        for text in ["1500.00", "1500", "1500.0", "1500.000", "1.5e3", "15E2", "150000e-2", "0.15e+4"] {
            assert_eq!(round_trip(text).as_deref(), Ok("1500.00"), "{text}");
        }
        for (text, written) in [
            ("0.01", "0.01"),
            ("1e-2", "0.01"),
            ("0.1", "0.10"),
            ("0.29", "0.29"),
            ("1.10", "1.10"),
            ("99999999.99", "99999999.99"),
            ("9999999999e-2", "99999999.99"),
            ("1e7", "10000000.00"),
            ("16777217.01", "16777217.01"),
        ] {
            assert_eq!(round_trip(text).as_deref(), Ok(written), "{text}");
        }
    }

    #[test]
    fn every_amount_is_read_back_as_it_was_written() {
        for cents in (1..=20_000).chain([9_999_999_999, 1_000_000_000, 123_456_789]) {
            let written = serde_json::to_string(&Valor::from_cents(cents)).unwrap();
            assert_eq!(Valor::parse(&written).map(Valor::cents), Ok(cents), "{written}");
        }
    }

    #[test]
    fn an_invalid_amount_is_refused_with_the_reason() {
        for (text, reason) in [
            ("0", "above 0"),
            ("0.00", "above 0"),
            ("-0", "above 0"),
            ("-1", "above 0"),
            ("0e999", "above 0"),
            ("1.005", "two decimals"),
            ("0.001", "two decimals"),
            ("1e-3", "two decimals"),
            ("100000000", "at most 99999999.99"),
            ("1e8", "at most 99999999.99"),
            ("1e999", "at most 99999999.99"),
            ("1e99999", "at most 99999999.99"),
            ("1e99999999999999999999", "at most 99999999.99"),
            ("0e99999", "above 0"),
            ("1e-99999", "two decimals"),
            ("1e-99999999999999999999", "two decimals"),
            ("1e", "a number such as"),
            ("1e+", "a number such as"),
            ("1e+-1", "a number such as"),
            ("\"1500.00\"", "a number such as"),
            ("null", "a number such as"),
            ("true", "a number such as"),
            ("{}", "a number such as"),
            ("[1]", "a number such as"),
        ] {
            let said = round_trip(text).unwrap_err();
            assert!(said.contains(reason), "{text}: {said}");
        }
    }
}
