//! Query parameters, and the pages of lists.

use std::collections::BTreeMap;

use axum::{extract::FromRequestParts, http::request::Parts};
use semel::Timestamp;

use super::{
    fields::Wrong,
    problem::{INVALID_QUERY, Problem},
};

/// The default and the largest number of items on a page.
const LIMIT: i64 = 50;
const MOST: i64 = 500;

/// The parameters of a request. A handler takes it as an argument.
pub struct Query {
    given: BTreeMap<String, String>,
    wrong: Wrong,
}

/// The start and the length of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The last id of the page before; 0 for the first page, since ids begin at 1.
    pub after: i64,
    /// The number of items.
    pub limit: i64,
}

impl Place {
    /// The page of `rows`, of which one more than the limit was read: it shows whether there is a next page. Also the
    /// cursor of the next page.
    #[must_use]
    pub fn cut<T>(self, mut read: Vec<T>, id: impl FnOnce(&T) -> i64) -> (Vec<T>, Option<String>) {
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        let more = read.len() > limit;
        read.truncate(limit);
        let next = read.last().filter(|_| more).map(|last| id(last).to_string());
        (read, next)
    }
}

impl Query {
    /// Parses the parameters.
    pub fn parse(query: &str) -> Self {
        let mut parsed = Self { given: BTreeMap::new(), wrong: Wrong::default() };
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()).into_owned() {
            if parsed.given.insert(name.clone(), value).is_some() {
                parsed.wrong.note(&name, "is given twice");
            }
        }
        parsed
    }

    /// Takes a parameter; `read` parses it.
    pub fn take<T>(&mut self, name: &str, read: impl FnOnce(&str) -> Result<T, &'static str>) -> Option<T> {
        let value = self.given.remove(name)?;
        // PostgreSQL accepts no NUL in a text, so no row can match.
        let read = if value.contains('\0') { Err("must not have a NUL character") } else { read(&value) };
        read.map_err(|message| self.wrong.note(name, message)).ok()
    }

    /// Takes `limit` and `cursor`.
    pub fn place(&mut self) -> Place {
        let limit = self.take("limit", |text| {
            number(text).filter(|limit| (1..=MOST).contains(limit)).ok_or("must be a number from 1 to 500")
        });
        let after = self.take("cursor", |text| {
            number(text).filter(|after| *after > 0).ok_or("must be the cursor that the previous page returned")
        });
        Place { after: after.unwrap_or(0), limit: limit.unwrap_or(LIMIT) }
    }

    /// Ends the reading. An ignored filter would show rows that it should hide.
    ///
    /// # Errors
    /// When there are mistakes.
    pub fn finish(mut self) -> Result<(), Problem> {
        for name in self.given.keys() {
            self.wrong.note(name, "is not a parameter of this path");
        }
        self.wrong.check(&INVALID_QUERY)
    }
}

/// A time of RFC 3339.
///
/// # Errors
/// When it is none.
pub fn time(text: &str) -> Result<Timestamp, &'static str> {
    let time = chrono::DateTime::parse_from_rfc3339(text);
    let time = time.map_err(|_| "must be a time such as 2026-01-31T12:00:00Z")?;
    Ok(Timestamp::from_micros(time.timestamp_micros()))
}

/// A number in its canonical form.
pub fn number(text: &str) -> Option<i64> {
    text.parse().ok().filter(|number: &i64| number.to_string() == text)
}

impl<S: Sync> FromRequestParts<S> for Query {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        Ok(Self::parse(parts.uri.query().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(query: &str) -> Result<Place, String> {
        let mut query = Query::parse(query);
        let place = query.place();
        let told = |problem: Problem| String::from_utf8(problem.into_http().into_body().to_vec()).unwrap();
        query.finish().map(|()| place).map_err(told)
    }

    #[test]
    fn a_page_has_fifty_items_by_default() {
        assert_eq!(place(""), Ok(Place { after: 0, limit: 50 }));
        assert_eq!(place("limit=500&cursor=7"), Ok(Place { after: 7, limit: 500 }));
    }

    #[test]
    fn a_time_is_read_with_any_offset() {
        let noon = time("2026-01-31T12:00:00Z").unwrap();
        assert_eq!(time("2026-01-31T13:00:00.000000+01:00"), Ok(noon));
        for text in ["", "2026-01-31", "1769860800", "noon"] {
            assert!(time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_wrong_parameter_is_refused_and_not_ignored() {
        for query in [
            "limit=0",
            "limit=501",
            "limit=",
            "limit=x",
            "limit=+1",
            "cursor=x",
            "cursor=-1",
            "cursor=",
            "curser=1",
            "limit=1&limit=2",
            "cursor=7%00",
        ] {
            assert!(place(query).unwrap_err().contains("invalid-query"), "{query}");
        }
        let both = place("limit=0&cursor=x").unwrap_err();
        assert!(both.contains("limit must be") && both.contains("cursor must be"), "{both}");
    }
}
