//! The signed text: the body, and the other signed parts.

use super::{format::Sent, mac::Mac};

/// The signed text, part by part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Timestamp,
    Id,
    Body,
}

impl Template {
    /// `{timestamp}.{body}`
    pub(super) fn stripe() -> Self {
        Self(vec![Part::Timestamp, Part::Text(".".to_owned()), Part::Body])
    }

    /// `{id}.{timestamp}.{body}`
    pub(super) fn standard() -> Self {
        let stop = || Part::Text(".".to_owned());
        Self(vec![Part::Id, stop(), Part::Timestamp, stop(), Part::Body])
    }

    /// Parses `{id}.{timestamp}.{body}`. The error completes "signed …".
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(next) = rest.chars().next() {
            let part = if next == '{' {
                let Some((name, after)) = rest[1..].split_once('}') else {
                    return Err("has a { without its }".to_owned());
                };
                rest = after;
                match name {
                    "timestamp" => Part::Timestamp,
                    "id" => Part::Id,
                    "body" => Part::Body,
                    _ => return Err(format!("may have {{body}}, {{timestamp}} and {{id}} in it, not {{{name}}}")),
                }
            } else {
                let end = rest.find('{').unwrap_or(rest.len());
                let (text, after) = rest.split_at(end);
                rest = after;
                Part::Text(text.to_owned())
            };
            if parts.contains(&part) && !matches!(part, Part::Text(_)) {
                return Err("names a part twice".to_owned());
            }
            parts.push(part);
        }
        let template = Self(parts);
        template.check().map_err(str::to_owned).map(|()| template)
    }

    /// The signed text must be unambiguous. Otherwise a third party that has seen a delivery could move the end of its
    /// id into the timestamp, and send another delivery under the same signature.
    fn check(&self) -> Result<(), &'static str> {
        if !self.has(&Part::Body) {
            return Err("must have {body} in it");
        }
        if self.0.windows(2).any(|pair| !pair.iter().any(|part| matches!(part, Part::Text(_)))) {
            return Err("must have a separator, such as a full stop, between two parts");
        }
        if self.separators().any(|text| !text.chars().all(|char| char.is_ascii_punctuation())) {
            return Err("must have only punctuation between two parts");
        }
        Ok(())
    }

    /// The separators between parts.
    fn separators(&self) -> impl Iterator<Item = &str> {
        self.0.windows(3).filter_map(|window| match window {
            [_, Part::Text(text), _] => Some(text.as_str()),
            _ => None,
        })
    }

    fn has(&self, part: &Part) -> bool {
        self.0.contains(part)
    }

    pub(super) fn signs_timestamp(&self) -> bool {
        self.has(&Part::Timestamp)
    }

    pub(super) fn signs_id(&self) -> bool {
        self.has(&Part::Id)
    }

    /// Whether an id can be separated from the next part.
    pub(super) fn admits(&self, id: &str) -> bool {
        !self.signs_id() || !self.separators().any(|text| id.contains(|char| text.contains(char)))
    }

    /// Feeds the signed text. A missing part counts as empty; the reader has checked that none is missing.
    pub(super) fn feed(&self, mac: &mut Mac, sent: &Sent<'_>, body: &[u8]) {
        for part in &self.0 {
            match part {
                Part::Text(text) => mac.update(text.as_bytes()),
                // The text as it was sent: the number printed again could differ.
                Part::Timestamp => mac.update(sent.timestamp.map_or(b"", |(_, written)| written)),
                Part::Id => mac.update(sent.id.unwrap_or_default().as_bytes()),
                Part::Body => mac.update(body),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ambiguous_template_is_refused() {
        for (text, why) in [
            ("", "must have {body}"),
            ("body", "must have {body}"),
            ("{timestamp}", "must have {body}"),
            ("{body", "without its }"),
            ("{Body}", "not {Body}"),
            ("{url}.{body}", "not {url}"),
            ("{body}.{body}", "twice"),
            ("{id}.{id}.{body}", "twice"),
            ("{id}{timestamp}.{body}", "separator"),
            ("{timestamp}{body}", "separator"),
            ("{id}7{timestamp}.{body}", "punctuation"),
            ("{timestamp}x{body}", "punctuation"),
            ("{timestamp} {body}", "punctuation"),
        ] {
            let message = Template::parse(text).unwrap_err();
            assert!(message.contains(why), "{text}: {message}");
        }
        for text in ["{body}", "{timestamp}.{body}", "{id}.{timestamp}.{body}", "v0:{timestamp}:{body}", "{body}|{id}"]
        {
            assert!(Template::parse(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn the_built_in_templates_equal_their_texts() {
        assert_eq!(Template::parse("{timestamp}.{body}"), Ok(Template::stripe()));
        assert_eq!(Template::parse("{id}.{timestamp}.{body}"), Ok(Template::standard()));
    }

    #[test]
    fn a_signed_id_cannot_contain_the_separator() {
        let template = Template::parse("v0:{id}.{timestamp}::{body}").unwrap();
        for (id, admitted) in [("msg_1", true), ("v0", true), ("a.b", false), ("a:b", false), (".", false)] {
            assert_eq!(template.admits(id), admitted, "{id}");
        }
        let unsigned = Template::parse("{timestamp}.{body}").unwrap();
        assert!(unsigned.admits("a.b"), "an unsigned id may contain anything");
    }
}
