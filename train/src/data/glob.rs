//! Patterns of paths, as shells have them: `*`, `?` and `[a-z]` in a name, `**` for any folders.

use std::path::{Component, Path, PathBuf};

/// The longest pattern, in bytes.
const LONGEST: usize = 4096;
/// The most paths that a pattern may match.
const MOST: usize = 10_000;
/// The most names that are looked at for one.
const LOOKED_AT: usize = 1_000_000;
/// Folders below one another that `**` goes into.
const DEEPEST: usize = 32;

/// The paths that a pattern matches, sorted; what is no pattern, or is there as it was written, is itself. Hidden names are matched by patterns that
/// begin with a dot alone, and `**` follows no links. Else what is wrong.
pub fn expand(pattern: &str) -> Result<Vec<PathBuf>, String> {
    if pattern.len() > LONGEST {
        return Err(format!("it has {} bytes, and a path or pattern has at most {LONGEST}", pattern.len()));
    }
    if !is_pattern(pattern) || Path::new(pattern).exists() {
        return Ok(vec![pattern.into()]);
    }
    let mut start = PathBuf::new();
    let mut names: Vec<String> = vec![];
    for component in Path::new(pattern).components() {
        match component {
            Component::Normal(name) if !names.is_empty() || is_pattern(&name.to_string_lossy()) => {
                names.push(name.to_string_lossy().into())
            }
            _ if !names.is_empty() => return Err("`..` stands behind a pattern, where it has no meaning".into()),
            other => start.push(other),
        }
    }
    if names.last().is_some_and(|name| name == "**") {
        return Err("`**` is any folders: a pattern of files goes on behind it, as in **/*.jsonl".into());
    }
    if start.as_os_str().is_empty() {
        start.push(".");
    }
    let mut walk = Walk { found: vec![], looked_at: 0 };
    walk.go(&start, &names, 0)?;
    let mut found = walk.found;
    if found.is_empty() {
        return Err("nothing matches this pattern (correct it; the shell's quotes keep patterns from it, and kiln expands them)".into());
    }
    // What stands before the pattern is shown as it was written.
    if !pattern.starts_with("./") {
        found.iter_mut().for_each(|path| *path = path.strip_prefix("./").map_or(path.clone(), Path::to_path_buf));
    }
    found.sort();
    found.dedup();
    Ok(found)
}

fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

struct Walk {
    found: Vec<PathBuf>,
    looked_at: usize,
}

impl Walk {
    fn go(&mut self, at: &Path, names: &[String], depth: usize) -> Result<(), String> {
        let Some((name, rest)) = names.split_first() else {
            if self.found.len() == MOST {
                return Err(format!("it matches more than {MOST} paths (name folders, or a narrower pattern)"));
            }
            self.found.push(at.to_owned());
            return Ok(());
        };
        if name == "**" {
            self.go(at, rest, depth)?;
            if depth == DEEPEST {
                return Err(format!("{} is {DEEPEST} folders below the pattern's beginning (begin it further down)", at.display()));
            }
            for (path, _) in self.entries(at, |name| !name.starts_with('.'))? {
                if path.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
                    self.go(&path, names, depth + 1)?;
                }
            }
            return Ok(());
        }
        if !is_pattern(name) {
            let path = at.join(name);
            return if path.exists() { self.go(&path, rest, depth) } else { Ok(()) };
        }
        let pattern: Vec<char> = name.chars().collect();
        for (path, _) in self.entries(at, |name| (pattern[0] == '.' || !name.starts_with('.')) && matches(&pattern, name))? {
            if rest.is_empty() || path.is_dir() {
                self.go(&path, rest, depth)?;
            }
        }
        Ok(())
    }

    /// What is in a folder; nothing where it is none, or may not be read.
    fn entries(&mut self, folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<(PathBuf, String)>, String> {
        let mut all = vec![];
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            self.looked_at += 1;
            if self.looked_at > LOOKED_AT {
                return Err(format!("more than {LOOKED_AT} names were looked at (use a narrower pattern)"));
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            if wanted(&name) {
                all.push((entry.path(), name));
            }
        }
        all.sort();
        Ok(all)
    }
}

