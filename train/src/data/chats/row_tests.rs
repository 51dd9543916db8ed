//! Files and layouts.

use super::tests::chat;
use super::*;
use serde_json::json;
use std::ops::ControlFlow;
use std::path::Path;

type Turns = Vec<(String, String)>;

/// Every conversation of some text, or the error.
fn read(dir: &Path, name: &str, bytes: impl AsRef<[u8]>, layout: Option<Layout>) -> Result<(String, Vec<Turns>), String> {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    let mut all = vec![];
    let found = each_conversation(&[&path], layout, &mut |_, c| {
        all.push(c.messages.iter().map(|m| (m.role.clone(), m.content.to_string())).collect());
        Ok(())
    });
    found.map(|layout| (layout.to_string(), all)).map_err(|e| e.to_string().replace(&format!("{}/", dir.display()), ""))
}

fn roles(turns: &[(&str, &str)]) -> Turns {
    turns.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect()
}

#[test]
fn every_layout_is_found_and_read() {
    let dir = tempfile::tempdir().unwrap();
    for (row, layout, want) in [
        (
            json!({"id": 1, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}),
            "turns in \"messages\" with \"role\" and \"content\"",
            vec![("system", "s"), ("user", "u"), ("assistant", "a")],
        ),
        (
            json!({"system": "s", "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}),
            "turns in \"conversations\" with \"from\" and \"value\"",
            vec![("system", "s"), ("user", "u"), ("assistant", "a")],
        ),
        (
            json!({"messages": "[{\"role\": \"user\", \"content\": \"u\"}]"}),
            "turns in \"messages\" with \"role\" and \"content\"",
            vec![("user", "u")],
        ),
        (
            json!({"instruction": "i", "input": "x", "output": "o", "system": "", "history": [["p", "r"]]}),
            "Alpaca's \"instruction\", \"input\" and \"output\"",
            vec![("user", "p"), ("assistant", "r"), ("user", "i\nx"), ("assistant", "o")],
        ),
        (
            json!({"instruction": "", "input": "x", "output": "o"}),
            "Alpaca's \"instruction\", \"input\" and \"output\"",
            vec![("user", "x"), ("assistant", "o")],
        ),
        (
            json!({"instruction": "i", "input": "", "output": "o"}),
            "Alpaca's \"instruction\", \"input\" and \"output\"",
            vec![("user", "i"), ("assistant", "o")],
        ),
        (json!({"prompt": "p", "reply": "r"}), "prompts in \"prompt\" and replies in \"reply\"", vec![("user", "p"), ("assistant", "r")]),
        (
            json!({"question": "p", "answer": "r"}),
            "prompts in \"question\" and replies in \"answer\"",
            vec![("user", "p"), ("assistant", "r")],
        ),
    ] {
        let lines = format!("{row}\n\n{row}\n");
        let want = (layout.to_string(), vec![roles(&want); 2]);
        assert_eq!(read(dir.path(), "a.jsonl", &lines, None), Ok(want.clone()));
        assert_eq!(read(dir.path(), "b.json", format!("\u{feff} [{row},\n{row}]\n"), None), Ok(want.clone()));
        assert_eq!(read(dir.path(), "c.gz", gzip(&lines), None), Ok(want.clone()));
        let members = [gzip(&format!("[{row},")), gzip(&format!("{row}]"))].concat();
        assert_eq!(read(dir.path(), "d.json.gz", members, None), Ok(want));
    }
    let named = Layout::named("q, a").unwrap();
    assert_eq!(read(dir.path(), "e", r#"{"q": "x", "a": "y"}"#, Some(named)).unwrap().1, [roles(&[("user", "x"), ("assistant", "y")])]);
}

fn gzip(text: &str) -> Vec<u8> {
    use std::io::Write;
    let mut gzip = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    gzip.finish().unwrap()
}

#[test]
fn a_row_that_does_not_fit_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let good = r#"{"messages": [{"role": "user", "content": "u"}]}"#;
    for (bad, part) in [
        (r#"{"conversations": []}"#, "a.jsonl, line 2: no field \"messages\", only [\"conversations\"] (expected turns in \"messages\""),
        (r#"{"messages": []}"#, "line 2: the field \"messages\" is an empty list"),
        (r#"{"messages": 5}"#, "the field \"messages\" is not a list but 5"),
        (r#"{"messages": [5]}"#, "turn 1 of \"messages\": it is 5, and no object"),
        (r#"{"messages": [{"role": "human2", "content": "u"}]}"#, "its \"role\" is \"human2\", which is none of system, developer, user"),
        (r#"{"messages": [{"role": "user", "content": 7}]}"#, "its \"content\" is neither a string nor a list of parts but 7"),
        (r#"{"messages": [{"role": "user", "text": "u"}]}"#, "it has no \"content\", only [\"role\", \"text\"]"),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "image"}]}]}"#,
            "a part of its \"content\" is no text: {\"type\": \"image\"}",
        ),
        (r#"{"messages": [{"role": "assistant", "content": null}]}"#, "turn 1"),
        (
            r#"{"messages": ["#,
            "line 2: not a JSON object: EOF while parsing a list at its column 14 (correct or remove the line; an object is one line)",
        ),
        (r#"{"messages": [{"role": "user", "content": "u"}], "tools": "x"}"#, "the field \"tools\" is a string, and no JSON"),
        ("5", "it is 5, not a JSON object"),
    ] {
        let error = read(dir.path(), "a.jsonl", format!("{good}\n{bad}\n"), None).unwrap_err();
        assert!(error.contains(part), "{error}");
        if !bad.ends_with('[') {
            let error = read(dir.path(), "a.json", format!("[{good}, {bad}]"), None).unwrap_err();
            assert!(error.contains("a.json, row 2: "), "{error}");
        }
    }
    let calls = r#"{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"x": 1}], "name": null}]}"#;
    assert_eq!(read(dir.path(), "a.jsonl", calls, None).unwrap().1, [roles(&[("assistant", "None")])]);
    for (first, part) in [
        (r#"{"text": "t"}"#, "line 1: it has the fields [\"text\"]: plain text"),
        (r#"{"a": 1, "b": 2}"#, "its fields [\"a\", \"b\"] are of no known layout"),
        (r#"{"messages": [{"who": 1}]}"#, "have the fields [\"who\"], neither"),
    ] {
        let error = read(dir.path(), "a.jsonl", first, None).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn broken_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let row = r#"{"prompt": "p", "reply": "r"}"#;
    let long: String = (0..5000).map(|i| format!("{{\"prompt\": \"p{i}\", \"reply\": \"r{}\"}}\n", i * 7919 % 1000)).collect();
    let packed = gzip(&long);
    let mut damaged = packed.clone();
    damaged[packed.len() / 2] ^= 0x55;
    for (name, bytes, part) in [
        ("empty", vec![], "empty: it is empty"),
        ("spaces", b" \n \n".to_vec(), "spaces: it is empty"),
        ("cut.gz", packed[..packed.len() / 2].to_vec(), "cut.gz: it is cut short"),
        ("cut2.gz", packed[..packed.len() - 4].to_vec(), "cut2.gz: it is cut short"),
        ("bad.gz", damaged, "bad.gz"),
        ("cut.json", format!("[{row}, {row}, {{\"prompt\"").into_bytes(), "cut.json, row 3: not JSON: EOF"),
        ("tail.json", format!("[{row}] x").into_bytes(), "tail.json, row 2: not JSON: trailing characters"),
        ("latin.jsonl", b"{\"prompt\": \"\xe9\", \"reply\": \"r\"}\n".to_vec(), "line 1: invalid UTF-8 at its byte 12"),
        ("latin.json", b"[{\"prompt\": \"\xe9\", \"reply\": \"r\"}]".to_vec(), "latin.json, row 1: not JSON: invalid unicode"),
        ("x.zst", vec![0x28, 0xb5, 0x2f, 0xfd, 0], "compressed with zstd"),
        ("x.zip", b"PK\x03\x04 ".to_vec(), "a zip archive"),
        ("x.parquet", b"PAR1 and then nothing".to_vec(), "x.parquet: not a readable parquet file"),
        ("y.parquet", b"PAR1".to_vec(), "y.parquet: not a readable parquet file"),
        (
            "text.parquet",
            b"some words\n".to_vec(),
            "text.parquet: it is not a parquet file, although it is called so: it is some other text",
        ),
        (
            "page.parquet",
            b"\n<!DOCTYPE html>".to_vec(),
            "page.parquet: it is not a parquet file, although it is called so: it begins like a web page",
        ),
        (
            "text.jsonl.gz",
            b"some words\n".to_vec(),
            "text.jsonl.gz: it is not a gzip file, although it is called so: it is some other text",
        ),
        ("zeros.gz", vec![0; 40], "zeros.gz: it is not a gzip file, although it is called so: it begins like no file"),
        ("lfs.parquet", b"version https://git-lfs.github.com/spec/v1\noid".to_vec(), "lfs.parquet: it is a pointer of Git LFS"),
    ] {
        let error = read(dir.path(), name, bytes, None).unwrap_err();
        assert!(error.contains(part), "{name}: {error}");
    }
}

/// A few KB of gzip may hold a row of GBs, and a file as many rows as it likes that are within the limit.
#[test]
fn a_row_of_any_file_has_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let row = |bytes: usize| format!("{{\"prompt\": \"p\", \"reply\": \"{}\"}}", "x".repeat(bytes));
    let (short, long) = (row(9 << 20), row(17 << 20));
    for (rows, place) in [([&short, &short, &short], None), ([&short, &short, &long], Some(3)), ([&long, &short, &short], Some(1))] {
        let (lines, array) = (rows.map(|r| format!("{r}\n")).concat(), format!("[{}, {}, {}]", rows[0], rows[1], rows[2]));
        for (name, unit, bytes) in [
            ("a.jsonl", "line", lines.clone().into_bytes()),
            ("a.jsonl.gz", "line", gzip(&lines)),
            ("a.json", "row", array.clone().into_bytes()),
            ("a.json.gz", "row", gzip(&array)),
        ] {
            let found = read(dir.path(), name, bytes, None);
            match place {
                None => assert_eq!(found.unwrap().1.len(), 3),
                Some(n) => assert_eq!(found.unwrap_err(), format!("{name}, {unit} {n}: it has more than 16.0 MiB (split it into several)")),
            }
        }
    }
}

/// White space in the place of rows ends, too, and so does a row of turns that are each rendered behind all before.
#[test]
fn white_space_and_turns_have_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let row = "{\"messages\": [{\"role\": \"user\", \"content\": \"u\"}]}\n";
    for (blank, line) in [(" ", 2), ("\n", (16 << 20) + 2)] {
        let most = blank.repeat(16 << 20);
        assert_eq!(read(dir.path(), "a.jsonl.gz", gzip(&format!("{most}{row}")), None).unwrap().1.len(), 1, "{blank:?}");
        let more = format!("{most}{blank}{row}");
        let said = read(dir.path(), "a.jsonl.gz", gzip(&more), None).unwrap_err();
        assert_eq!(said, "a.jsonl.gz: it begins with more than 16.0 MiB of white space", "{blank:?}");
        let said = read(dir.path(), "a.jsonl.gz", gzip(&format!("{row}{more}")), None).unwrap_err();
        let why =
            if blank == " " { "it has more than 16.0 MiB (split it into several)" } else { "it ends more than 16.0 MiB of empty lines" };
        assert_eq!(said, format!("a.jsonl.gz, line {line}: {why}"), "{blank:?}");
    }
    let turns = |n: usize| format!("{{\"messages\": [{}]}}\n", vec!["{\"role\": \"user\", \"content\": \"u\"}"; n].join(","));
    assert_eq!(read(dir.path(), "a.jsonl", turns(4096), None).unwrap().1[0].len(), 4096);
    let said = read(dir.path(), "a.jsonl", turns(4097), None).unwrap_err();
    assert!(said.starts_with("a.jsonl, line 1: it has 4097 turns, and at most 4096 are read (split it)"), "{said}");
}

#[test]
fn a_folder_is_all_its_files_by_name() {
    let dir = tempfile::tempdir().unwrap();
    assert!(list(&[dir.path()]).unwrap_err().to_string().contains("holds no .jsonl"));
    for (name, text) in [
        ("b.jsonl", "{\"prompt\": \"2\", \"reply\": \"r\"}"),
        ("a.json", "[{\"prompt\": \"1\", \"reply\": \"r\"}]"),
        ("README.md", "#"),
        ("dataset_info.json", "{}"),
    ] {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let mut seen = vec![];
    each_conversation(&[dir.path()], None, &mut |row, c| {
        seen.push((row.unit, row.number, c.messages[0].content.to_string()));
        Ok(())
    })
    .unwrap();
    assert_eq!(seen, [("row", 1, "1".to_string()), ("line", 1, "2".to_string())]);
    // A caller's own error, and an end that it wants.
    let stop = each_conversation(&[dir.path()], None, &mut |row, _| Err(row.error("enough"))).unwrap_err().to_string();
    assert!(stop.ends_with("a.json, row 1: enough"), "{stop}");
    let mut rows = 0;
    std::fs::write(dir.path().join("a.json"), "[{}, {}, broken").unwrap();
    each_row(&dir.path().join("a.json"), None, &mut |_| {
        rows += 1;
        Ok(if rows == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })
    .unwrap();
    assert_eq!(rows, 2);
}

/// Two rows of turns, one of them with a message that has no content.
fn write_parquet(path: &Path, schema: &str, compression: ::parquet::basic::Compression) {
    use ::parquet::data_type::{ByteArray, ByteArrayType};
    let schema = std::sync::Arc::new(::parquet::schema::parser::parse_message_type(schema).unwrap());
    let properties = ::parquet::file::properties::WriterProperties::builder().set_compression(compression).build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = ::parquet::file::writer::SerializedFileWriter::new(file, schema, properties.into()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for (values, levels) in [(&["user", "assistant", "user"][..], [4, 4, 4]), (&["é", "b"], [4, 4, 3])] {
        let values: Vec<ByteArray> = values.iter().map(|text| ByteArray::from(*text)).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), Some(&[0, 1, 0])).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn parquet_files_of_every_compression_are_read() {
    use ::parquet::basic::{Compression, GzipLevel, ZstdLevel};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let schema = |list: &str| {
        format!(
            "message m {{ optional group {list} (LIST) {{ repeated group list {{ optional group element {{
                optional binary role (UTF8); optional binary content (UTF8); }} }} }} }}"
        )
    };
    let gzip = Compression::GZIP(GzipLevel::default());
    let zstd = Compression::ZSTD(ZstdLevel::default());
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::LZ4, Compression::LZ4_RAW, zstd, gzip] {
        write_parquet(&path, &schema("messages"), compression);
        let mut seen = vec![];
        let error = each_conversation(&[&path], None, &mut |row, c| {
            seen.push((row.number, c));
            Ok(())
        })
        .unwrap_err()
        .to_string();
        assert_eq!(seen, [(1, chat(&[("user", "é"), ("assistant", "b")]))]);
        assert!(error.contains("a.parquet, row 2: turn 1 of \"messages\": it has no \"content\", only [\"role\"]"), "{error}");
    }
    // The codec of a column is two bytes of the file's end: what is not read is named.
    write_parquet(&path, &schema("messages"), Compression::SNAPPY);
    let bytes = std::fs::read(&path).unwrap();
    for (codec, name) in [(4, "brotli"), (3, "LZO")] {
        let errors = bytes.windows(2).enumerate().filter(|(_, pair)| *pair == [0x15, 0x02]).map(|(at, _)| {
            let mut other = bytes.clone();
            other[at + 1] = 2 * codec;
            std::fs::write(&path, other).unwrap();
            each_conversation(&[&path], None, &mut |_, _| Ok(())).map_or_else(|e| e.to_string(), |_| String::new())
        });
        let errors: Vec<String> = errors.collect();
        let said = format!("compressed with {name}, which is not read (write it with snappy, gzip, zstd or lz4)");
        assert!(errors.iter().any(|e| e.contains("a.parquet") && e.contains(&said)), "{said}: {errors:?}");
    }
    std::fs::write(&path, bytes).unwrap();
    let error = each_conversation(&[&path], Layout::named("sharegpt"), &mut |_, _| Ok(())).unwrap_err().to_string();
    assert!(error.contains("no column \"conversations\", only [\"messages\"]"), "{error}");
    // Cut and damaged anywhere: an error or rows, and no panic that reaches the caller.
    let bytes = std::fs::read(&path).unwrap();
    for at in (0..bytes.len()).step_by(7) {
        let mut damaged = bytes.clone();
        damaged[at] = damaged[at].wrapping_add(77);
        std::fs::write(&path, &damaged).unwrap();
        let _ = each_conversation(&[&path], None, &mut |_, _| Ok(()));
        std::fs::write(&path, &bytes[..at]).unwrap();
        assert!(each_conversation(&[&path], None, &mut |_, _| Ok(())).is_err());
    }
}
