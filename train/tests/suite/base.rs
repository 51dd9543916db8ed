//! A base brings its own defaults, above the preset's and below what someone sets.

use super::common::{kiln, text};
use engine::ranks::threads;
use kiln::config::TrainConfig;
use kiln::recipe;
use std::fs;
use std::path::Path;

const SHAPE: &str = "--set dim=32 --set layers=2 --set heads=4 --set kv_heads=2 --set head_dim=8 --set hidden=48 --threads 1";

/// A folder of a small decoder, and conversations of up to some hundred bytes.
fn folder(dir: &Path) -> (String, String) {
    kiln(format!("train decoder {SHAPE} --set seq=256 --set batch=2 --steps 1 --out {}/first", dir.display()).split_whitespace()).ok();
    kiln(["export", &text(&dir.join("first")), "--out", &text(&dir.join("model"))]).ok();
    let chat = |i: usize| format!("{{\"prompt\": \"What comes after {i}?\", \"reply\": \"After {i} comes {}.\"}}\n", i + 1);
    fs::write(dir.join("chats.jsonl"), (0..200).map(chat).collect::<String>()).unwrap();
    (text(&dir.join("model")), text(&dir.join("chats.jsonl")))
}

/// Keys of a run's config.toml.
fn settings(run: &Path) -> toml::Table {
    fs::read_to_string(run.join("config.toml")).unwrap().parse().unwrap()
}

#[test]
fn a_base_brings_its_own_learning_rate() {
    let dir = tempfile::tempdir().unwrap();
    let (base, chats) = folder(dir.path());
    let train = |name: &str, more: &str| {
        let set = format!("train decoder --threads 1 --base {base} --data {chats} --out {}/{name} {more}", dir.path().display());
        let mut args: Vec<String> = set.split_whitespace().map(str::to_owned).collect();
        args.extend(["--set".into(), "data.template=Q: {prompt}\\nA: {reply}\\n".into()]);
        kiln(args)
    };
    let run = |name: &str| settings(&dir.path().join(name));
    let said = train("all", "").ok();
    let all = run("all");
    let number = |t: &toml::Table, key: &str| t["train"][key].as_float().unwrap();
    assert_eq!((number(&all, "learning_rate"), number(&all, "epochs"), number(&all, "final_rate")), (1e-5, 3.0, 0.1));
    // Rows are as long as the longest of these examples needs, and a step has about 16 of them.
    let (seq, batch, steps) = (all["model"]["seq"].as_integer(), all["train"]["batch"].as_integer(), all["train"]["steps"].as_integer());
    assert_eq!(seq, Some(64), "{all}");
    assert!(batch.is_some_and(|n| (12..=16).contains(&n)) && steps.is_some_and(|n| (30..=45).contains(&n)), "{all}");
    assert_eq!(all["train"]["warmup"].as_integer(), Some(2), "3% of {steps:?}");
    let whole = format!("{}{}", said.out, said.err);
    assert!(whole.contains("train.learning_rate = 1e-5") && whole.contains("3 epochs"), "{whole}");
    assert!(whole.contains(&format!("decoder tiny from {base}")), "{whole}");
    // Adapters bear more; what someone sets stays.
    train("lora", "--lora --epochs 1").ok();
    assert_eq!((number(&run("lora"), "learning_rate"), number(&run("lora"), "epochs")), (2e-4, 1.0));
    let high = train("own", "--set learning_rate=2e-3 --steps 2 --set seq=128 --set batch=2").ok();
    let own = run("own");
    assert_eq!((number(&own, "learning_rate"), number(&own, "epochs")), (2e-3, 0.0));
    assert_eq!((own["train"]["steps"].as_integer(), own["model"]["seq"].as_integer()), (Some(2), Some(128)));
    assert!(high.err.contains("train.learning_rate = 0.002 is high"), "{}", high.err);
    // A run that goes on keeps its own, until it is told more epochs.
    kiln(["train", "--out", &text(&dir.path().join("own")), "--resume", "--steps", "3", "--threads", "1"]).ok();
    assert_eq!(number(&run("own"), "learning_rate"), 2e-3);
    kiln(["train", "--out", &text(&dir.path().join("lora")), "--resume", "--epochs", "2", "--threads", "1"]).ok();
    let steps = |t: &toml::Table| t["train"]["steps"].as_integer().unwrap();
    assert!(steps(&run("lora")) > steps(&own) && number(&run("lora"), "epochs") == 2.0);
    train("both", "--steps 2 --set epochs=2").fails(&["train.steps and train.epochs", "one of the two"]);
}

