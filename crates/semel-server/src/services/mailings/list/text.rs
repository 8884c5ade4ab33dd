//! Characters that a reader cannot see, and short quotations.

use unicode_normalization::UnicodeNormalization;

/// Characters that change the order in which the text around them is shown. With them, `exe.csv` can look like
/// `vsc.exe`.
pub(super) fn is_bidi(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Characters without width, such as the byte order mark. They arrive by copy and paste from web pages and office
/// programs.
pub(super) fn is_zero_width(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2064}' | '\u{feff}')
}

/// The beginning of a text, at most `chars` characters.
pub(super) fn excerpt(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => text[..end].to_owned(),
        None => text.to_owned(),
    }
}

/// The form in which the names of columns are compared: `E-Mail` is `email`, `Correo electrónico` is
/// `correoelectronico`. Accents are dropped as combining marks, which are not alphanumeric.
pub(super) fn fold(name: &str) -> String {
    name.nfd().flat_map(char::to_lowercase).filter(|c| c.is_alphanumeric()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excerpt_counts_characters_and_not_bytes() {
        assert_eq!(excerpt("üüü", 2), "üü");
        assert_eq!(excerpt("üü", 2), "üü");
        assert_eq!(excerpt("", 2), "");
    }

    #[test]
    fn names_that_differ_in_case_accents_and_separators_fold_to_one() {
        for name in ["E-Mail", "e_mail", " E mail ", "EMAIL", "É-mail"] {
            assert_eq!(fold(name), "email");
        }
        assert_eq!(fold("Correo electrónico"), "correoelectronico");
    }
}
