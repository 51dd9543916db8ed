//! Which token ends a document. Any vocabulary may hold `</s>` as an ordinary piece of text, so only tokens that were added to one count: what
//! the files beside a tokenizer.json name, then names that are well known.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::DataError;
use crate::input;

/// The token that ends a document, and who says so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Eos {
    /// None: documents follow one another with nothing between them.
    pub id: Option<u32>,
    pub from: String,
}

/// Which files of a model's folder may name it, in the order in which they are asked.
const FILES: [&str; 3] = ["generation_config.json", "tokenizer_config.json", "config.json"];

/// Added special tokens that end documents, by the names that published tokenizers have for them.
const KNOWN: [&str; 7] = ["<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>", "<EOS_TOKEN>", "<EOT>"];

/// Tokens that end a turn of a conversation. Models that chat name them as the end of what they write; documents end in another one, where
/// there is another one.
const TURNS: [&str; 10] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
];

/// The choice for a tokenizer, by the files in `folder` where one is named.
pub fn choose(tokenizer: &tokenizers::Tokenizer, folder: Option<&Path>) -> Result<Eos, DataError> {
    let added = tokenizer.get_added_tokens_decoder();
    let (mut turn, mut passed_over) = (None, vec![]);
    for (file, folder) in folder.into_iter().flat_map(|folder| FILES.map(|file| (file, folder))) {
        for named in named_in(&folder.join(file))? {
            let found = match &named {
                Named::Id(id) => added.get(id).map(|token| (*id, token)),
                Named::Token(name) => added.iter().find(|(_, token)| token.content == *name).map(|(id, token)| (*id, token)),
            };
            match found {
                Some((id, token)) if TURNS.contains(&token.content.as_str()) => {
                    passed_over.push(format!("{file} names {}, which ends a turn", token.content));
                    turn.get_or_insert((id, file));
                }
                Some((id, _)) => return Ok(Eos { id: Some(id), from: file.into() }),
                None => passed_over.push(format!("{file} names {}, which is no added token", named.text())),
            }
        }
    }
    let known = KNOWN.iter().find_map(|name| added.iter().find(|(_, token)| token.special && token.content == *name));
    let (id, from) = match (known, turn) {
        (Some((id, _)), _) => (Some(*id), "its name is well known".to_string()),
        (None, Some((id, file))) => (Some(id), file.to_string()),
        (None, None) => (None, "no file names one, and no added special token has a well-known name".to_string()),
    };
    passed_over.dedup();
    Ok(Eos { id, from: [&[from], &passed_over[..]].concat().join("; ") })
}

enum Named {
    Id(u32),
    Token(String),
}

impl Named {
    fn text(&self) -> String {
        match self {
            Named::Id(id) => id.to_string(),
            Named::Token(name) => format!("{name:?}"),
        }
    }
}