/// About 16 examples a step, in however many micro-batches and on however many ranks they are computed; as many steps as epochs take of them.
#[test]
fn a_step_has_as_many_examples_however_it_is_computed() {
    let dir = tempfile::tempdir().unwrap();
    let (base, chats) = folder(dir.path());
    let begun = |ranks: usize, accumulate: usize| {
        let all = threads::each(ranks, 1, |ranks| {
            let recipe = recipe::find("decoder").unwrap();
            let mut c = recipe::preset(recipe, None).unwrap();
            let sets = [format!("model.base={base}"), format!("data.path={chats}"), format!("train.accumulate={accumulate}")];
            sets.iter().for_each(|s| c.set(s).unwrap());
            c.set("data.template=Q: {prompt} A: {reply} ").unwrap();
            if ranks.size() > 1 {
                c.ranks = ranks;
            }
            let config = recipe::begin(recipe, &c).unwrap().0;
            let train: TrainConfig = config.section("train").unwrap();
            let rows = recipe.task(&config).unwrap().epoch().unwrap();
            (train.batch, train.steps, rows)
        });
        all.into_iter().next().unwrap()
    };
    let (one, steps, rows) = begun(1, 1);
    assert!((12..=16).contains(&one) && steps == (3 * rows).div_ceil(one as u64), "{one} {steps} {rows}");
    for (ranks, accumulate) in [(1, 2), (1, 5), (3, 1), (3, 2)] {
        let (batch, steps, rows) = begun(ranks, accumulate);
        let a_step = batch * accumulate;
        assert!(batch.is_multiple_of(ranks), "{batch} rows on {ranks} ranks");
        assert!(
            (one..one + ranks * accumulate).contains(&a_step),
            "{a_step} rows in {accumulate} micro-batches on {ranks} ranks, not {one}"
        );
        assert_eq!(steps, (3 * rows).div_ceil(a_step as u64));
    }
}

#[test]
fn recipes_without_a_base_or_epochs_refuse_their_flags() {
    for (args, parts) in [
        ("train hydra --base models/x", ["--base", "hydra has no model.base"]),
        ("train hydra --epochs 2", ["--epochs", "hydra has no train.epochs"]),
        ("train vision_bdh --lora", ["--lora", "vision_bdh has no model.train"]),
        ("plan hrm --bits 4", ["--bits", "hrm has no model.bits"]),
        ("train decoder --steps 2 --epochs 2", ["--steps", "--epochs"]),
    ] {
        kiln(args.split_whitespace()).fails(&parts);
    }
}

#[test]
fn adapters_without_a_base_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = text(&dir.path().join("run"));
    kiln(["train", "decoder", "--lora", "--steps", "1", "--out", &out]).fails(&["model.train = \"lora\"", "--base", "model.train=all"]);
    // Of a preset that is made to be timed, it is said.
    let sets = "model.pretrain=0 dim=16 model.layers=1 heads=2 kv_heads=1 head_dim=8 hidden=24 seq=64 batch=2 eval_batches=1 weight=0";
    let args = format!("train polychromic --steps 1 --threads 1 --out {out}");
    let sets = sets.split(' ').flat_map(|s| ["--set", s]);
    let said = kiln(args.split(' ').chain(sets)).ok().err;
    assert!(said.contains("weights are drawn at random") && said.contains("--base"), "{said}");
}

#[test]
fn four_bits_do_not_change_the_count_of_parameters() {
    let dir = tempfile::tempdir().unwrap();
    let (base, _) = folder(dir.path());
    let frozen = |name: &str, bits: &str| {
        let args = format!("train decoder --threads 1 --base {base} --lora --bits {bits} --steps 1 --out {}/{name}", dir.path().display());
        let said = kiln(args.split_whitespace()).ok();
        let whole = format!("{}{}", said.out, said.err);
        let line = whole.lines().find(|l| l.contains("that are frozen")).unwrap_or_else(|| panic!("{whole}")).to_string();
        line[line.find(": ").unwrap()..].to_string()
    };
    assert_eq!(frozen("sixteen", "16"), frozen("four", "4"));
}

