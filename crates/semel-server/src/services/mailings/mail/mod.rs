//! Mails: composed from templates, and sent by file, SMTP or HTTP. This folder knows no tables and no routes.
//!
//! - [`template`]: subject, text and HTML with the values of one recipient
//! - [`message`]: one mail, and its bytes, which are the same each time
//! - [`dkim`]: the signature of those bytes
//! - [`transport`]: how a mail leaves, and whether it did
//! - [`verdict`]: the results of sending

pub(crate) mod dkim;
mod file;
mod http;
mod http_body;
pub(crate) mod message;
mod smtp;
mod smtp_pool;
mod smtp_stream;
pub(crate) mod template;
mod template_rules;
pub(crate) mod transport;
pub(crate) mod transport_url;
pub(crate) mod verdict;

#[cfg(test)]
mod tests;
