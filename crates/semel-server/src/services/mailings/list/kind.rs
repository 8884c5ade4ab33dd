//! Files that are no text at all, told by their first bytes.

use super::broken::Broken;

/// Refuses what is certainly not a CSV file, with a code that says what it is.
pub(super) fn check(first: &[u8]) -> Result<(), Broken> {
    if first.starts_with(b"\xff\xfe") || first.starts_with(b"\xfe\xff") {
        return Err(Broken::new("not-utf8", "the file is UTF-16: save it again with the encoding UTF-8").at(1));
    }
    if first.starts_with(b"PK\x03\x04") || first.starts_with(b"PK\x05\x06") {
        return Err(zip(first));
    }
    if first.starts_with(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1") {
        return Err(Broken::new(
            "is-spreadsheet",
            "the file is an old Office file (such as XLS): save it as CSV UTF-8",
        ));
    }
    const ARCHIVES: [&[u8]; 6] =
        [b"\x1f\x8b", b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh91AY&SY"];
    if ARCHIVES.iter().any(|magic| first.starts_with(magic)) {
        return Err(Broken::new("is-archive", "the file is compressed: unpack it first"));
    }
    if first.starts_with(b"%PDF-") {
        return Err(Broken::new("is-pdf", "the file is a PDF document: a list must be a CSV file"));
    }
    let text = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first).trim_ascii_start();
    let begins = |tag: &[u8]| text.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag));
    if [&b"<!doctype html"[..], b"<html", b"<head", b"<body", b"<table"].iter().any(|tag| begins(tag)) {
        return Err(Broken::new("is-html", "the file is an HTML page: a list must be a CSV file"));
    }
    if begins(b"<?xml") {
        return Err(Broken::new("is-xml", "the file is XML: a list must be a CSV file"));
    }
    Ok(())
}

/// Office files are ZIP archives whose first entries have known names.
fn zip(first: &[u8]) -> Broken {
    let contains = |name: &[u8]| first.windows(name.len()).any(|window| window == name);
    if contains(b"[Content_Types].xml") || contains(b"xl/") {
        return Broken::new("is-xlsx", "the file is an Excel workbook: save it as CSV UTF-8");
    }
    if contains(b"opendocument.spreadsheet") {
        return Broken::new("is-spreadsheet", "the file is an OpenDocument spreadsheet: save it as CSV in UTF-8");
    }
    Broken::new("is-archive", "the file is a ZIP archive: unpack it first")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(first: &[u8]) -> Option<&'static str> {
        check(first).err().map(|broken| broken.code)
    }

    #[test]
    fn files_that_are_no_text_are_named() {
        for (first, expected) in [
            (&b"PK\x03\x04\x14\0\x06\0[Content_Types].xml"[..], "is-xlsx"),
            (b"PK\x03\x04....xl/workbook.xml", "is-xlsx"),
            (b"PK\x03\x04mimetypeapplication/vnd.oasis.opendocument.spreadsheet", "is-spreadsheet"),
            (b"PK\x03\x04....list.csv", "is-archive"),
            (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is-spreadsheet"),
            (b"\x1f\x8b\x08", "is-archive"),
            (b"7z\xbc\xaf\x27\x1c", "is-archive"),
            (b"%PDF-1.7", "is-pdf"),
            (b"<!DOCTYPE html>", "is-html"),
            (b"\xef\xbb\xbf \n<HTML>", "is-html"),
            (b"<table><tr>", "is-html"),
            (b"<?xml version=\"1.0\"?>", "is-xml"),
            (b"\xff\xfea\0", "not-utf8"),
            (b"\xfe\xff\0a", "not-utf8"),
        ] {
            assert_eq!(code(first), Some(expected));
        }
        assert!(check(b"\xff\xfea\0").is_err_and(|broken| broken.message.contains("UTF-16")));
    }

    #[test]
    fn text_passes() {
        for first in [&b""[..], b"email\na@x.com", b"PKW,email", b"BZh,email", b"<a@x.com>"] {
            assert_eq!(code(first), None);
        }
    }
}
