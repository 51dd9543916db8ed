//! The byte tokenizer as a tokenizer.json, for programs that know no other kind: the id of a token is its byte.

use serde_json::{Map, Value, json};

/// Files of other tokenizers are longer.
const MOST_BYTES: usize = 1 << 14;

/// Byte-level BPE without merges, so every byte stays a token. The token that ends a document is the character of its byte, which is no letter of that alphabet:
/// as an added token it is found in a text before its bytes are.
pub fn json() -> Value {
    let plain = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = (256..).filter_map(char::from_u32);
    let letters = (0..=255u8).map(|byte| if plain(byte) { char::from(byte) } else { others.next().expect("characters do not end here") });
    let mut vocab: Map<String, Value> = letters.zip(0..256).skip(1).map(|(letter, id)| (letter.to_string(), id.into())).collect();
    let end = "\0";
    vocab.insert(end.into(), 0.into());
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{ "id": 0, "content": end, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true }],
        "pre_tokenizer": level, "decoder": level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                   "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": [] },
    })
}

/// Whether this is the text of that file, however it is set out; as transformers saves it, it also names that nothing is put around a text.
pub fn is(text: &[u8]) -> bool {
    let Some(mut value) = Some(text).filter(|t| t.len() <= MOST_BYTES).and_then(|t| serde_json::from_slice::<Value>(t).ok()) else {
        return false;
    };
    if value["post_processor"]["special_tokens"].as_object().is_some_and(Map::is_empty) {
        value["post_processor"] = Value::Null;
    }
    value == json()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_is_its_bytes_and_back() {
        let text = json().to_string();
        let own = tokenizers::Tokenizer::from_bytes(&text).unwrap();
        // Every byte that UTF-8 has: all of ASCII, and characters of two to four bytes with every lead and continuation byte.
        let ascii: String = (0..128u8).map(char::from).collect();
        let step = |from: u32, to: u32, by: usize| (from..to).step_by(by).filter_map(char::from_u32).collect::<String>();
        let many = [step(0x80, 0x800, 1), step(0x800, 0x1_0000, 61), step(0x1_0000, 0x11_0000, 997)].concat();
        let seen: std::collections::BTreeSet<u8> = many.bytes().chain(ascii.bytes()).collect();
        assert_eq!(seen.len(), 256 - 13, "C0, C1 and F5 to FF stand in no text");
        for text in [&ascii, &many, " two  spaces\r\n\n\ttab ", "\u{100}\0\u{100} it's 12 \u{1f980}", ""] {
            let ids = own.encode(text, true).unwrap().get_ids().to_vec();
            assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>(), "{text:?}");
            assert_eq!(own.decode(&ids, false).unwrap(), text);
        }
        assert_eq!(own.get_vocab_size(true), 256);
        // As it is saved again it is still known, and nothing else is.
        assert!(is(text.as_bytes()) && is(own.to_string(true).unwrap().as_bytes()));
        let mut saved = json();
        saved["post_processor"] = json!({ "type": "TemplateProcessing", "single": [{ "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }], "special_tokens": {} });
        assert!(is(saved.to_string().as_bytes()));
        saved["added_tokens"] = json!([]);
        assert!(!is(saved.to_string().as_bytes()) && !is(b"{") && !is(b"[]"));
    }
}
