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

/// The content and the message of an upload.
pub(super) struct Uploaded<'a> {
    pub(super) content_hash: &'a str,
    pub(super) message_hash: &'a str,
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
    /// The file with another message.
    MessageDiffers(Box<Mailing>),
}

impl Known {
    /// What an upload would be, and the mailing that it is or contradicts.
    pub(super) fn named(&self) -> (&'static str, Option<&Mailing>) {
        match self {
            Self::New => ("created", None),
            Self::Same(mailing, _) => ("known", Some(mailing)),
            Self::FilenameReused(mailing) => (FILENAME_REUSED.name, Some(mailing)),
            Self::ContentReused(mailing) => (CONTENT_REUSED.name, Some(mailing)),
            Self::MessageDiffers(mailing) => (MESSAGE_DIFFERS.name, Some(mailing)),
        }
    }
}

/// Decides. Of several mailings that are alike, the oldest counts.
pub(super) fn recognise(identity: Identity, uploaded: &Uploaded<'_>, alike: Alike) -> Known {
    let Alike { both, by_name, by_content } = alike;
    let same = |m: Mailing| match m.content_hash == uploaded.content_hash {
        true if m.message_hash != uploaded.message_hash => Known::MessageDiffers(Box::new(m)),
        equal => Known::Same(Box::new(m), !equal),
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
