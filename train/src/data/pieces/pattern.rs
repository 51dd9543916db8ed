//! What a pattern that splits text does at a place: whether one of its matches may lie across it, and whether a match certainly begins or ends
//! there.

use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Place {
    pub crossed: bool,
    /// The white space at the place is always in some match: nothing that is left between matches lies across.
    pub covered: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pattern {
    /// Before a space that follows something else.
    pub space: Place,
    /// After a line break, before something that is neither white space nor a slash.
    pub line: Place,
}

/// Of all texts that a part of a pattern matches.
#[derive(Debug, Clone, Copy, Default)]
struct Facts {
    empty: bool,
    /// May be the white space alone.
    alone: bool,
    /// May begin with what follows the place.
    begins: bool,
    /// May end with what precedes it.
    ends: bool,
    crosses: bool,
}

/// The characters on both sides of a place; and its white space.
struct Sides {
    before: ClassUnicode,
    behind: ClassUnicode,
    white: char,
}

impl Pattern {
    pub fn text(text: &str) -> Pattern {
        Pattern::of(&Hir::literal(text.as_bytes())).expect("a literal is known")
    }

    /// None where the pattern looks around itself, or holds what is not known here.
    pub fn regex(regex: &str) -> Option<Pattern> {
        // White space at the end of a text and the same before a word differ: of a run the last character is left over. No run ends at either
        // place but a single line break, and that is matched alone either way.
        let plain = regex.replace(r"\s+(?!\S)|\s+", r"\s+");
        Pattern::of(&regex_syntax::parse(&plain).ok()?)
    }

    fn of(hir: &Hir) -> Option<Pattern> {
        let one = |c: char| ClassUnicode::new([ClassUnicodeRange::new(c, c)]);
        let mut solid = class(r"\S");
        let space = place(hir, &Sides { before: solid.clone(), behind: one(' '), white: ' ' })?;
        solid.difference(&one('/'));
        Some(Pattern { space, line: place(hir, &Sides { before: one('\n'), behind: solid, white: '\n' })? })
    }
}

fn class(text: &str) -> ClassUnicode {
    match regex_syntax::parse(text).map(Hir::into_kind) {
        Ok(HirKind::Class(Class::Unicode(class))) => class,
        _ => ClassUnicode::empty(),
    }
}

fn place(hir: &Hir, sides: &Sides) -> Option<Place> {
    let facts = facts(hir, sides)?;
    Some(Place { crossed: facts.crosses, covered: facts.alone })
}

fn facts(hir: &Hir, sides: &Sides) -> Option<Facts> {
    let in_class = |class: &ClassUnicode, c: char| class.ranges().iter().any(|r| (r.start()..=r.end()).contains(&c));
    Some(match hir.kind() {
        HirKind::Empty => Facts { empty: true, ..Facts::default() },
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).ok()?;
            let letter = |c: char| Facts {
                empty: false,
                alone: c == sides.white,
                begins: in_class(&sides.behind, c),
                ends: in_class(&sides.before, c),
                crosses: false,
            };
            text.chars().map(letter).fold(Facts { empty: true, ..Facts::default() }, then)
        }
        HirKind::Class(Class::Unicode(class)) => {
            let meets = |side: &ClassUnicode| {
                let mut both = class.clone();
                both.intersect(side);
                !both.ranges().is_empty()
            };
            Facts {
                empty: false,
                alone: in_class(class, sides.white),
                begins: meets(&sides.behind),
                ends: meets(&sides.before),
                crosses: false,
            }
        }
        HirKind::Class(Class::Bytes(_)) | HirKind::Look(_) => return None,
        HirKind::Repetition(repetition) => {
            let one = facts(&repetition.sub, sides)?;
            let several = repetition.max.is_none_or(|most| most > 1);
            Facts {
                empty: one.empty || repetition.min == 0,
                alone: one.alone && (repetition.min <= 1 || one.empty) && repetition.max != Some(0),
                crosses: one.crosses || several && one.ends && one.begins,
                ..one
            }
        }
        HirKind::Capture(capture) => facts(&capture.sub, sides)?,
        HirKind::Concat(parts) => {
            let parts = parts.iter().map(|part| facts(part, sides)).collect::<Option<Vec<_>>>()?;
            parts.into_iter().fold(Facts { empty: true, ..Facts::default() }, then)
        }
        HirKind::Alternation(ways) => {
            let ways = ways.iter().map(|way| facts(way, sides)).collect::<Option<Vec<_>>>()?;
            ways.into_iter().fold(Facts::default(), |a, b| Facts {
                empty: a.empty || b.empty,
                alone: a.alone || b.alone,
                begins: a.begins || b.begins,
                ends: a.ends || b.ends,
                crosses: a.crosses || b.crosses,
            })
        }
    })
}

fn then(a: Facts, b: Facts) -> Facts {
    Facts {
        empty: a.empty && b.empty,
        alone: a.alone && b.empty || a.empty && b.alone,
        begins: a.begins || a.empty && b.begins,
        ends: b.ends || b.empty && a.ends,
        crosses: a.crosses || b.crosses || a.ends && b.begins,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(regex: &str) -> [bool; 4] {
        let p = Pattern::regex(regex).unwrap_or_else(|| panic!("{regex}"));
        [p.space.crossed, p.space.covered, p.line.crossed, p.line.covered]
    }

    /// Forms in which published tokenizers split text, and forms that would break at a place.
    #[test]
    fn a_pattern_says_what_it_does_at_a_place() {
        let words = [false, true, false, true];
        for (regex, expected) in [
            (r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", words),
            (r"(?i:'s|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+", words),
            (r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+", words),
            (r"\p{N}{1,3}", [false; 4]),
            (r"[a-z]+", [false; 4]),
            (r"\s", words),
            (r"\s{2,}", [false; 4]),
            (r"\w+\s", [true, false, false, false]),
            (r"\w+ ?", [true, false, false, false]),
            (r"(a|b )+", [true, false, false, false]),
            (r"( ?a)+", [true, false, false, false]),
            (r"\n\w+|\s", [false, true, true, true]),
            (r"\s*\w+", [false, false, true, false]),
            (r"[^,]+", [true, true, true, true]),
        ] {
            assert_eq!(of(regex), expected, "{regex}");
        }
        for regex in [r"a(?=b)", r"(?<!a)b", r"\ba", r"a$", r"("] {
            assert_eq!(Pattern::regex(regex), None, "{regex}");
        }
        assert_eq!(Pattern::text(" ").space, Place { crossed: false, covered: true });
        assert_eq!(Pattern::text("a b").space, Place { crossed: true, covered: false });
    }
}