/// Two commands and no setting also where the base was never taught to chat: it learns by a usual template, which its export has.
#[test]
fn a_base_without_a_chat_template_learns_by_a_usual_one() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let run = |line: String| kiln(line.split_whitespace());
    super::chats::model(&dir.path().join("base"), "");
    // A base model's folder names the token that ends a document, and no template.
    fs::write(at("base/tokenizer_config.json"), "{\"eos_token\": \"<|stop|>\"}").unwrap();
    fs::write(at("chats.jsonl"), super::chats::lines(&super::chats::conversations())).unwrap();
    let (base, chats) = (at("base"), at("chats.jsonl"));
    let shown = run(format!("data preview --data {chats} --base {base} --count 2")).ok().out;
    assert!(shown.contains("User: What is 1?\nAssistant:\u{27e6} A number, 1.<|stop|>"), "{shown}");
    let train =
        |out: &str, more: &str| run(format!("train decoder --base {base} --data {chats} --epochs 1 --threads 1 --out {} {more}", at(out)));
    let said = train("whole", "").ok();
    assert!(said.out.contains("data.template = \"turns\" (the base has no chat template"), "{}", said.out);
    train("lora", "--lora").ok();
    for (of, to) in [("whole", "mine"), ("lora", "adapters")] {
        run(format!("export {} --out {}", at(of), at(to))).ok();
        let template = fs::read_to_string(dir.path().join(to).join("chat_template.jinja")).unwrap();
        assert!(template.contains("add_generation_prompt") && template.contains("<|stop|>"), "{template}");
        // What is put to the export is what the run learned by.
        let written = |of: &str| run(format!("generate {} --prompt Why --temperature 0 --max-tokens 8 --threads 1", at(of))).ok().out;
        assert_eq!(written(of), written(to));
        let raw = format!("generate {} --raw --temperature 0 --max-tokens 8 --threads 1 --prompt", at(to));
        let raw = kiln(raw.split_whitespace().chain(["User: Why\nAssistant:"])).ok().out;
        assert!(raw.ends_with(&written(to)), "{raw:?} {:?}", written(to));
    }
    // The names are settings like others, and say what they need.
    train("named", "--set data.template=chatml").fails(&["data.template", "no token <|im_start|>"]);
}

/// Two commands and no setting: a model that has learned one kind of text learns conversations, forgets little, and is exported.
#[test]
fn a_base_learns_conversations_and_keeps_what_it_knew() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let run = |line: String| kiln(line.split_whitespace());
    let small = "--set dim=64 --set layers=2 --set heads=4 --set kv_heads=2 --set head_dim=16 --set hidden=128";
    run(format!("train decoder {small} --set batch=8 --steps 500 --threads 1 --out {}", at("first"))).ok();
    run(format!("export {} --out {}", at("first"), at("base"))).ok();
    // What it writes is text of the kind that it has learned.
    fs::write(at("prompts.txt"), "the \nsome \ncount \na \nif \n".repeat(40)).unwrap();
    let written = run(format!("generate {} --prompts {} --json --raw --max-tokens 110 --threads 1", at("first"), at("prompts.txt"))).ok();
    let line = |row: &str| -> String {
        let row: serde_json::Value = serde_json::from_str(row).unwrap();
        format!("{}{}\n", row["prompt"].as_str().unwrap(), row["text"].as_str().unwrap())
    };
    fs::write(at("text.txt"), written.out.lines().map(line).collect::<String>()).unwrap();
    run(format!("data prepare {} --tokenizer {} --val-share 0.9 --out {}", at("text.txt"), at("base"), at("text"))).ok();
    // As a model that has learned to reply has it, so has this one a template.
    let config = fs::read_to_string(at("base/tokenizer_config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["chat_template"] =
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA:{% else %} {{ m.content }}\n{% endif %}{% endfor %}".into();
    fs::write(at("base/tokenizer_config.json"), config.to_string()).unwrap();
    const NUMBERS: [&str; 10] = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
    let chat = |i: usize| {
        let (from, to, thing) = (i % 9, (i % 9 + 1 + i / 9 % 9).min(9), ["stone", "boat", "lamp", "ring", "hat"][i / 81 % 5]);
        let (question, answer) = match i % 2 {
            0 => (format!("count {thing}s from {} to {}", NUMBERS[from], NUMBERS[to]), NUMBERS[from..=to].join(" ")),
            _ => (format!("what comes after {} {thing}s?", NUMBERS[from]), format!("after {} comes {}", NUMBERS[from], NUMBERS[from + 1])),
        };
        let messages = serde_json::json!([{ "role": "user", "content": question }, { "role": "assistant", "content": answer }]);
        serde_json::json!({ "messages": messages }).to_string() + "\n"
    };
    fs::write(at("chats.jsonl"), (0..1500).map(chat).collect::<String>()).unwrap();

    run(format!("train decoder --base {} --data {} --threads 1 --out {}", at("base"), at("chats.jsonl"), at("tuned"))).ok();
    run(format!("export {} --out {}", at("tuned"), at("mine"))).ok();

    let loss = |model: &str, data: &str| {
        let out = run(format!("eval {} --data {} --json --threads 1", at(model), at(data))).ok().out;
        serde_json::from_str::<serde_json::Value>(&out).unwrap()["loss"].as_f64().unwrap()
    };
    let (chats, knew) = (["base", "mine"].map(|model| loss(model, "chats.jsonl")), ["base", "mine"].map(|model| loss(model, "text")));
    assert!(chats[1] < 0.7 * chats[0], "conversations that it has not seen: {chats:?}");
    assert!(knew[1] < 1.1 * knew[0], "text of the first kind: {knew:?}");
}
