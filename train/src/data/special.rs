//! Which tokens end a document, end what a model writes, begin a sequence and pad. Any vocabulary may hold `</s>` as an ordinary piece of text, so
//! only tokens that were added to one count: what the files beside a tokenizer.json name, then names that are well known.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use tokenizers::Tokenizer;

use super::{DataError, Words};
use crate::guarded::guarded;
use crate::input;

/// The token that ends a document, or the one that begins it, and who says so: what a data set and a checkpoint note.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Noted {
    /// None: documents follow one another with nothing between them.
    pub id: Option<u32>,
    pub from: String,
}

/// A special token, and who says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    pub id: u32,
    pub text: String,
    /// A file's name, or a reason.
    pub from: String,
}

impl Token {
    pub fn noted(&self) -> Noted {
        Noted { id: Some(self.id), from: self.from.clone() }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Special {
    /// Between documents. Models that chat name the end of a turn as their end; documents end in another token, where there is one.
    pub document: Option<Token>,
    /// Every token that ends what a model writes, as the files list them.
    pub ends: Vec<Token>,
    /// What the files name as the beginning of a sequence. Some name one that nobody uses: see `begin`.
    pub bos: Option<Token>,
    /// What the tokenizer itself (its post-processor) puts before a text, and so before a document.
    pub begin: Option<Token>,
    pub pad: Option<Token>,
    /// What the files name and was not taken, with the reason; "eos", "bos" or "pad" first.
    pub passed_over: Vec<(&'static str, String)>,
}

/// Tokens for one role, in one file.
const MOST: usize = 1024;

/// Which files of a model's folder may name them, in the order in which they are asked.
const FILES: [&str; 3] = ["generation_config.json", "tokenizer_config.json", "config.json"];

/// Added special tokens that end documents, by the names that published tokenizers have for them.
const KNOWN: [&str; 7] = ["<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>", "<EOS_TOKEN>", "<EOT>"];

/// Tokens that end a turn of a conversation.
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

impl Special {
    /// By the files in `folder`, where one is named.
    pub fn find(tokenizer: &Tokenizer, folder: Option<&Path>) -> Result<Special, DataError> {
        let added = tokenizer.get_added_tokens_decoder().into_iter().map(|(id, token)| (id, token.content)).collect();
        let read = |file: &str| folder.map_or(Ok(None), |folder| read_object(&folder.join(file)));
        let tables = [read(FILES[0])?, read(FILES[1])?, read(FILES[2])?];
        let mut passed_over = vec![];
        let mut all = |role: &'static str| {
            by_files(&added, tables.each_ref().map(Option::as_ref), role, &mut passed_over)
                .map_err(|(file, reason)| DataError::Special { path: folder.unwrap_or(Path::new("")).join(file), reason })
        };
        let (ends, bos, pad) = (all("eos")?, all("bos")?.into_iter().next(), all("pad")?.into_iter().next());
        let turn = |token: &&Token| TURNS.contains(&token.text.as_str());
        let named = ends.iter().find(|token| !turn(token)).cloned();
        let document = named.or_else(|| known(tokenizer)).or_else(|| ends.first().cloned());
        let begin = begin(tokenizer, bos.as_ref());
        Ok(Special { document, ends, bos, begin, pad, passed_over })
    }

    /// What ends a document, as a data set notes it.
    pub fn noted_end(&self) -> Noted {
        let (id, from) = match &self.document {
            // A file's name is reason enough.
            Some(token) if FILES.contains(&token.from.as_str()) => return token.noted(),
            Some(token) => (Some(token.id), token.from.as_str()),
            None => (None, "no file names one, and no added special token has a well-known name"),
        };
        let why = self.passed_over.iter().filter(|(role, _)| *role == "eos").map(|(_, why)| why.as_str());
        Noted { id, from: std::iter::once(from).chain(why).collect::<Vec<_>>().join("; ") }
    }

    /// For people: a line for each token but the end of a document that ends what a model writes.
    pub fn end_lines(&self) -> Vec<String> {
        let what = |t: &Token| if TURNS.contains(&t.text.as_str()) { "end of turn" } else { "end of what is written" };
        let others = self.ends.iter().filter(|end| self.document.as_ref().is_none_or(|document| document.id != end.id));
        others.map(|t| format!("{}: {}, {}", what(t), named(&t.text, t.id), t.from)).collect()
    }

    /// For people: a line for each but the one that ends documents.
    pub fn other_lines(&self) -> Vec<String> {
        let one = |what: &str, token: &Option<Token>, none: &str| match token {
            Some(t) => format!("{what}: {}, {}", named(&t.text, t.id), t.from),
            None => format!("{what}: {none}"),
        };
        let mut lines = self.end_lines();
        lines.push(one("before a document", &self.begin, "nothing"));
        if let Some(bos) = self.bos.as_ref().filter(|bos| self.begin.as_ref().is_none_or(|begin| begin.id != bos.id)) {
            lines.push(one("beginning of a sequence", &Some(bos.clone()), "") + "; the tokenizer does not put it before texts");
        }
        lines.push(one("padding", &self.pad, "none"));
        lines.extend(self.passed_over.iter().map(|(_, why)| format!("not taken: {why}")));
        lines
    }
}

/// For people: a token as it is written, and its id.
pub fn named(text: &str, id: u32) -> String {
    let plain = !text.is_empty() && !text.contains(|c: char| c.is_control() || c.is_whitespace());
    if plain { format!("{text} ({id})") } else { format!("{text:?} ({id})") }
}

/// The added token that the tokenizer itself puts before a text.
fn begin(tokenizer: &Tokenizer, bos: Option<&Token>) -> Option<Token> {
    let first =
        |text: &str, whole: bool| guarded(|| tokenizer.encode(text, whole).ok()).flatten().and_then(|e| e.get_ids().first().copied());
    let id = first("", true).filter(|id| first("a", true) == Some(*id) && first("a", false) != Some(*id))?;
    let text = tokenizer.get_added_tokens_decoder().get(&id)?.content.clone();
    let named = bos.filter(|bos| bos.id == id).map(|bos| bos.from.clone());
    Some(Token { id, text, from: named.unwrap_or_else(|| "the tokenizer's post-processor".into()) })
}

/// Adds the tokens that tokenizer_config.json lists and tokenizer.json does not, as transformers does; how many there were.
pub(super) fn complete(tokenizer: &mut Words, folder: &Path) -> Result<usize, DataError> {
    let path = folder.join("tokenizer_config.json");
    let bad = |reason: String| DataError::Special { path: path.clone(), reason };
    let table = read_object(&path)?.unwrap_or_default();
    let (mut missing, there) = (vec![], tokenizer.get_added_tokens_decoder());
    for (key, value) in table.get("added_tokens_decoder").and_then(Json::as_object).into_iter().flatten() {
        let entry = |value: &Json| -> Option<(u32, tokenizers::AddedToken)> {
            Some((key.parse().ok()?, serde_json::from_value(value.clone()).ok()?))
        };
        let (id, token) = entry(value).ok_or_else(|| bad(format!("its added_tokens_decoder has {key:?}: {value}, which is no token")))?;
        if !there.contains_key(&id) {
            missing.push((id, token));
        }
    }
    missing.sort_by_key(|(id, _)| *id);
    let tokens: Vec<tokenizers::AddedToken> = missing.iter().map(|(_, token)| token.clone()).collect();
    tokenizer.add(&tokens).map_err(|e| bad(format!("its added_tokens_decoder has tokens that cannot be added: {e}")))?;
    for (id, token) in &missing {
        if tokenizer.token_to_id(&token.content) != Some(*id) {
            let got = tokenizer.token_to_id(&token.content);
            return Err(bad(format!(
                "its token {:?} has the id {id}, and tokenizer.json makes it {got:?}: they do not belong together",
                token.content
            )));
        }
    }
    Ok(missing.len())
}

fn known(tokenizer: &Tokenizer) -> Option<Token> {
    let added = tokenizer.get_added_tokens_decoder();
    let found = KNOWN.iter().find_map(|name| added.iter().find(|(_, token)| token.special && token.content == *name));
    found.map(|(id, token)| Token { id: *id, text: token.content.clone(), from: "by its name".into() })
}

/// What the files name for a role ("eos", "bos" or "pad"), each token once, in the order of the files; an error is a file and what is wrong in it. Only
/// `added` tokens count. This is the rule wherever a model is read or written.
pub fn by_files(
    added: &BTreeMap<u32, String>,
    tables: [Option<&Map<String, Json>>; 3],
    role: &'static str,
    passed_over: &mut Vec<(&'static str, String)>,
) -> Result<Vec<Token>, (&'static str, String)> {
    let mut all: Vec<Token> = vec![];
    for (file, table) in FILES.into_iter().zip(tables) {
        for key in [format!("{role}_token_id"), format!("{role}_token")] {
            let values = match table.and_then(|table| table.get(&key)) {
                Some(Json::Array(values)) => &values[..],
                Some(value) => std::slice::from_ref(value),
                None => &[],
            };
            if values.len() > MOST {
                return Err((file, format!("its {key} names {} tokens; {MOST} is the most that is read", values.len())));
            }
            // Some files write -1 for none.
            for value in values.iter().filter(|value| !value.is_null() && **value != -1) {
                let content = value.get("content").unwrap_or(value);
                let found = match (content.as_i64(), content.as_str()) {
                    (Some(id), _) => u32::try_from(id).ok().and_then(|id| added.get_key_value(&id)),
                    (_, Some(name)) => added.iter().find(|(_, text)| *text == name),
                    (None, None) => return Err((file, format!("its {key} is {value}, neither a token nor an id"))),
                };
                match found {
                    Some((id, _)) if all.iter().any(|token| token.id == *id) => {}
                    Some((id, text)) => all.push(Token { id: *id, text: text.clone(), from: file.into() }),
                    None => passed_over.push((role, format!("{file} has {key} = {content}, which is no added token"))),
                }
            }
        }
    }
    Ok(all)
}

/// A file of JSON that may be missing.
pub(crate) fn read_object(path: &Path) -> Result<Option<Map<String, Json>>, DataError> {
    if !path.exists() {
        return Ok(None);
    }
    let text = input::read_to_string(path).map_err(DataError::io("read", path))?;
    let bad = |e: serde_json::Error| DataError::Special { path: path.to_owned(), reason: format!("not a JSON object: {e}") };
    serde_json::from_str(&text).map(Some).map_err(bad)
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::super::tokenizer::tests::{byte_level, letters};
    use super::*;
    use serde_json::json;

    /// A folder with a tokenizer of bytes, an ordinary "</s>" (256) and these added tokens from 257 on, and these files beside it.
    fn chosen(special: &[&str], beside: &[(&str, Json)]) -> Result<(Option<u32>, String), DataError> {
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
            ("no file", &qwen[..], vec![], Some(257), "by its name"),
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
                "by its name",
            ),
            (
                "a turn's end where there is no other",
                &["<|im_end|>"],
                vec![(of_tokenizer, json!({"eos_token": "<|im_end|>"}))],
                Some(257),
                of_tokenizer,
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
                "no file names one, and no added special token has a well-known name; tokenizer_config.json has eos_token = \"</s>\", which is no added token; config.json has eos_token_id = 3, which is no added token",
            ),
            ("nothing fits", &["<META>"], vec![], None, "no file names one, and no added special token has a well-known name"),
            ("well known", &["<META>", "<EOT>"], vec![], Some(258), "by its name"),
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
            (json!({"eos_token_id": [1, true]}), "its eos_token_id is true"),
            (json!({"eos_token": {"lstrip": false}}), "neither a token nor an id"),
        ] {
            let error = chosen(&["<a>"], &[("generation_config.json", value)]).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("--eos"), "{error}");
        }
    }

