//! What chat templates expect of Python: the functions, filters, tests and methods that transformers' environment of Jinja2 has, where minijinja's
//! differ or are missing.

use std::fmt::Write;

use chrono::NaiveDateTime;
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};

/// What a template calls to refuse a conversation; what it said is the error's message.
pub(super) const REFUSED: &str = "raise_exception: ";

/// The environment of transformers' apply_chat_template. `now` is the time that templates are told.
pub(super) fn environment(now: NaiveDateTime) -> Environment<'static> {
    let mut env = Environment::new();
    // Building fails for delimiters alone, which stay as they are.
    if let Ok(syntax) = env.syntax().to_builder().trim_blocks(true).lstrip_blocks(true).build() {
        env.set_syntax(syntax);
    }
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(method);
    env.set_formatter(|out, _, value| match float(value) {
        Some(x) => Ok(out.write_str(&float_text(x))?),
        None => Ok(write!(out, "{value}")?),
    });
    env.add_filter("tojson", tojson);
    env.add_filter("trim", |text: &Value, chars: Option<String>| strip(&text.to_string(), chars.as_deref(), true, true).to_string());
    for name in ["length", "count"] {
        env.add_filter(name, |value: &Value| if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) });
    }
    env.add_test("sequence", |v: &Value| matches!(v.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined));
    env.add_test("iterable", |v: &Value| !v.is_none() && v.try_iter().is_ok());
    env.add_function("raise_exception", |message: Value| -> Result<Value, Error> { Err(invalid(format!("{REFUSED}{message}"))) });
    env.add_function("strftime_now", move |format: &str| -> Result<String, Error> {
        let mut text = String::new();
        write!(text, "{}", now.format(format)).map_err(|_| invalid(format!("strftime_now({format:?}): no such format")))?;
        Ok(text)
    });
    env
}

pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// How JSON is laid out: the arguments of Python's json.dumps.
#[derive(Debug, Clone)]
pub(super) struct Style {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

impl Default for Style {
    fn default() -> Style {
        Style { indent: None, item: ", ".into(), key: ": ".into(), ascii: false, sort: false }
    }
}

fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = kwargs.get(name)?;
        Ok(args.get(at).cloned().or(named).filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let mut style = Style {
        ascii: argument(0, "ensure_ascii")?.is_some_and(|v| v.is_true()),
        sort: argument(3, "sort_keys")?.is_some_and(|v| v.is_true()),
        ..Style::default()
    };
    if let Some(indent) = argument(1, "indent")? {
        style.indent = Some(match indent.as_str() {
            Some(text) => text.into(),
            None => " ".repeat(i64::try_from(indent.clone())?.max(0) as usize),
        });
        style.item = ",".into();
    }
    if let Some(separators) = argument(2, "separators")? {
        let two: Vec<Value> = separators.try_iter()?.collect();
        let [item, key] = &two[..] else { return Err(invalid("tojson: separators are two strings")) };
        (style.item, style.key) = (item.to_string(), key.to_string());
    }
    kwargs.assert_all_used()?;
    json(value, &style)
}

/// A value as json.dumps writes it.
pub(super) fn json(value: &Value, style: &Style) -> Result<String, Error> {
    let mut out = String::new();
    write_json(&mut out, value, style, 0)?;
    Ok(out)
}

fn write_json(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => match float(value) {
            Some(x) if x.is_nan() => out.push_str("NaN"),
            Some(x) if x.is_infinite() => out.push_str(if x > 0.0 { "Infinity" } else { "-Infinity" }),
            Some(x) => out.push_str(&float_text(x)),
            None => out.push_str(&value.to_string()),
        },
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_items(out, ['[', ']'], &items, style, depth, |out, item| write_json(out, item, style, depth + 1))?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort {
                keys.sort();
            }
            write_items(out, ['{', '}'], &keys, style, depth, |out, key| {
                write_string(out, &key.to_string(), style.ascii);
                out.push_str(&style.key);
                write_json(out, &value.get_item(key)?, style, depth + 1)
            })?;
        }
        kind => return Err(invalid(format!("tojson: a value of kind {kind} cannot be written as JSON"))),
    }
    Ok(())
}

fn write_items(
    out: &mut String,
    [open, close]: [char; 2],
    items: &[Value],
    style: &Style,
    depth: usize,
    mut write: impl FnMut(&mut String, &Value) -> Result<(), Error>,
) -> Result<(), Error> {
    let newline = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    };
    out.push(open);
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push_str(&style.item);
        }
        newline(out, depth + 1);
        write(out, item)?;
    }
    if !items.is_empty() {
        newline(out, depth);
    }
    out.push(close);
    Ok(())
}