/// What a file names as the end, if it is there: a token by name or as an object with its content, an id, or a list of those.
fn named_in(path: &Path) -> Result<Vec<Named>, DataError> {
    if !path.exists() {
        return Ok(vec![]);
    }
    let bad = |reason: String| DataError::Eos { path: path.to_owned(), reason };
    let text = input::read_to_string(path).map_err(DataError::io("read", path))?;
    let table: serde_json::Map<String, Value> = serde_json::from_str(&text).map_err(|e| bad(format!("not a JSON object: {e}")))?;
    let mut all = vec![];
    for key in ["eos_token_id", "eos_token"] {
        let values = match table.get(key) {
            Some(Value::Array(values)) => &values[..],
            Some(value) => std::slice::from_ref(value),
            None => &[],
        };
        for value in values.iter().filter(|value| !value.is_null()) {
            let content = value.get("content").unwrap_or(value);
            let id = content.as_u64().and_then(|id| u32::try_from(id).ok()).map(Named::Id);
            let named = id.or_else(|| content.as_str().map(|name| Named::Token(name.into())));
            all.push(named.ok_or_else(|| bad(format!("its {key} is {value}, neither a token nor an id")))?);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::super::tokenizer::tests::{byte_level, letters};
    use super::*;
    use serde_json::json;

    /// A folder with a tokenizer of bytes, an ordinary "</s>" (256) and these added tokens from 257 on, and these files beside it.
    fn chosen(special: &[&str], beside: &[(&str, Value)]) -> Result<(Option<u32>, String), DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, byte_level(letters(&["</s>"]), special).to_string()).unwrap();
        for (name, value) in beside {
            std::fs::write(dir.path().join(name), value.to_string()).unwrap();
        }
        let eos = Tokenizer::from_spec(path.to_str().unwrap())?.end();
        Ok((eos.id, eos.from))
    }

    /// Shapes of published folders: an ordinary "</s>" is in every one of these vocabularies.
    #[test]
    fn the_end_of_a_document_is_an_added_token_that_the_files_name() {
        let qwen = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
        let llama = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"];
        let generation = "generation_config.json";
        let of_tokenizer = "tokenizer_config.json";
        for (what, special, beside, id, from) in [
            ("no file", &qwen[..], vec![], Some(257), "its name is well known"),
            (
                "a list: the first that ends documents",
                &qwen,
                vec![(generation, json!({"eos_token_id": [259, 257]}))],
                Some(257),
                generation,
            ),
            ("an id", &qwen, vec![(generation, json!({"eos_token_id": 257}))], Some(257), generation),
            (
                "a turn's end is passed over",
                &qwen,
                vec![(of_tokenizer, json!({"eos_token": "<|im_end|>"})), ("config.json", json!({"eos_token_id": 259}))],
                Some(257),
                "its name is well known; tokenizer_config.json names <|im_end|>, which ends a turn; config.json names <|im_end|>, which ends a turn",
            ),
            (
                "a turn's end where there is no other",
                &["<|im_end|>"],
                vec![(of_tokenizer, json!({"eos_token": "<|im_end|>"}))],
                Some(257),
                "tokenizer_config.json; tokenizer_config.json names <|im_end|>, which ends a turn",
            ),
            ("a name", &llama, vec![(of_tokenizer, json!({"eos_token": "<|end_of_text|>"}))], Some(258), of_tokenizer),
            ("an object", &llama, vec![(of_tokenizer, json!({"eos_token": {"content": "<|end_of_text|>"}}))], Some(258), of_tokenizer),
            (
                "generation_config.json is asked first",
                &["<a>", "<b>", "<c>"],
                vec![
                    (of_tokenizer, json!({"eos_token": "<b>"})),
                    ("config.json", json!({"eos_token_id": 259})),
                    (generation, json!({"eos_token_id": 257})),
                ],
                Some(257),
                generation,
            ),
            (
                "null says nothing",
                &["<a>"],
                vec![(generation, json!({"eos_token_id": null})), ("config.json", json!({"eos_token_id": 257}))],
                Some(257),
                "config.json",
            ),
            (
                "an ordinary entry is not taken",
                &["<a>"],
                vec![(of_tokenizer, json!({"eos_token": "</s>"})), ("config.json", json!({"eos_token_id": 3}))],
                None,
                "no file names one, and no added special token has a well-known name; tokenizer_config.json names \"</s>\", which is no added token; config.json names 3, which is no added token",
            ),
            ("nothing fits", &["<META>"], vec![], None, "no file names one, and no added special token has a well-known name"),
            ("well known", &["<META>", "<EOT>"], vec![], Some(258), "its name is well known"),
        ] {
            assert_eq!(chosen(special, &beside).unwrap(), (id, from.to_string()), "{what}");
        }
        // Some vocabularies have HTML's tags as added tokens that are not special.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        let mut json = byte_level(letters(&[]), &["</s>", "<eos>"]);
        json["added_tokens"][0]["special"] = false.into();
        std::fs::write(&path, json.to_string()).unwrap();
        assert_eq!(Tokenizer::from_spec(path.to_str().unwrap()).unwrap().eos(), Some(257));
    }

    #[test]
    fn a_file_that_cannot_say_is_named() {
        for (value, part) in [
            (json!([1]), "generation_config.json: not a JSON object"),
            (json!({"eos_token_id": -1}), "its eos_token_id is -1, neither a token nor an id"),
            (json!({"eos_token_id": [1, true]}), "its eos_token_id is true"),
            (json!({"eos_token": {"lstrip": false}}), "neither a token nor an id"),
        ] {
            let error = chosen(&["<a>"], &[("generation_config.json", value)]).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("--eos"), "{error}");
        }
    }
}
