//! Texts that come from outside: cut to a size, or out of a panic.

use std::any::Any;

/// The longest stored error, reason of a doubt or reason of a person, in bytes. It is stored on the operation and in
/// its journal, and people read it. A longer text is cut, and marked.
pub const MAX_TEXT: usize = 8 << 10;

/// The text, cut at a character if it is longer than [`MAX_TEXT`], with a mark that has its full length.
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

/// The text of a panic, as `catch_unwind` or a task's join gives it.
#[must_use]
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text")
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
    fn a_longer_text_is_cut_at_a_character_and_marked_as_cut() {
        for shift in 0..4 {
            let text = format!("{}{}", "x".repeat(shift), "💥".repeat(MAX_TEXT));
            let cut = bounded(text.clone());
            assert!(cut.len() <= MAX_TEXT && cut.len() > MAX_TEXT - 8, "{}", cut.len());
            assert!(cut.ends_with(&format!(" … (cut, {} bytes in all)", text.len())), "{cut}");
            assert!(text.starts_with(cut.split(" … ").next().unwrap()));
        }
    }

    #[test]
    fn a_panic_has_the_text_it_was_made_with() {
        let text = |work: fn()| panic_text(&*std::panic::catch_unwind(work).unwrap_err()).to_owned();
        assert_eq!(text(|| panic!("plain")), "plain");
        assert_eq!(text(|| panic!("with {}", 1 + 1)), "with 2");
        assert_eq!(text(|| std::panic::panic_any(7)), "no text");
    }
}