fn write_string(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ascii && c > '~') => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// The number, where it is a float and no integer.
fn float(value: &Value) -> Option<f64> {
    if value.kind() == ValueKind::Number && !value.is_integer() { f64::try_from(value.clone()).ok() } else { None }
}

/// A float as Python's repr writes it.
fn float_text(x: f64) -> String {
    if x.is_nan() || x.is_infinite() {
        return if x.is_nan() {
            "nan"
        } else if x > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .into();
    }
    // Rust changes to exponents at the same sizes, but writes 1e16 for 1e+16 and 1e-5 for 1e-05.
    let text = format!("{x:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, size) = exponent.strip_prefix('-').map_or(('+', exponent), |size| ('-', size));
            format!("{digits}e{sign}{size:0>2}")
        }
        None => text,
    }
}

/// Python counts four control characters as white space that Rust does not.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let gone = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(gone) } else { text };
    if right { text.trim_end_matches(gone) } else { text }
}

/// Methods of strings, lists and dicts. Those that minijinja-contrib has wrong or not at all come first.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let list = |items: Vec<&str>| Ok(Value::from_iter(items.into_iter().map(Value::from)));
    let tuple = |items: [&str; 3]| Ok(Value::from(Tuple::from(items.map(Value::from))));
    let unknown = || Err(Error::from(ErrorKind::UnknownMethod));
    match (value.as_str(), name) {
        (Some(text), "strip" | "lstrip" | "rstrip") => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Ok(strip(text, chars, name != "rstrip", name != "lstrip").into())
        }
        (Some(text), "split" | "rsplit") => {
            let (sep, most, kwargs): (Option<&Value>, Option<i64>, Kwargs) = from_args(args)?;
            let sep = sep.cloned().or(kwargs.get("sep")?).filter(|v| !v.is_none());
            let most = most.or(kwargs.get("maxsplit")?).and_then(|n| usize::try_from(n).ok()).map_or(usize::MAX, |n| n.saturating_add(1));
            kwargs.assert_all_used()?;
            match sep.as_ref().map(|v| v.as_str()) {
                None => list(split_spaces(text, most, name == "rsplit")),
                Some(Some("")) => Err(invalid("split: empty separator")),
                Some(Some(sep)) if name == "split" => list(text.splitn(most, sep).collect()),
                Some(Some(sep)) => {
                    let mut parts: Vec<&str> = text.rsplitn(most, sep).collect();
                    parts.reverse();
                    list(parts)
                }
                Some(None) => Err(invalid("split: the separator is no string")),
            }
        }
        (Some(text), "partition") => {
            let (sep,): (&str,) = from_args(args)?;
            tuple(text.split_once(sep).map_or([text, "", ""], |(a, b)| [a, sep, b]))
        }
        (Some(text), "rpartition") => {
            let (sep,): (&str,) = from_args(args)?;
            tuple(text.rsplit_once(sep).map_or(["", "", text], |(a, b)| [a, sep, b]))
        }
        (Some(text), "removeprefix") => {
            let (part,): (&str,) = from_args(args)?;
            Ok(text.strip_prefix(part).unwrap_or(text).into())
        }
        (Some(text), "removesuffix") => {
            let (part,): (&str,) = from_args(args)?;
            Ok(text.strip_suffix(part).unwrap_or(text).into())
        }
        (Some(text), "title") => Ok(title(text).into()),
        (Some(text), "isspace") => Ok((!text.is_empty() && text.chars().all(is_space)).into()),
        (Some(text), "index") => {
            let (part,): (&str,) = from_args(args)?;
            text.find(part).map(|at| text[..at].chars().count().into()).ok_or_else(|| invalid("index: substring not found"))
        }
        (Some(text), "zfill") => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = text.split_at(text.starts_with(['+', '-']).into());
            let zeros = width.saturating_sub(text.chars().count());
            Ok(format!("{sign}{}{digits}", "0".repeat(zeros.min(1 << 16))).into())
        }
        (Some(text), "splitlines") => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            list(split_lines(text, keep.unwrap_or(false)))
        }
        (None, "index") if value.kind() == ValueKind::Seq => {
            let (item,): (&Value,) = from_args(args)?;
            value.try_iter()?.position(|v| v == *item).map(Value::from).ok_or_else(|| invalid("index: the list has no such item"))
        }
        (None, "copy") if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) => Ok(value.clone()),
        // Jinja2's sandbox refuses to change lists and dicts, too.
        (None, "append" | "extend" | "insert" | "pop" | "update" | "setdefault" | "remove" | "clear" | "sort" | "reverse")
            if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) =>
        {
            Err(invalid(format!("{name}: templates may not change lists and dicts")))
        }
        _ if name.starts_with('_') => unknown(),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// A capital wherever a letter follows none.
