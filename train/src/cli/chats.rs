//! `kiln data preview` of chats: how a model is given them, and which tokens it learns.

use crate::data::chats::{ChatError, ChatTemplate, Learn, Special, Way, complete, each_conversation, encode};
use anyhow::{Result, bail};
use std::path::Path;
use std::process::ExitCode;

/// Around what is learned.
const MARKS: [&str; 2] = ["\u{27e6}", "\u{27e7}"];

/// Prints the first `count` examples, and counts all.
pub fn preview(data: &Path, base: &Path, count: usize, learn: &str) -> Result<ExitCode> {
    let learn = Learn::ALL.iter().find(|l| l.0 == learn).map_or(Learn::Assistant, |l| l.1);
    let path = base.join("tokenizer.json");
    let text = crate::input::read_to_string(&path).map_err(|e| anyhow::anyhow!("cannot read {}: {e}", path.display()))?;
    let mut tokenizer = match tokenizers::Tokenizer::from_bytes(text.as_bytes()) {
        Ok(tokenizer) => tokenizer,
        Err(e) => bail!("{} is not a readable tokenizer.json: {e}", path.display()),
    };
    complete(&mut tokenizer, base)?;
    Special::find(&tokenizer, Some(base))?.lines().iter().for_each(|line| crate::say!("{line}"));
    let added: Vec<String> = tokenizer.get_added_tokens_decoder().into_values().map(|t| t.content).collect();
    let template = ChatTemplate::of_folder(base, &added, None)?;
    let (mut chats, mut examples, mut tokens, mut learned, mut split) = (0, 0, 0, 0, 0);
    let layout = each_conversation(data, None, &mut |row, conversation| {
        chats += 1;
        let own = template.examples(&conversation, learn).map_err(|e| row.error(e.to_string()))?;
        split += own.iter().filter(|e| e.way == Way::Split).count();
        for example in own {
            let encoded = encode(&tokenizer, &example)?;
            examples += 1;
            tokens += encoded.ids.len();
            learned += encoded.learned.iter().filter(|l| **l).count();
            if examples <= count {
                crate::say!("{}\n", marked(&tokenizer, &encoded.ids, &encoded.learned)?);
            }
        }
        Ok(())
    })?;
    out!(
        "{}: {layout}; {chats} chats, {examples} examples, {tokens} tokens, of which {learned} are learned ({}..{})",
        data.display(),
        MARKS[0],
        MARKS[1]
    );
    if split > 0 {
        out!("the template writes earlier turns otherwise when more follow: each of {split} turns is an example of its own");
    }
    Ok(ExitCode::SUCCESS)
}

/// The tokens as text, with marks around those that are learned.
fn marked(tokenizer: &tokenizers::Tokenizer, ids: &[u32], learned: &[bool]) -> Result<String, ChatError> {
    let (mut text, mut from) = (String::new(), 0);
    while from < ids.len() {
        let to = (from..ids.len()).find(|&i| learned[i] != learned[from]).unwrap_or(ids.len());
        let part = tokenizer.decode(&ids[from..to], false).map_err(|e| ChatError::Encode { reason: e.to_string() })?;
        text += &if learned[from] { format!("{}{part}{}", MARKS[0], MARKS[1]) } else { part };
        from = to;
    }
    Ok(text)
}
