//! Texts that come from outside, cut to a size.

/// The longest error, reason of a doubt or reason of a person that is stored, in bytes. It is for a person to read; it
/// is stored on the operation and in its journal, and goes through the same batches as everything else. What is longer
/// is cut, and says so.
pub const MAX_TEXT: usize = 8 << 10;

/// The text, cut at a character if it is longer than [`MAX_TEXT`], with a mark that tells how long it was.
pub(crate) fn bounded(text: String) -> String {
    if text.len() <= MAX_TEXT {
        return text;
    }
    let mark = format!(" … (cut, {} bytes in all)", text.len());
    let mut end = MAX_TEXT - mark.len();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{mark}", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_within_the_limit_is_kept_as_it_is() {
        for text in [String::new(), "é".repeat(MAX_TEXT / 2)] {
            assert_eq!(bounded(text.clone()), text);
        }
    }

    #[test]
    fn a_longer_text_is_cut_at_a_character_and_says_so() {
        for shift in 0..4 {
            let text = format!("{}{}", "x".repeat(shift), "💥".repeat(MAX_TEXT));
            let cut = bounded(text.clone());
            assert!(cut.len() <= MAX_TEXT && cut.len() > MAX_TEXT - 8, "{}", cut.len());
            assert!(cut.ends_with(&format!(" … (cut, {} bytes in all)", text.len())), "{cut}");
            assert!(text.starts_with(cut.split(" … ").next().unwrap()));
        }
    }
}