fn title(text: &str) -> String {
    let (mut out, mut inside) = (String::with_capacity(text.len()), false);
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        inside = c.is_alphabetic();
    }
    out
}

/// At most `most` pieces between runs of white space; the last one keeps its inner space.
fn split_spaces(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let (mut parts, mut rest) = (vec![], strip(text, None, !from_right, from_right));
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        match cut.filter(|_| parts.len() + 1 < most) {
            None => {
                parts.push(rest);
                break;
            }
            Some(at) => {
                let after = at + rest[at..].chars().next().map_or(0, char::len_utf8);
                let (part, left) = if from_right { (&rest[after..], &rest[..at]) } else { (&rest[..at], &rest[after..]) };
                parts.push(part);
                rest = strip(left, None, !from_right, from_right);
            }
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

/// Lines as Python counts them: nine characters and one pair end one.
fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    const ENDS: [char; 10] = ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
    let (mut lines, mut rest) = (vec![], text);
    while let Some(at) = rest.find(ENDS) {
        let end = if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        lines.push(&rest[..if keep { at + end } else { at }]);
        rest = &rest[at + end..];
    }
    lines.extend((!rest.is_empty()).then_some(rest));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Python's Jinja2 makes of these, with transformers' environment.
    #[test]
    fn templates_see_python() {
        let now = chrono::NaiveDate::from_ymd_opt(2024, 3, 5).unwrap().and_hms_opt(7, 8, 9).unwrap();
        let env = environment(now);
        let value: Value = serde_json::from_str(r#"{"x": "é\n\"<>", "n": [1, 2.0, null, true, 1e22, 1e-7]}"#).unwrap();
        let context = minijinja::context! { v => value, text => " \u{1c}a b  c \n" };
        for (source, want) in [
            ("a\n  {% if true %}\n  b\n  {% endif %}\n{# c #}\nd\n", "a\n  b\nd"),
            ("{{ v | tojson }}", "{\"x\": \"é\\n\\\"<>\", \"n\": [1, 2.0, null, true, 1e+22, 1e-07]}"),
            ("{{ v.n[:2] | tojson(indent=2) }}", "[\n  1,\n  2.0\n]"),
            ("{{ [[], {}] | tojson(indent=1) }}", "[\n [],\n {}\n]"),
            ("{{ 'é🦀' | tojson(ensure_ascii=true) }}", "\"\\u00e9\\ud83e\\udd80\""),
            ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", "{\"a\":2,\"b\":1}"),
            ("{{ text | trim }}|{{ text.lstrip() }}|{{ text.strip(' \\n') }}", "a b  c|a b  c \n|\u{1c}a b  c"),
            ("{{ text.split() }}{{ text.split(None, 1) }}{{ text.rsplit(None, 1) }}", "['a', 'b', 'c']['a', 'b  c \\n'][' \\x1ca b', 'c']"),
            ("{{ 'a,b,c'.split(',', maxsplit=1) }}{{ 'a,b,c'.rsplit(',', 1) }}", "['a', 'b,c']['a,b', 'c']"),
            ("{{ 'a=b'.partition('=') }}{{ 'ab'.rpartition('=') }}", "('a', '=', 'b')('', '', 'ab')"),
            ("{{ 'xax'.removeprefix('x').removesuffix('x') }}{{ '-7'.zfill(4) }}{{ \"they're\".title() }}", "a-007They'Re"),
            ("{{ 'a\\r\\nb\\x0bc'.splitlines() }}{{ [3, 4].index(4) }}{{ 'abc'.index('c') }}", "['a', 'b', 'c']12"),
            ("{{ none }}{{ true }}{{ 1e16 }}{{ 0.1 }}{{ nothing }}{{ nothing | length }}", "NoneTrue1e+160.10"),
            ("{{ none is iterable }}{{ 'a' is sequence }}{{ {} is sequence }}{{ 1 is iterable }}", "FalseTrueTrueFalse"),
            ("{{ strftime_now('%d %b %Y, %A %H:%M') }}", "05 Mar 2024, Tuesday 07:08"),
        ] {
            assert_eq!(env.render_str(source, &context).unwrap(), want, "{source}");
        }
        for source in
            ["{{ [].append(1) }}", "{{ strftime_now('%Q') }}", "{{ raise_exception('x') }}", "{{ 'a'.index('b') }}", "{{ 'a'.split('') }}"]
        {
            assert!(env.render_str(source, &context).is_err(), "{source}");
        }
    }
}
