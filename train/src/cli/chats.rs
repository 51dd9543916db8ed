//! `kiln data preview` of chats: the rows that training makes of them, and which tokens are learned.

use crate::data::replies::{Example, Files, Rows, Words};
use crate::data::{Source, Split, Tokenizer, percent};
use crate::models::Shape;
use crate::models::decoder::{RepliesConfig, longest_row, row};
use anyhow::Result;
use std::path::Path;
use std::process::ExitCode;

/// Around what is learned.
const MARKS: [&str; 2] = ["\u{27e6}", "\u{27e7}"];

/// Which rows are shown.
pub struct Shown {
    pub split: Split,
    /// None: as in training, which asks the longest example.
    pub seq: Option<usize>,
    pub seed: u64,
    pub count: usize,
    /// Every example for programs, instead.
    pub json: bool,
}

/// Prints the first rows of a split, and counts all.
pub fn preview(mut config: RepliesConfig, base: &Path, shown: Shown) -> Result<ExitCode> {
    let tokenizer = Tokenizer::from_spec(&base.display().to_string())?;
    if !shown.json {
        out!("{}", tokenizer.describe_end(&tokenizer.end()));
        for line in tokenizer.special().map_or(vec![], |special| special.other_lines()) {
            out!("{line}");
        }
    }
    // A folder without weights and config.json has a template, too.
    let sizes = base.join("config.json");
    let (vocab, context) = match sizes.exists() {
        true => Shape::read(&sizes).map(|shape| (shape.vocab, shape.context))?,
        false => (tokenizer.vocab(), usize::MAX),
    };
    if let Some(usual) = config.usual_template(&tokenizer, base) {
        config.template = usual.into();
    }
    let most = shown.seq.unwrap_or(longest_row(context));
    let chosen = config.path.find()?;
    let (all, words) = config.chats(&chosen, &tokenizer, Some(base), (vocab, most))?;
    let longest = all.iter().flat_map(|files| files.examples()).map(Example::places).max().unwrap_or(1);
    let seq = shown.seq.unwrap_or(row(longest, most));
    for (files, part) in all.iter().zip(&chosen.parts) {
        let rows = files.rows(shown.split, seq, config.pack, shown.seed, config.ignore_tokens.clone())?;
        if chosen.is_mixture() && !shown.json {
            out!("{} from {}:", percent(part.share), part.name);
        }
        show_rows(&rows, &tokenizer, &shown, (seq, chosen.is_mixture().then_some(&part.name)))?;
        if !shown.json {
            summary(&part.name, files, &words, &rows, (seq, shown.split))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `data`: the part of a mixture, where it is one.
fn show_rows(rows: &Rows, tokenizer: &Tokenizer, shown: &Shown, (seq, data): (usize, Option<&String>)) -> Result<()> {
    let count = if shown.json { rows.len() } else { rows.len().min(shown.count as u64) };
    for i in 0..count {
        let targets = rows.item(i)?.targets;
        let own: Vec<&Example> = rows.examples(i).collect();
        if !shown.json {
            out!("row {i}: {} examples in {} of {seq} places", own.len(), own.iter().map(|e| e.places()).sum::<usize>());
        }
        let mut from = 0;
        for example in own {
            let to = from + example.places();
            let learned: Vec<bool> = std::iter::once(false).chain(targets[from..to].iter().map(|target| *target >= 0)).collect();
            if shown.json {
                let mut line = serde_json::json!({ "row": i, "ids": example.tokens, "learned": learned });
                data.into_iter().for_each(|name| line["data"] = name.as_str().into());
                out_json!(line.to_string());
            } else {
                out!("{}\n", marked(tokenizer, &example.tokens, &learned));
            }
            from = to;
        }
    }
    Ok(())
}

fn summary(name: &str, files: &Files, words: &Words, rows: &Rows, (seq, split): (usize, Split)) -> Result<()> {
    let examples = files.examples();
    let tokens: usize = examples.iter().map(|e| e.tokens.len()).sum();
    let learned: usize = examples.iter().map(Example::learned).sum();
    let counts = files.counts;
    out!(
        "{}: {}; {} chats, {} examples, {tokens} tokens, of which {learned} are learned ({}..{}); template {}",
        name,
        files.layout,
        counts.chats,
        examples.len(),
        MARKS[0],
        MARKS[1],
        words.name()
    );
    let [train, val] = Split::ALL.map(|split| files.count(split));
    out!(
        "{} rows of {seq} in the {} split ({:.0}% full); {train} examples to learn from, {val} to validate with",
        rows.len(),
        split.name(),
        100.0 * rows.filled()
    );
    if counts.cut + counts.skipped + counts.nothing > 0 {
        out!("{} examples cut, {} skipped; {} chats without a turn to learn", counts.cut, counts.skipped, counts.nothing);
    }
    if counts.split > 0 {
        out!("the template writes earlier turns otherwise when more follow: in {} chats each turn is an example of its own", counts.split);
    }
    if let Some(reason) = files.lacks() {
        out!("not enough to train on: {reason}");
    }
    if let Some(reason) = files.without_validation() {
        out!("nothing to validate with: {reason}");
    }
    Ok(())
}

/// An example as text, with marks around what a row learns of it.
fn marked(tokenizer: &Tokenizer, ids: &[u32], learned: &[bool]) -> String {
    let (mut text, mut from) = (String::new(), 0);
    while from < ids.len() {
        let to = (from..ids.len()).find(|&i| learned[i] != learned[from]).unwrap_or(ids.len());
        let part = tokenizer.decode(&ids[from..to]);
        text += &if learned[from] { format!("{}{part}{}", MARKS[0], MARKS[1]) } else { part };
        from = to;
    }
    text
}
