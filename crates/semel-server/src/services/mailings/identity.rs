//! Whether an upload is a known mailing.

use super::{
    problems::{CONTENT_REUSED, FILENAME_REUSED, MESSAGE_DIFFERS},
    tables::mailings::{Alike, Mailing},
};

/// How uploads are recognised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Identity {
    /// The same name with the same content; a half match is refused.
    #[default]
    Both,
    /// The name alone.
    Filename,
    /// Name and content together: a half match is a new mailing.
    FilenameAndContent,
    /// The content alone.
    Content,
}

impl Identity {
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        match text {
            "filename" => Ok(Self::Filename),
            "filename+content" => Ok(Self::FilenameAndContent),
            "content" => Ok(Self::Content),
            _ => Err("must be filename, filename+content or content"),
        }
    }
}

/// The content and the message of an upload, and the other fields if they were given.
pub(super) struct Uploaded<'a> {
    pub(super) content_hash: &'a str,
    pub(super) message_hash: &'a str,
    pub(super) policy: Option<&'a str>,
    /// The index of the address column.
    pub(super) column: Option<usize>,
    pub(super) send_at: Option<i64>,
}

impl Uploaded<'_> {
    /// In what a mailing of the same content differs.
    fn differs_in(&self, m: &Mailing) -> Vec<&'static str> {
        let fields = [
            ("subject, sender or body", self.message_hash != m.message_hash),
            ("policy", self.policy.is_some_and(|policy| policy != m.policy)),
            ("column", self.column.is_some_and(|column| i64::try_from(column) != Ok(m.address_column))),
            // Not the present one: a late mailing that is resumed has none.
            ("sendAt", self.send_at.is_some() && self.send_at != m.send_at_given),
        ];
        fields.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
    }
}

/// What an upload is.
#[derive(Clone, Debug)]
pub(super) enum Known {
    /// A new mailing.
    New,
    /// This one; whether its file had another content.
    Same(Box<Mailing>, bool),
    /// Another content under the name.
    FilenameReused(Box<Mailing>),
    /// The content under another name.
    ContentReused(Box<Mailing>),
    /// The file with another message, policy, column or time; their names.
    MessageDiffers(Box<Mailing>, Vec<&'static str>),
}

impl Known {
    /// What an upload would be, and the mailing that it is or contradicts.
    pub(super) fn named(&self) -> (&'static str, Option<&Mailing>) {
        match self {
            Self::New => ("created", None),
            Self::Same(mailing, _) => ("known", Some(mailing)),
            Self::FilenameReused(mailing) => (FILENAME_REUSED.name, Some(mailing)),
            Self::ContentReused(mailing) => (CONTENT_REUSED.name, Some(mailing)),
            Self::MessageDiffers(mailing, _) => (MESSAGE_DIFFERS.name, Some(mailing)),
        }
    }
}

/// Decides. Of several mailings that are alike, the oldest counts.
pub(super) fn recognise(identity: Identity, uploaded: &Uploaded<'_>, alike: Alike) -> Known {
    let Alike { both, by_name, by_content } = alike;
    let same = |m: Mailing| {
        if m.content_hash != uploaded.content_hash {
            return Known::Same(Box::new(m), true);
        }
        match uploaded.differs_in(&m) {
            fields if fields.is_empty() => Known::Same(Box::new(m), false),
            fields => Known::MessageDiffers(Box::new(m), fields),
        }
    };
    match identity {
        Identity::Both => match (both, by_name, by_content) {
            (Some(m), ..) => same(m),
            (None, Some(m), _) => Known::FilenameReused(Box::new(m)),
            (None, None, Some(m)) => Known::ContentReused(Box::new(m)),
            (None, None, None) => Known::New,
        },
        Identity::Filename => by_name.map_or(Known::New, same),
        Identity::FilenameAndContent => both.map_or(Known::New, same),
        Identity::Content => by_content.map_or(Known::New, same),
    }
}
