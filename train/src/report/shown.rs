//! Text on its way to a screen. Names, settings and messages come from files, and a file may say anything: a terminal obeys control characters (they set its
//! title, move what is written, forge a line), and signs that turn the direction of writing make a text look like another. They are shown as escapes.
//! The macros that print do this to every line; what kiln itself tells a terminal, a progress bar's colors say, goes another way.

use std::borrow::Cow;

/// Whether a screen does something else with a character than show it. New lines and tabs are a text's own.
fn acts(c: char) -> bool {
    let control = c.is_control() && c != '\n' && c != '\t';
    control || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The text with `\u{1b}` in the place of an escape character. What has none comes back as it is, so twice is as once.
pub fn shown(text: &str) -> Cow<'_, str> {
    replaced(text, acts, |c| c.escape_unicode().to_string())
}

/// The same for what is to stay in its line: a cell of a table, a name.
pub fn shown_in_line(text: &str) -> Cow<'_, str> {
    replaced(text, |c| acts(c) || c.is_control(), |c| c.escape_default().to_string())
}

/// A message holds so many bytes of its beginning, and of its end, which says what to do.
const BEGINNING: usize = 48 << 10;
const END: usize = 4 << 10;

/// The same for a message: what it quotes of a file may be as long as files are, and the rest of it is then nowhere to be seen.
pub fn shown_in_brief(text: &str) -> Cow<'_, str> {
    if engine::mutant!("messages-of-any-length", text.len() <= BEGINNING + END, true) {
        return shown(text);
    }
    let is_boundary = |at: &usize| text.is_char_boundary(*at);
    let beginning = (0..=BEGINNING).rev().find(is_boundary).unwrap_or(0);
    let end = (text.len() - END..text.len()).find(is_boundary).unwrap_or(text.len());
    let between = end - beginning;
    Cow::Owned(format!("{} .. ({between} bytes more) .. {}", shown(&text[..beginning]), shown(&text[end..])))
}

/// JSON with such characters in its own escapes: it reads as the same.
pub fn shown_in_json(json: &str) -> Cow<'_, str> {
    replaced(json, acts, |c| format!("\\u{:04x}", c as u32))
}

fn replaced(text: &str, is: impl Fn(char) -> bool, by: impl Fn(char) -> String) -> Cow<'_, str> {
    if !text.contains(&is) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is(c) { out += &by(c) } else { out.push(c) }
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_obeyed_nowhere() {
        for plain in ["", "größer 🦀 日本", "two\n\tlines", "a\\u{1b}", "\u{a0}\u{200b}\u{200f}"] {
            assert!(matches!(shown(plain), Cow::Borrowed(same) if same == plain), "{plain:?}");
        }
        // All of C0 but two, DEL, C1, and what turns the direction.
        let acting = (0..0x20).chain(0x7f..0xa0).chain(0x202a..=0x202e).chain(0x2066..=0x2069).filter(|c| ![9, 10].contains(c));
        let mut count = 0;
        for c in acting.map(|c| char::from_u32(c).unwrap()) {
            let text = format!("a{c}b");
            assert_eq!(shown(&text), format!("a\\u{{{:x}}}b", c as u32));
            assert!(!shown_in_line(&text).contains(c));
            assert_eq!(shown(&shown(&text)), shown(&text));
            let json = serde_json::json!({ &text: [text] }).to_string();
            assert!(!shown_in_json(&json).contains(c), "{c:?}");
            assert_eq!(serde_json::from_str::<serde_json::Value>(&shown_in_json(&json)).unwrap(), serde_json::json!({ &text: [text] }));
            count += 1;
        }
        assert_eq!(count, 30 + 33 + 9);
        assert_eq!(shown_in_line("a\nb\tc\u{1b}"), "a\\nb\\tc\\u{1b}");
        assert_eq!(shown("\u{1b}]0;x\u{7}"), "\\u{1b}]0;x\\u{7}");
    }

    #[test]
    fn of_a_long_message_the_beginning_and_the_end_are_shown() {
        let usual = "é".repeat((BEGINNING + END) / 2);
        assert_eq!(shown_in_brief(&usual), usual);
        let long = format!("error: \u{1b}{}: take another", "é".repeat(1 << 20));
        let brief = shown_in_brief(&long);
        assert!(
            brief.len() < BEGINNING + END + 100 && brief.starts_with("error: \\u{1b}é") && brief.ends_with("é: take another"),
            "{brief}"
        );
        let cut: usize = brief.split_once(" .. (").unwrap().1.split_once(" bytes more) .. ").unwrap().0.parse().unwrap();
        assert!((2 << 20) - BEGINNING - END < cut + 100 && cut < 2 << 20, "{cut}");
    }
}