/// Whether a name is of a pattern. After a `*` what follows is tried from each place on, and only the last `*` is ever gone back to, so that no pattern
/// takes longer than its length times the name's.
fn matches(pattern: &[char], name: &str) -> bool {
    let name: Vec<char> = name.chars().collect();
    let (mut p, mut n) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while n < name.len() {
        let next = match pattern.get(p) {
            Some('*') => {
                back = Some((p + 1, n));
                p += 1;
                continue;
            }
            Some(_) => one(&pattern[p..], name[n]),
            None => None,
        };
        match (next, back) {
            (Some(length), _) => (p, n) = (p + length, n + 1),
            (None, Some((after, from))) => {
                (p, n) = (after, from + 1);
                back = Some((after, from + 1));
            }
            (None, None) => return false,
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// How much of a pattern matches this character, where it begins with something that does.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern[0] {
        '?' => Some(1),
        '[' => {
            let not = matches!(pattern.get(1), Some('!' | '^'));
            let from = 1 + usize::from(not);
            // The first one may be a bracket itself.
            let Some(end) = (from + 1..pattern.len()).find(|&at| pattern[at] == ']') else { return (c == '[').then_some(1) };
            let (mut set, mut is) = (&pattern[from..end], false);
            while let [first, rest @ ..] = set {
                (is, set) = match rest {
                    ['-', last, rest @ ..] => (is || (*first..=*last).contains(&c), rest),
                    _ => (is || *first == c, rest),
                };
            }
            (is != not).then_some(end + 1)
        }
        own => (own == c).then_some(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_as_in_a_shell() {
        for (pattern, own, others) in [
            ("*.jsonl", &["a.jsonl", ".jsonl", "a.b.jsonl"][..], &["a.json", "jsonl"][..]),
            ("a*b*c", &["abc", "aXbXXc", "abbbcbc"], &["ab", "abcd", "acb"]),
            ("part-?[0-9].txt", &["part-a7.txt", "part-00.txt"], &["part-7.txt", "part-aa.txt"]),
            ("[!a-c]x", &["dx", "-x"], &["ax", "bx", "x"]),
            ("[^]-]", &["a"], &["]", "-"]),
            ("[]a]", &["]", "a"], &["b"]),
            ("a[b", &["a[b"], &["ab"]),
            ("ä?", &["äö"], &["ä"]),
            ("**", &["a", ""], &[]),
        ] {
            let pattern: Vec<char> = pattern.chars().collect();
            own.iter().for_each(|name| assert!(matches(&pattern, name), "{pattern:?} {name}"));
            others.iter().for_each(|name| assert!(!matches(&pattern, name), "{pattern:?} {name}"));
        }
        // What takes others minutes.
        let hostile: Vec<char> = "*a".repeat(200).chars().collect();
        assert!(!matches(&hostile, &("a".repeat(199) + &"b".repeat(250))));
    }

    #[test]
    fn patterns_are_expanded_in_order_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        for name in ["b.jsonl", "a.jsonl", ".hidden.jsonl", "c.txt", "x[1].jsonl", "more/d.jsonl", "more/deep/e.jsonl"] {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        std::os::unix::fs::symlink(dir.path(), dir.path().join("more/loop")).unwrap();
        let found = |pattern: &str| {
            let all = expand(&at(pattern)).unwrap();
            all.iter().map(|p| p.strip_prefix(dir.path()).unwrap().display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(found("*.jsonl"), ["a.jsonl", "b.jsonl", "x[1].jsonl"]);
        assert_eq!(found(".*.jsonl"), [".hidden.jsonl"]);
        assert_eq!(found("x[1].jsonl"), ["x[1].jsonl"], "as it was written");
        assert_eq!(found("none.jsonl"), ["none.jsonl"], "no pattern");
        assert_eq!(found("m*/d*.jsonl"), ["more/d.jsonl"]);
        assert_eq!(found("m*/deep/e.jsonl"), ["more/deep/e.jsonl"]);
        assert_eq!(found("**/*.jsonl"), ["a.jsonl", "b.jsonl", "more/d.jsonl", "more/deep/e.jsonl", "x[1].jsonl"]);
        for (pattern, part) in [
            (at("*.csv"), "nothing matches"),
            (at("more/**"), "**/*.jsonl"),
            (at("*/../a.jsonl"), "`..` stands behind a pattern"),
            ("*".repeat(5000), "5000 bytes"),
        ] {
            let error = expand(&pattern).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