    fn hugging_face(special: &[&str]) -> Words {
        Words::read(byte_level(letters(&[]), special).to_string().as_bytes()).unwrap()
    }

    /// Llama-3's way: the post-processor puts a token before every text.
    #[test]
    fn the_post_processor_says_what_begins_a_document() {
        let mut json = byte_level(letters(&[]), &["<|begin_of_text|>", "<|end_of_text|>", "[CLS]"]);
        let find = |json: &Json, folder: Option<&Path>| {
            Special::find(&tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap(), folder).unwrap().begin.map(|t| (t.id, t.from))
        };
        let puts = |before: &[&str]| {
            let special = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
            let text = json!({"Sequence": {"id": "A", "type_id": 0}});
            let ids = ["<|begin_of_text|>", "<|end_of_text|>", "[CLS]"].iter().zip(256..);
            let all = ids.map(|(name, id)| (name.to_string(), json!({"id": name, "ids": [id], "tokens": [name]})));
            let single: Vec<Json> = before.iter().map(|name| if *name == "A" { text.clone() } else { special(name) }).collect();
            json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": all.collect::<Map<_, _>>()})
        };
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer_config.json"), json!({"bos_token": "<|begin_of_text|>"}).to_string()).unwrap();
        let (named, unnamed) = ("tokenizer_config.json".to_string(), "the tokenizer's post-processor".to_string());
        // A file that names one does not put it there.
        assert_eq!(find(&json, Some(dir.path())), None);
        for (single, folder, begin) in [
            (&["<|begin_of_text|>", "A"][..], Some(dir.path()), Some((256, named))),
            (&["<|begin_of_text|>", "A"], None, Some((256, unnamed.clone()))),
            (&["[CLS]", "A", "<|end_of_text|>"], Some(dir.path()), Some((258, unnamed))),
            (&["A", "<|end_of_text|>"], Some(dir.path()), None),
        ] {
            json["post_processor"] = puts(single);
            assert_eq!(find(&json, folder), begin, "{single:?}");
        }
    }

