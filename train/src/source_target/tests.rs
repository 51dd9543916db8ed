use super::*;
use crate::data::{Input, PrepareOptions, prepare};
use std::path::PathBuf;

struct Made {
    dir: tempfile::TempDir,
}

impl Made {
    fn new() -> Made {
        Made { dir: tempfile::tempdir().unwrap() }
    }

    fn at(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn file(&self, name: &str, text: &str) {
        std::fs::write(self.at(name), text).unwrap();
    }

    fn prepared(&self, name: &str) {
        self.file("text.txt", &"0123456789".repeat(30));
        let input = Input::Files { paths: vec![PathBuf::from(self.at("text.txt"))], field: "text".into() };
        prepare(&PrepareOptions { val_share: 0.2, ..PrepareOptions::new(input, "byte", Path::new(&self.at(name))) }).unwrap();
    }

    fn config(&self, names: &[&str]) -> SourceTargetConfig {
        let path = Paths::from(names.iter().map(|name| self.at(name)).collect::<Vec<_>>());
        SourceTargetConfig { path, val_share: 0.0, ..SourceTargetConfig::default() }
    }

    fn open(&self, names: &[&str]) -> SourceTarget {
        SourceTarget::new(self.config(names), 256, (40, 16), 3).unwrap()
    }
}

/// The texts of an item: its source, what the decoder reads, and what it writes.
fn texts(data: &SourceTarget, i: u64) -> [String; 3] {
    let item = data.source(Split::Train).unwrap().item(i).unwrap();
    assert_eq!((item.ids.len(), item.targets.len(), item.until.len()), (56, 56, 0));
    assert!(item.targets[..40].iter().all(|target| *target == -1));
    let text = |ids: &[i32]| Tokenizer::Byte.decode(&ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect::<Vec<_>>());
    let written = item.targets[40..].iter().filter(|target| **target >= 0).count();
    [text(&item.ids[..40]), text(&item.ids[40..40 + written]), text(&item.targets)]
}

const CHAT: &str = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}, {"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]}"#;
const PAIRS: &str = "{\"prompt\": \"What?\", \"reply\": \"That.\"}\n{\"prompt\": \"Who?\", \"reply\": \"He.\"}\n";
const ROWS: &str = "{\"encoder_ids\": [65, 66], \"decoder_input_ids\": [1, 67], \"labels\": [67, 0]}\n";

#[test]
fn every_turn_is_an_item_behind_all_turns_before_it() {
    let made = Made::new();
    made.file("chats.jsonl", CHAT);
    let data = made.open(&["chats.jsonl"]);
    assert_eq!((data.epoch(), data.source(Split::Train).unwrap().counted()), (Some(2), None));
    let [first, second] = [0, 1].map(|i| texts(&data, i));
    assert_eq!(first[0], "User: a\nAssistant:");
    assert!(first[2].starts_with(" bc\0"), "{first:?}");
    // The decoder begins with the source's last token, and reads what it wrote.
    assert_eq!(first[1], format!(":{}", &first[2][..first[2].len() - 1]));
    // One byte more than 40: the first is lost.
    assert_eq!(second[0], "ser: a\nAssistant: bc\0\nUser: d\nAssistant:");
    assert!(second[2].starts_with(" e\0"), "{second:?}");
    let asked = data.asked();
    assert_eq!(Tokenizer::Byte.decode(&asked.head("Hm?").unwrap()), "User: Hm?\nAssistant:");
    assert!(asked.has_turns() && asked.stop().unwrap() == Some(0) && asked.begin.is_none());
    let long = asked.head(&"x".repeat(100)).unwrap();
    assert_eq!((long.len(), Tokenizer::Byte.decode(&long[29..])), (40, "\nAssistant:".into()), "its end stays");
    assert!(data.describe().unwrap().contains("chats.jsonl: turns in \"messages\""), "{}", data.describe().unwrap());
    let learn = |learn| SourceTarget::new(SourceTargetConfig { learn, ..made.config(&["chats.jsonl"]) }, 256, (40, 16), 3);
    assert_eq!(learn(Learn::Last).unwrap().epoch(), Some(1));
    assert!(learn(Learn::All).err().unwrap().to_string().contains("data.learn = all"));
}

#[test]
fn pairs_rows_of_tokens_and_running_text_are_told_apart() {
    let made = Made::new();
    made.file("pairs.jsonl", PAIRS);
    made.file("rows.jsonl", ROWS);
    made.prepared("text");
    let pairs = made.open(&["pairs.jsonl"]);
    assert_eq!(texts(&pairs, 1), ["Who?\n", "\nHe.", "He.\0"].map(String::from));
    assert_eq!(Tokenizer::Byte.decode(&pairs.asked().head("Why?").unwrap()), "Why?\n");
    let rows = made.open(&["rows.jsonl"]);
    assert_eq!(texts(&rows, 0), ["AB", "\u{1}C", "C\0"].map(String::from));
    assert_eq!(rows.asked().begin, Some(1), "as all of them do");
    assert!(rows.asked().head("x").unwrap_err().to_string().contains("data.tokenizer") && rows.beginning().unwrap().is_none());
    let text = made.open(&["text"]);
    let digits = |from: usize, n: usize| "0123456789".repeat(10)[from % 10..from % 10 + n].to_string();
    assert_eq!(texts(&text, 1), [digits(56, 40), digits(95, 16), digits(96, 16)]);
    assert!(text.makes_own_rows() && !pairs.makes_own_rows());
    assert_eq!(text.beginning().unwrap().unwrap().tokens.len(), 40);
    for (data, what) in
        [(&pairs, "prompts in \"prompt\""), (&rows, "rows of tokens, 1 to learn"), (&text, "running text, 4 windows of 40 + 16")]
    {
        assert!(data.describe().unwrap().contains(what), "{}", data.describe().unwrap());
    }
    made.file("book.txt", "text");
    let error = |names: &[&str]| SourceTarget::new(made.config(names), 256, (40, 16), 3).err().unwrap().to_string();
    assert!(error(&["book.txt"]).contains("kiln data prepare"), "{}", error(&["book.txt"]));
    assert!(error(&["rows.jsonl", "text"]).contains("rows.jsonl: is no folder that kiln data prepare made"));
    assert!(SourceTarget::new(made.config(&["text"]), 100, (40, 16), 3).err().unwrap().to_string().contains("model.vocab = 100"));
}

/// Items are of one form, so that a mixture may be of all kinds.
#[test]
fn a_mixture_may_be_of_all_kinds_and_validates_with_what_has_something() {
    let made = Made::new();
    made.file("pairs.jsonl", PAIRS);
    made.file("rows.jsonl", ROWS);
    made.prepared("text");
    let data = made.open(&["pairs.jsonl:1", "rows.jsonl:1", "text:2"]);
    let source = data.source(Split::Train).unwrap();
    let first = (0..400).map(|i| source.item(i).unwrap().ids[0]).collect::<Vec<_>>();
    let count = |of: &dyn Fn(i32) -> bool| first.iter().filter(|id| of(**id)).count();
    assert_eq!(count(&|id| id == 65).abs_diff(100) / 2, 0);
    assert_eq!(count(&|id| (48..58).contains(&id)).abs_diff(200) / 2, 0);
    assert_eq!((data.epoch(), source.order(3), data.without_validation()), (None, None, None));
    assert_eq!(data.source(Split::Val).unwrap().len(), 1, "the text's 61 tokens");
    assert!(data.describe().unwrap().contains("50% from"), "{}", data.describe().unwrap());
    assert_ne!(data.identity()["data"], made.open(&["pairs.jsonl:1", "rows.jsonl:1", "text:3"]).identity()["data"]);
    let pairs = made.open(&["pairs.jsonl"]);
    assert!(pairs.without_validation().unwrap().contains("val_share = 0") && pairs.source(Split::Val).is_err());
}

#[test]
fn a_run_is_asked_as_it_learned_where_its_data_is_gone() {
    let made = Made::new();
    made.file("chats.jsonl", CHAT);
    let data = made.open(&["chats.jsonl"]);
    let meta = json!({ "identity": data.identity() });
    let saved = crate::checkpoint::save(Path::new(&made.at("run")), 1, &[], &data.kept(), &meta, 0.into()).unwrap();
    std::fs::remove_file(made.at("chats.jsonl")).unwrap();
    let found = crate::checkpoint::open(&saved.path).unwrap();
    let asked = Asked::of_run(&made.config(&["chats.jsonl"]), &found, 256, 40).unwrap();
    assert_eq!(asked.head("Hm?").unwrap(), data.asked().head("Hm?").unwrap());
    assert_eq!((asked.stop().unwrap(), asked.begin), (data.asked().stop().unwrap(), None));
}

/// Where the data is not, the checkpoint says what the decoder reads first.
#[test]
fn a_checkpoint_knows_how_replies_begin() {
    let made = Made::new();
    made.file("rows.jsonl", ROWS);
    let config = SourceTargetConfig { tokenizer: "byte".into(), ..made.config(&["rows.jsonl"]) };
    let data = SourceTarget::new(config.clone(), 256, (40, 16), 3).unwrap();
    assert_eq!(data.asked().begin, Some(1), "the token that all rows begin with");
    let dir = made.dir.path().join("checkpoints");
    let saved = crate::checkpoint::save(&dir, 1, &[], &[], &json!({ "identity": data.identity() }), 1.into()).unwrap();
    std::fs::remove_file(made.at("rows.jsonl")).unwrap();
    let asked = Asked::of_run(&config, &crate::checkpoint::open(&saved.path).unwrap(), 256, 40).unwrap();
    assert_eq!((asked.begin, asked.unnamed), (Some(1), false));
}
