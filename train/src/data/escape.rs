//! Escape sequences in text from a command line or a config, where a shell hands a backslash on as it is.

/// Undoes `\n`, `\t`, `\r`, `\\`, `\"`, `\'` and `\u{..}`; any other backslash is an error, for a text that means one writes two.
pub fn unescape(text: &str) -> Result<String, String> {
    let (mut plain, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find('\\') {
        plain.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let mut letters = rest.chars();
        plain.push(match letters.next() {
            Some('n') => '\n',
            Some('t') => '\t',
            Some('r') => '\r',
            Some(c @ ('\\' | '"' | '\'')) => c,
            Some('u') => {
                let digits = letters.as_str().strip_prefix('{').and_then(|digits| digits.split_once('}'));
                let found = digits.and_then(|(digits, rest)| Some((char::from_u32(u32::from_str_radix(digits, 16).ok()?)?, rest)));
                let (c, behind) = found.ok_or("\\u is followed by a character's number in braces, as in \\u{1F980}")?;
                letters = behind.chars();
                c
            }
            other => {
                let shown = other.map_or("a backslash at the end".into(), |c| format!("'\\{c}'"));
                return Err(format!(
                    "{shown} is no escape sequence (those are \\n, \\t, \\r, \\\", \\\\ and \\u{{..}}); a backslash is written \\\\"
                ));
            }
        });
        rest = letters.as_str();
    }
    plain.push_str(rest);
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::unescape;

    #[test]
    fn escape_sequences_are_undone_once() {
        for (text, plain) in [
            ("", ""),
            ("plain, größer", "plain, größer"),
            (r"Q: {prompt}\nA: {reply}{eos}", "Q: {prompt}\nA: {reply}{eos}"),
            (r#"\t\r\"\'\\n"#, "\t\r\"'\\n"),
            (r"\u{e4}\u{1F980}!", "ä🦀!"),
            ("already\na line", "already\na line"),
        ] {
            assert_eq!(unescape(text).as_deref(), Ok(plain));
        }
        for (text, part) in [
            (r"a\d", r"'\d' is no escape sequence"),
            (r"a\", "a backslash at the end"),
            (r"\u41", r"\u{1F980}"),
            (r"\u{zz}", "in braces"),
            (r"\u{d800}", "in braces"),
            (r"\u{41", "in braces"),
            (r"\ü", r"'\ü'"),
        ] {
            let error = unescape(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