    #[test]
    fn special_tokens_come_from_the_files_in_order_and_are_added_ones() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, value: serde_json::Value| std::fs::write(dir.path().join(name), value.to_string()).unwrap();
        let find = |special: &[&str]| Special::find(&hugging_face(special), Some(dir.path())).unwrap();
        let llama = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<pad>"];
        write("generation_config.json", json!({"bos_token_id": 256, "eos_token_id": [257, 258, 259]}));
        write(
            "tokenizer_config.json",
            json!({"eos_token": "<|eot_id|>", "pad_token": {"content": "<pad>"}, "bos_token": "<|begin_of_text|>"}),
        );
        write("config.json", json!({"eos_token_id": 3, "pad_token_id": -1}));
        let found = find(&llama);
        let token = |id: u32, from: &str| Token { id, text: llama[id as usize - 256].into(), from: from.into() };
        assert_eq!(found.ends, [257, 258, 259].map(|id| token(id, "generation_config.json")));
        assert_eq!(found.document, Some(token(257, "generation_config.json")));
        assert_eq!((found.bos.clone(), found.begin.clone()), (Some(token(256, "generation_config.json")), None));
        assert_eq!(found.pad, Some(token(260, "tokenizer_config.json")));
        let lines = found.other_lines().join("\n");
        for part in [
            "config.json has eos_token_id = 3, which is no added token",
            "end of turn: <|eom_id|> (258), generation_config.json",
            "end of turn: <|eot_id|> (259), generation_config.json",
            "before a document: nothing",
            "beginning of a sequence: <|begin_of_text|> (256), generation_config.json; the tokenizer does not put it before texts",
            "padding: <pad> (260), tokenizer_config.json",
        ] {
            assert!(lines.contains(part), "{lines}");
        }
        // A chat model that names its turn's end alone: documents end in the token whose name is known.
        std::fs::remove_file(dir.path().join("generation_config.json")).unwrap();
        write("tokenizer_config.json", json!({"eos_token": "<|im_end|>", "bos_token": null}));
        let found = find(&["<|endoftext|>", "<|im_start|>", "<|im_end|>"]);
        assert_eq!(found.document.map(|t| (t.id, t.from)), Some((256, "by its name".into())));
        assert_eq!(found.ends.iter().map(|t| t.id).collect::<Vec<_>>(), [258]);
        assert_eq!((found.bos, found.pad), (None, None));
        // Without another, the turn's end ends documents, too.
        assert_eq!(find(&["<|im_end|>"]).document.map(|t| t.id), Some(256));
        write("tokenizer_config.json", json!({"eos_token": true}));
        let error = Special::find(&hugging_face(&[]), Some(dir.path())).unwrap_err().to_string();
        assert!(error.contains("tokenizer_config.json: its eos_token is true"), "{error}");
    }

    #[test]
    fn tokens_that_only_the_config_lists_are_added() {
        let dir = tempfile::tempdir().unwrap();
        let write = |id: u32| {
            let entry =
                json!({"content": "<new>", "lstrip": false, "rstrip": false, "single_word": false, "normalized": false, "special": true});
            std::fs::write(dir.path().join("tokenizer_config.json"), json!({"added_tokens_decoder": {id.to_string(): entry}}).to_string())
                .unwrap();
        };
        write(257);
        let mut one = hugging_face(&["<old>"]);
        assert_eq!(complete(&mut one, dir.path()).unwrap(), 1);
        assert_eq!(one.encode("<new>", false).unwrap().get_ids(), [257]);
        assert_eq!(complete(&mut one, dir.path()).unwrap(), 0, "there already");
        write(300);
        let error = complete(&mut hugging_face(&["<old>"]), dir.path()).unwrap_err().to_string();
        assert!(error.contains("\"<new>\" has the id 300") && error.contains("Some(257)"), "{error}");
    }
}
