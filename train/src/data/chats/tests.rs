//! Templates and data of our own writing, in the styles of published ones.

use super::*;
use serde_json::json;

/// Styles of published templates: text, the added tokens, and what ends a turn.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
const LLAMA3: &str = "{{ bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
";
const GEMMA: &str = "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}
{%- for message in messages -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{ '<start_of_turn>' + role + '\\n' + message.content.strip() }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}";
const MISTRAL: &str = "{{ bos_token }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
    {{ raise_exception('roles take turns') }}{% endif %}{% if message.role == 'user' %}{{ '[INST] ' ~ message.content ~ ' [/INST]' }}\
    {% else %}{{ ' ' ~ message.content ~ eos_token }}{% endif %}{% endfor %}";
/// The system's message stands in the last user's turn, if that is the last turn of all.
const LATE: &str = "{% set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '[INST]' }}{{ system + '\\n' if loop.last and system }}{{ m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + eos_token }}
    {%- endif %}
{%- endfor %}";
/// Puts one more token behind a conversation that is over.
const PHI: &str = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}";
/// Leaves out the thinking of earlier turns; the last turn has a block of thinking in any case.
const THINKS: &str =
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set text = m.content.split('</think>')[-1].lstrip('\\n') %}
    {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
    {{- text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";
/// Opens the thinking in the prompt.
const OPENS: &str = "{% for m in messages %}{{ '<U>' + m.content if m.role == 'user' else '<A>' + m.content.split('</think>')[-1] + '<E>' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<A><think>\\n' }}{% endif %}";
const MARKED: &str = "{% for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{- m.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}";

fn template(source: &str) -> ChatTemplate {
    let added = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<|end|>", "<E>"].map(String::from);
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(name, text)| (name.to_string(), text.to_string()));
    ChatTemplate::new(source, None, "a test", tokens.to_vec(), &added, None).unwrap()
}

pub fn chat(turns: &[(&str, &str)]) -> Conversation {
    Conversation { messages: turns.iter().map(|(role, content)| Message::new(role, content)).collect(), tools: None }
}

/// The learned parts of each example, and how they were found.
fn learned(source: &str, turns: &[(&str, &str)], learn: Learn) -> Vec<(Way, Vec<String>)> {
    let examples = template(source).examples(&chat(turns), learn).unwrap();
    examples.iter().map(|e| (e.way, e.learned.iter().map(|range| e.text[range.clone()].to_string()).collect())).collect()
}

const TURNS: [(&str, &str); 4] = [("user", "1?"), ("assistant", "One."), ("user", "2?"), ("assistant", "Two.")];

/// Conversations are rendered on many threads.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<ChatTemplate>();
};

#[test]
fn texts_are_those_of_the_families() {
    for (source, prompt, want) in [
        (CHATML, true, "<|im_start|>user\nHi \n<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA3, true, "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        (LLAMA3, false, "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"),
        (GEMMA, true, "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),
        (MISTRAL, false, "<s>[INST] Hi \n [/INST]"),
        (PHI, false, "<|user|>\nHi \n<|end|>\n</s>"),
        (THINKS, false, "<|im_start|>user\nHi \n<|im_end|>\n"),
    ] {
        assert_eq!(template(source).render(&chat(&[("user", "Hi \n")]), prompt).unwrap(), want);
    }
    // Text that only looks like tags.
    for (source, want) in [
        ("{% raw %}\n{% generation %}{% endraw %}\nx", "\n{% generation %}x"),
        ("{# {% raw %} {% generation %} #}{{ '{% generation %}' }}", "{% generation %}"),
        ("a{%- generation -%} b{% set c = 1 %} {%- endgeneration %} {{ c is defined }}{", "ab False{"),
    ] {
        assert_eq!(template(source).render(&chat(&TURNS), false).unwrap(), want);
    }
    let error = template(GEMMA).render(&chat(&[("system", "x")]), false).unwrap_err().to_string();
    assert_eq!(error, "the chat template of a test: it refuses the conversation: no system here");
    let error = template(MISTRAL).render(&chat(&[("user", "a"), ("user", "b")]), false).unwrap_err().to_string();
    assert!(error.contains("roles take turns"), "{error}");
    let broken = ChatTemplate::new("{% for x in %}", None, "a test", vec![], &[], None).err().unwrap().to_string();
    assert!(broken.contains("a test") && broken.contains("line 1"), "{broken}");
}

#[test]
fn what_is_learned_is_the_assistants_text_and_the_end_of_its_turn() {
    for (source, way, want) in [
        (CHATML, Way::Prefix, ["One.<|im_end|>", "Two.<|im_end|>"]),
        (LLAMA3, Way::Prefix, ["One.<|eot_id|>", "Two.<|eot_id|>"]),
        (GEMMA, Way::Prefix, ["One.<end_of_turn>", "Two.<end_of_turn>"]),
        (MISTRAL, Way::Prefix, [" One.</s>", " Two.</s>"]),
        (PHI, Way::Prefix, ["One.<|end|>", "Two.<|end|>"]),
        (OPENS, Way::Changed, ["One.<E>", "Two.<E>"]),
        (MARKED, Way::Marked, ["One.<|im_end|>", "Two.<|im_end|>"]),
    ] {
        let want = want.map(String::from);
        assert_eq!(learned(source, &TURNS, Learn::Assistant), [(way, want.to_vec())], "{source}");
        assert_eq!(learned(source, &TURNS, Learn::Last), [(way, want[1..].to_vec())], "{source}");
        let whole = template(source).render(&chat(&TURNS), false).unwrap();
        assert_eq!(learned(source, &TURNS, Learn::All), [(Way::Whole, vec![whole])]);
        assert_eq!(learned(source, &TURNS[..1], Learn::Assistant), [], "nothing to learn");
    }
    let opens = OPENS.replace("<think>\\n", "<think>");
    assert_eq!(learned(&opens, &TURNS, Learn::Assistant), [(Way::Changed, vec!["One.<E>".to_string(), "Two.<E>".to_string()])]);
    assert_eq!(template(PHI).end_of_turn(), Some("<|end|>"));
    assert_eq!(template("{% for m in messages %}{{ m.content }}{% endfor %}").end_of_turn(), None);
}

/// Short texts, texts that look like markup, empty ones, and turns that are not where they usually are.
#[test]
fn odd_turns_are_found() {
    for text in ["n", "<|im_end|>", "", "\n", "im_end", "<", "x<|im_end|>\n", "é🦀"] {
        for turns in [
            vec![("user", "n"), ("assistant", text), ("user", "")],
            vec![("assistant", text), ("user", "x")],
            vec![("user", ""), ("assistant", text)],
        ] {
            assert_eq!(learned(CHATML, &turns, Learn::Assistant)[0].1, [format!("{text}<|im_end|>")], "{turns:?}");
        }
    }
    let twice = [("user", "a"), ("assistant", "b"), ("assistant", "c")];
    assert_eq!(learned(CHATML, &twice, Learn::Assistant)[0].1, ["b<|im_end|>", "c<|im_end|>"]);
    let system = [("system", "s"), ("assistant", "b")];
    assert_eq!(learned(CHATML, &system, Learn::Assistant)[0].1, ["b<|im_end|>"]);
}

#[test]
fn a_template_that_rewrites_earlier_turns_makes_an_example_of_each() {
    let turns = [("user", "1?"), ("assistant", "<think>\nHm.\n</think>\n\nOne."), ("user", "2?"), ("assistant", "Two.")];
    let examples = template(THINKS).examples(&chat(&turns), Learn::Assistant).unwrap();
    let first = "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n";
    let next = "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(examples[0].text, format!("{first}<think>\nHm.\n</think>\n\nOne.<|im_end|>\n"));
    assert_eq!(examples[1].text, format!("{first}One.<|im_end|>\n{next}<think>\n\n</think>\n\nTwo.<|im_end|>\n"));
    assert_eq!(
        learned(THINKS, &turns, Learn::Assistant),
        [
            (Way::Split, vec!["<think>\nHm.\n</think>\n\nOne.<|im_end|>".to_string()]),
            (Way::Split, vec!["<think>\n\n</think>\n\nTwo.<|im_end|>".to_string()])
        ]
    );
    assert_eq!(learned(THINKS, &turns, Learn::Last), [(Way::Prefix, vec!["<think>\n\n</think>\n\nTwo.<|im_end|>".to_string()])]);
    let told = "{{ 'off' if enable_thinking is defined and not enable_thinking else 'on' }}";
    assert_eq!([false, true].map(|think| template(told).prompt(&chat(&turns), think).unwrap()), ["off", "on"]);
    // One turn is one example.
    assert_eq!(learned(THINKS, &turns[..2], Learn::Assistant).len(), 1);
}

/// The whole text has no system's message at all: what the model is asked with has it.
#[test]
fn a_turn_stands_behind_the_prompt_for_it() {
    let turns = [("system", "S"), ("user", "1?"), ("assistant", "One."), ("user", "2?"), ("assistant", "Two.")];
    let t = template(LATE);
    assert_eq!(t.render(&chat(&turns), false).unwrap(), "[INST]1?[/INST] One.</s>[INST]2?[/INST] Two.</s>");
    let examples = t.examples(&chat(&turns), Learn::Assistant).unwrap();
    let texts: Vec<&str> = examples.iter().map(|e| e.text.as_str()).collect();
    assert_eq!(texts, ["[INST]S\n1?[/INST] One.</s>", "[INST]1?[/INST] One.</s>[INST]S\n2?[/INST] Two.</s>"]);
    assert_eq!(learned(LATE, &turns, Learn::Assistant).into_iter().flat_map(|e| e.1).collect::<Vec<_>>(), [" One.</s>", " Two.</s>"]);
    assert_eq!(learned(LATE, &turns[1..], Learn::Assistant), [(Way::Prefix, vec![" One.</s>".to_string(), " Two.</s>".to_string()])]);
}

#[test]
fn a_turn_that_cannot_be_found_is_refused() {
    // What an assistant says is not in what these write.
    for blind in
        ["{{ messages | length }}{{ '!' if add_generation_prompt }}", "{% for m in messages %}{{ '<U>' if m.role == 'user' }}{% endfor %}"]
    {
        let error = template(blind).examples(&chat(&TURNS[..2]), Learn::Assistant).unwrap_err().to_string();
        assert!(error.contains("message 2") && error.contains("{% generation %}"), "{error}");
    }
}

/// Marks that a template works on would change its text: it is then as if there were none.
#[test]
fn marks_never_change_the_text() {
    let trims = "{% for m in messages %}{% set x %}{% generation %} {{ m.content }} {% endgeneration %}{% endset %}
        {{- '<' + x | trim + '>' }}{% endfor %}";
    let examples = template(trims).examples(&chat(&TURNS[..2]), Learn::Assistant).unwrap();
    assert_eq!((examples[0].way, examples[0].text.as_str()), (Way::Changed, "<1?><One.>"));
    // Characters that are the marks themselves.
    let strange = [("user", "a"), ("assistant", "\u{fdd0}b\u{fdd1}")];
    let examples = template(MARKED).examples(&chat(&strange), Learn::Assistant).unwrap();
    assert!(examples[0].text.contains("\u{fdd0}b\u{fdd1}") && examples[0].way != Way::Marked);
    assert_eq!(&examples[0].text[examples[0].learned[0].clone()], "\u{fdd0}b\u{fdd1}<|im_end|>");
}

#[test]
fn a_template_is_found_in_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let open = || ChatTemplate::of_folder(dir.path(), &[], None);
    let render = |tools: bool| {
        let tools = tools.then(|| minijinja::Value::from_iter([1]));
        open().unwrap().render(&Conversation { tools, ..chat(&TURNS[..1]) }, false).unwrap()
    };
    assert!(open().err().unwrap().to_string().contains("has no chat template"));
    write(
        "tokenizer_config.json",
        &json!({"bos_token": {"content": "<b>", "lstrip": false}, "eos_token": null, "chat_template": "{{ bos_token }}{{ eos_token }}1"})
            .to_string(),
    );
    assert_eq!(render(true), "<b>1");
    let list = json!([{"name": "default", "template": "2"}, {"name": "tool_use", "template": "3"}]);
    write("tokenizer_config.json", &json!({"chat_template": list}).to_string());
    assert_eq!((render(false), render(true)), ("2".into(), "3".into()));
    write("chat_template.jinja", "4{{ sep_token }}\n");
    write("special_tokens_map.json", r#"{"sep_token": "<p>"}"#);
    assert_eq!(render(true), "4<p>");
    std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    for (config, part) in [
        (json!({"chat_template": [{"name": "rag", "template": ""}]}), "none is called \"default\""),
        (json!({"chat_template": [{"template": ""}]}), "has no \"name\""),
        (json!({"chat_template": 5}), "neither a string nor a list"),
        (json!({"bos_token": 5, "chat_template": ""}), "its bos_token is 5"),
        (json!([]), "not a JSON object"),
    ] {
        write("tokenizer_config.json", &config.to_string());
        let error = open().err().unwrap().to_string();
        assert!(error.contains("tokenizer_config.json") && error.contains(part), "{error}");
    }
}

/// Every byte a token, and these added tokens from 256 on; offsets leave out white space.
fn tokenizer(special: &[&str]) -> crate::data::Tokenizer {
    let mut letters: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    letters.sort();
    let vocab: serde_json::Map<_, _> = letters.iter().enumerate().map(|(id, c)| (c.to_string(), id.into())).collect();
    let added: Vec<_> = special
        .iter()
        .zip(vocab.len()..)
        .map(|(name, id)| {
            json!({"id": id, "content": name, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = json!({"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "post_processor": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    crate::data::Tokenizer::from_json(std::path::Path::new("test.json"), json.to_string().as_bytes()).unwrap()
}

#[test]
fn tokens_are_learned_by_their_place_in_the_text() {
    let tokenizer = tokenizer(&["<|im_start|>", "<|im_end|>"]);
    // A header that ends in a space is none of the reply, though offsets leave the space out.
    let named =
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}{{ 'assistant: ' if add_generation_prompt }}";
    let cases = [(CHATML, "a", "One é🦀."), (CHATML, " ", "  \n "), (CHATML, "<|im_end|>", " x "), (named, "a", "One."), (named, "", " x")];
    for (source, prompt, reply) in cases {
        let conversation = chat(&[("user", prompt), ("assistant", reply), ("user", "z")]);
        let rendered = &template(source).examples(&conversation, Learn::Assistant).unwrap()[0];
        let encoded = encode(&tokenizer, rendered).unwrap();
        assert_eq!(encoded.ids.len(), encoded.learned.len());
        let part: Vec<u32> = encoded.ids.iter().zip(&encoded.learned).filter(|(_, learned)| **learned).map(|(id, _)| *id).collect();
        assert_eq!(tokenizer.decode(&part), format!("{reply}<|im_end|>"));
        assert_eq!(part.last(), Some(&257));
        let all = std::iter::once(0..rendered.text.len()).collect();
        assert!(encode(&tokenizer, &Rendered { learned: all, ..rendered.clone() }).unwrap().learned.iter().all(|learned| *learned));
    }
}

/// However it is given: a file is not even read.
#[test]
fn a_template_has_a_longest_source() {
    let said = ChatTemplate::of_text(&"x".repeat(200_000), "own", None, &[], None).err().unwrap().to_string();
    assert!(said.contains("its source has 195 KiB, and 128 KiB is the most"), "{said}");
}
